"""Judges that cannot work are refused, and a key is never repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workers.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig
from workers.config.judge import JudgeConfig
from workers.config.reward import names

GOOD = {"url": "http://127.0.0.1:8000/v1", "model": "m"}
SECRET = "sk-proj-42"


@pytest.mark.parametrize(("values", "message"), [
    ({"url": "localhost:8000/v1"}, "reward.judge.url='localhost:8000/v1': must be http://"),
    ({"url": "http:///v1"}, "reward.judge.url"), ({"url": "http://host:99999/v1"}, "reward.judge.url"),
    ({"url": "http://[::1/v1"}, "reward.judge.url"),
    ({"url": f"https://me:{SECRET}@host/v1"}, "reward.judge.url='...': must hold neither"),
    ({"url": f"https://host/v1?key={SECRET}"}, "reward.judge.url='...': must hold neither"),
    ({"model": ""}, "reward.judge.model='': must name a model"),
    ({"api_key_env": SECRET}, "reward.judge.api_key_env='...': must be the name of an environment variable, never the key itself"),
    ({"template": "{prompt}"}, "must have {completion}"),
    ({"template": "{completion} {answer}"}, "reward.judge.template=['answer']: may ask for prompt"),
    ({"template": "{completion}", "template_file": "x"}, "must be empty with reward.judge.template"),
    ({"template": "{completion}", "rubric": "Be kind."}, "reward.judge.rubric='Be kind.': has no {rubric} in the template"),
    ({"template": "{completion}" * 5000}, "must have at most 32000 characters"), ({"rubric": "x" * 40_000}, "must have at most 32000"),
    ({"pattern": "("}, "reward.judge.pattern='(': is no regular expression"), ({"pattern": r"\d+"}, "must have a group"),
    ({"pattern": r"(\d+)+"}, "must not repeat a group that repeats"), ({"pattern": r"((?:a*)*)"}, "must not repeat"),
    ({"scale_min": 10.0}, "reward.judge.scale_max=10.0"), ({"scale_max": float("nan")}, "scale_max=nan"),
    ({"scale_max": float("inf")}, "scale_max=inf"),
    ({"max_tokens": 0}, "reward.judge.max_tokens=0"), ({"max_answer_kb": 0}, "max_answer_kb=0"), ({"concurrency": 0}, "concurrency=0"),
    ({"max_retries": -1}, "max_retries=-1"), ({"cache_size": -1}, "cache_size=-1"), ({"max_calls": -1}, "max_calls=-1"),
    ({"timeout_s": 0.0}, "timeout_s=0.0"), ({"timeout_s": float("inf")}, "timeout_s=inf"), ({"backoff_s": float("nan")}, "backoff_s=nan"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    *(({"failed": failed}, f"reward.judge.failed={failed!r}: must be drop, or a score") for failed in ("", "nan", "1.5", "-0.1", "zero", "inf")),
])
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        RewardConfig(judge=JudgeConfig(**{**GOOD, **values})).check()
    assert message in str(refusal.value) and SECRET not in str(refusal.value)


def test_what_can_work_is_not() -> None:
    JudgeConfig().check()
    JudgeConfig(**GOOD, api_key_env="OPENAI_API_KEY", failed="0.5", template='{completion} {"score": 3} {rubric}', rubric="r").check()  # type: ignore[arg-type]
    assert [JudgeConfig(failed=failed).stand_in for failed in ("drop", "0", "1", "0.5")] == [None, 0, 1, 0.5]


def test_who_asks_the_judge() -> None:
    assert names("judge", "judge") and names("0.5*number+0.5*judge", "judge")
    assert not names("my.judge:judge", "judge") and not names("number", "judge")


@pytest.mark.parametrize("changes", [
    {"reward": RewardConfig(verifier="judge")}, {"reward": RewardConfig(parts={"judge": 0.5})},
    {"reward": RewardConfig(verifier="0.5*number+0.5*judge")}, {"data": DataConfig(verifier="judge")}])
def test_a_judge_needs_an_endpoint(changes: dict[str, Any]) -> None:
    config = Config(model=ModelConfig(path="/m"), **changes)
    with pytest.raises(ConfigError, match="reward.judge.url='': must name an endpoint with verifier 'judge'"):
        config.check()
    config.reward.judge = JudgeConfig(**GOOD)  # type: ignore[arg-type]
    config.check()


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (path := tmp_path / "template.txt").write_text("Judge {completion}.")
    config = JudgeConfig(template_file=str(path))
    config.settle()
    assert (config.template, config.template_file) == ("Judge {completion}.", "")
    path.write_text("Judge it.")
    with pytest.raises(ConfigError, match="must have {completion}"):
        JudgeConfig(template_file=str(path)).settle()
    path.write_bytes(b"\xff\xfe")
    for name in (path, tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="reward.judge.template_file=.*cannot be read"):
            JudgeConfig(template_file=str(name)).settle()


def test_the_key_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = JudgeConfig(**GOOD, api_key_env="JUDGE_KEY")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reward.judge.api_key_env='JUDGE_KEY': there is no such environment variable"):
        config.settle()
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    config.settle()
