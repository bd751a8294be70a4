"""Supervised runs: what is refused, the plan without inference, examples from every source, and the groups that they become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launcher.config.device_split import plan
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import job_specs
from launcher.monitoring.supervisor_policy import Submit
from launcher.views.queue_view import rows
from launcher.views.run_view import evaluation_line, step_line, summary_lines
from tests.unit.launcher.config.test_schema import composed
from tests.unit.launcher.monitoring.test_supervisor_policy import entry, over_time, policy
from workers.config import AllocationConfig, Bound, ClusterKind, Config, ConfigError, DataConfig, DataKind, ParallelConfig, RunKind
from workers.coordinator.groups import supervised_groups
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.staleness import StalenessPolicy
from workers.coordinator.groups.supervised_groups import Supervision
from workers.data.examples import Example, end_token, open_examples
from workers.messages.groups import check_group
from workers.model.architecture import read_architecture
from workers.model.end_tokens import eos_ids
from workers.model.initialize import make_tiny
from workers.run.folder import RunFolder

TINY = ("experiment=sft_tiny",)


@pytest.mark.parametrize(("override", "words"), [
    ("algorithm.advantage=gae", "run.kind=supervised"), ("algorithm.kl_weight=0.1", "must be 0"), ("run.target_accuracy=0.5", "must be null"),
    ("workflow.temperature=0.5", "must be 1"), ("data.response_field=prompt", "another meaning"), ("trainer.microbatch_tokens=16", "context_length"),
])
def test_what_makes_no_sense_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        composed(*TINY, override)
    assert str(caught.value).startswith(override.partition("=")[0])


def test_settings_of_rollouts_are_not_looked_at() -> None:
    assert composed(*TINY, "workflow.group_size=1", "workflow.max_new_tokens=10000").supervised
    assert not composed("experiment=tiny").supervised


def test_a_supervised_model_is_what_rl_begins_with() -> None:
    assert composed("experiment=demo", "model=hf", "model.path=/runs/first/final_model").model.path == "/runs/first/final_model"


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 4))
def test_all_devices_train(devices: int, tp: int, pp: int) -> None:
    parallel = ParallelConfig(tp=tp, pp=pp)
    if devices < tp * pp:
        with pytest.raises(ConfigError, match=f"Use allocation.num_devices={tp * pp}"):
            plan(AllocationConfig(devices), parallel, inference=False)
        return
    found = plan(AllocationConfig(devices), parallel, inference=False)
    assert found.num_replicas == found.num_inference_devices == 0 and found.num_unused < tp * pp
    assert found.num_train_devices + found.num_unused == devices and "none for inference" in found.describe()


def test_there_is_one_job() -> None:
    full = FullConfig()
    full.run.kind, full.cluster.kind, full.cluster.train.time = RunKind.supervised, ClusterKind.slurm, "60"
    full.allocation = AllocationConfig(16, devices_per_node=8, replica_size=16)  # no replica has to fit anywhere
    (train,) = job_specs(full.plan(), full, RunFolder(Path("/run")))
    assert (train.role, train.nodes_per_element, train.devices_per_node) == ("train", 2, 8)
    full.allocation.num_devices = 17
    with pytest.raises(ConfigError, match="num_devices=16 or 18"):
        job_specs(full.plan(), full, RunFolder(Path("/run")))


def test_inference_is_not_submitted_where_there_is_none() -> None:
    assert over_time(policy(nodes_needed={"train": 1}), 0, 200, entry(0), inference=[]) == []
    assert Submit("inference") in over_time(policy(), 0, 200, entry(0), inference=[])


def test_what_people_see() -> None:
    record = {"step": 3, "seconds": 1.0, "loss": 0.5, "perplexity": 1.6487, "grad_norm": 1.0, "lr": 1e-3, "tokens_trained": 7}
    assert "loss 0.5000  perplexity 1.649" in step_line(record)
    assert evaluation_line({"step": 3, "heldout_loss": 0.25, "num_prompts": 20}) == "held-out loss after step 3: 0.2500 nats a token (20 examples)"
    summary = {"kind": "supervised", "heldout_before": 3.0, "heldout_after": 0.5, "heldout_prompts": 20, "num_steps": 3, "seconds": 5.0,
               "tokens_trained": 7}
    assert summary_lines(summary)[0].startswith("held-out loss 3.000 -> 0.500 nats a token on 20 examples")
    role = {"running": [], "pending": 0, "done": 0, "failed": 0}
    shown = dict(rows({"replicas_ready": 0}, {"roles": {"train": role}, "hours": None, "checkpoint": {"step": 2, "age_s": 1, "best_step": 1,
                                              "best_loss": 0.5}}, 0.0))
    assert "inference" not in shown and "replicas" not in shown and "training" in shown and "loss 0.5000" in shown["checkpoint"]


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Config:
    make_tiny(tmp_path / "model", 1)
    config = Config()
    config.run.kind, config.model.path = RunKind.supervised, str(tmp_path / "model")
    return config


def texts(config: Config, example: Example) -> tuple[str, str]:
    tokenizer = Tokenizer.from_file(str(Path(config.model.path) / "tokenizer.json"))
    prompt, response = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (example.prompt, example.response))
    return prompt, response


def test_arithmetic_knows_its_answers(tiny: Config) -> None:
    tiny.data = DataConfig(digits=1, num_examples=0, num_heldout=5)
    examples = open_examples(tiny)
    for example in [examples.train(index) for index in range(20)] + examples.heldout():
        prompt, response = texts(tiny, example)
        a, b = map(int, prompt.removesuffix(" =").split(" + "))
        assert response == f" {a + b}<eos>" and not example.problem(32) and "more than engine.context_length=4" in example.problem(4)


def test_reasoning_gym_knows_its_answers(tiny: Config) -> None:
    tiny.data, tiny.reward.verifier = DataConfig(kind=DataKind.reasoning_gym, num_heldout=3), "reasoning_gym"
    responses = [texts(tiny, example)[1] for example in open_examples(tiny).heldout()]
    assert len(responses) == 3 and all(response[0] == " " and response.endswith("<eos>") for response in responses)


def files(config: Config, folder: Path, *lines: dict) -> None:
    paths = [folder / name for name in ("train.jsonl", "heldout.jsonl")]
    for number, path in enumerate(paths):
        path.write_text("\n".join(json.dumps(line | {"prompt": f"{line['prompt']}{number}"}) for line in lines))
    config.data = dataclasses.replace(config.data, kind=DataKind.jsonl, path=str(paths[0]), heldout_path=str(paths[1]))


def test_responses_of_files_are_learnt_as_they_are(tiny: Config, tmp_path: Path) -> None:
    files(tiny, tmp_path, {"prompt": "a", "response": "  b\n"}, {"prompt": "c", "answer": 7, "response": "d"})
    assert {texts(tiny, example) for example in open_examples(tiny).heldout()} == {("a1", "  b\n<eos>"), ("c1", "d<eos>")}
    tiny.data.response_field = "answer"
    files(tiny, tmp_path, {"prompt": "a", "answer": 7})
    assert texts(tiny, open_examples(tiny).train(0)) == ("a0", "7<eos>")


@pytest.mark.parametrize("line", [{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 1, "response": ""}, {"prompt": "a", "response": "b"}])
def test_files_without_responses_are_refused(tiny: Config, tmp_path: Path, line: dict) -> None:
    if line.get("response") == "b":
        tiny.data.response_field = "reply"
        line = {"prompt": "a", "answer": "1"}
    files(tiny, tmp_path, {"prompt": "x", tiny.data.response_field: "y"}, line)
    with pytest.raises(ConfigError, match=rf"train.jsonl:2: no text in the column '{tiny.data.response_field}'"):
        open_examples(tiny)


def test_with_a_chat_template_the_answer_is_the_assistants(tiny: Config) -> None:
    (Path(tiny.model.path) / "chat_template.jinja").write_text(
        "{% for message in messages %}b{{ message['content'] }}c{% endfor %}{% if add_generation_prompt %}a\n{% endif %}")
    tiny.data = DataConfig(digits=1, num_examples=0, num_heldout=5, chat_template=True)
    prompt, response = texts(tiny, open_examples(tiny).train(0))
    assert prompt.startswith("b") and prompt.endswith(" =ca\n") and response.removesuffix("<eos>").isdecimal()


def test_the_end_is_where_engines_stop(tiny: Config) -> None:
    folder = Path(tiny.model.path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert end_token(folder, tokenizer) == tokenizer.token_to_id("<eos>")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"eos_token": {"content": "<pad>"}}))
    assert end_token(folder, tokenizer) == tokenizer.token_to_id("<pad>"), "at which engines stop, whatever config.json says"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, tokenizer.token_to_id("<pad>")]}))
    assert set(eos_ids(folder, read_architecture(folder))) == {1, *map(tokenizer.token_to_id, ("<eos>", "<pad>"))}
    (folder / "tokenizer_config.json").write_text("{}")
    assert end_token(folder, tokenizer) == tokenizer.token_to_id("<eos>")


# -- groups ------------------------------------------------------------------------------------------------------------


class Numbered:
    """Example k says k; those in `unusable` have no response."""

    def __init__(self, unusable: set[int]) -> None:
        self._unusable = unusable

    def train(self, index: int) -> Example:
        return Example(f"t{index}", [1, 2], [] if index in self._unusable else [index % 7, 3])


@given(st.sets(st.integers(0, 40)), st.integers(1, 5), st.sampled_from(Bound), st.integers(0, 3), st.data())
def test_batches_are_the_examples_in_order_whatever_is_given_back(unusable: set[int], batch: int, bound: Bound, eta: int,
                                                                  data: st.DataObject) -> None:
    ledger, policy = Ledger(3), StalenessPolicy(eta, batch, bound)
    supervision = Supervision(Numbered(unusable), ledger, batch, 16)
    consumed: list[int] = []
    held: list[list[str]] = []
    for _ in range(20):
        step = len(consumed) // batch
        if data.draw(st.booleans(), "give back"):
            ledger.return_to_buffer()
            held.clear()
        while len(held) < 2:  # the present batch, and the next one
            assert supervision.fill(1, step + len(held)) == ""
            assert policy.may_form(step + len(held), ledger.finished.versions, ledger.running_versions())
            chosen = policy.choose(ledger.waiting_to_be_consumed())
            for group in ledger.take(chosen):
                check_group(group)
            held.append(chosen)
        ledger.consume(held[0])
        consumed += sorted(index_of(group_id) for group_id in held.pop(0))
    assert consumed == [index for index in range(1000) if index not in unusable][:len(consumed)]
    assert set(ledger.set_aside) == {index for index in unusable if index < ledger.next_index}


def test_a_data_set_without_usable_examples_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_groups, "MAX_UNUSABLE", 5)
    cause = Supervision(Numbered(set(range(100))), Ledger(3), 2, 16).fill(1, 0)
    assert cause.startswith("5 examples in a row cannot be trained on") and "t4" in cause
