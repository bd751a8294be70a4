"""What the command line says of itself: its page, every key's line, keys that do nothing, the runs in a folder, and how a run was stopped."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from omegaconf import OmegaConf
from rich.console import Console

import launcher.__main__
from launcher.__main__ import CONF, command_of, dispatch
from launcher.cli import composing, config_reference, runs, schema_keys, starting
from launcher.cli.composing import Composer
from launcher.cli.effect_rules import RULES
from launcher.cli.help_page import COMMANDS, page
from launcher.monitoring.stop import told
from launcher.monitoring.watch import follow
from workers.config import Config, ConfigError
from workers.run.folder import RunFolder
from workers.run.outage import OutageTooLong

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def composer() -> Iterator[Composer]:
    with composing.opened(CONF) as opened:
        yield opened


def test_the_page_fits_a_screen_and_names_every_command() -> None:
    lines = page().splitlines()
    assert len(lines) <= 36 and all(any(line.strip().startswith(name) for line in lines) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        dispatch([command, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: headway ")


def test_the_page_is_shown_without_hydra_or_the_config() -> None:
    code = "import sys; from launcher.__main__ import dispatch; dispatch([]); print(*{'hydra', 'omegaconf', 'submitit', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(("arguments", "command", "rest"), [
    (["experiment=demo"], "run", ["experiment=demo"]), (["run", "a=1"], "run", ["a=1"]), (["--plain", "sweep", "a=1"], "sweep", ["--plain", "a=1"]),
    (["status", "x"], "status", ["x"]), (["--cfg", "job"], "run", ["--cfg", "job"]), (["--plain", "status"], "run", ["--plain", "status"]),
    (["--config-dir", "sweep", "a=1"], "run", ["--config-dir", "sweep", "a=1"]), (["-cd", "x", "sweep", "a=1"], "sweep", ["-cd", "x", "a=1"])])
def test_a_command_may_stand_behind_flags(arguments: list[str], command: str, rest: list[str]) -> None:
    assert command_of(arguments) == (command, rest)


def test_every_key_has_a_line() -> None:
    known = schema_keys.all_keys()
    assert len(known) > 300 and not [name for name, key in known.items() if not key.line], "a comment behind the field says what the key is"


@pytest.mark.parametrize(("name", "kind", "default", "told"), [
    ("trainer.lr", "number", "2e-05", "learning rate"), ("run.target_accuracy", "number or null", "null", "score of the held-out prompts"),
    ("engine.load_timeout_s", "number", "300.0", "seconds for pausing"), ("cluster.reward.gpus", "one of gres, gpus_per_node, gpus_per_task, none",
                                                                          "none", ""),
    ("rollout.concurrency", "whole number or text", "16", "groups in flight"), ("workflow.stop", "list of texts", "[]", ""),
    ("data.parts.easy.digits", "whole number", "2", ""), ("cluster.train.sbatch.nice", "text", "{}", "")])
def test_a_key_is_known_by_type_default_and_unit(name: str, kind: str, default: str, told: str) -> None:
    key = schema_keys.find(name)
    assert key is not None and (key.kind, key.shown) == (kind, default) and key.told.startswith(told)


@pytest.mark.parametrize(("arguments", "words"), [
    ([], ["experiment=demo", "trainer.", "num_minibatches"]), (["data"], ["data=gsm8k", "data.num_heldout"]), (["trainer.lr"], ["2e-05"]),
    (["timeout"], ["reward.timeout_s", "seconds after which"]), (["cluster.train"], ["cluster.train.mem"]), (["--json"], ['"key": "run.kind"'])])
def test_the_reference_shows_groups_and_keys(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["config", *arguments]) == 0
    out = capsys.readouterr().out
    assert not [word for word in words if word not in out]


def test_the_options_of_a_group_are_for_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["config", "--json", "experiment"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["group"] for one in found} == {"experiment"} and "demo" in [one["option"] for one in found]


def test_info_may_stand_before_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    options, rest, _ = starting.parsed("run", ["--info", "experiment=demo", "run.seed=1"])
    assert (options.info, rest) == ("all", ["experiment=demo", "run.seed=1"])
    options, rest, _ = starting.parsed("run", ["--info", "defaults", "experiment=demo"])
    assert (options.info, rest) == ("defaults", ["experiment=demo"])


def test_the_defaults_that_are_shown_are_those_of_a_run(composer: Composer) -> None:
    composed = OmegaConf.to_object(composer.composed(["model.path=/m"]))
    for name, key in schema_keys.all_keys().items():
        if schema_keys.ANY not in name and name != "model.path":
            assert key.shown == schema_keys.written(functools.reduce(getattr, name.split("."), composed)), name


def test_every_option_of_every_group_says_what_it_is() -> None:
    groups = config_reference.read_groups(CONF)
    assert not [f"{group}={option}" for group, options in groups.items() for option, line in options.items() if len(line) < 10]


SHIPPED = [f"{path.parent.name}={path.stem}" for path in sorted(CONF.glob("*/*.yaml"))]
NEEDS = {"data=jsonl": ["data.path=a"], "workflow=agent": ["workflow.agent=a:b"], "workflow=verifiers": ["workflow.env=a"],
         "engine=sglang": ["trainer.microbatch_tokens=4096"]}


@pytest.mark.parametrize("option", SHIPPED)
def test_no_file_of_ours_sets_what_does_nothing(option: str, composer: Composer) -> None:
    group, name = option.split("=")
    brings = option in ("model=smollm2", "model=tiny") or "override /model" in (CONF / group / f"{name}.yaml").read_text()
    assert composer.check([option, *([] if brings else ["model.path=/m"]), *NEEDS.get(option, [])]).notes == ()


def test_what_a_later_argument_overrules_is_said(composer: Composer) -> None:
    done = composer.check(["experiment=tiny", "trainer.lr=1e-3", "trainer.lr=1e-4", "run.seed=3"])
    assert done.config.trainer.lr == 1e-4 and done.notes == ("trainer.lr=1e-3 has no effect: trainer.lr=1e-4 comes after it",)


@pytest.mark.parametrize(("arguments", "words"), [
    ("data.split=x", "only data.kind=hf has splits"), ("data=reasoning_gym data.digits=3", "only data.kind=arithmetic makes sums"),
    ("reward.num_elements=2", "only reward=array"), ("reward.overlong_buffer=2", "takes nothing off"), ("sandbox.memory_mb=256", "runs programs"),
    ("workflow=shell_agent reward.verifier=exact", "repositories' tests"), ("workflow=shell_agent data.verifier=exact", "repositories' tests"),
    ("workflow.max_rejected=0.5", "workflow.keep=all"), ("engine.synthetic_mean_tokens=3", "engine.server=synthetic"),
    ("weights=disk weights.delta=true", "nothing is streamed"), ("staleness.eta=0 staleness.warmup_steps=5", "nothing to grow to"),
    ("tracking.project=mine", "names no tracker"), ("tracking=mlflow tracking.offline=true", "can be offline"),
    ("staleness.max_divergence=0.2", "keeps a budget"), ("staleness.min_ess=0.5", "keeps a budget"),
    ("algorithm=sapo algorithm.clip_epsilon=0.1", "clip and cispo"), ("algorithm.sapo_tau_positive=2", "soft gates"),
    ("algorithm=ppo algorithm.behavior_cap=2", "no proximal policy"), ("algorithm=m2po algorithm.behavior_cap=2", "second moment alone"),
    ("algorithm.second_moment=0.1", "off_policy=second_moment"), ("algorithm.kl_estimator=k2", "algorithm.kl_weight=0"),
    ("algorithm.critic_lr=1e-4", "has a critic"), ("trainer.min_lr=1e-6", "does not fall"), ("trainer.export_keep=3", "at the end only"),
    ("trainer.parallel.sequence=false", "splits nothing"), ("evaluation.every_steps=0 checkpoint.keep_best=true", "nothing is judged between"),
    ("evaluation.every_steps=0 run.target_accuracy=0.8", "judges nothing between"),
    ("evaluation.enabled=false evaluation.every_steps=0 evaluation.top_p=0.5", "judges nothing"), ("evaluation.top_k=5", "is greedy"),
    ("evaluation.checkpoint=best", "evaluation.run=RUN"), ("selftest.action=off selftest.mean_tolerance=1", "compares nothing"),
    ("alarms.loss=2", "only supervised"), ("alarms.off=[entropy_collapse] alarms.entropy=0.1", "entropy_collapse is not judged"),
    ("launch.keep=true", "only `headway selftest`"), ("launch.max_concurrent_runs=2", "one after the other"),
    ("launch.selftest=true trainer.lr=1e-3", "a self-test sets it itself"), ("launch.selftest=true tracking=wandb", "a self-test sets it itself"),
    ("experiment=sft_tiny staleness.eta=3", "nothing is generated"), ("experiment=sft_tiny allocation.min_replicas=2", "nothing is generated"),
    ("cluster=slurm cluster.reward.partition=cpu", "jobs of their own with reward=array only"),
    ("data=mixture data.parts.sums.split=train", "has splits"), ("data=mixture data.verifier=exact", "every part of the mixture names its own"),
    ("trainer.num_minibatches=1 algorithm.proximal=recompute", "is the proximal one"),
    ("launch.selftest=true staleness.warmup_steps=5", "a self-test sets it itself")])
def test_a_key_that_does_nothing_is_said(arguments: str, words: str, composer: Composer) -> None:
    given = arguments.split()
    base = [] if given[0].startswith("experiment=") else ["experiment=tiny"]
    (note,) = composer.check([*base, *given]).notes
    assert words in note and note.startswith(given[-1].split("=")[0])


@pytest.mark.parametrize(("argument", "words"), [
    ("evaluation.top_p=0.9", "is greedy"), ("tracking=wandb", "shown in no tracker"), ("data.digits=3", "makes sums")])
def test_an_evaluation_says_what_does_nothing_too(argument: str, words: str, composer: Composer) -> None:
    (note,) = composer.check(["eval=greedy", "model.path=/m", "data=gsm8k", "data.path=/d", argument]).notes
    assert words in note and note.startswith(argument.split("=")[0])


@pytest.mark.parametrize(("argument", "words"), [
    ("reward.verifier=exact", "Give data.verifier"), ("cluster.account=me", "Choose cluster=slurm"), ("data.task=chain_sum", "data=reasoning_gym")])
def test_an_evaluation_refuses_what_would_make_it_another_one(argument: str, words: str, composer: Composer) -> None:
    with pytest.raises(ConfigError, match=f"{argument.split('=')[0]}=.*would be without effect.*{words}"):
        composer.check(["eval=greedy", "model.path=/m", "data=gsm8k", "data.path=/d", argument])


@pytest.mark.parametrize(("arguments", "words"), [
    ("data.parts.sums.path=/mine.jsonl", "data.parts.sums.path=/mine.jsonl: would be without effect: these prompts are made up"),
    ("data.parts={new: {kind: arithmetic, path: /mine.jsonl}}", "data.parts.new.path=.*Choose data.parts.new.kind=jsonl"),
    ("data.path=/mine.jsonl", "data.path=/mine.jsonl: would be without effect: the parts .* have files of their own. Give data.parts.NAME.path")])
def test_a_mixture_refuses_files_that_nobody_would_read(arguments: str, words: str, composer: Composer) -> None:
    with pytest.raises(ConfigError, match=words):
        composer.check(composer.combinations(["experiment=tiny", "data=mixture", arguments], False)[0])


@pytest.mark.parametrize("arguments", [
    "model=smollm2 model.path=/cache", "model=hf model.path=/m data=jsonl data.path=x reward.verifier=exact", "cluster=slurm cluster.time=60",
    "data=mixture data.filter=drop data.parts.sums.max_prompt_tokens=50",
    "reward=array reward.num_elements=2", "evaluation.temperature=0.6 evaluation.top_p=0.9", "algorithm=decoupled_ppo_critic algorithm.value_clip=2",
    "data=gsm8k reward.verifier=math_verify", "reward.verifier=code sandbox.memory_mb=256", "experiment=code_tiny sandbox.memory_mb=256",
    "+cluster.train.sbatch.nice=5 cluster=slurm", "reward.parts.boxed=0.1", "experiment=sft_tiny trainer.lr=1e-3"])
def test_a_key_that_counts_is_taken_in_silence(arguments: str, composer: Composer) -> None:
    given = arguments.split()
    base = [] if "experiment=" in arguments else ["experiment=tiny"]
    (combination,) = composer.combinations([*base, *given], False)
    assert composer.check(combination).notes == ()


def test_a_run_folder_that_is_away_for_as_long_as_its_run_waits(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text(json.dumps({"run": {"outage_minutes": 0}}))

    def away() -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(OSError, match="Stale file handle"):
        follow(run, "x", Console(), True, away)
    error = OutageTooLong(errno.ESTALE, "cannot be reached, and that for 60 s (run.outage_minutes)")
    monkeypatch.setattr(launcher.__main__, "_answer", lambda _: (_ for _ in ()).throw(error))
    assert dispatch(["watch", str(run.path)]) == 1
    assert capsys.readouterr().err == "headway: cannot be reached, and that for 60 s (run.outage_minutes)\n"


def test_every_rule_names_keys_that_there_are() -> None:
    assert not [one for rule in RULES for one in rule.keys.split() if schema_keys.find(one) is None and not schema_keys.is_section(one)]


def test_what_users_name_below_a_key_needs_no_plus(composer: Composer) -> None:
    (combination,) = composer.combinations(["experiment=tiny", "cluster=slurm", "cluster.train.sbatch.nice=5", "reward.parts.boxed=0.25"], False)
    config = composer.check(combination).config
    assert config.cluster.train.sbatch == {"nice": "5"} and config.reward.parts == {"boxed": 0.25}


def test_a_sweep_is_expanded_and_keeps_other_keys(composer: Composer) -> None:
    found = composer.combinations(["experiment=tiny", "staleness.eta=0,4", "trainer.lr=choice(1e-3,2e-3)", "hydra.sweep.dir=x"], True)
    assert [one[1:] for one in found] == [("staleness.eta=0", "trainer.lr=0.001"), ("staleness.eta=0", "trainer.lr=0.002"),
                                          ("staleness.eta=4", "trainer.lr=0.001"), ("staleness.eta=4", "trainer.lr=0.002")]
    [zeros] = [composer.combinations(["evaluation.checkpoint=1.50,1.100,'2.0',best"], True)]
    assert [one[0].partition("=")[2].strip("'") for one in zeros] == ["1.50", "1.100", "2.0", "best"], "names, and no numbers"
    assert composer.sweep_folder(["hydra.sweep.dir=/a/x"]) == Path("/a/x") and composer.sweep_folder([]).parent == Path("runs/sweeps").absolute()


def run_in(folder: Path, name: str, **files: object) -> RunFolder:
    run = RunFolder.create(folder / name)
    run.config.write_bytes(msgspec.json.encode(Config()))
    for what, content in files.items():
        getattr(run, what).write_text(content if isinstance(content, str) else json.dumps(content))
    return run


def test_the_runs_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_in(tmp_path, "done", metrics='{"step": 1}\n{"step": 2}\n{"st', evaluations='{"step": 2, "accuracy": 0.75}\n')
    done.end("", "test")
    run_in(tmp_path / "sweeps" / "first", "000-a", metrics="").end("stopped: by Ctrl-C", "test")
    run_in(tmp_path, "new")
    os.utime(done.keys, (1.0, 1.0))
    assert dispatch(["runs", "--json", str(tmp_path)]) == 0
    rows = {Path(row["run"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["state"] for name, row in rows.items()} == {"done": "finished", "000-a": "stopped", "new": "gone"}
    assert (rows["done"]["step"], rows["done"]["score"], rows["new"]["step"]) == (2, 0.75, None) and next(iter(rows)) == "done"
    assert dispatch(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "0.750" in out and "stopped" in out and "sweeps/first/000-a" in out
    (tmp_path / "none").mkdir()
    assert dispatch(["runs", str(tmp_path / "none")]) == 0 and "no runs yet" in capsys.readouterr().out


def test_slurm_that_does_not_answer_is_asked_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    calls = tmp_path / "calls"
    for name in ("squeue", "scontrol"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\necho {name} >> {calls}\necho 'slurm_load_jobs error: Invalid user id' >&2\nexit 1\n")
        command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    for name in ("one", "two"):
        run = run_in(tmp_path / "runs", name)
        run.submitted.write_text(json.dumps({"cluster": "slurm", "arrays": [{"role": "train", "job_id": "7", "name": name}]}))
    assert dispatch(["runs", "--json", str(tmp_path / "runs")]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["?", "?"] and calls.read_text().split() == ["scontrol"]


def test_a_folder_that_vanishes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gone = RunFolder((tmp_path / "gone").absolute())
    monkeypatch.setattr(runs, "find", lambda folder: iter([gone]))
    assert dispatch(["runs", "--json", str(tmp_path)]) == 0 and json.loads(capsys.readouterr().out) == []


def test_a_run_that_was_stopped_has_not_failed(tmp_path: Path) -> None:
    run = run_in(tmp_path, "run")
    assert told(run, {"state": "failed", "cause": "out of memory"}) == "" and told(run, {"state": "finished", "cause": ""}) == ""
    said = told(run, {"state": "failed", "cause": "stopped: by Ctrl-C"})
    assert said == f"the run was stopped by Ctrl-C; go on from the start, as there is no checkpoint yet: headway resume {run.path}"


def test_ctrl_c_while_stopping_leaves_the_request_and_no_traceback(tmp_path: Path) -> None:
    run = run_in(tmp_path, "run")
    waits = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        created = psutil.Process(waits.pid).create_time()
        job = {"name": "run-train", "job_id": str(waits.pid), "log": "x", "created": created}
        run.submitted.write_text(json.dumps({"cluster": "local", "jobs": [job]}))
        stopping = subprocess.Popen([sys.executable, "-m", "launcher", "stop", str(run.path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while not run.stop.exists():
            assert stopping.poll() is None
            time.sleep(0.01)
        stopping.send_signal(signal.SIGINT)
        _, err = stopping.communicate(timeout=60)
    finally:
        waits.kill()
        waits.wait()
    assert stopping.returncode == 1 and "the request to stop stands" in err and "Traceback" not in err


@pytest.mark.parametrize(("line", "found"), [
    ("headway sta", "status"), ("headway run experiment=d", "experiment=demo"), ("headway experiment=d", "experiment=demo"), ("headway logs ru", "")])
def test_the_shell_completes_commands_groups_and_keys(line: str, found: str) -> None:
    environment = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run([sys.executable, "-m", "launcher", "--shell-completion", "query=bash"], cwd=ROOT, env=environment, capture_output=True,
                          text=True, check=True, timeout=60)
    assert found in done.stdout.split() if found else not done.stdout.split()
