"""The self-test with real engines and real ranks: what engines of other weights or settings report is found out, whatever the layout.

Megatron's parallel groups are global to the process: taken over if they are there, and down again at the end of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.conformance.models import endless, prompt_of
from tests.conformance.models import write_model as write_engine_model
from tests.support.groups import make_group
from tests.support.megatron_case import write_model
from tests.wire.gangs import run_ranks
from tests.wire.ranks import selftest_rank
from workers.config import Config, EngineConfig, TrainerConfig
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.from_coordinator import Batch
from workers.messages.parts import Group, Version
from workers.rollout.engines.client import EngineClient, SamplingParams
from workers.rollout.engines.servers.process import ServerProcess
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group
from workers.trainer.selftest.self_test import SelfTest, SelfTestFailed
from workers.trainer.train_step import train_batch

LAYOUTS = ["tp2", "pp2", "cp2", "dp2"]
TEMPERATURE, LENGTH, NUM_GROUPS, NUM_SAMPLES = 0.8, 24, 4, 3
DEADLINE_S = 200.0


@pytest.fixture(scope="module", autouse=True)
def groups_of_this_process() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    process_group.close()


def test_every_layout_finds_the_same_gap_and_refuses_alike(tmp_path: Path) -> None:
    write_model(selftest_rank.KIND, tmp_path / selftest_rank.KIND)
    alone = selftest_rank.found(tmp_path, None, "")
    run_ranks("tests.wire.ranks.selftest_rank", tmp_path, 2, *LAYOUTS)
    for layout in LAYOUTS:
        ranks = [dict(np.load(tmp_path / f"{layout}.{rank}.npz")) for rank in range(2)]
        for result in ranks:
            for name in ("logprob_gap_mean", "logprob_gap_max", "loss", "grad_norm"):
                assert result[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), (layout, name)
            assert result["num_tokens_compared"] == alone["num_tokens_compared"] > 0
            assert result["told"][:4] == pytest.approx(alone["told"][:4], rel=1e-4), "the whole minibatch, whichever rank has its tokens"
            assert result["told"][-1] == alone["told"][-1] == 0, "no step was taken"
        if layout == "dp2":  # each copy looks at its own groups
            assert sum(result["told"][4] for result in ranks) == pytest.approx(alone["told"][4], rel=1e-4)
        else:
            assert [result["told"][4] for result in ranks] == pytest.approx([alone["told"][4]] * 2, rel=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose responses have all the same length."""
    return endless(write_engine_model(tmp_path_factory.mktemp("engine") / "model", "qwen3", 3))


@pytest.fixture
async def client(model: Path, tmp_path: Path) -> EngineClient:
    server = ServerProcess(EngineConfig(num_slots=16, context_length=256, prefill_chunk=32, start_timeout_s=DEADLINE_S), model, tmp_path / "log")
    client = await server.start(Version(1, 0))
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


async def sampled(client: EngineClient, step: int, temperature: float = TEMPERATURE) -> Batch:
    """The share of a batch that the engine has sampled, said to be of `step`."""
    groups: list[Group] = []
    for number in range(NUM_GROUPS):
        prompt = prompt_of(5 + 3 * number, number)
        found = [await client.generate(f"{step}-{number}-{sample}", prompt, SamplingParams(LENGTH, temperature), 10 * number + sample)
                 for sample in range(NUM_SAMPLES)]
        tokens, logprobs = ([value for one in found for value in getattr(one, name)] for name in ("tokens", "logprobs"))
        lengths = Int32.of([LENGTH] * NUM_SAMPLES)
        groups.append(msgspec.structs.replace(
            make_group(f"g{number}", 0, [step] * NUM_SAMPLES, rewards=[1.0, 0.0, 1.0]), prompt=Int32.of(prompt), lengths=lengths,
            tokens=Int32.of(tokens), logprobs=Float32.of(logprobs), loss_mask=Bool.of([True] * len(tokens)), run_lengths=lengths))
    return Batch(step, 0, 1, groups, [[0, 1], [2, 3]], 0.0)


def setup() -> Config:
    config = Config()
    config.workflow.temperature = TEMPERATURE
    config.trainer = TrainerConfig(microbatch_tokens=160, num_minibatches=2, lr=5e-3)
    return config


async def test_an_engine_that_holds_other_weights_after_an_update_is_found_out(client: EngineClient, model: Path) -> None:
    engine, config, told = MegatronEngine(setup(), model), setup(), []
    test = SelfTest(config, engine.architecture, Version(1, 0), told.append)
    metrics = train_batch(engine, await sampled(client, 0), lambda: False, test)
    assert len(told) == 1 and "version 1.0: engine and trainer agree" in told[0]
    assert metrics["logprob_gap_max"] < 1e-3 and metrics["num_tokens_compared"] == NUM_GROUPS * NUM_SAMPLES * LENGTH
    after = {name: tensor.clone() for name, tensor in engine.iter_hf_tensors()}
    with pytest.raises(SelfTestFailed, match="stale weights: before an update both agreed"):
        train_batch(engine, await sampled(client, 1), lambda: False, test)  # the engine was never told of version 1.1
    assert engine.num_steps == 1 and all(torch.equal(tensor, after[name]) for name, tensor in engine.iter_hf_tensors())


async def test_an_engine_that_samples_at_another_temperature_is_found_out(client: EngineClient, model: Path) -> None:
    engine, config = MegatronEngine(setup(), model), setup()
    with pytest.raises(SelfTestFailed, match=r"1\. temperature: .*at a temperature of 1 "):
        train_batch(engine, await sampled(client, 0, 1.0), lambda: False, SelfTest(config, engine.architecture, Version(1, 0), print))
    assert engine.num_steps == 0
