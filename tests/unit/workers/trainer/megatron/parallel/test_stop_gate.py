"""A training step that is abandoned leaves everything as it was; one that has begun to update is finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import Asked, config, make_groups, train, write_model
from workers.config import Dtype, Schedule
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel.stop_gate import StepAbandoned

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3-tied", tmp_path_factory.mktemp("model") / "qwen3-tied")


def everything(engine: MegatronEngine) -> list[torch.Tensor]:
    weights = [tensor.clone() for _, tensor in engine.iter_hf_tensors()]
    inner = engine._policy.trained.optimizer.optimizer
    rates = torch.tensor([[group["lr"], group["weight_decay"], group.get("step", 0)] for group in inner.param_groups])
    return [*weights, rates, *(value.clone() for state in inner.state.values() for value in state.values())]


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_abandoned_at_any_time_and_taken_again(folder: Path, dtype: Dtype) -> None:
    def build() -> MegatronEngine:
        return MegatronEngine(config(dtype=dtype, num_minibatches=2, microbatch_tokens=26, warmup_steps=4, lr_schedule=Schedule.linear), folder)

    first, second = make_groups(4, seed=1), make_groups(4, seed=2)
    plain, engine = build(), build()
    never = Asked(10**9)
    train(plain, first)
    expected = train(plain, second, stop_requested=never)
    train(engine, first)
    before = everything(engine)
    assert never.times > 6, "at the beginning, before every micro-batch, at the boundaries"
    for at in range(1, never.times + 1):
        asked = Asked(at)
        with pytest.raises(StepAbandoned, match="training step 2 was abandoned"):
            train(engine, second, stop_requested=asked)
        assert asked.times == at, "whoever has said yes is not asked again"
        assert engine.num_steps == 1
        assert all(torch.equal(now, then) for now, then in zip(everything(engine), before, strict=True))
    last = Asked(never.times + 1)
    assert train(engine, second, stop_requested=last) == expected
    assert last.times == never.times, "nobody is asked after the first update"
    assert all(torch.equal(now, then) for now, then in zip(everything(engine), everything(plain), strict=True))


def test_how_often_it_is_asked(folder: Path) -> None:
    engine = MegatronEngine(config(microbatch_tokens=4096), folder)
    groups, asked = make_groups(), Asked(10**9)
    metrics = train(engine, groups, engine.logprobs(groups), stop_requested=asked)
    assert metrics["num_microbatches"] == 1
    assert asked.times == 3, "at the beginning, before the micro-batch, before the update"


def test_a_request_that_raises_leaves_the_engine_usable(folder: Path) -> None:
    engine = MegatronEngine(config(), folder)
    groups = make_groups()
    before = everything(engine)

    def broken() -> bool:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        train(engine, groups, stop_requested=broken)
    assert all(torch.equal(now, then) for now, then in zip(everything(engine), before, strict=True))
    train(engine, groups)
