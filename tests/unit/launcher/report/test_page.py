"""The page of a run: self-contained, complete, tolerant of whatever a run folder lacks, and inert whatever the model has written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.report import ending, main, page, sweep_page
from launcher.report.record import read
from tests.support.report_runs import Page, make, step, write_lines
from workers.config import RunKind
from workers.run import incarnations
from workers.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[4]
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "section", "article", "nav", "footer", "h1", "h2", "p", "div", "span", "b",
    "i", "a", "ul", "li", "dl", "dt", "dd", "figure", "figcaption", "svg", "path", "text", "rect", "table", "caption", "thead", "tbody", "tr", "th",
    "td", "pre", "code", "details", "summary"}
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "id", "class", "href", "viewbox", "role", "aria-label", "d", "x", "y", "width", "height"}
SECTIONS = {"learning", "updates", "staleness", "throughput", "timeline", "alarms", "samples", "config"}
HOSTILE = [
    "<script>alert(1)</script>", "</pre></div><img src=x onerror=alert(1)>", '" onmouseover="alert(1)', "' onload='alert(1)", "<!-- ", "]]>",
    "</style><b>", "{{ 7 * 7 }}{% include 'x' %}", "&lt;b&gt;", "javascript:alert(1)", "<svg/onload=alert(1)>", "<a href=https://example.org>x</a>"]


def page_of(run: RunFolder) -> Page:
    """The page that the command writes, checked to be inert."""
    assert main([str(run.path)]) == 0
    return inert(run.report.read_text())


def inert(text: str) -> Page:
    """The page's parts; fails where it could run or load anything."""
    found = Page(text)
    assert not found.open and found.declarations == ["doctype html"]
    assert found.tags <= TAGS, found.tags - TAGS
    names = {name for _, attributes in found.elements for name in attributes}
    assert names <= ATTRIBUTES, names - ATTRIBUTES
    links = [attributes["href"] for _, attributes in found.elements if "href" in attributes]
    assert all(re.fullmatch("#[a-z]+", link) and link[1:] in found.ids for link in links), links
    style = "".join(found.within("style"))
    assert "url(" not in style and "@import" not in style and "http" not in style
    policies = [attributes["content"] for tag, attributes in found.elements if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policies and policies[0].startswith("default-src 'none'") and "script-src" not in policies[0]
    drawn = [attributes["d"] for tag, attributes in found.elements if tag == "path"]
    assert all(re.fullmatch(r"[MVHZhv0-9eE .,+-]+", d) for d in drawn), "coordinates are numbers"
    return found


def test_a_whole_run(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {"staleness": {"eta": 2}}, (0.25, 0.75), 40, "finished")
    write_lines(run.heldout_samples, [
        {"step": at, "samples": [{"prompt_id": "p1", "prompt": "1+2=", "reference": "3", "response": text, "score": score}]}
        for at, text, score in ((0, "12", 0.0), (20, "4", 0.0), (40, "3", 1.0))])
    found = page_of(run)
    assert found.ids >= SECTIONS
    for said in (
            "small", "finished", "all steps done", "0.250 → 0.750", "50 prompts never trained on", "η = 2", "Reward", "Loss", "Entropy",
            "KL divergence", "Gradient norm", "Learning rate", "Clipped and masked", "Importance weights", "Effective sample size", "Response length",
            "Tokens a second", "The trainer", "waits for a batch", "The rollout workers", "have nothing to do", "Samples before and after", "1+2=",
            "num_microbatches", "staleness.eta", "None on record."):
        assert said in found.text, said
    write_lines(run.metrics, [step(1) | {"lead_reason": "narrowed: mean 0.3 of 0.1 nats"}])
    assert "1.5 steps, narrowed: mean 0.3 of 0.1 nats" in page_of(run).text
    answers = found.within("pre")
    assert "12" in answers and "3" in answers and "4" not in answers, "the first and the last evaluation"
    assert run.report.stat().st_size < 600_000


def test_a_supervised_run(tmp_path: Path) -> None:
    found = page_of(make(tmp_path / "run", None, (2.5, 0.5), 12, "finished", kind=RunKind.supervised))
    for said in ("2.500 → 0.500", "Held-out loss", "Perplexity", "measures the held-out loss"):
        assert said in found.text, said
    assert "staleness" not in found.ids and "Held-out accuracy" not in found.text and "The rollout workers" not in found.text
    assert "a supervised run generates nothing" in found.text


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (0.25,), 12)
    run.end(HOSTILE[0], "test")
    samples = [{"prompt_id": text, "prompt": text, "reference": text, "response": text, "score": 0.5} for text in HOSTILE]
    write_lines(run.heldout_samples, [{"step": 0, "samples": samples}, {"step": 12, "samples": samples}])
    lines = [json.loads(line) | {HOSTILE[1]: 1.0, "alarms_since": {HOSTILE[0]: 1}, "alarm_changes": [HOSTILE[1]]}
             for line in run.metrics.read_text().splitlines()]
    write_lines(run.metrics, lines)
    config = json.loads(run.config.read_text())
    config["run"]["name"] = config["data"]["path"] = config["workflow"]["stop"] = HOSTILE[1]
    run.config.write_text(json.dumps(config))
    found = page_of(run)
    shown = found.within("pre")
    assert all(shown.count(text) >= 3 and text in found.within("code") for text in HOSTILE[:8]), "letter by letter, as text"
    assert found.within("h1")[0].strip() == HOSTILE[1] and HOSTILE[0] in found.within("td") and f"step 1: {HOSTILE[1]}" in found.within("li")
    assert "49" not in shown


