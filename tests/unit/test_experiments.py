"""The experiments that are shipped with prompts of their own: config, prompts and verifiers fit, before any model is loaded."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF
from launcher.config.schema import FullConfig, register, to_object
from launcher.preflight import device_choice
from tests.unit.launcher.cli.test_mistakes import answered
from workers.data import demo_tasks
from workers.data.prompts import open_prompts
from workers.reward.code.tests import Asserts, parse
from workers.reward.verifiers.matching import number

register()

ROOT = CONF.parent
EXPERIMENTS = ("code_tiny", "gsm_symbolic", "multi_turn")
NUM_PHRASES = len({*demo_tasks._ONE, *demo_tasks._TWO, *demo_tasks._THREE})


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their paths begin at the root of the repository, as `make` does."""
    monkeypatch.chdir(ROOT)


def composed(experiment: str) -> FullConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_object(compose("config", overrides=[f"experiment={experiment}"]))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_what_would_be_submitted_is_shown(
        experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = {"cpu": {"name": "CPU", "runs": ["float32"], "best": "float32"}}
    monkeypatch.setattr(device_choice, "settle", functools.partial(device_choice.settle, ask=lambda: cpu))
    status, out, err = answered(f"--dry-run experiment={experiment} run.dir={tmp_path / 'run'}", capsys)
    assert status == 0, err
    assert f"{experiment}-inference" in out and f"{experiment}-train" in out


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_prompts_are_there_and_held_out_ones_are_others(experiment: str) -> None:
    config = composed(experiment)
    source = open_prompts(config.data, config.reward, config.run.seed)
    heldout = {prompt.text for prompt in source.heldout()}
    training = {source.train(index).text for index in range(config.run.num_steps * config.trainer.batch_groups)}
    assert len(heldout) == config.data.num_heldout and not heldout & training


def test_shipped_prompts_are_those_that_the_code_makes(tmp_path: Path) -> None:
    demo_tasks.write(tmp_path)
    for name in EXPERIMENTS:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (CONF / "prompts" / f"{name}.jsonl").read_bytes()


def passes(row: dict[str, Any], response: str) -> bool:
    """Whether `response`, one of our own expressions, passes the tests of `row`."""
    names: dict[str, Any] = {}
    reference = parse(json.dumps(row["answer"]))
    assert isinstance(reference, Asserts)
    exec(f"{reference.prompt}{response}\n{reference.test}", names)
    try:
        names["check"](names["f"])
    except (AssertionError, NameError):
        return False
    return True


def test_answers_of_code_tiny_pass_their_own_tests_alone() -> None:
    rows = list(demo_tasks.code_rows())
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(passes(row, row["response"]) for row in rows)
    for row, other in itertools.permutations(rows[:NUM_PHRASES], 2):
        assert not passes(row, other["response"]), (row["response"], other["response"])


def test_worked_answers_of_gsm_symbolic_are_right() -> None:
    rows = list(demo_tasks.gsm_rows())
    assert {row["id"].split("/")[1] for row in rows} == set(map(str, demo_tasks.TEMPLATES))
    for row in rows:
        assert number("", row["response"], row["answer"]) == 1
        for calculation in row["response"].split(", "):
            left, right = calculation.split(" = ")
            assert eval(left) == int(right)  # digits and signs alone
