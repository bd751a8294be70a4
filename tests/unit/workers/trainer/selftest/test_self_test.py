"""The self-test: what is compared, when it is judged, and that it leaves everything as it was where it refuses to go on.

Megatron's parallel groups are global to the process, so the engines of all tests share them; they come down at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.groups import make_group
from tests.support.megatron_case import config, make_groups, train, write_model
from workers.algorithms.agreement import Agreement
from workers.config import Advantage, Config, Dtype, Interrupt, Proximal, RunKind, SelfTestAction, Server
from workers.messages.arrays import Float32, Int32
from workers.messages.from_coordinator import Batch
from workers.messages.parts import Version
from workers.model.architecture import Architecture
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import Comparison, MegatronEngine
from workers.trainer.megatron.objective import TokenMasks
from workers.trainer.selftest.self_test import MIN_TOKENS, SelfTest, SelfTestFailed, fresh_tokens
from workers.trainer.train_step import to_train_group, train_batch

pytestmark = pytest.mark.usefixtures("megatron_groups")

ARCHITECTURE = Architecture("llama", 97, 8, 8, 1, 1, 1, 8, 512, 1e-5, False, 10000.0, None, (1,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3-tied", tmp_path_factory.mktemp("models") / "model")


# -- what is compared ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8), st.data())
def test_fresh_tokens_are_of_the_epoch_and_the_step(runs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    lengths, epochs, steps = (Int32.of(list(column)) for column in zip(*runs, strict=True))
    total = sum(length for length, _, _ in runs)
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    sizes = np.diff([0, *cuts, total])
    group = msgspec.structs.replace(make_group(), lengths=Int32.of(sizes), epochs=epochs, steps=steps, run_lengths=lengths)
    expected = [(epoch, step) == (2, 1) for length, epoch, step in runs for _ in range(length)]
    found = fresh_tokens(group, Version(2, 1))
    assert [len(row) for row in found] == sizes.tolist() and np.concatenate(found).tolist() == expected


def share_of(steps: list[list[int]], step: int = 0) -> tuple[Batch, list[TrainGroup]]:
    groups = [make_group(f"g{number}", 0, list(row)) for number, row in enumerate(steps)]
    share = Batch(step, 0, 1, groups, [list(range(len(groups)))], 0.0)
    return share, [to_train_group(group) for group in groups]


def masks(test: SelfTest, steps: list[list[int]], step: int) -> list[list[list[bool]]] | None:
    comparison = test.comparison(*share_of(steps, step))
    return comparison and [[row.tolist() for row in rows] for rows in comparison.fresh]


def make_test(*, action: SelfTestAction = SelfTestAction.fail, told: list[str] | None = None, begins_with: int = 0, **changes: Any) -> SelfTest:
    setup = Config()
    setup.selftest.action = action
    for key, value in changes.items():
        part, name = key.split("__")
        setattr(getattr(setup, part), name, value)
    return SelfTest(setup, ARCHITECTURE, Version(1, begins_with), (told if told is not None else []).append)


def test_tokens_of_the_present_version_are_compared_and_with_a_kept_cache_only_whole_groups() -> None:
    steps = [[2, 2, 1], [2, 2, 2]]
    assert masks(make_test(), steps, 2) == [[[True], [True], [False]], [[True], [True], [True]]]
    assert masks(make_test(engine__interrupt=Interrupt.in_place), steps, 2) == [[[False], [False], [False]], [[True], [True], [True]]]
    assert masks(make_test(begins_with=2), steps, 2) == masks(make_test(), steps, 2)
    other = SelfTest(Config(), ARCHITECTURE, Version(2, 2), print)
    assert masks(other, steps, 2) == [[[False]] * 3] * 2, "an earlier epoch's weights of the same step may be others"


def test_nothing_is_compared_where_there_is_no_model_or_no_engine() -> None:
    assert masks(make_test(action=SelfTestAction.auto, engine__server=Server.synthetic), [[0]], 0) is None
    assert masks(make_test(action=SelfTestAction.fail, run__kind=RunKind.supervised), [[0]], 0) is None
    assert masks(make_test(action=SelfTestAction.off), [[0]], 0) is None
    assert masks(make_test(action=SelfTestAction.auto), [[0]], 0) is not None
    assert masks(make_test(action=SelfTestAction.fail, engine__server=Server.synthetic), [[0]], 0) is not None


# -- when it is judged ---------------------------------------------------------------------------------------------------


def judge(test: SelfTest, step: int, mean: float, num_tokens: int = 200, share: float = 0.5) -> None:
    def logprobs_at(_: float) -> list[list[np.ndarray]]:
        return [[np.array([-0.5 - mean], np.float32)] * 3]

    comparison = test.comparison(*share_of([[step] * 3], step))
    assert comparison is not None
    comparison.judge(Agreement(num_tokens, share, mean, 2 * mean), logprobs_at)


def test_weights_are_judged_as_they_begin_and_once_updated() -> None:
    told: list[str] = []
    test = make_test(told=told, begins_with=4)
    judge(test, 4, 1e-5)
    judge(test, 5, 2e-5)
    assert len(told) == 2 and "version 1.4: engine and trainer agree" in told[0] and "version 1.5: engine and trainer agree" in told[1]
    for mean in (1e-5, 0.5, 0.6, 1e-5):
        judge(test, 6, mean)
    assert len(told) == 4 and "now above" in told[2] and "again within" in told[3], "later on it is told, and ends nothing"


def test_a_failed_test_ends_the_run_and_says_what_is_known() -> None:
    test = make_test()
    with pytest.raises(SelfTestFailed, match=r"(?s)version 1.0: .*differ by 0.5 nats on average over 200 tokens, 1 at most; "
                                             r"selftest.mean_tolerance=0.001. Likely causes:\n  1. .*The update was not made.*selftest.action=warn"):
        judge(test, 0, 0.5)
    test = make_test()
    judge(test, 0, 1e-6)
    with pytest.raises(SelfTestFailed, match=r"stale weights: before an update both agreed \(1e-06 nats"):
        judge(test, 3, 0.5)
    with pytest.raises(SelfTestFailed):
        judge(make_test(), 0, float("nan"))


def test_a_warning_is_given_once() -> None:
    told: list[str] = []
    test = make_test(action=SelfTestAction.warn, told=told)
    judge(test, 0, 0.5)
    judge(test, 0, 0.5)
    assert len(told) == 1 and told[0].startswith("warning: self-test of version 1.0") and "Likely causes" in told[0]


def test_few_tokens_are_judged_only_where_they_are_all() -> None:
    test = make_test()
    judge(test, 0, 0.5, MIN_TOKENS - 1)
    judge(test, 0, 0.0, 0, 0.0)
    with pytest.raises(SelfTestFailed):
        judge(test, 0, 0.5, 3, 1.0)
    with pytest.raises(SelfTestFailed):
        judge(make_test(), 0, 0.5, MIN_TOKENS)


def test_a_kept_cache_is_no_fault_of_updated_weights_unless_they_do_not_move() -> None:
    told: list[str] = []
    test = make_test(engine__interrupt=Interrupt.in_place, told=told)
    judge(test, 0, 0.0)
    judge(test, 1, 0.5)
    assert "now above" in told[-1]
    test = make_test(engine__interrupt=Interrupt.in_place, trainer__lr=0.0)
    with pytest.raises(SelfTestFailed):
        judge(test, 1, 0.5)


@pytest.mark.parametrize(("engine", "trainer", "given", "expected"), [
    (Dtype.float32, Dtype.float32, 0.0, 1e-3), (Dtype.bfloat16, Dtype.float32, 0.0, 0.1), (Dtype.float32, Dtype.bfloat16, 0.0, 0.1),
    (Dtype.bfloat16, Dtype.bfloat16, 0.02, 0.02)])
def test_the_tolerance_goes_by_the_arithmetic(engine: Dtype, trainer: Dtype, given: float, expected: float) -> None:
    setup = Config()
    setup.engine.dtype, setup.trainer.dtype, setup.selftest.mean_tolerance = engine, trainer, given
    assert setup.mean_tolerance == expected


# -- in the engine ---------------------------------------------------------------------------------------------------------


def sampled_by(engine: MegatronEngine, seed: int = 0, off_by: float = 0.0) -> tuple[list[TrainGroup], TokenMasks]:
    """Groups whose behaviour log-probs are the engine's own, moved by `off_by` up and down, and for each response a first part that is fresh."""
    groups, rng = make_groups(6, seed=seed), np.random.default_rng(seed)
    for group, rows in zip(groups, engine.logprobs(groups), strict=True):
        group.behavior_logprobs = [row + np.float32(off_by) * rng.choice([-1, 1], row.shape).astype(np.float32) for row in rows]
    return groups, [[np.arange(len(response)) < 4 for response in group.responses] for group in groups]


