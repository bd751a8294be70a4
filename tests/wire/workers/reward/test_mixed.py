"""Weighted sums of verifiers: real reward processes beside a real endpoint; what becomes of the parts' scores on their way to the metrics."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.endpoints.judge_server import judge_server
from tests.support.episodes import PROMPT, Chatter, make_lease, make_workflow
from tests.support.groups import make_group
from workers.config import RewardConfig
from workers.config.judge import JudgeConfig
from workers.coordinator.groups.consumption import part_means
from workers.messages.codec import MessageError, encode, from_workers
from workers.messages.from_worker import GroupFinished
from workers.messages.parts import Group, Purpose
from workers.reward.judges.judge_client import Judge
from workers.reward.mixed import score_parts
from workers.reward.pool.pool import RewardPool, VerifierError

ROOT = Path(__file__).resolve().parents[4]
VERIFIER = "0.5*number+0.25*boxed+0.25*judge"


def reward(url: str, **judge: Any) -> RewardConfig:
    return RewardConfig(verifier=VERIFIER, max_retries=0, num_processes=2,
                        judge=JudgeConfig(**{"url": url, "model": "m", "max_retries": 0, "template": "{completion}", **judge}))


def with_pool(config: RewardConfig, use: Callable[[RewardPool], Awaitable[Any]]) -> Any:
    async def used() -> Any:
        async with asyncio.timeout(180), RewardPool(config) as pool:
            return await use(pool)

    return asyncio.run(used())


def test_every_part_is_judged_where_it_belongs() -> None:
    async def use(pool: RewardPool) -> Any:
        mixed = await score_parts(pool, "p", r"\boxed{5}", "5", VERIFIER, False)
        alone = await score_parts(pool, "p", r"\boxed{5}", "5", "judge", False)
        arguments = Path(f"/proc/{pool.pids[0]}/cmdline").read_bytes()
        return mixed, alone, pool.num_scored, pool.judge.num_calls, arguments

    with judge_server(lambda number, question: "Score: 4") as server:
        mixed, alone, num_scored, num_calls, arguments = with_pool(reward(server.url), use)
    assert mixed == (pytest.approx(0.85), {"number": 1.0, "boxed": 1.0, "judge": 0.4}) and alone == (pytest.approx(0.4), {"judge": 0.4})
    assert alone[0] == alone[1]["judge"]
    assert (num_scored, num_calls) == (2, 1) and server.url.encode() not in arguments and b"{completion}" not in arguments


def test_a_judge_without_a_score_costs_no_process() -> None:
    async def use(pool: RewardPool) -> Any:
        with pytest.raises(VerifierError, match="the judge gave no score: it answered 500") as error:
            await score_parts(pool, "p", "5", "5", VERIFIER, False)
        return error.value.hopeless, pool.num_scored, pool.num_killed

    with judge_server(lambda number, question: "500") as server:
        assert with_pool(reward(server.url), use) == (True, 2, 0)


def test_what_is_asked_before_is_looked_at_before() -> None:
    async def use(pool: RewardPool) -> None:
        with pytest.raises(VerifierError, match="HEADWAY_TEST_NO_KEY"):
            await pool.load("judge")

    with_pool(reward("http://127.0.0.1:1", api_key_env="HEADWAY_TEST_NO_KEY"), use)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_the_parts_of_a_group_go_with_it(purpose: Purpose) -> None:
    async def use(pool: RewardPool) -> Group:
        workflow = make_workflow(Chatter(says=lambda prompt: "42"), pool, group_size=2)  # type: ignore[arg-type]
        return await workflow.run(make_lease(verifier=VERIFIER, purpose=purpose))

    with judge_server(lambda number, question: "Score: 4") as server:
        group = with_pool(reward(server.url), use)
    assert server.questions == ["42"] and group.part_scores == {"number": 1.0, "boxed": 0.0, "judge": pytest.approx(0.4)}
    arrived = from_workers(1 << 20).decode(encode(GroupFinished(group)))
    assert isinstance(arrived, GroupFinished) and arrived.group.part_scores == group.part_scores


def test_held_out_answers_have_their_own_scores_alone() -> None:
    async def use(pool: RewardPool) -> Any:
        workflow = make_workflow(Chatter(says=lambda prompt: str(next(said))), pool, group_size=2)
        trained = await workflow.run(make_lease(verifier="judge"))
        with pytest.raises(BaseExceptionGroup) as error:
            await workflow.run(make_lease(verifier="judge", purpose=Purpose.evaluation))
        return trained.scores.tolist(), trained.part_scores, error.group_contains(VerifierError)

    said = iter(range(10))
    with judge_server(lambda number, question: "500" if number else "Score: 4") as server:
        assert with_pool(reward(server.url, failed="0.25", concurrency=1), use) == ([pytest.approx(0.4), 0.25], {}, True)


@given(st.lists(st.tuples(st.integers(1, 4), st.dictionaries(st.sampled_from("abc"), st.floats(0, 1)))))
def test_the_means_of_a_batch_are_over_its_episodes(pieces: list[tuple[int, dict[str, float]]]) -> None:
    groups = [with_parts(number, parts) for number, parts in pieces]
    means = part_means(groups)
    assert set(means) == {name for _, parts in pieces for name in parts}
    for name, mean in means.items():
        every = [parts[name] for number, parts in pieces if name in parts for _ in range(max(2, number))]  # make_group has 2 at least
        assert mean == pytest.approx(sum(every) / len(every))


def with_parts(number: int, parts: dict[str, float]) -> Group:
    return msgspec.structs.replace(make_group("g1", 1, [0] * number, rewards=[0.0] * number), part_scores=parts)


@pytest.mark.parametrize("parts", [{"judge": 1.5}, {"judge": -0.1}, {"judge": float("nan")}, {"": 0.5}, {"x" * 201: 0.5},
                                   {f"p{number}": 0.5 for number in range(65)}, {"judge": "1"}])
def test_parts_that_cannot_be_are_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        from_workers(1 << 20).decode(encode(GroupFinished(with_parts(1, parts))))


def test_the_endpoint_of_the_page_works_as_written(tmp_path: Path) -> None:
    """But for its port, which another program may have."""
    [script] = re.findall(r"```python\n(# judge\.py\n.*?)```", (ROOT / "docs/judges.md").read_text(), re.DOTALL)
    (tmp_path / "judge.py").write_text(script.replace("8123", "0"))
    with subprocess.Popen([sys.executable, "-u", tmp_path / "judge.py"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]

            async def ask() -> list[float]:
                judge = Judge(JudgeConfig(url=url, model="any", max_retries=0))
                try:
                    return [await judge.score(PROMPT, completion, "42") for completion in ("42", "I do not know, perhaps 42")]
                finally:
                    await judge.close()

            short, long = asyncio.run(ask())
            assert 0 <= long < short <= 1
        finally:
            process.kill()
