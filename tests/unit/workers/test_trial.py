"""The user's own functions are tried before anything is submitted: real functions, in real processes where those of a run are."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

import pytest

from workers import trial
from workers.config import Config, ConfigError, DataConfig, DataKind, EngineConfig, ModelConfig, RewardConfig, WorkflowConfig
from workers.config.data import PartConfig
from workers.data.prompt import Prompt
from workers.model.initialize import make_tiny
from workers.run import user_code
from workers.run.user_code import TookTooLong, import_function, in_time, told
from workers.trial import check_functions, try_adapters, try_functions

OWN = '''
import asyncio, sys, time

def good(prompt, completion, reference):
    return float(completion == reference)

def two(prompt, completion):
    return 1.0

def deep(prompt, completion, reference):
    return inner({})

def inner(table):
    return table["missing"]

def on_nothing(prompt, completion, reference):
    return 1.0 / len(completion)

def three(prompt, completion, reference):
    return 3

def hangs(prompt, completion, reference):
    time.sleep(1000)

def keep(scores, lengths):
    return max(scores) > 0.5

def keeps_nothing(scores):
    return False

async def right(episode, llm, reward):
    reply = await llm.generate()
    assert await reward(reply) == 1.0 and reply.tokens[-1] == episode.config.options["end"]
    return await reward(await llm.generate("again"), verifier="own_functions:good")

async def option(episode, llm, reward):
    return episode.config.options["depth"]

async def nothing(episode, llm, reward):
    await llm.generate()

async def waits(episode, llm, reward):
    await asyncio.sleep(1000)

async def blocks(episode, llm, reward):
    while True:
        time.sleep(0.01)

def not_async(episode, llm, reward):
    return 1.0

async def agent(task, base_url, api_key):
    import aiohttp
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer " + api_key}) as session:
        body = {"model": "any", "messages": [{"role": "user", "content": task["prompt"]}]}
        async with session.post(base_url + "/chat/completions", json=body) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
    return float(said == task["reference"])

async def agent_that_raises(task, base_url, api_key):
    await agent(task, base_url, api_key)
    raise OSError("no browser")

def fields(row):
    return {"prompt": row["q"], "answer": row["a"]}

def stuck(row):
    while True:
        time.sleep(0.01)

def leaves(row):
    sys.exit("no")
'''
PROMPTS = [Prompt("p1", "1 + 2 =", "own_functions:good", "3"), Prompt("p2", "1 + 1 =", "numeric", "2", place="/data/rows.jsonl:7")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_tiny(folder := tmp_path_factory.mktemp("models") / "tiny", 1)
    return folder


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_functions.py").write_text(OWN)
    (tmp_path / "slow_import.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    (tmp_path / "broken_import.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).resolve().parents[3]}:{tmp_path}")  # reward processes are others


def config(verifier: str = "own_functions:good", timeout_s: float = 30.0, **workflow: object) -> Config:
    return Config(model=ModelConfig(path="/nowhere"), engine=EngineConfig(context_length=64), reward=RewardConfig(verifier, timeout_s=timeout_s),
                  workflow=WorkflowConfig(**{"max_new_tokens": 8, **workflow}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "words"), [
    ("no_such_module:f", ["No module named 'no_such_module'", "PYTHONPATH"]),
    ("own_functions:absent", ["has no function 'absent'"]), ("own_functions:two", ["two() takes 2 positional arguments but 3 were given"]),
    ("own_functions:deep", ["KeyError: 'missing'\n  ", 'own_functions.py, line 14, in inner: return table["missing"]\n', "in deep: "]),
    ("own_functions:on_nothing", ["with the completion ''", "ZeroDivisionError"]), ("own_functions:three", ["returned 3.0; a verifier must return"]),
    ("own_functions:hangs", ["no answer within reward.timeout_s=0.5"]), ("0.5*own_functions:good+0.5*own_functions:two", ["two() takes"])])
def test_a_verifier_that_cannot_work_is_refused_with_its_own_lines(model: Path, name: str, words: list[str]) -> None:
    prompts = [Prompt("p2", "1 + 1 =", name, "2", place="/data/rows.jsonl:7")]
    with pytest.raises(ConfigError) as refused:
        try_functions(config(name, 0.5 if "hangs" in name else 30.0), model, prompts)
    said = str(refused.value)
    assert all(word in said for word in [*words, "reward.verifier='own_functions:" if "own" in name else "", "launch.try_functions=false"]), said
    assert "tried on /data/rows.jsonl:7" in said and "workers/" not in said


@pytest.mark.parametrize(("verifier", "reference", "words"), [
    ("numeric", "many", "need one"), ("0.5*numeric_distance+0.5*boxed", "1e5", "need one"), ("number", "x = 3", "such as 18"),
    ("multiple_choice", "Paris", "one letter")])
def test_a_reference_that_the_verifier_cannot_use_is_refused_with_its_row(model: Path, verifier: str, reference: str, words: str) -> None:
    good = Prompt("p1", "1 + 1 =", verifier, "A" if "choice" in verifier else "−2")
    prompts = [good, Prompt("p2", "?", verifier, reference, place="/rows.jsonl:7")]
    with pytest.raises(ConfigError, match=f"^/rows.jsonl:7: verifier '{re.escape(verifier)}': reference '{reference}'.*{words}.*Correct the row"):
        check_functions(config("numeric"), model, prompts, tried=False)
    check_functions(config("numeric"), model, [good], tried=False)
    check_functions(config("numeric", name="own_functions:right"), model, prompts, tried=False)  # which may ask another verifier


def test_what_works_passes_with_the_real_verifier_and_the_models_tokens(model: Path) -> None:
    assert try_functions(config(), model, PROMPTS) == []
    options: dict[str, object] = {"options": {"end": 1}, "keep": "own_functions:keep", "group_size": 4}
    assert try_functions(config(name="own_functions:right", **options), model, PROMPTS) == []


def test_a_part_of_the_reward_is_tried_though_no_prompt_names_it(model: Path) -> None:
    setup = config("numeric")
    setup.reward.parts = {"own_functions:two": 0.5}
    with pytest.raises(ConfigError, match=r"own_functions:two.*takes 2 positional"):
        try_functions(setup, model, PROMPTS[1:])


def test_a_row_that_names_the_judge_needs_its_endpoint(model: Path) -> None:
    prompts = [Prompt("p2", "1 + 1 =", "0.5*number+0.5*judge", "2", place="/data/rows.jsonl:7")]
    with pytest.raises(ConfigError, match=r"reward\.judge\.url='': must name an endpoint: /data/rows\.jsonl:7 has verifier"):
        try_functions(config("numeric"), model, prompts)
    setup = config("numeric")
    setup.reward.judge.url = "http://127.0.0.1:9/v1"
    assert try_functions(setup, model, prompts) == []


@pytest.mark.parametrize(("settings", "words"), [
    ({"name": "own_functions:option"}, ["raised KeyError: 'depth'\n  ", "in option: return episode.config.options", "workflow.options"]),
    ({"name": "own_functions:nothing"}, ["returned None: it must return the episode's score"]),
    ({"name": "own_functions:waits"}, ["had not come to its end after 0.5 s"]),
    ({"name": "own_functions:blocks", "group_size": 1}, ["TookTooLong: it had not come to its end after 5.1 s\n  ", "in blocks: "]),
    ({"keep": "own_functions:keeps_nothing"}, ["workflow.keep=", "takes 1 positional argument but 2 were given"]),
    ({"name": "agent", "agent": "own_functions:agent_that_raises"}, ["the agent raised OSError: no browser\n  ", "in agent_that_raises"])])
def test_a_workflow_that_cannot_work_is_refused_with_its_own_lines(
        model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], words: list[str]) -> None:
    if settings.get("name") == "own_functions:waits":
        monkeypatch.setattr(trial, "GROUP_S", 0.5)
        monkeypatch.setattr(trial, "LATER_S", 60.0)
    if settings.get("name") == "own_functions:blocks":  # the reward process has to be there before that, on a busy machine too
        monkeypatch.setattr(trial, "GROUP_S", 5.0)
        monkeypatch.setattr(trial, "LATER_S", 0.1)
    with pytest.raises(ConfigError) as refused:
        try_functions(config("numeric", **settings), model, PROMPTS[1:])
    assert all(word in str(refused.value) for word in words), refused.value


def test_agents_are_tried_with_the_endpoint_and_may_fail_where_that_is_allowed(model: Path) -> None:
    assert try_functions(config("numeric", name="agent", agent="own_functions:agent"), model, PROMPTS[1:]) == []
    [note] = try_functions(config("numeric", name="agent", agent="own_functions:agent_that_raises", agent_failures="zero"), model, PROMPTS[1:])
    assert note.startswith("workflow.agent, tried on /data/rows.jsonl:7: ") and "the agent raised OSError: no browser\n  " in note


@pytest.mark.parametrize(("adapter", "words"), [
    ("own_functions:fields", ""), ("own_functions:absent", "has no function 'absent'"), ("broken_import:f", "cannot be imported. JSONDecodeError: .*"
     r"\n  \S+/broken_import.py, line 2, in <module>: json.loads"), ("slow_import:f", r"TookTooLong.*\n  \S+/slow_import.py, line 3"),
    ("own_functions:good", r"rows.jsonl:1: data.adapter='own_functions:good' raised TypeError: good\(\) missing 2"),
    ("own_functions:leaves", "rows.jsonl:1: .*SystemExit: no"), ("own_functions:stuck", r"jsonl:1: .*TookTooLong.*\n  \S+, line \d+, in stuck: ")])
def test_adapters_are_imported_and_tried_on_the_first_rows(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str, words: str) -> None:
    for limit in ("IMPORT_S", "ROW_S") if "TookTooLong" in words else ():
        monkeypatch.setattr(trial, limit, 1.5)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "1 + 1 =", "a": 2}) + "\n")
    rows = {"kind": DataKind.jsonl, "path": str(tmp_path / "rows.jsonl"), "adapter": adapter}
    for data in (DataConfig(**rows), DataConfig(kind=DataKind.mixture, parts={"a": PartConfig(**rows)})):
        if not words:
            try_adapters(data)
            continue
        with pytest.raises(ConfigError, match=words):
            try_adapters(data)


def test_what_swallows_the_first_interruption_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "AGAIN_S", 0.5)

    def deaf() -> None:
        for _ in range(2):
            with contextlib.suppress(TookTooLong):
                time.sleep(100)
        time.sleep(100)

    with pytest.raises(TookTooLong), in_time(0.05):
        deaf()
    with in_time(1000):
        pass


def test_what_a_module_lacks_is_told_from_a_module_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    with pytest.raises(ConfigError, match=r"needs_more cannot be imported \(No module named 'no_such_package'\).*\n  \S+/needs_more.py, line 1"):
        import_function("needs_more:f", "workflow.agent")
    with pytest.raises(ConfigError) as refused:
        import_function("not_there.at_all:f", "workflow.agent")
    assert str(refused.value).endswith("correct the import path")


def test_only_the_users_lines_are_shown() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        assert told(error).count("\n") == 1 and f"{__file__}, line" in told(error)
