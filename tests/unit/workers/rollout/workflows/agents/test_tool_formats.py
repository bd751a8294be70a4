"""Calls of tools in the forms of the model families, against the chat templates of their models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.episodes import Chatter
from tests.unit.workers.rollout.workflows.agents.test_conversation import Talk, told, user
from workers.config import ConfigError
from workers.data.chat import ChatTemplate
from workers.messages.groups import samples
from workers.rollout.workflows.agents.chat_messages import ChatMessage, as_messages, reply
from workers.rollout.workflows.agents.chat_requests import read_chat
from workers.rollout.workflows.agents.tool_formats import ToolCall, find_calls, format_of, to_json
from workers.rollout.workflows.rendering import ChatText, PlainText

TEMPLATES = Path(__file__).parents[5] / "support" / "chat_templates"
FORMS = {"qwen2_5": "hermes", "qwen3": "hermes", "qwen3_coder": "qwen_xml", "llama3_1": "llama3", "mistral_v0_3": "mistral"}
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>")
MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}, "d": {"type": "boolean"},
                                     "e": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "f": {"type": ["integer", "null"]}}}}}
SUB = {"type": "function", "function": {"name": "sub", "description": "Subtracts.", "parameters": {"type": "object", "properties": {}}}}


def text_of(name: str, folder: Path) -> ChatText:
    shutil.copy(TEMPLATES / f"{name}.jinja", folder / "chat_template.jinja")
    template = ChatTemplate(folder)
    return ChatText(template.render_chat, template.text)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatText]:
    return {name: text_of(name, tmp_path_factory.mktemp(name)) for name in FORMS}


def turn(text: ChatText, calls: list[ToolCall]) -> str:
    """What the template writes where the model has called tools: the turn as the model would have said it."""
    before = [ChatMessage("user", "?")]
    opening = text.opening(as_messages(before, [ADD, SUB], True), [ADD, SUB])
    whole = text._render(as_messages([*before, ChatMessage("assistant", "", tuple(calls))], [ADD, SUB], True), [ADD, SUB])
    opening = opening.removesuffix("\n")  # Qwen3-Coder's begins a turn of calls alone without it
    assert whole.startswith(opening)
    return whole[len(opening):].partition(next(end for end in ENDS if end in whole[len(opening):]))[0]


word = st.text(st.characters(codec="utf-8", exclude_characters='<\r\n"\\'), min_size=1, max_size=8).map(str.strip).filter(bool)
arguments = st.fixed_dictionaries({}, optional={"a": st.integers(-10**9, 10**9), "b": word, "c": st.lists(st.integers(0, 9), max_size=3),
                                                "d": st.booleans()})


@pytest.mark.parametrize("name", FORMS)
@given(st.lists(arguments, min_size=1, max_size=3), st.booleans())
def test_calls_that_the_template_writes_are_found(name: str, texts: dict[str, ChatText], said: list[dict[str, Any]], plain: bool) -> None:
    text, form = texts[name], format_of("auto", texts[name])
    calls = [ToolCall("add", to_json(entry)) for entry in (said[:1] if form == "llama3" else said)]  # Llama's has one at once
    written = turn(text, calls)
    for marker in MARKERS if plain else ():  # special tokens, which are not in the text of a reply
        written = written.replace(marker, "")
    assert form == FORMS[name] and text.shows_tools
    found = reply(written, [SUB, ADD], form)
    assert found == ChatMessage("assistant", "", tuple(calls)), written


@pytest.mark.parametrize("name", FORMS)
def test_the_template_shows_tools_and_results(name: str, texts: dict[str, ChatText]) -> None:
    text = texts[name]
    opening = text.opening(as_messages([ChatMessage("user", "?")], [ADD], True), [ADD])
    assert "Adds." in opening and "?" in opening
    following = text.following(as_messages([ChatMessage("tool", "FORTY", call_id="000001000")], shows_tools=True))
    assert "FORTY" in following and following.startswith(ENDS) and "?" not in following


def test_a_history_has_its_results_beside_their_calls(texts: dict[str, ChatText]) -> None:
    """Mistral's template writes what tells which is whose."""
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [
        {"id": f"chatcmpl-tool-00000{number}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for number in (7, 8)]}, *(
        {"role": "tool", "tool_call_id": f"chatcmpl-tool-00000{number}", "content": str(number)} for number in (8, 7))]
    messages = read_chat(json.dumps({"model": "m", "messages": said}).encode()).messages
    history = texts["mistral_v0_3"].opening(as_messages(messages, [ADD], True), [ADD])
    calls, _, results = history.partition("[TOOL_RESULTS]")
    assert [calls.count(f'"id": "ol-00000{number}"') for number in (7, 8)] == [1, 1]
    assert results.index('"call_id": "ol-000008"') < results.index('"call_id": "ol-000007"')


@pytest.mark.parametrize("name", FORMS)
def test_a_tool_is_called_and_answered_in_one_sequence(name: str, texts: dict[str, ChatText]) -> None:
    text = texts[name]
    written = turn(text, [ToolCall("add", '{"a": 12}')])

    async def steps(talk: Talk) -> None:
        message = told(await talk.ask(user("?"), tools=[ADD]))
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 12}
        last = await talk.ask(user("?"), message, {"role": "tool", "tool_call_id": call["id"], "content": "FORTY-TWO"}, tools=[ADD])
        assert last.said.content == "so 42"

    chatter = Chatter(says=lambda prompt: "so 42" if "FORTY-TWO" in prompt else written)
    (view,) = samples(Talk(steps, chatter, text=text, context=9000, max_new_tokens=400).group())
    assert bytes(view.tokens[view.loss_mask].tolist()).decode() == f"{written}\0so 42\0"