@pytest.mark.parametrize(("text", "seen"), [
    ("a\x00b", "a\\u0000b"), ("a\u202eb", "a\\u202eb"), ("a\u200bb", "a\\u200bb"), ("a\ud800b", "a\\ud800b"), ("a\x1b[31mb", "a\\u001b[31mb"),
    ("a\u2028b", "a\\u2028b"), ("a\tb\nc é 漢 🙂 ❤\ufe0f", "a\tb\nc é 漢 🙂 ❤\ufe0f"),
    ("a\U000e0041b", "a\\U000e0041b"), ("a\u00ad\u3164b", "a\\u00ad\\u3164b")],
    ids=["nul", "override", "zero_width", "surrogate", "escape", "line", "letters", "tag", "filler"])
def test_what_cannot_be_seen_is_shown_by_its_number(tmp_path: Path, text: str, seen: str) -> None:
    run = make(tmp_path / "run")
    write_lines(run.heldout_samples, [{"step": 0, "samples": [{"prompt_id": "p", "prompt": "q", "response": text, "score": 1.0}]}])
    assert seen in page_of(run).within("pre")


def test_the_templates_exempt_nothing_from_escaping() -> None:
    sources = [path.read_text() for path in (ROOT / "launcher" / "report").rglob("*.html")]
    assert len(sources) >= 4
    assert not any(re.search(r"\|\s*safe|autoescape|Markup", source) for source in sources)
    assert page.environment().autoescape is True


def _no_folder(run: RunFolder) -> None:
    shutil.rmtree(run.epochs)


def _cut(run: RunFolder) -> None:
    for path in (run.metrics, run.evaluations):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) - 9])


def _broken_lines(run: RunFolder) -> None:
    for path in (run.metrics, run.evaluations, run.heldout_samples):
        with path.open("ab") as file:
            file.write(b'nonsense\n[1]\n"x"\n\xff\xfe\n{"step": null}\n{"step": "3"}\n{}\n')


def _odd_values(run: RunFolder) -> None:
    odd = {"reward": "x", "loss": None, "lr": True, "entropy": 1e400, "grad_norm": [1], "staleness_histogram": {"-1": 2, "x": 1, "3": "y"},
           "alarms": "x", "alarms_since": [1], "alarm_changes": 3, "seconds": "soon", "tokens_trained": 10**400, "behavior_weight_max": -1.0,
           "replicas": None}
    write_lines(run.metrics, [{"step": number} | odd for number in range(1, 5)])
    write_lines(run.evaluations, [{"step": 0, "accuracy": 3.0, "num_prompts": 0, "avg": 3, "pass": [1], "num_samples": 4}, {"accuracy": 0.5}])
    write_lines(run.heldout_samples, [{"step": 0, "samples": {"a": 1}}, {"step": 1, "samples": [3, {"score": "x"}]}])


def _broken_files(run: RunFolder) -> None:
    for path in (run.outcome, run.summary, run.submitted):
        path.unlink(missing_ok=True)
        path.write_text("{")
    (run.epochs / "000001").write_text("{")


def _alien_config(run: RunFolder) -> None:
    run.config.write_text('{"run": {"kind": "other"}, "allocation": {"num_devices": "two"}, "x": 3, "staleness": null}')


def _nothing(run: RunFolder) -> None:
    for path in (run.metrics, run.evaluations, run.outcome):
        path.unlink()


@pytest.mark.parametrize("harm", [_no_folder, _cut, _broken_lines, _odd_values, _broken_files, _alien_config, _nothing])
def test_a_harmed_run_still_has_a_page(tmp_path: Path, harm: Callable[[RunFolder], None]) -> None:
    run = make(tmp_path / "run", None, (0.25, 0.5), 12, "failed")
    harm(run)
    found = page_of(run)
    assert {"learning", "timeline", "samples", "config"} <= found.ids
    if harm in (_no_folder, _broken_lines, _broken_files):
        assert "cannot be read" in found.text