def setup_of(**algorithm: Any) -> Config:
    setup = config(num_minibatches=3, lr=1e-2)
    for name, value in algorithm.items():
        setattr(setup.algorithm, name, value)
    return setup


def ignore(*arguments: Any) -> None:
    pass


def num_compared(groups: list[TrainGroup], fresh: TokenMasks) -> int:
    return sum(int((row & mask).sum()) for group, rows in zip(groups, fresh, strict=True) for row, mask in zip(rows, group.loss_mask, strict=True))


@pytest.mark.parametrize(("algorithm", "all_of_it"), [
    ({"proximal": Proximal.recompute}, True), ({"proximal": Proximal.loglinear}, False), ({"proximal": Proximal.reuse}, False),
    ({"decoupled": False}, False), ({"proximal": Proximal.recompute, "kl_weight": 0.1}, True),
    ({"advantage": Advantage.gae}, True), ({"advantage": Advantage.gae, "proximal": Proximal.reuse, "critic_warmup_steps": 2}, True),
])
def test_the_gap_is_that_of_the_weights_from_before_the_step(model: Path, algorithm: dict[str, Any], all_of_it: bool) -> None:
    engine = MegatronEngine(setup_of(**algorithm), model)
    groups, fresh = sampled_by(engine, off_by=0.25)
    judged: list[Agreement] = []
    metrics = train(engine, groups, comparison=Comparison(fresh, lambda found, _: judged.append(found)))
    first = num_compared(groups[:2], fresh[:2])
    assert metrics["num_tokens_compared"] == (num_compared(groups, fresh) if all_of_it else first)
    assert metrics["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-4) and metrics["logprob_gap_max"] == pytest.approx(0.25, abs=1e-3)
    assert [found.num_tokens for found in judged] == [first] and judged[0].mean == pytest.approx(0.25, abs=1e-4)
    assert judged[0].share == pytest.approx(first / sum(group.num_valid_tokens for group in groups[:2]))


def test_what_is_compared_changes_nothing_of_training(model: Path) -> None:
    found = []
    for comparing in (False, True):
        engine = MegatronEngine(setup_of(), model)
        groups, fresh = sampled_by(engine)
        metrics = train(engine, groups, comparison=Comparison(fresh, ignore) if comparing else None)
        found.append((metrics, weights(engine)))
    (without, before), (with_it, after) = found
    assert without["num_tokens_compared"] == 0 and "logprob_gap_mean" not in without and with_it["logprob_gap_max"] < 1e-4
    assert all(with_it[name] == value for name, value in without.items() if name != "num_tokens_compared")
    assert all(np.array_equal(after[name], value) for name, value in before.items())


def weights(engine: MegatronEngine) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in engine.iter_hf_tensors()}


