"""`headway rollouts`: the samples that are asked for, in a terminal and as a page that can neither run nor load what a model has written."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report import main as report
from launcher.rollouts import main, rollouts_page
from launcher.rollouts.kept_rows import Range, Wanted, parts, pieces, read, weights
from tests.support.report_runs import make
from tests.unit.launcher.report.test_page import BROWSER, HOSTILE
from workers.metrics.rollout_table import table
from workers.run.folder import RunFolder


def row(step: int = 1, kind: str = "train", **others: Any) -> dict[str, Any]:
    return {"step": step, "kind": kind, "group": f"e{step}.0" if kind == "heldout" else f"g{step}", "prompt_id": "1+1", "sample": 0, "episode": 0,
            "prompt": "1 + 1 =", "response": "two", "reference": "2", "reward": 1.0, "score": 1.0, "num_tokens": 2,
            "part_scores": [("right", 1.0)], "age": 0, "tokens": [5, 6],
            "token_ends": [1, 3], "logprobs": [-1.0, -1.0], "proximal_logprobs": [-1.0, -0.3], "trained_on": [True, True],
            "versions": [0, 1]} | others


def keep(run: RunFolder, name: str, *kept: dict[str, Any]) -> None:
    run.rollouts.mkdir(exist_ok=True)
    parquet.write_table(table(list(kept)), run.rollouts / name)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = make(tmp_path / "run", None, (0.25, 0.75), 40, "finished")
    for step in (1, 2, 30):
        keep(made, f"train-{step:08d}.parquet", row(step, reward=-float(step), response="two" * step, num_tokens=step, token_ends=[1, 3 * step]))
    keep(made, "heldout-00000020.000.parquet", row(20, "heldout", prompt_id="held", proximal_logprobs=None, response="SIX", versions=[20, 20]))
    return made


def listed(run: RunFolder, capsys: pytest.CaptureFixture[str], *flags: str) -> list[tuple[int, str]]:
    assert main([str(run.path), "--json", *flags]) == 0
    return [(found["step"], found["kind"]) for found in map(json.loads, capsys.readouterr().out.splitlines())]


@pytest.mark.parametrize(("flags", "steps"), [
    ((), [30, 20, 2, 1]), (("--kind", "heldout"), [20]), (("--step", "2:20"), [20, 2]), (("--step", ":2"), [2, 1]), (("--step", "30"), [30]),
    (("--reward", ":-2"), [30, 2]), (("--tokens", "2:"), [30, 20, 2]), (("--text", "SI[XY]"), [20]), (("--text", r"1 \+ 1"), [30, 20, 2, 1]),
    (("--prompt", "held"), [20]), (("-n", "2"), [30, 20]), (("--step", "99:"), [])])
def test_what_is_asked_for(run: RunFolder, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], steps: list[int]) -> None:
    assert [step for step, _ in listed(run, capsys, *flags)] == steps


def test_in_a_terminal(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.path), "--colour", "weight"]) == 0
    told = capsys.readouterr().out
    assert "step 2 train, 1+1, sample 0: reward -2, score 1, 2 tokens by versions 0 to 1, age 0\n1 + 1 =\ntwotwo\nreference 2\n" in told
    assert main([str(run.path), "--text", "nobody said this"]) == 0 and "no kept sample is like that" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--step", "a:b"), ("--step", "1:2:3"), ("--text", "("), ("--kind", "x"), ("-n", "x"), ("--html", "--json")])
def test_mistakes_are_told(run: RunFolder, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(run.path), *flags])
    assert left.value.code == 2 and "headway: " in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "named"), [(("--html", "-n", "3"), "--number"), (("--html", "--colour", "weight", "--full"), "--full, --colour"),
                                              (("--json", "--full"), "--full")])
def test_options_without_effect_are_refused(run: RunFolder, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], named: str) -> None:
    assert main([str(run.path), *flags]) == 2 and f"{named}: has no effect with {flags[0]}" in capsys.readouterr().err
    assert not run.rollouts_page.exists()


def test_nothing_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(tmp_path / "run", None, (0.25, 0.75), 40, "finished")
    assert main([str(made.path)]) == 2 and "rollout.keep=0" in capsys.readouterr().err


def test_damaged_and_removed_files(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    gone = parts(run.rollouts)[0]
    gone.path.unlink()
    assert list(read(gone)) == []
    whole = (run.rollouts / "train-00000030.parquet").read_bytes()
    for damaged in (b"PAR1 and no more", whole[:200] + bytes(200) + whole[400:], whole[:4] + bytes(300) + whole[304:]):
        (run.rollouts / "train-00000040.parquet").write_bytes(damaged)
        assert main([str(run.path)]) == 1 and "cannot be read" in capsys.readouterr().err
    assert report([str(run.path)]) == 0 and "no page of the rollouts: " in capsys.readouterr().out and run.report.exists()


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_ranges(low: float, high: float, value: float) -> None:
    assert (value in Range.of(f"{low!r}:{high!r}")) == (low <= value <= high)
    assert value in Range.of(":") and value in Range.of(repr(value))


@given(st.lists(st.text(max_size=3), min_size=1, max_size=8))
def test_pieces_are_the_response(texts: list[str]) -> None:
    ends = [len("".join(texts[:number])) for number in range(1, len(texts) + 1)]
    assert pieces(row(response="".join(texts), token_ends=ends)) == texts
    assert pieces(row(response="".join(texts), token_ends=[])) == ["".join(texts)]


def test_weights_of_what_is_trained_on() -> None:
    assert weights(row()) == pytest.approx([1.0, 2.0137], rel=1e-3)
    assert weights(row(trained_on=[True, False])) == [1.0, None] and weights(row(proximal_logprobs=None)) == [None, None]


@given(st.lists(st.integers(0, 1000), unique=True, max_size=60))
def test_steps_are_spread(steps: list[int]) -> None:
    steps = sorted(steps)
    order = list(rollouts_page.spread(steps))
    assert sorted(order) == steps and order[:1] == steps[-1:]
    if len(steps) > 4:
        first = sorted(steps.index(step) for step in order[:3])
        assert first == [0, (len(steps) - 1) // 2, len(steps) - 1]


def test_a_page_has_as_much_as_fits(run: RunFolder) -> None:
    for step in range(100, 200):
        keep(run, f"train-{step:08d}.parquet", row(step, prompt="x" * 1000))
    shown = rollouts_page.chosen(parts(run.rollouts), Wanted(), 30_000)
    assert 5 < len(shown) < 40 and [entry["step"] for entry in shown] == sorted(entry["step"] for entry in shown)
    steps = [entry["step"] for entry in shown]
    assert {1, 20, 199} <= set(steps), "the first, the last, and what is held out"
    assert max(second - first for first, second in itertools.pairwise(steps) if first >= 100) < 60


def test_what_one_kind_does_not_need_is_the_others(run: RunFolder) -> None:
    for step in range(100, 130):
        rows = (row(step, "heldout", group=f"e{step}.{at}", prompt_id=f"p{at}", prompt="x" * 500) for at in (3, 50))
        keep(run, f"heldout-{step:08d}.000.parquet", *rows)
    size = len(json.dumps(rollouts_page.chosen(parts(run.rollouts), Wanted(), 20_000)))
    assert 17_000 < size < 21_000
    assert {entry["prompt_id"] for entry in rollouts_page.chosen(parts(run.rollouts), Wanted(kind="heldout"), 10**6)} == {"p3", "held"}
    assert len(rollouts_page.chosen(parts(run.rollouts), Wanted(prompt_id="p50"), 10**6)) == 30, "asked for, it is there"


def test_the_page_is_inert(run: RunFolder) -> None:
    keep(run, "train-00000003.parquet", *(row(3, prompt=text, response=text, token_ends=[], reference=text, prompt_id=text) for text in HOSTILE))
    assert main([str(run.path), "--html"]) == 0
    page = run.rollouts_page.read_text()
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == page.count("<script") == 2, "the data and the page's own"
    (kind, data), (own, script) = scripts
    assert kind == ' type="application/json" id="data"' and own == "" and "<" not in data
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'") and f"script-src 'sha256-{digest}';" in policy[1]
    assert "innerHTML" not in script and "http" not in page.replace("http-equiv", "").replace(data, "")
    assert {entry["prompt"] for entry in json.loads(data)["samples"]} >= set(HOSTILE)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(("asked", "cards"), [
    ("", 4 + len(HOSTILE)), ("kind=heldout", 1), ("text=six", 1), ("from=2&to=20&kind=train", 1 + len(HOSTILE)), ("colour=weight&from=30", 1),
    ("least=-2&most=-2", 1)])
def test_a_browser_draws_and_searches_it(run: RunFolder, tmp_path: Path, asked: str, cards: int) -> None:
    keep(run, "train-00000003.parquet", *(row(3, prompt=text, response=text, token_ends=[], prompt_id=text) for text in HOSTILE))
    assert main([str(run.path), "--html"]) == 0
    done = subprocess.run([str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
                           f"{run.rollouts_page.as_uri()}#{asked}"], capture_output=True, text=True, timeout=120, check=False)
    drawn = done.stdout.partition('<main id="prompts">')[2].partition("</main>")[0]
    assert done.returncode == 0 and drawn.count('class="sample') == cards, done.stderr
    assert f"{cards} of {4 + len(HOSTILE)} samples here" in done.stdout
    assert ("rgb(var(--up)" in drawn) == ("weight" in asked)
    if not asked:
        assert 'class="v1"' in drawn and "<img" not in drawn and all(html.escape(text, quote=False) in drawn for text in HOSTILE if "&" not in text)
