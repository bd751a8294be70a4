"""The supervised objective in the engine against Hugging Face's own loss, and a supervised run that goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.hf_reference import load_reference, saved_tensors
from tests.support.megatron_case import config, make_groups, write_model
from workers.config import Config, DataConfig, RunKind
from workers.coordinator.core import Coordinator
from workers.coordinator.snapshot import Snapshot, decode
from workers.coordinator.training.step_records import HeldoutLoss, StepRecord
from workers.data.examples import open_examples
from workers.data.prompts import open_prompts
from workers.messages.from_coordinator import Batch, Refused
from workers.messages.from_worker import BatchRequest, CheckpointRequest, Register, StepFinished
from workers.messages.parts import Announcement, Message, Role, Version
from workers.model.initialize import make_tiny
from workers.trainer.batch.group import TrainGroup
from workers.trainer.heldout import HeldoutExamples, to_group
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.objective import PolicyTargets
from workers.trainer.megatron.parallel.stop_gate import StopGate
from workers.trainer.selftest.self_test import SelfTest
from workers.trainer.train_step import train_batch

pytestmark = pytest.mark.usefixtures("megatron_groups")

TRAINER = b"trainer"


def setup_of(**trainer: object) -> Config:
    setup = config(**trainer)
    setup.run.kind, setup.workflow.temperature = RunKind.supervised, 1.0
    return setup


def single_responses(num: int) -> list[TrainGroup]:
    """One response a group, all of which counts."""
    for group in (groups := make_groups(num)):
        group.responses, group.behavior_logprobs = group.responses[3:4], group.behavior_logprobs[3:4]
        group.loss_mask, group.versions, group.rewards = [np.ones(len(group.responses[0]), np.bool_)], group.versions[3:4], np.zeros(1, np.float32)
    return groups


def cross_entropy(model: torch.nn.Module, groups: list[TrainGroup]) -> torch.Tensor:
    """Hugging Face's loss of a padded batch whose labels are masked on the prompts."""
    rows = [(group.prompt.tolist(), group.responses[0].tolist()) for group in groups]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    padding = [longest - len(prompt) - len(response) for prompt, response in rows]
    return model(input_ids=torch.tensor([prompt + response + [0] * rest for (prompt, response), rest in zip(rows, padding, strict=True)]),
                 attention_mask=torch.tensor([[1] * (longest - rest) + [0] * rest for rest in padding]),
                 labels=torch.tensor([[-100] * len(prompt) + response + [-100] * rest
                                      for (prompt, response), rest in zip(rows, padding, strict=True)])).loss


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3"])
def test_loss_and_gradients_are_hugging_faces(tmp_path: Path, kind: str) -> None:
    folder = write_model(kind, tmp_path / "model")
    engine, model, groups = MegatronEngine(setup_of(microbatch_tokens=48), folder), load_reference(folder), single_responses(6)
    tokens = float(sum(group.num_valid_tokens for group in groups))
    stats = engine._policy.accumulate(groups, list(range(6)), PolicyTargets([]), tokens, StopGate(lambda: False))
    assert len(stats) > 1, "several micro-batches"
    loss = cross_entropy(model, groups)
    loss.backward()
    assert sum(float(part["loss"]) for part in stats) == pytest.approx(loss.item(), rel=1e-5)
    with torch.no_grad():
        for parameter in engine._policy.trained.model.parameters():
            parameter.copy_(parameter.main_grad)
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found, expected = dict(engine.iter_hf_tensors()), saved_tensors(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if not name.endswith("k_proj.bias"):  # it is nothing but rounding
            assert float((found[name].cpu() - gradient).norm() / gradient.norm()) <= 1e-5, name


def test_a_step_reports_the_mean_over_all_tokens(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "model")
    engine, groups = MegatronEngine(setup_of(num_minibatches=2, lr=0.0), folder), single_responses(5)
    metrics = engine.train_step(groups, [[0], [1, 2, 3, 4]], None, None)
    with torch.no_grad():
        loss = cross_entropy(load_reference(folder), groups).item()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5) and metrics["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)
    assert metrics["grad_norm"] > 0 and "clip_share" not in metrics and metrics["num_tokens"] == sum(group.num_valid_tokens for group in groups)
    with pytest.raises(ValueError, match="advantages are given with run.kind=supervised"):
        engine.train_step(groups, [[0, 1, 2, 3, 4]], None, [group.rewards for group in groups])


# -- a run -------------------------------------------------------------------------------------------------------------


def tiny_run(folder: Path) -> Config:
    setup = setup_of(batch_groups=4, num_minibatches=2, lr=3e-3)
    make_tiny(folder, 1)
    setup.model.path, setup.run.num_steps, setup.engine.context_length = str(folder), 6, 32
    setup.trainer.microbatch_tokens, setup.evaluation.every_steps = 64, 2
    setup.data = DataConfig(digits=1, num_examples=0, num_heldout=5)
    setup.check()
    return setup


class Run:
    """One incarnation of a supervised run: coordinator and trainer in one process, the next batch always asked for ahead."""

    def __init__(self, setup: Config, epoch: int, restored: tuple[Snapshot, Path] | None = None) -> None:
        self.config, self.engine = setup, MegatronEngine(setup, Path(setup.model.path))
        if restored is not None:
            self.engine.load_state(restored[1])
        prompts = open_prompts(setup.data, setup.reward, setup.run.seed)
        self.core = Coordinator(setup, prompts, epoch, 0.0, restored[0] if restored else None, open_examples(setup))
        self.heldout = HeldoutExamples(setup, self.engine)
        self.step = self.engine.num_steps
        self.self_test = SelfTest(setup, self.engine.architecture, Version(epoch, self.step), print)
        self.tell(Register(Role.trainer, "node", 1))
        self.publish({})

    def tell(self, message: Message) -> list[Message]:
        self.core.handle(TRAINER, message, 1.0)
        sent, self.core.outbox = [message for _, message in self.core.outbox], []
        assert not [message for message in sent if isinstance(message, Refused)]
        return sent

    def publish(self, metrics: dict[str, float]) -> None:
        self.tell(StepFinished(Announcement(Version(self.core.epoch, self.step), "nowhere", "nothing"), metrics | self.heldout.measure()))

    def go_on_to(self, last: int) -> Run:
        batch: Batch | None = None
        while self.step < last:
            asked = [] if batch else self.tell(BatchRequest(self.step))
            batch = batch or next(message for message in asked if isinstance(message, Batch))
            ahead = self.tell(BatchRequest(self.step + 1))
            metrics = train_batch(self.engine, batch, lambda: False, self.self_test)
            self.step += 1
            self.publish(metrics)
            batch = next((message for message in ahead if isinstance(message, Batch)), None)
        return self

    def save(self, folder: Path) -> tuple[Snapshot, Path]:
        folder.mkdir(mode=0o700)
        self.engine.save_state(folder)
        self.tell(CheckpointRequest(self.step, f"/run/checkpoints/.{self.core.epoch}.{self.step}.tmp", final=True))
        assert self.core.checkpoint is not None
        return decode(self.core.snapshot(1.0, {}).encode()), folder

    def consumed(self) -> list[list[int]]:
        return [record.consumed for record in self.core.training.records if isinstance(record, StepRecord)]


def test_a_run_that_goes_on_from_a_checkpoint_is_the_uninterrupted_one(tmp_path: Path) -> None:
    setup = tiny_run(tmp_path / "model")
    whole = Run(setup, 1).go_on_to(6)
    first = Run(setup, 1).go_on_to(3)
    second = Run(setup, 2, first.save(tmp_path / "checkpoint")).go_on_to(6)
    assert whole.core.ended == second.core.ended == "" and first.core.ended is None
    assert first.consumed() + second.consumed() == whole.consumed() == [list(range(4 * step, 4 * step + 4)) for step in range(6)]
    weights, again = dict(whole.engine.iter_hf_tensors()), dict(second.engine.iter_hf_tensors())
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    losses = [record.loss for record in whole.core.training.records if isinstance(record, HeldoutLoss)]
    assert len(losses) == 7 and losses[-1] < 0.8 * losses[0]
    assert set(whole.core.totals.head_ages) == {0}


def test_heldout_loss_is_the_mean_over_all_held_out_tokens(tmp_path: Path) -> None:
    setup = tiny_run(tmp_path / "model")
    engine = MegatronEngine(setup, tmp_path / "model")
    groups = [to_group(example) for example in open_examples(setup).heldout()]
    with torch.no_grad():
        loss = cross_entropy(load_reference(tmp_path / "model"), groups).item()
    assert HeldoutExamples(setup, engine).measure() == {
        "heldout_loss": pytest.approx(loss, rel=1e-5), "heldout_tokens": sum(group.num_valid_tokens for group in groups)}
