"""What a new user gets wrong, and what is answered: one thing, in Headway's own words, with exit status 2. Add a row for every mistake.

Rows of `MISTAKES` are answered in this process; `{files}` is a folder with the user's own configuration files, made by `FILES`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import CONF, dispatch
from launcher.cli import composing
from workers.config import ConfigError

ROOT = Path(__file__).resolve().parents[4]
JARGON = ("hydra", "omegaconf", "Traceback", "ConfigAttributeError", "ConfigKeyError", "Could not override", "append to your config", "interpolation",
          "yaml.scanner", "DictConfig", "RoleConfig", "argument --")

FILES: dict[str, str | bytes] = {
    "cluster/misspelt.yaml": "defaults:\n  - slurm\n  - _self_\naccount: x\ninference:\n  partiton: gpu\n",
    "cluster/alone.yaml": "account: x\ntime: '1:00:00'\n",
    "cluster/bracket.yaml": "defaults:\n  - slurm\naccount: [x\ntime: 1\n",
    "cluster/tab.yaml": "defaults:\n\t- slurm\n",
    "cluster/colon.yaml": "setup: module: load\n",
    "cluster/indented.yaml": "account: x\n  qos: y\n",
    "cluster/base.yaml": "defaults:\n  - slrum\n  - _self_\n",
    "experiment/model.yaml": "# @package _global_\ndefaults:\n  - override /model: smolm2\n",
    "experiment/type.yaml": "# @package _global_\ndefaults:\n  - override /model: tiny\ntrainer:\n  lr: fast\n",
    "experiment/twice.yaml": "# @package _global_\ndefaults:\n  - override /model: tiny\ntrainer:\n  lr: 1\n  lr: 2\n",
    "experiment/task.yaml": "# @package _global_\ndefaults:\n  - override /model: tiny\ndata:\n  task: gcd\n",
    "experiment/list.yaml": "- a\n- b\n",
    "experiment/header.yaml": "trainer:\n  lr: 0.1\n",
    "experiment/section.yaml": "# @package _global_\ntraner:\n  lr: 0.1\n",
    "data/number.yaml": "kind: jsonl\npath: x\nnum_heldout: many\n",
    "data/parts.yaml": "kind: mixture\nparts:\n  sums: {kind: arithmetic, weight: 2}\nnum_heldout: many\n",
    "data/stages.yaml": "kind: jsonl\nstages: [{until: 10, options: {x: 1}}]\nnum_heldout: many\n",
    "data/bad_part.yaml": "kind: mixture\nparts:\n  sums: {digits: x}\n",
    "experiment/unknown_tag.yaml": "# @package _global_\nrun:\n  name: !secret x\n",
    "experiment/latin.yaml": b"# @package _global_\nrun:\n  name: \xe9\n",
    "experiment/itself.yaml": "# @package _global_\ndefaults: [itself]\n",
    "experiment/to.yaml": "# @package _global_\ndefaults: [fro]\n",
    "experiment/fro.yaml": "# @package _global_\ndefaults: [to]\n",
    "experiment/word.yaml": "# @package _global_\ndefaults: tiny\n",
    "experiment/empty.yaml": "# @package _global_\ntrainer:\n",
    "experiment/dotted.yaml": "# @package _global_\ntrainer.lr: 1\n",
    "experiment/home.yaml": "# @package _global_\ndefaults: [tiny]\nrun:\n  dir: ~nobody-here/x\n",
    "experiment/optional.yaml": "# @package _global_\ndefaults:\n  - optional /cluster: nothere\ntrainer:\n  lr: fast\n",
    "cluster/sexagesimal.yaml": "defaults: [slurm, _self_]\ntrain:\n  time: 1:00:00\n",
    "cluster/sexagesimal_below.yaml": "defaults: [slurm, _self_]\ntrain:\n  sbatch:\n    nice: 5\n    time-min: 8:00:00\n",
    "cluster/twice_merged.yaml": "defaults: [slurm, _self_]\ntrain: &gpu {mem: 1G}\ninference: {<<: *gpu, mem: 2G, mem: 3G}\n",
    "experiment/nogroup.yaml": "# @package _global_\ndefaults:\n  - override /modle: tiny\n",
    "experiment/noword.yaml": "# @package _global_\ndefaults:\n  - model: tiny\n",
    "experiment/own_hydra.yaml": "# @package _global_\ndefaults: [tiny]\nhydra:\n  run: {dir: x}\n",
    "file": "",
    "folder/keep": "",
}

MISTAKES = [
    # A word that is no key, no group, no command.
    ("experiment=demo trainer.num_steps=3", "there is no key trainer.num_steps. Did you mean run.num_steps (training steps after which it ends)?"),
    ("experiment=demo trainer.lrr=1", "Did you mean trainer.lr (learning rate)?"),
    ("experiment=demo trainer.learning_rate=1e-5", "Did you mean trainer.lr (learning rate)?"),
    ("experiment=demo batch_size=8", "Did you mean trainer.batch_groups"),
    ("experiment=demo num_gpus=8", "Did you mean allocation.num_devices"),
    ("experiment=demo max_tokens=8", "Did you mean workflow.max_new_tokens"),
    ("experiment=demo workflow.temprature=1", "Did you mean workflow.temperature"),
    ("experiment=demo cluster.partition=gpu", "Did you mean cluster.train.partition"),
    ("experiment=demo xyzzy.q=1", "there is no key xyzzy.q. `headway config` lists all keys"),
    ("experiment=demo +foo.bar=3", "there is no key foo.bar"),
    ("experiment=demo +trainer.num_steps=3", "Did you mean run.num_steps"),
    ("experiment=demo ++trainer.num_steps=3", "Did you mean run.num_steps"),
    ("expriment=demo", "there is no expriment. Did you mean experiment?"),
    ("demo", "demo: not KEY=VALUE. Did you mean experiment=demo?"),
    ("experiment demo", "experiment: not KEY=VALUE. Write experiment=OPTION with one of"),
    ("experiment:demo", "Write experiment=demo"),
    ("statsu runs/x", "Did you mean the command `headway status`?"),
    ("experiment=demo trainer.lr =1", "Write trainer.lr=VALUE, without spaces: learning rate (number)"),
    ("experiment=demo =1", "there is no key before the '='"),
    ("experiment=demo ~run.seed", "nothing can be taken out of the configuration. Set the key to another value: run.seed=VALUE"),
    ("experiment=demo --dryrun", "there is no such flag. Did you mean --dry-run?"),
    ("experiment=demo --trainer.lr=1", "Write trainer.lr=1, without dashes"),
    ("--cfg jobs experiment=demo", "Use one of job, hydra, all"),
    ("--cfg job experiment=demo trainer.num_steps=3", "Did you mean run.num_steps"),
    ("experiment=demo hydra.run.dir=x", "hydra.run.dir=x: this key is without effect here"),
    # An option that a group has not.
    ("experiment=dem", "group experiment has no 'dem'. There is demo, "),
    ("model=smollm", "group model has no 'smollm'. There is smollm2, "),
    ("cluster=slrum", "group cluster has no 'slrum'. There is slurm, "),
    ("data=demo", "group data has no 'demo'. Did you mean experiment=demo?"),
    ("experiment=demo trainer=1", "group trainer has no '1'. There is default"),
    ("sweep --detach experiment=tiny staleness.eta=0,4", "launch.detach=True: must be false for a sweep on this machine"),
    ("sweep experiment=tiny,demoo", "group experiment has no 'demoo'"),
    ("eval greedi evaluation.run=x", "group eval has no 'greedi'. There is greedy, sampled"),
    ("eval", "give one kind of evaluation"),
    # A value that cannot be.
    ("experiment=demo trainer.lr=fast", "trainer.lr=fast: must be a number. trainer.lr: learning rate"),
    ("experiment=demo engine.num_slots=1.5", "must be a whole number. engine.num_slots: requests generated at once by a server"),
    ("experiment=demo reward.timeout_s=10s", "must be a number. reward.timeout_s: seconds after which a verifier is killed"),
    ("experiment=demo run.num_steps=null", "run.num_steps=null: must be a whole number"),
    ("experiment=demo staleness.bound=loose", "must be one of admission, hard"),
    ("experiment=demo evaluation.enabled=maybe", "must be true or false"),
    ("experiment=demo workflow.stop=text", "must be a list of texts"),
    ("experiment=demo trainer.lr=", "must be a number"),
    ("experiment=demo trainer.lora=16", "trainer.lora is a section of keys. Give one of them, such as trainer.lora.rank=VALUE"),
    ("experiment=demo trainer.lora.targets=[qkv]", "must be a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ("experiment=demo trainer.lor.rank=8", "there is no key trainer.lor.rank. Did you mean trainer.lora.rank"),
    ("experiment=demo weights.adapter_only=true", "weights.adapter_only=True: must be false with trainer.lora.rank=0"),
    ("experiment=demo trainer.lora.rank=8 weights=nccl weights.adapter_only=true", "weights.adapter_only=True: must be false with weights=nccl"),
    ("experiment=demo run=3", "run is a section of keys. Give one of them"),
    ("experiment=demo workflow.stop=a,b", "a list is written workflow.stop=[a,b]"),
    ("experiment=demo workflow.stop=[a", "its value cannot be read. Lists are written workflow.stop=[a,b]"),
    ("experiment=demo staleness.eta=0,4", "several values need a sweep: headway sweep ... staleness.eta=0,4"),
    ("experiment=demo 'trainer.lr=${foo.bar}'", "trainer.lr: refers to what there is not"),
    ("experiment=demo 'run.name=${oc.env:HEADWAY_NO_SUCH}'", "run.name: refers to what there is not"),
    ("experiment=demo trainer.batch_groups=7", "trainer.num_minibatches=2: must divide trainer.batch_groups=7"),
    ("experiment=demo allocation.num_devices=1", "allocation.num_devices=1: must be at least 2"),
    ("data=jsonl model.path=/x", "data.path=''"),
    ("run", "model.path=''"),
    ("model.path=/m data=mixture data.parts.sums.digits=x", "data.parts.sums.digits=x: must be a whole number"),
    ("model.path=/m data=mixture data.parts.sums=3", "is a section of keys. Give one of them, such as data.parts.sums."),
    ("model.path=/m data=mixture data.parts.NEW.digits=1", "data.parts has no NEW yet. A new one is given as a whole: "
                                                           "'data.parts={NEW: {digits: 1}}'"),
    ("data=reasoning_gym 'data.stages=[{untill: 10}]'", "must be a list of sections"),
    ("experiment=null", "a group cannot be without an option. Leave it out, or choose one of"),
    ("eval=null model.path=/m", "a group cannot be without an option"),
    ("experiment=tiny,demo", "several values need a sweep: headway sweep ... experiment=tiny,demo"),
    ("experiment=tiny @foo=1", "there is no key before the '@'"),
    ("experiment=tiny trainer@foo=default", "there is no section foo"),
    ("experiment=tiny \"run.dir='~nobody-here/x'\"", "run.dir='~nobody-here/x': there is no user nobody-here here"),
    # What would do nothing.
    ("experiment=demo model.path=/nope", "model.path=/nope: model=smollm2 brings a model of its own, and would not start from this folder"),
    ("experiment=tiny model.path=/nope", "model=tiny brings a model of its own"),
    ("experiment=tiny data.path=/nope", "data.path=/nope: would be without effect: these prompts are made up"),
    ("experiment=tiny data.task=gcd", "only data.kind=reasoning_gym has tasks. Choose data=reasoning_gym"),
    ("experiment=tiny reward.judge.rubric=x", "reward.judge.rubric=x: would be without effect: no verifier of this run is the judge"),
    ("experiment=tiny reward.verifier=judge", "reward.judge.url='': must name an endpoint with verifier 'judge'. See docs/judges.md"),
    ("experiment=tiny cluster.time=60", "with cluster.kind=local all runs on this machine. Choose cluster=slurm"),
    ("experiment=tiny cluster.train.partition=gpu", "with cluster.kind=local all runs on this machine"),
    ("model.path=/m data=gsm8k reward.verifier=number", "would be without effect: data.verifier says what judges these prompts"),
    ("experiment=tiny workflow.num_answers=3", "workflow.num_answers=3: must be left at its default with workflow.name=single_turn"),
    ("experiment=tiny algorithm.gamma=0.9", "must be 1 with algorithm.advantage=group_norm"),
    ("eval greedy model.path=/m trainer.lr=1e-5", "has no meaning with run.kind=evaluation"),
    # Sweeps.
    ("sweep experiment=tiny staleness.eta=0,-1", "(of the combination experiment=tiny staleness.eta=-1; no run of the sweep was started)"),
    ("-m experiment=tiny staleness.eta=0,-1", "staleness.eta=-1: must be 0 or more"),
    ("--dry-run sweep experiment=tiny allocation.num_devices=2,1", "allocation.num_devices=1: must be at least 2"),
    ("sweep experiment=tiny staleness.eta=0,x", "staleness.eta=x: must be a whole number"),
    ("sweep experiment=tiny 'trainer.lr=interval(0,1)'", "only lists of values can be swept"),
    ("sweep experiment=tiny run.dir=/x staleness.eta=0,1", "run.dir='/x': cannot be given with -m"),
    ("sweep experiment=tiny staleness.eta=0,1 'hydra.sweep.dir=${nope}'", "refers to what there is not"),
    ("sweep experiment=tiny staleness.eta=0,1 hydra.sweep.dir=a,b", "must be the path of one folder"),
    ("sweep experiment=tiny staleness.eta=0,1 hydra.sweep.dir=null", "must be the path of one folder"),
    ("sweep experiment=tiny 'trainer.lr=glob(*)'", "glob is not known here"),
    ("sweep 'experiment=glob(t*)'", "glob is not known here"),
    # Files of the user's own.
    ("--config-dir {files} data=parts model.path=/m", "data/parts.yaml:4: data.num_heldout=many: must be a whole number"),
    ("--config-dir {files} data=stages model.path=/m", "data/stages.yaml:3: data.num_heldout=many: must be a whole number"),
    ("--config-dir {files} data=bad_part model.path=/m", "data/bad_part.yaml:2: data.parts={'sums': {'digits': 'x'}}: must be a whole number. "
                                                         "data.parts.sums.digits"),
    ("--config-dir {files} experiment=unknown_tag", "experiment/unknown_tag.yaml:3: a value that cannot be read, such as one with a tag"),
    ("--config-dir {files} experiment=latin", "experiment/latin.yaml: cannot be read (not a text)"),
    ("--config-dir {files} experiment=itself", "experiment/itself.yaml: defaults: names itself"),
    ("--config-dir {files} experiment=to", "files name each other in their defaults"),
    ("--config-dir {files} experiment=home", "there is no user of that name here"),
    ("--config-dir {files} experiment=word", "experiment/word.yaml:2: defaults: must be a list"),
    ("--config-dir {files} experiment=empty", "experiment/empty.yaml:2: trainer=null: trainer is a section of keys"),
    ("--config-dir {files} experiment=dotted", "experiment/dotted.yaml:2: trainer.lr: a file has no keys with dots. Write trainer: and below it"),
    ("--config-dir {files} experiment=optional", "experiment/optional.yaml:5: trainer.lr=fast: must be a number"),
    ("--config-dir {files} cluster=sexagesimal_below experiment=tiny",
     "cluster/sexagesimal_below.yaml:5: 8:00:00: YAML takes this for one number, 28800. Quote it: '8:00:00'"),
    ("--config-dir {files} cluster=sexagesimal experiment=tiny", "cluster/sexagesimal.yaml:3: 1:00:00: YAML takes this for one number, 3600. "
                                                                 "Quote it: '1:00:00'"),
    ("--config-dir {files} cluster=twice_merged experiment=tiny", "cluster/twice_merged.yaml:3: cluster.inference.mem stands there twice"),
    ("--config-dir /no/such cluster=mine experiment=tiny", "--config-dir /no/such: there is no such folder"),
    ("--config-dir {files} cluster=mine experiment=tiny", "group cluster has no 'mine'. There is"),
    ("--config-dir {files} cluster=misspelt experiment=tiny", "cluster/misspelt.yaml:6: there is no key cluster.inference.partiton. Did you mean "
                                                              "cluster.inference.partition"),
    ("--config-dir {files} cluster=alone experiment=tiny", "cluster/alone.yaml:1: cluster.account=x: would be without effect"),
    ("--config-dir {files} cluster=bracket experiment=tiny", "cluster/bracket.yaml:4: not valid YAML"),
    ("--config-dir {files} cluster=tab experiment=tiny", "cluster/tab.yaml:2: not valid YAML: a sign that YAML does not know there, such as a tab"),
    ("--config-dir {files} cluster=colon experiment=tiny", "cluster/colon.yaml:1: not valid YAML: a second ':' in the line"),
    ("--config-dir {files} cluster=indented experiment=tiny", "cluster/indented.yaml:2: not valid YAML"),
    ("--config-dir {files} cluster=base experiment=tiny", "cluster/base.yaml: defaults: group cluster has no 'slrum'. There is slurm"),
    ("--config-dir {files} experiment=model", "experiment/model.yaml: defaults: group model has no 'smolm2'. There is smollm2"),
    ("--config-dir {files} experiment=type", "experiment/type.yaml:5: trainer.lr=fast: must be a number"),
    ("--config-dir {files} experiment=twice", "experiment/twice.yaml:6: trainer.lr stands there twice"),
    ("--config-dir {files} experiment=task", "experiment/task.yaml:5: data.task=gcd: would be without effect"),
    ("--config-dir {files} experiment=list", "experiment/list.yaml: must hold KEY: VALUE lines"),
    ("--config-dir {files} experiment=nogroup", "experiment/nogroup.yaml: defaults: there is no group modle. Did you mean model?"),
    ("--config-dir {files} experiment=noword", "experiment/noword.yaml: defaults: model: tiny: another option of this group is chosen already. "
                                               "Write `- override /model: tiny`"),
    ("--config-dir {files}/cluster cluster=alone experiment=tiny", "is the folder of a group. Give the one above it: --config-dir "),
    ("--shell-completion install=nosh", "must be --shell-completion install=SHELL or uninstall=SHELL, with bash, zsh or fish"),
    ("experiment=tiny run.num_steps=99999999999999999999999", "must be at least 1 and below 2^31"),
    ("eval greedy", "nothing says what is judged. Give evaluation.run=RUN, or model.path=FOLDER"),
    ("logs RUN train -n x", "--lines/-n 'x': must be a whole number"),
    ("logs RUN train --lines", "--lines/-n needs a value"),
    ("resume", "headway: give RUN. "),
    ("report", "headway: give FOLDER. "),
    ("--config-dir {files} experiment=header", "experiment/header.yaml:1: an experiment sets keys of all sections: its first line must be"),
    ("--config-dir {files} experiment=section", "experiment/section.yaml:2: there is no key traner. Did you mean the section trainer?"),
    ("--config-dir {files} data=number model.path=/m", "data/number.yaml:3: data.num_heldout=many: must be a whole number"),
    # Run folders and other commands.
    ("status", "give RUN"),
    ("status {files}/gone", "gone: not a run folder: there is no such folder"),
    ("watch {files}/file", "not a run folder but a file"),
    ("stop {files}/folder", "not a run folder (no config.json)"),
    ("resume {files}/gone", "there is no such folder"),
    ("status " + "x" * 260, "is too long for the name of a file"),
    ("resume " + "x" * 260, "is too long for the name of a file"),
    ("runs " + "x" * 260, "is too long for the name of a file"),
    ("report " + "x" * 260, "is too long for the name of a file"),
    ("x" * 260, "is too long for the name of a file"),
    ("help nonsense", "nonsense: there is no such command. Use one of run, sweep"),
    ("--dry-run=true experiment=tiny", "--dry-run takes no value. Leave 'true' out"),
    ("--info nonsense experiment=tiny", "there is no --info 'nonsense'. Use one of all"),
    ("logs {files}/folder", "give role"),
    ("logs {files}/folder trian", "there is no role 'trian'. Use one of"),
    ("report {files}/gone", "neither a run folder"),
    ("status {files}/folder --jsno", "there is no such flag or argument: --jsno"),
    ("runs {files}/gone", "there is no such folder"),
    ("runs {files}/file", "is a file"),
    ("config trainer.lrr", "Did you mean trainer.lr?"),
    ("config qqqq", "there is no group, section or key qqqq"),
    ("eval greedy evaluation.run={files}/gone", "not a run folder"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's own files."""
    folder = tmp_path_factory.mktemp("mine")
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def answered(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, standard output and error of a command line."""
    try:
        status = dispatch(shlex.split(line))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    said = capsys.readouterr()
    return status, said.out, said.err


def assert_plain(said: str) -> None:
    """No library's words, and no more than is needed."""
    own = re.sub(r"hydra\.sweep\.dir|hydra\.run\.dir|job, hydra, all", "", said).lower()  # keys that are called so
    assert not [word for word in JARGON if word.lower() in own]
    assert len(said.strip().splitlines()) <= 2, "one answer"


@pytest.mark.parametrize(("line", "says"), MISTAKES)
def test_a_mistake_has_one_clear_answer(line: str, says: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                        tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = answered(line.replace("{files}", str(files)), capsys)
    assert status == 2 and says in err, f"{out}\n{err}"
    assert_plain(err)
    assert not out and list(tmp_path.iterdir()) == [], "nothing was begun"


def test_settings_of_hydra_in_a_file_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = answered(f"--config-dir {files} experiment=own_hydra", capsys)
    assert status == 2 and "experiment/own_hydra.yaml:3: hydra: is without effect here. Leave it out" in err


def test_there_are_many_rows() -> None:
    assert len(MISTAKES) > 90 and len({line for line, _ in MISTAKES}) == len(MISTAKES)


def test_a_users_own_files_come_before_ours(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("defaults: [slurm, _self_]\naccount: me\ntrain: {partition: gpu}\n")
    with composing.opened(CONF, tmp_path) as own:
        checked = own.check(["experiment=tiny", "cluster=mine"])
    assert checked.notes == () and checked.config.cluster.train.account == "me"
    with pytest.raises(ConfigError, match="is a file"), composing.opened(CONF, tmp_path / "cluster" / "mine.yaml"):
        raise AssertionError


@pytest.mark.parametrize("arguments", [
    ["model.path=/m", "data=mixture", "data.parts.sums.digits=1"], ["model.path=/m", "data=mixture", "data.parts.sums.weight=3"],
    ["model.path=/m", "data=mixture", "data.parts={new: {digits: 1}}"], ["data=reasoning_gym", "data.stages=[{until: 10, options: {x: 1}}]"],
    ["experiment=tiny", "reward.parts={boxed:0.1}"], ["data.columns={prompt: q}"], ["cluster=slurm", "cluster.train.sbatch={nice: 5}"],
])
def test_what_the_schema_takes_is_not_refused(arguments: list[str]) -> None:
    with composing.opened(CONF) as own:
        (checked,) = own.combinations(arguments, False)
        own.composed(checked)


def test_lists_of_quoted_texts_can_be_swept() -> None:
    with composing.opened(CONF) as own:
        found = [own.composed(one).workflow.stop for one in own.combinations(["experiment=tiny", 'workflow.stop=["x y"],["a,b"]'], True)]
    assert found == [["x y"], ["a,b"]]


def test_a_mapping_of_a_file_may_be_merged_into_another(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("defaults: [slurm, _self_]\ntrain: &gpu {partition: gpu, mem: 1G}\n"
                                                    "inference: &more {<<: *gpu, mem: 20G}\nreward: *more\n")
    with composing.opened(CONF, tmp_path) as own:
        cluster = own.check(["experiment=tiny", "cluster=mine"]).config.cluster
    assert [(part.partition, part.mem) for part in (cluster.train, cluster.inference, cluster.reward)] == [("gpu", "1G"), *[("gpu", "20G")] * 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into everything")
@pytest.mark.parametrize("line", [
    "experiment=tiny model=hf model.path={closed}/m", "--dry-run model.path={closed}/m", "eval greedy evaluation.run={closed}/run",
    "--config-dir {closed}/mine experiment=tiny", "{closed}/run"])
def test_a_path_that_may_not_be_looked_at_is_refused(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (closed := tmp_path / "closed").mkdir(mode=0)
    status, _, err = answered(line.format(closed=closed), capsys)
    closed.chmod(0o700)
    assert status == 2 and "you may not look into it" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into everything")
def test_what_may_not_be_entered_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    for command in ("status", "stop", "runs", "report"):
        status, _, err = answered(f"{command} {closed if command == 'runs' else closed / 'run'}", capsys)
        assert status == 2 and "you may not look into it" in err
    closed.chmod(0o700)


@pytest.mark.parametrize(("arguments", "status", "says"), [
    ([], 0, r"(?s)usage: headway \[COMMAND\].*status.*--dry-run.*headway experiment=demo.*headway config.*exit status"),
    (["experiment=demo", "trainer.num_steps=3"], 2, r"^headway: trainer.num_steps=3: there is no key .*run\.num_steps"),
    (["status", "/no/such"], 2, r"^headway: /no/such: not a run folder"),
    (["--dry-run", "experiment=tiny", "trainer.lora.alpha=8"], 0, r"^note: trainer.lora.alpha=8 has no effect: trainer.lora.rank=0 trains"),
    (["--dry-run", "experiment=tiny", "trainer.min_lr=1e-4"], 0, r"^note: trainer.min_lr=0.0001 has no effect: trainer.lr_schedule=constant"),
])
def test_the_console_command_answers_alike(arguments: list[str], status: int, says: str) -> None:
    command = str(Path(sys.executable).with_name("headway"))
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status and re.search(says, done.stderr if status else done.stdout)
    assert_plain(done.stderr)