@pytest.mark.parametrize(("form", "text", "content", "calls"), [
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "sub"}', "", [("add", {"a": 1}), ("sub", {})]),
    ("llama3", 'I say {"name": "add", "parameters": {}}', None, []), ("llama3", '{"name": "add", "parameters": {}} so', None, []),
    ("llama3", '{"name": "other", "parameters": {}}', None, []), ("llama3", '{"name": "add", "parameters": [1]}', None, []), ("llama3", "", "", []),
    ("mistral", 'So[TOOL_CALLS] [{"name": "add", "arguments": {"b": "]"}}]', "So", [("add", {"b": "]"})]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{}', "", [("add", {"a": 1}), ("sub", {})]),
    ("mistral", 'add{"a": 1}sub{}', "", [("add", {"a": 1}), ("sub", {})]), ("mistral", 'add{"a": 1} and so on', None, []),
    ("mistral", '[{"name": "other", "arguments": {}}]', None, []), ("mistral", "[{", None, []),
    ("qwen_xml", "So\n<tool_call>\n<function=add>\n<parameter=b>\n1\n2\n</parameter>\n</function>\n</tool_call>", "So", [("add", {"b": "1\n2"})]),
    ("qwen_xml", "<function=add>\n<parameter=d>\nTrue\n</parameter>\n<parameter=new>\nx y\n</parameter>\n</function>", "",
     [("add", {"d": True, "new": "x y"})]),
    ("qwen_xml", "<function=add>\n<parameter=e>\n12\n</parameter>\n<parameter=f>\n12\n</parameter>\n</function>", "",
     [("add", {"e": "12", "f": 12})]),
    ("qwen_xml", "<function=add>\n<parameter=e>\nnull\n</parameter>\n<parameter=f>\nnull\n</parameter>\n</function>", "",
     [("add", {"e": None, "f": None})]),
    ("hermes", 'So <tool_call>{"name": "add", "arguments": {"b": "use <tool_call> and </tool_call>"}}</tool_call>', "So",
     [("add", {"b": "use <tool_call> and </tool_call>"})]),
    ("hermes", '<tool_call>{"name": "add", <tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>', '<tool_call>{"name": "add",', [("sub", {})]),
    ("qwen_xml", "<tool_call>\n<function=other>\n</function>\n</tool_call>", None, []), ("qwen_xml", "<function=add>", None, [])])
def test_calls_in_what_models_say(form: str, text: str, content: str | None, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert reply(text, [ADD, SUB], form) == ChatMessage(
        "assistant", text if content is None else content, tuple(ToolCall(name, to_json(entry)) for name, entry in calls))


@given(st.text(st.sampled_from('{}[]":;, aAD<>/=_\n') | st.characters(codec="utf-8"), max_size=40), st.sampled_from(sorted({*FORMS.values()})))
def test_whatever_is_said_is_read(text: str, form: str) -> None:
    content, calls = find_calls(text, [ADD], form)
    assert calls or content == text
    assert find_calls(text, [], form) == (text, []) and all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_a_template_without_tools_has_hermes_alone(texts: dict[str, ChatText]) -> None:
    for text in (PlainText(), ChatText(lambda messages, tools: "", "{{ messages }}")):
        assert format_of("auto", text) == format_of("hermes", text) == "hermes" and not text.shows_tools
        with pytest.raises(ConfigError, match="workflow.tool_format='llama3': the chat template shows the model no tools"):
            format_of("llama3", text)
    assert format_of("mistral", texts["qwen3"]) == "mistral"


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"properties": {"x": True, "n": {"type": "integer"}}}}}


@pytest.mark.parametrize("value", ["...", "{1, 2}", "b'a'", "1j", "{(1, 2): 3}"])
def test_what_has_no_json_stays_text(value: str) -> None:
    said = f"<function=search>\n<parameter=n>\n{value}\n</parameter>\n<parameter=x>\n1\n</parameter>\n</function>"
    (call,) = find_calls(said, [TOOL], "qwen_xml")[1]
    assert call.name == "search" and json.loads(call.arguments)["x"] == 1 and set(json.loads(call.arguments)) == {"n", "x"}


@pytest.mark.parametrize("text", [" " * 40_000, "<function=" * 8000, "<function=search>" + "<parameter=a>" * 8000, "[ " * 20_000, "search " * 9000])
@pytest.mark.parametrize("form", ["mistral", "qwen_xml"])
def test_degenerate_answers_are_read_in_no_time(form: str, text: str) -> None:
    """They took half a minute when patterns were tried from every place anew: longer than this test may take."""
    assert find_calls(text, [TOOL], form) == (text, [])


def test_a_name_is_a_whole_word() -> None:
    assert find_calls('research {"x": 1}', [TOOL], "mistral") == ('research {"x": 1}', [])
    assert [call.name for call in find_calls('[TOOL_CALLS]search {"x": 1}', [TOOL], "mistral")[1]] == ["search"]