@pytest.mark.parametrize("algorithm", [{}, {"advantage": Advantage.gae}])
def test_a_refused_step_leaves_everything_as_it_was(model: Path, algorithm: dict[str, Any]) -> None:
    engine = MegatronEngine(setup_of(**algorithm), model)
    groups, fresh = sampled_by(engine, off_by=0.5)
    before, values = weights(engine), critic_of(engine)

    def refuse(found: Agreement, logprobs_at: Callable[[float], Any]) -> None:
        again = logprobs_at(0.7)
        assert [[len(row) for row in rows] for rows in again[:2]] == [[len(row) for row in group.responses] for group in groups[:2]]
        assert all(len(row) == 0 for rows in again[2:] for row in rows)
        raise SelfTestFailed(f"{found}")

    with pytest.raises(SelfTestFailed, match="0.5 nats"):
        train(engine, groups, comparison=Comparison(fresh, refuse))
    assert engine.num_steps == 0 and all(np.array_equal(weights(engine)[name], value) for name, value in before.items())
    assert all(np.array_equal(new, old) for new, old in zip(critic_of(engine), values, strict=True))
    taken, fresh_one = train(engine, groups), train(MegatronEngine(setup_of(**algorithm), model), groups)
    assert taken == fresh_one, "the step can be taken all the same, as if nothing had been"


def critic_of(engine: MegatronEngine) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in engine._critic.trained.model.parameters()] if engine._critic else []


@pytest.mark.parametrize(("reported", "words"), [(1.0, "temperature of 1 "), (0.49, "temperature of 0.49 .*applied twice")])
def test_an_engine_with_another_temperature_is_found_out(model: Path, reported: float, words: str) -> None:
    """A whole step, from received groups: the recorded log-probs are those at another temperature than workflow.temperature=0.7."""
    setup = setup_of()
    engine, other = (MegatronEngine(use, model) for use in (setup, at_temperature(reported)))
    groups = [make_group(f"g{number}", 0, [0] * 20) for number in range(3)]
    groups = [msgspec.structs.replace(group, tokens=Int32.of(np.random.default_rng(number).integers(0, 97, 20).astype(np.int32)))
              for number, group in enumerate(groups)]
    said = other.logprobs([to_train_group(group) for group in groups])
    groups = [msgspec.structs.replace(group, logprobs=Float32.of(np.concatenate(rows))) for group, rows in zip(groups, said, strict=True)]
    share = Batch(0, 0, 1, groups, [[0], [1], [2]], 0.0)
    before = weights(engine)
    with pytest.raises(SelfTestFailed, match=words):
        train_batch(engine, share, lambda: False, SelfTest(setup, engine.architecture, Version(1, 0), print))
    assert engine.num_steps == 0 and all(np.array_equal(weights(engine)[name], value) for name, value in before.items())


def at_temperature(temperature: float) -> Config:
    setup = setup_of()
    setup.workflow.temperature = temperature
    return setup
