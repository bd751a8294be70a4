"""An evaluation alone as the launcher sees it: one array of inference, kept going by its progress; which model; what people are told."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF
from launcher.config.device_split import split
from launcher.config.schema import FullConfig, as_yaml, register, to_object
from launcher.jobs.job_specs import job_specs
from launcher.launch.evaluation import complete, find_model
from launcher.monitoring.observation import Observation
from launcher.monitoring.supervisor_policy import FRUITLESS, SETTLE_S, Decision, End, Situation, Submit, SupervisorPolicy
from launcher.slurm.queries import HistoryEntry
from launcher.slurm.states import State
from launcher.views import evaluation_view, queue_view
from workers.config import AllocationConfig, ClusterKind, Config, ConfigError, DataKind, Placement, RunKind, SelfTestAction
from workers.run.folder import RunFolder

register()


def config(**allocation: int) -> FullConfig:
    made = FullConfig(allocation=AllocationConfig(**{"num_devices": 6, **allocation}))  # type: ignore[arg-type]
    made.run.kind, made.cluster.kind = RunKind.evaluation, ClusterKind.slurm
    made.cluster.inference.time = "60"
    return made


def test_all_devices_generate_and_there_is_one_array(tmp_path: Path) -> None:
    made = config(replica_size=2)
    assert made.roles == ("inference",) and made.self_test_action is SelfTestAction.off
    (spec,) = job_specs(made.plan(), made, RunFolder(tmp_path))
    assert (spec.role, spec.element.role, spec.throttle, spec.devices_per_element) == ("inference", "evaluation", 3, 2)
    assert made.plan().describe() == "6 devices: 6 for inference (3 x 2, 100%), none for training"


def test_fewer_devices_than_a_replica_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least one replica of 4"):
        split(AllocationConfig(num_devices=3, replica_size=4), training=False)


@pytest.mark.parametrize(("part", "name", "value"), [
    ("evaluation", "enabled", False), ("evaluation", "every_steps", 5), ("run", "target_accuracy", 0.5), ("reward", "placement", Placement.array)],
    ids=["disabled", "steps", "target", "rewards-apart"])
def test_what_needs_training_is_refused(part: str, name: str, value: object) -> None:
    made = Config()
    made.run.kind, made.model.path = RunKind.evaluation, "somewhere"
    made.check()
    setattr(getattr(made, part), name, value)
    with pytest.raises(ConfigError, match=f"{part}.{name}=.*run.kind=evaluation"):
        made.check()


def test_only_an_evaluation_names_a_run() -> None:
    made = Config()
    made.model.path, made.evaluation.run = "somewhere", "runs/first"
    with pytest.raises(ConfigError, match="must be empty unless run.kind=evaluation"):
        made.check()


def empty(now: float, num_judged: int, hours: float = 0.0) -> Situation:
    observed = Observation(now, {"inference": [], "train": []}, {"inference": [], "train": []}, "", [], None, roles=("inference",))
    return Situation(observed, False, False, (0, num_judged), hours, {"inference": 4})


def decisions(policy: SupervisorPolicy, num_judged: list[int], hours: float = 0.0) -> list[Decision]:
    """What is decided while the queue stays empty for so long that something is, again and again."""
    found: list[Decision] = []
    for number, judged_then in enumerate(num_judged):
        for seconds in (0.0, SETTLE_S):
            found += policy.decide(empty(1000.0 * number + seconds, judged_then, hours))
    return found


def test_an_evaluation_that_gets_on_is_submitted_again_and_one_that_does_not_ends() -> None:
    def fresh(max_hours: float = 24.0) -> SupervisorPolicy:
        return SupervisorPolicy(max_hours, {"inference": 1}, {})

    assert decisions(fresh(), list(range(6))) == [Submit("inference")] * 6
    assert [type(one) for one in decisions(fresh(), [5] * (FRUITLESS + 1))] == [Submit] * FRUITLESS + [End]
    (end,) = decisions(fresh(max_hours=1.0), [0], hours=2.0)
    assert isinstance(end, End) and end.in_order and "run.max_hours=1 is used up" in end.cause


def test_its_hours_are_those_in_which_any_element_ran() -> None:
    def past(start: float, elapsed_s: float) -> HistoryEntry:
        return HistoryEntry("1_0", State.COMPLETED, elapsed_s, 1, ("n0",), start, start + elapsed_s, 0)

    history = [past(0.0, 3600.0), past(1800.0, 3600.0), past(1900.0, 100.0), past(9000.0, 1800.0)]
    observed = Observation(20000.0, {"inference": [], "train": []}, {"inference": history, "train": []}, "", [], None, roles=("inference",))
    assert observed.training_hours == pytest.approx(1.5 + 0.5)


def test_without_a_sign_of_life_it_is_said_what_the_evaluation_waits_for() -> None:
    role = {"running": [], "pending": 3, "reasons": {"Resources": 3}, "next": "7_0", "starts": None, "done": 0, "failed": 0}
    said = queue_view.absent(None, {"roles": {"inference": role}}, 0.0)
    assert "the evaluation waits for its job 7_0, which is pending (Resources: no nodes are free)" in said
    assert "no job of the evaluation is in the queue" in queue_view.absent(None, {"roles": {"inference": {**role, "pending": 0}}}, 0.0)


def status(time: float, chunks: dict[str, int], running: int = 0, ended: bool = False) -> bytes:
    told = {"time": time, "ended": ended, "num_prompts": 10, "num_samples": 2, "chunks": chunks, "tokens_generated": 7, "running": running}
    return json.dumps({**told, "host": "n0", "pid": 1, "job": "", "waiting_for": "", "draining": False}).encode()


def test_what_elements_say_adds_up_and_what_is_missing_is_told(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.evaluation.mkdir()
    assert evaluation_view.progress(run) is None
    (run.evaluation / "a.status").write_bytes(status(1000.0, {"0": 2, "1": 1}, ended=True))
    (run.evaluation / "b.status").write_bytes(status(1001.0, {"1": 3}, running=4))  # took over chunk 1, and what was judged of it
    (run.evaluation / "c.status").write_bytes(status(10.0, {}, running=4))  # killed long ago
    found = evaluation_view.progress(run)
    assert found is not None and (found["num_judged"], found["tokens_generated"], len(found["workers"])) == (5, 21, 1)
    assert ("missing", "5 prompts: 4 under way, 1 to come") in evaluation_view.facts(found)
    assert ("missing", "1 prompts: 1 under way, 0 to come") in evaluation_view.facts(found | {"num_judged": found["num_prompts"] - 1})
    assert evaluation_view.ending_lines(run) == [f"5 of 10 prompts are judged, and kept; the rest: headway resume {tmp_path}"]


def completed(*overrides: str) -> FullConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=list(overrides))
        complete(composed, overrides)
        return to_object(composed)


def trained_run(folder: Path) -> RunFolder:
    """A run of experiment=tiny that has finished, with its own data and verifier."""
    run = a_run(folder)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        trained = to_object(compose("config", overrides=["experiment=tiny", "data.num_heldout=7", "reward.verifier=numeric", "reward=array"]))
    run.config_yaml.write_bytes(as_yaml(trained))
    run.config.write_bytes(msgspec.json.encode(trained.for_workers()))
    run.final_model.mkdir()
    (run.final_model / "config.json").write_text("{}")
    return run


def test_an_evaluation_of_a_run_has_its_settings_but_for_what_the_command_line_says(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run")
    of_run = ("eval=greedy", f"evaluation.run={run.path}")
    plain = completed(*of_run)
    assert (plain.data.num_heldout, plain.data.digits, plain.reward.verifier, plain.workflow.stop) == (7, 1, "numeric", ["\n"])
    assert plain.model.path == str(run.final_model) and plain.reward.placement is Placement.node, "verifiers run beside the engines"
    changed = completed(*of_run, "data.num_heldout=5", "workflow.max_new_tokens=3", "reward.verifier=number")
    assert (changed.data.num_heldout, changed.data.digits, changed.workflow.max_new_tokens, changed.reward.verifier) == (5, 1, 3, "number")
    assert changed.engine == plain.engine
    other = completed(*of_run, "data=jsonl", "data.path=questions.jsonl")
    assert (other.data.kind, other.data.path, other.data.num_heldout) == (DataKind.jsonl, "questions.jsonl", 200), "none of the run's"


@pytest.mark.parametrize("override", ["experiment=demo", "model=tiny", "model.path=/model"])
def test_a_run_says_itself_what_its_model_is(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="cannot be given with evaluation.run"):
        completed("eval=greedy", f"evaluation.run={trained_run(tmp_path / 'run').path}", override)


@pytest.mark.parametrize("override", ["trainer.lr=1e-5", "staleness.eta=2", "workflow.group_size=4", "weights=disk", "algorithm=ppo",
                                      "run.num_steps=9", "cluster.train.partition=gpu", "alarms.entropy=0.1"])
def test_what_only_training_reads_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]}=.*has no meaning with run.kind=evaluation"):
        completed("eval=greedy", "model.path=/model", override)


def a_run(folder: Path) -> RunFolder:
    run = RunFolder.create(folder)
    for version in ("1.2", "1.4", "2.4", "2.6"):
        (run.checkpoints / version).mkdir()
        (run.checkpoints / version / "manifest.json").write_text("{}")
    (run.checkpoints / "2.8").mkdir()  # without a manifest it is none
    (run.exports / "6").mkdir(parents=True)
    (run.exports / "6" / "manifest.json").write_text(json.dumps({"version": {"epoch": 2, "step": 6}}))
    run.evaluations.write_text("".join(json.dumps({"step": step, "accuracy": accuracy}) + "\n" for step, accuracy in ((2, 0.5), (4, 0.7), (9, 0.9))))
    return run


@pytest.mark.parametrize(("checkpoint", "place"), [
    ("newest", "exports/6"), ("best", "checkpoints/2.4"), ("2", "checkpoints/1.2"), ("4", "checkpoints/2.4"), ("1.4", "checkpoints/1.4"),
    ("6", "exports/6"), ("2.6", "exports/6")])
def test_the_model_of_a_run_that_is_meant(tmp_path: Path, checkpoint: str, place: str) -> None:
    run = a_run(tmp_path / "run")
    assert find_model(run, checkpoint) == run.path / place


@pytest.mark.parametrize("checkpoint", ["final", "8", "3.4"])
def test_a_model_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.checkpoint='{checkpoint}'.*There are evaluation.checkpoint=newest, 1.2, 1.4, 2.4, 2.6"):
        find_model(a_run(tmp_path / "run"), checkpoint)


def test_a_finished_run_has_its_final_model(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.final_model.mkdir()
    (run.final_model / "config.json").write_text("{}")
    assert find_model(run, "final") == run.final_model and find_model(run, "newest") == run.exports / "6"
    (run.final_model / "manifest.json").write_text(json.dumps({"version": {"epoch": 2, "step": 9}}))
    assert find_model(run, "newest") == find_model(run, "best") == find_model(run, "9") == run.final_model, "step 9 has no checkpoint"


def test_a_checkpoint_is_named_as_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation.checkpoint='2.40'"):  # Hydra reads it as the number 2.4
        completed("eval=greedy", f"evaluation.run={trained_run(tmp_path / 'run').path}", "evaluation.checkpoint=2.40")
