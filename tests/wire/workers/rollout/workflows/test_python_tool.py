"""Programs of a model, run by a workflow in a real sandbox."""

from __future__ import annotations

from tests.support.episodes import Chatter, make_lease, make_workflow
from workers.config import RewardConfig, SandboxConfig
from workers.config.sandbox import SandboxPolicy
from workers.messages.groups import check_group, samples
from workers.reward.pool.pool import RewardPool

PROGRAM = "<python>import sys; print(6 * 7); print('torch' in sys.modules)</python>"


async def test_a_model_goes_on_from_what_its_program_prints() -> None:
    def says(prompt: str) -> str:
        return "42" if "output" in prompt else PROGRAM

    reward = RewardConfig(timeout_s=60.0)
    async with RewardPool(reward, SandboxConfig(policy=SandboxPolicy.weaken, wall_s=30.0)) as pool:
        workflow = make_workflow(Chatter(says=says), pool, name="python_tool", max_new_tokens=100, group_size=2)
        group = await workflow.run(make_lease())
    check_group(group)
    assert pool.num_executed == 2 and pool.num_killed == 0 and group.scores.tolist() == [1.0, 1.0]
    for view in samples(group):
        shown = bytes(view.tokens[~view.loss_mask].tolist()).decode()
        assert shown == "\n```output\n42\nFalse\n```\n" and bytes(view.tokens[view.loss_mask].tolist()).decode() == f"{PROGRAM}\0" + "42\0"