@pytest.mark.parametrize("num_steps", [0, 1, 2, 29, 30, 31])
def test_young_runs(tmp_path: Path, num_steps: int) -> None:
    found = page_of(make(tmp_path / "run", None, (0.25,) if num_steps else (), num_steps))
    assert ("No training step is on record" in found.text) is (num_steps == 0)


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, tuple(number / 100 for number in range(100)), 1000, "finished")
    samples = [{"prompt_id": f"p{index}", "prompt": "&" * 1000, "reference": "<" * 200, "response": "'" * 2000, "score": 0.0} for index in range(8)]
    write_lines(run.heldout_samples, [{"step": 10 * number, "samples": samples} for number in range(100)])
    page_of(run)
    assert run.report.stat().st_size < 2_000_000


def test_incarnations_are_marked(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (), 20, "finished")
    incarnations.record_end(run, 1, "preempted", "its place was needed", 8, 8)
    incarnations.claim(run, "77_1", "77", 0, "node2", 1, 8)
    found = page_of(run)
    assert "preempted" in found.text and "its place was needed" in found.text and "77_1" in found.text and "node2" in found.text
    assert "epoch 2" in found.within("text")
    marks = [attributes for tag, attributes in found.elements if tag == "path" and attributes["class"] == "mark"]
    assert len(marks) >= 10, "in every chart over steps, and in the timeline"


def test_alarms_are_listed_with_their_steps(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (), 6, "finished")
    since = [{}, {"entropy_collapse": 1}, {"entropy_collapse": 1}, {}, {"stale_data": 5}, {"stale_data": 5}]
    lines = [json.loads(line) | {"alarms": len(active), "alarms_since": active} for line, active in
             zip(run.metrics.read_text().splitlines(), since, strict=True)]
    lines[1]["alarm_changes"] = ["alarm entropy_collapse, since step 1: low. Remedy: raise it"]
    write_lines(run.metrics, lines)
    found = page_of(run)
    assert [text for text in found.within("td") if text in ("entropy_collapse", "1", "3", "stale_data", "5", "still at the last step, 6")][-6:] == [
        "entropy_collapse", "1", "3", "stale_data", "5", "still at the last step, 6"]
    assert "step 2: alarm entropy_collapse, since step 1: low. Remedy: raise it" in found.within("li")


def test_a_sweep_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for eta, accuracies in ((0, (0.25, 0.5)), (4, (0.25, 0.75))):
        make(tmp_path / f"{eta}", {"staleness": {"eta": eta}}, accuracies, 40, "finished")
    assert main([str(tmp_path), "--html"]) == 0
    path = tmp_path / "report.html"
    assert capsys.readouterr().out == f"report {path}\n"
    found = inert(path.read_text())
    assert {"runs", "outcome", "learning", "updates", "staleness", "throughput"} <= found.ids
    assert "staleness.eta" in found.within("th") and {"0.500", "0.750"} <= set(found.within("td"))
    assert "eta=0" in found.text and "eta=4" in found.text
    drawn = {attributes["class"] for tag, attributes in found.elements if tag == "path"}
    assert {"line tone0", "line tone1"} <= drawn


@pytest.mark.parametrize("num_runs", [1, 14])
def test_sweeps_of_one_and_of_many_runs_that_have_not_begun(tmp_path: Path, num_runs: int) -> None:
    runs = [make(tmp_path / f"{number:02}", {"run": {"seed": number}}) for number in range(num_runs)]
    found = inert(sweep_page.render(tmp_path, runs, 1e9))
    assert "Nothing is on record yet." in found.text and found.within("td").count("gone") == num_runs


def test_the_defaults_that_cannot_be_composed_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run")
    monkeypatch.setattr("launcher.report.changes.CONF", tmp_path / "nowhere")
    assert "the defaults cannot be composed" in inert(page.render(read(run), 1e9)).text


def test_the_launcher_writes_what_no_coordinator_has(tmp_path: Path) -> None:
    run, said = make(tmp_path / "run", None, (0.25,), 3, "failed"), []
    ending.tell_report(run, said.append)
    assert said == [f"report {run.report}"] and "failed" in inert(run.report.read_text()).text
    run.report.write_text("as it is")
    ending.tell_report(run, said.append)
    assert run.report.read_text() == "as it is", "it is newer than the end of the run"
    os.utime(run.report, (1, 1))
    ending.tell_report(run, said.append)
    assert run.report.read_text() != "as it is"


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = make(tmp_path / "run", None, (), 3, "failed"), []
    run.config.write_text("{")
    ending.tell_report(run, said.append)
    assert said[0].startswith("no report: ") and "not a readable run config" in said[0] and said[0].endswith(f"Later: headway report {run.path}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    ending.tell_report(run, said.append)
    assert "No such file" in said[1]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (0.25, 0.75), 40, "finished")
    samples = [{"prompt_id": text, "prompt": text, "response": text, "score": 0.0} for text in HOSTILE]
    write_lines(run.heldout_samples, [{"step": 0, "samples": samples}])
    page_of(run)
    done = subprocess.run([str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
                           run.report.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "<script" not in done.stdout and done.stdout.count("<svg") >= 15, done.stderr
