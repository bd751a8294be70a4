"""What `make demo` says before and after its run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher import demo
from launcher.__main__ import CONF
from launcher.preflight import device_choice
from workers.config import ConfigError


def test_it_says_first_what_will_happen_and_how_long_it_takes() -> None:
    command = [sys.executable, "-m", "launcher.demo", "experiment=demo", "--dry-run"]
    ended = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True, timeout=300, check=True)
    first = ended.stdout.splitlines()
    assert "SmolLM2-135M-Instruct learns two-digit addition" in first[0]
    assert "minutes on this machine (" in first[2] and "plan: 2 devices" in ended.stdout


@pytest.mark.parametrize(("gflops", "minutes"), [(212.0, 5), (87.0, 7)])
def test_a_slower_machine_is_told_more_minutes(
        gflops: float, minutes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_choice, "ask", lambda: {"cpu": {"name": "CPU", "runs": ["float32"], "best": "float32", "gflops": gflops}})
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "dispatch", lambda arguments: 0)
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert f"about {minutes} minutes on this machine (CPU, float32)" in said and "What to try next" in said


def test_a_torch_that_does_not_start_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    why = "torch cannot be used on this machine (no libgomp). Install it in the environment of this command"

    def ask() -> device_choice.Found:
        raise ConfigError(why)

    monkeypatch.setattr(device_choice, "ask", ask)
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == 2
    assert capsys.readouterr().err.splitlines() == [f"headway: {why}"]
