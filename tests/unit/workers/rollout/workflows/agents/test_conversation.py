"""Requests and answers of the OpenAI-compatible endpoint, tool calls as text, and how conversations go on: without sockets."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.episodes import Chatter, Judge, make_lease, make_workflow
from workers.config import ConfigError, WorkflowConfig
from workers.messages.groups import check_group, group_episodes, samples
from workers.messages.parts import Group
from workers.rollout.workflows.agent import load_agent
from workers.rollout.workflows.agents.chat_messages import ChatMessage, as_messages, reply
from workers.rollout.workflows.agents.chat_requests import ApiError, ChatRequest, read_chat, read_reward
from workers.rollout.workflows.agents.chat_responses import Answer
from workers.rollout.workflows.agents.completions import read_completion
from workers.rollout.workflows.agents.conversation import Chat
from workers.rollout.workflows.agents.tool_formats import ToolCall, to_json
from workers.rollout.workflows.episode import LLM, Episode, Reply, Reward
from workers.rollout.workflows.rendering import ChatText, PlainText, TextFormat, question

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
USER = {"role": "user", "content": "12 + 30 ="}


def body(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model": "any", "messages": list(messages or [USER]), **fields}).encode()


def asking(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return read_chat(body(*messages, **fields))


# -- requests ------------------------------------------------------------------------------------------------------------

def test_a_request_is_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    request = asking(
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}, USER,
        {"role": "assistant", "content": " Hm. ", "refusal": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "content": "4", "tool_call_id": "c"}, tools=[ADD], tool_choice="auto", max_tokens=9, max_completion_tokens=7, stop="\n",
        stream=True, stream_options={"include_usage": True}, n=1, temperature=0, seed=3, user="me", response_format={"type": "text"})
    assert request.messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "12 + 30 ="),
                                ChatMessage("assistant", "Hm.", (ToolCall("add", '{"a": 1}'),)),
                                ChatMessage("tool", "4"))
    assert (request.tools, request.calls_tools, request.max_new_tokens, request.stop) == ((ADD,), True, 7, ("\n",))
    assert (request.streams, request.streams_usage, request.logprobs, request.ignored) == (True, True, False, ("temperature", "seed"))
    assert not asking(tool_choice="none", tools=[ADD]).calls_tools


@pytest.mark.parametrize(("fields", "words"), [
    ({"n": 2}, "n: must be 1"), ({"response_format": {"type": "json_object"}}, "response_format: must be text"),
    ({"tool_choice": "required"}, "cannot be forced"), ({"logit_bias": {"5": 1}}, "logit_bias"), ({"top_logprobs": 2}, "top_logprobs: must be 0"),
    ({"max_tokens": 0}, "must be at least 1"), ({"stop": ["a", ""]}, "none of them empty"), ({"stop": ["a"] * 17}, "at most 16"),
    ({"tools": [{"type": "function"}]}, "tools: each must be"), ({"tools": [3]}, "tools: each must be"), ({"magic": 1}, "unknown field `magic`"),
    ({"max_tokens": "9"}, r"Expected `int \| null`, got `str` - at `\$.max_tokens`"), ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "robot", "content": ""}]}, "Invalid enum value 'robot'"),
    ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "must not be the assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, r"messages\[0\].content: only parts of text")])
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        asking(**fields)
    assert refused.value.status == 400 and set(refused.value.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"reward": "1"}', b'{"reward": 1.5}', b'{"reward": -0.1}', b"{}", b'{"reward": true}',
                                  b'{"reward": NaN}', b'{"reward": 1, "why": 2}', b'{"reward": null}', b"\xff", b'{"reward": 1e999}'])
def test_a_reward_is_one_number_from_0_to_1(text: bytes) -> None:
    with pytest.raises(ApiError):
        read_reward(text)
    assert [read_reward(b'{"reward": %b}' % value) for value in (b"0", b"1", b"0.25")] == [0.0, 1.0, 0.25]


@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["model", "messages", "role", "content", "tools", "function"]) | st.text(max_size=3), inner), max_leaves=8).map(
        lambda value: json.dumps(value).encode()))
def test_whatever_comes_is_read_or_refused(text: bytes) -> None:
    for read in (read_chat, read_reward):
        try:
            read(text)
        except ApiError as error:
            assert error.status == 400


# -- tools as text -------------------------------------------------------------------------------------------------------

def test_tools_are_written_as_qwen_does() -> None:
    said = [ChatMessage("system", "Be brief."), ChatMessage("user", "?"),
            ChatMessage("assistant", "So", (ToolCall("add", '{"a": 1}'), ToolCall("add", "{}"))),
            ChatMessage("tool", "1"), ChatMessage("tool", "0"), ChatMessage("user", "!")]
    system, user, assistant, results, last = as_messages(said, [ADD])
    assert system["content"].startswith("Be brief.\n\n# Tools\n\nYou may") and f"<tools>\n{to_json(ADD)}\n</tools>" in system["content"]
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in system["content"]
    assert user == {"role": "user", "content": "?"} and last == {"role": "user", "content": "!"}
    assert assistant == {"role": "assistant", "content": 'So\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
                                                         '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'}
    assert results == {"role": "user", "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n0\n</tool_response>"}
    assert as_messages([ChatMessage("user", "?")], [ADD])[0]["role"] == "system" and as_messages([]) == []


@pytest.mark.parametrize(("text", "content", "calls"), [
    ("4", "4", []), (' So <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "So", ['{"a": 1}']),
    ('<tool_call>\n{"name": "add"}\n</tool_call><tool_call>{"name": "add", "arguments": {"b": {"c": "}"}}}</tool_call>', "",
     ["{}", '{"b": {"c": "}"}}']),
    ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', []),
    ("<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []), ('<tool_call>{"name": "add"}', '<tool_call>{"name": "add"}', []),
    ('<tool_call>{"name": ["add"]}</tool_call>', '<tool_call>{"name": ["add"]}</tool_call>', []),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [])])
def test_calls_are_found_in_what_the_model_says(text: str, content: str, calls: list[str]) -> None:
    assert reply(text, [ADD]) == ChatMessage("assistant", content, tuple(ToolCall("add", arguments) for arguments in calls))
    assert reply(text, []) == ChatMessage("assistant", text.strip())


@pytest.mark.parametrize("value", ["NaN", "-Infinity", r'"\ud800"', "[" * 9999])
def test_what_has_no_json_is_no_call(value: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    assert reply(text, [ADD]) == ChatMessage("assistant", text)


values = st.recursive(st.none() | st.booleans() | st.integers(-10**9, 10**9) | st.text(max_size=8).filter(lambda text: "<" not in text),
                      lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(st.text(max_size=20).filter(lambda text: "<" not in text),
       st.lists(st.dictionaries(st.text(max_size=5).filter(lambda text: "<" not in text), values, max_size=3), max_size=3))
def test_calls_that_are_written_are_found_again(content: str, arguments: list[dict[str, Any]]) -> None:
    said = ChatMessage("assistant", content.strip(), tuple(ToolCall("add", to_json(entry)) for entry in arguments))
    assert reply(as_messages([said])[0]["content"], [ADD]) == said


# -- answers -------------------------------------------------------------------------------------------------------------

def answer(text: str, **fields: Any) -> Answer:
    request = asking(tools=[ADD], **fields)
    return Answer(request, 3, reply(text, request.tools), Reply(text, (5, 6), (-0.5, -1.5), "length"), 7, 1_700_000_000)


CALLING = 'So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("text", ["", "4", CALLING, CALLING.removeprefix("So ")])
def test_answers_are_what_openais_client_reads_whole_or_in_pieces(text: str) -> None:
    whole = ChatCompletion.model_validate(answer(text, logprobs=True).whole(), strict=True)
    choice, called = whole.choices[0], CALLING[3:] in text
    assert choice.finish_reason == ("tool_calls" if called else "length") and whole.usage is not None and whole.usage.total_tokens == 9
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [(entry.token, entry.logprob) for entry in choice.logprobs.content] == [("token_id:5", -0.5), ("token_id:6", -1.5)]
    *events, done = b"".join(answer(text, logprobs=True, stream_options={"include_usage": True}).stream()).split(b"\n\n")[:-1]
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "), strict=True) for event in events]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert done == b"data: [DONE]" and chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    streamed = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function is not None]
    whole_calls = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [(one.name, one.arguments) for one in streamed] == [(one.name, one.arguments) for one in whole_calls] == ([("add", '{"a": 1}')] * called)


# -- conversations -------------------------------------------------------------------------------------------------------

class Talk:
    """An agent's view, as a workflow's function: `steps` are run with its chat; what is said stands in `group`."""

    def __init__(self, steps: Any, chatter: Chatter | None = None, **settings: Any) -> None:
        self.chatter, self.steps = chatter or Chatter(says=lambda prompt: f"r{prompt.count('r:')}"), steps
        self.settings = {"group_size": 1, "context": 1000, "max_new_tokens": 50, **settings}

    async def _run(self, episode: Episode, llm: LLM, reward: Reward) -> float:
        async with asyncio.TaskGroup() as tasks:
            self.chat = Chat(llm, episode.config, tasks)
            await self.steps(self)
        return 1.0

    async def ask(self, *messages: dict[str, Any], gone: bool = False, **fields: Any) -> Answer:
        return await self.chat.ask(body(*messages, **fields), asking(*messages, **fields), lambda: gone)

    def group(self) -> Group:
        group = asyncio.run(make_workflow(self.chatter, Judge(), self._run, **self.settings).run(make_lease()))
        check_group(group)
        return group

    def texts(self) -> list[str]:
        """Each sequence, with what the model said in brackets."""
        group = self.group()
        assert set(group_episodes(group).tolist()) == {0}
        found = []
        for view in samples(group):
            text, before = bytes(group.prompt.tolist()).decode(), False
            for token, said in zip(view.tokens.tolist(), view.loss_mask.tolist(), strict=True):
                text += ("" if said == before else "[" if said else "]") + chr(token)
                before = said
            found.append(text)
        return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def told(said: Answer) -> dict[str, Any]:
    return said.whole()["choices"][0]["message"]


def test_what_extends_a_conversation_goes_on_token_for_token() -> None:
    async def steps(talk: Talk) -> None:
        first = await talk.ask(user("a"))
        second = await talk.ask(user("a"), told(first), user("b"))
        assert first.num_prompt_tokens == len("\nuser: a\nassistant:")
        assert second.num_prompt_tokens == len("\nuser: a\nassistant:r1\0\nuser: b\nassistant:")
    assert Talk(steps).texts() == ["\nuser: a\nassistant:[r1\0]\nuser: b\nassistant:[r2\0"]


def test_changed_history_other_tools_and_repeated_requests_begin_new_conversations() -> None:
    async def steps(talk: Talk) -> None:
        first = await talk.ask(user("a"))
        await talk.ask(user("a"), {"role": "assistant", "content": "other"}, user("b"))
        await talk.ask(user("a"), told(first), user("b"), tools=[ADD])
        await talk.ask(user("a"))
        assert talk.chat.last is not None and talk.chat.last.text == "r1"
    texts = Talk(steps, context=2000).texts()
    assert len(texts) == 4 and texts[0] == texts[3] == "\nuser: a\nassistant:[r1\0"
    assert texts[1] == "\nuser: a\nassistant: other\nuser: b\nassistant:[r2\0" and "# Tools" in texts[2] and texts[2].endswith("[r2\0")


def test_requests_beside_each_other_do_not_share_a_conversation() -> None:
    async def steps(talk: Talk) -> None:
        first = await talk.ask(user("a"))
        for second in await asyncio.gather(*(talk.ask(user("a"), told(first), user(text)) for text in "bc")):
            assert second.said.content == "r2"
    assert Talk(steps).texts() == ["\nuser: a\nassistant:[r1\0]\nuser: b\nassistant:[r2\0", "\nuser: a\nassistant: r1\nuser: c\nassistant:[r2\0"]


def test_tools_are_called_and_answered_in_one_conversation() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a":  12}}</tool_call>'

    async def steps(talk: Talk) -> None:
        first = await talk.ask(user("a"), tools=[ADD])
        message = told(first)
        assert first.finish == "tool_calls" and message["content"] is None
        message["tool_calls"][0]["function"]["arguments"] = '{ "a":12 }'  # as a framework may write it again
        last = await talk.ask(user("a"), message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}, tools=[ADD])
        assert last.finish == "stop" and last.said.content == "so 42"
    (text,) = Talk(steps, Chatter(says=lambda prompt: "so 42" if "42" in prompt else call), max_new_tokens=100).texts()
    assert text.endswith(f"assistant:[{call}\0]\nuser: <tool_response>\n42\n</tool_response>\nassistant:[so 42\0")


def test_stop_strings_and_lengths_of_a_request_count_as_far_as_the_runs_allow() -> None:
    chatter = Chatter(says=lambda prompt: "abcdefgh")

    async def steps(talk: Talk) -> None:
        assert (await talk.ask(user("a"), max_tokens=3)).finish == "length"
        cut = await talk.ask(user("b"), max_tokens=999, stop="f")
        assert cut.said.content == "abcd" and [params.stop for params in chatter.params] == [("e",), ("f", "e")]
        assert [params.max_new_tokens for params in chatter.params] == [3, 50] and {params.temperature for params in chatter.params} == {1.0}
    Talk(steps, chatter, stop=["e"]).group()


def test_a_request_without_room_is_refused_and_remembered() -> None:
    async def steps(talk: Talk) -> None:
        first = await talk.ask(user("a"))
        for messages in ([user("x" * 100)], [user("a"), told(first), user("x" * 100)]):
            with pytest.raises(ApiError, match="leaves no room") as refused:
                await talk.ask(*messages)
            assert refused.value.code == "context_length_exceeded"
        assert talk.chat.full
        await talk.ask(user("b"))
    assert Talk(steps, context=60).texts() == ["\nuser: a\nassistant:[r1\0", "\nuser: b\nassistant:[r1\0"]


def test_a_closed_episode_and_one_under_way_refuse() -> None:
    async def steps(talk: Talk) -> None:
        under_way = asyncio.create_task(talk.ask(user("a")))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="still being sampled") as refused:
            talk.chat.reward(1.0)
        assert refused.value.status == 409
        await under_way
        talk.chat.reward(0.5)
        for late in (lambda: talk.ask(user("b")), lambda: asyncio.to_thread(talk.chat.reward, 1.0)):
            with pytest.raises(ApiError, match="is closed") as refused:
                await late()
            assert refused.value.status == 410
        assert talk.chat.score == 0.5
    Talk(steps).group()


def test_a_turn_that_nobody_waits_for_any_more_does_not_keep_the_score() -> None:
    async def steps(talk: Talk) -> None:
        first = await talk.ask(user("a"))
        left = asyncio.create_task(talk.ask(user("a"), told(first), user("b"), gone=True))
        await asyncio.sleep(0)
        talk.chat.reward(0.5)
        await left
        assert talk.chat.score == 0.5
    Talk(steps).group()


def test_what_nobody_listened_to_answers_the_same_request_again() -> None:
    async def steps(talk: Talk) -> None:
        lost = asyncio.create_task(talk.ask(user("a"), gone=True))
        await asyncio.sleep(0)
        again = await talk.ask(user("a"))
        assert (await lost) is again
        assert (await talk.ask(user("a"))) is not again, "it was answered"
    assert Talk(steps).texts() == ["\nuser: a\nassistant:[r1\0"] * 2


def test_an_episode_has_only_so_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rollout.workflows.agents.conversation.MAX_AT_ONCE", 2)
    monkeypatch.setattr("workers.rollout.workflows.agents.conversation.MAX_TURNS", 3)

    async def steps(talk: Talk) -> None:
        results = await asyncio.gather(*(talk.ask(user(text)) for text in "abc"), return_exceptions=True)
        assert [result.status for result in results if isinstance(result, ApiError)] == [429]
        await talk.ask(user("d"))
        with pytest.raises(ApiError, match="may have 3 turns"):
            await talk.ask(user("e"))
    Talk(steps).group()


class Alternates(PlainText):
    """A template that refuses two messages of one role."""

    def opening(self, prompt: Any, tools: Any = None) -> str:
        roles = [message["role"] for message in prompt]
        if any(one == two for one, two in pairwise(roles)):
            raise ConfigError("roles must alternate")
        return super().opening(prompt)


def test_what_the_template_cannot_render_is_the_requests_fault() -> None:
    async def steps(talk: Talk) -> None:
        with pytest.raises(ApiError, match="roles must alternate") as refused:
            await talk.ask(user("a"), user("b"))
        assert refused.value.status == 400
        await talk.ask(user("a"))
    Talk(steps, text=Alternates()).group()


# -- reasoning -----------------------------------------------------------------------------------------------------------

no_marks = st.text(max_size=12).filter(lambda text: "<" not in text)


@given(no_marks.map(str.strip), no_marks.map(str.strip), st.sampled_from(["as it is", "left out", "joined", "stripped of all but content"]))
def test_a_reply_with_reasoning_goes_on_with_the_same_tokens_however_it_comes_back(reasoning: str, content: str, how: str) -> None:
    said = f"<think>\n{reasoning}\n</think>\n\n{content}"

    async def steps(talk: Talk) -> None:
        message = told(await talk.ask(user("a")))
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
        back = {"as it is": message, "left out": {**message, "reasoning_content": None}, "joined": {"role": "assistant", "content": said},
                "stripped of all but content": {"role": "assistant", "content": content}}[how]
        await talk.ask(user("a"), back, user("b"))
    chatter = Chatter(says=lambda prompt: "end" if "user: b" in prompt else said)
    (view,) = samples(Talk(steps, chatter, max_new_tokens=200).group())
    assert bytes(view.tokens.tolist()) == f"{said}\0\nuser: b\nassistant:end\0".encode()


def test_another_reasoning_is_another_conversation() -> None:
    async def steps(talk: Talk) -> None:
        message = told(await talk.ask(user("a")))
        await talk.ask(user("a"), {**message, "reasoning_content": "no"}, user("b"))
    assert len(Talk(steps, Chatter(says=lambda prompt: "<think>so</think>4")).texts()) == 2


@pytest.mark.parametrize(("text", "thinks", "reasoning", "content"), [
    ("4", False, "", "4"), ("<think>a</think>4", False, "a", "4"), ("a</think>4", True, "a", "4"), ("a</think>4", False, "a", "4"),
    ("<think>a", False, "a", ""), ("a", True, "a", ""), ("</think>4", True, "", "4")])
def test_reasoning_stands_apart_from_the_text(text: str, thinks: bool, reasoning: str, content: str) -> None:
    said = reply(text, [], thinks=thinks)
    assert (said.reasoning, said.content) == (reasoning, content)
    answer = Answer(asking(), 1, said, Reply(text, (5,), (-0.5,), "stop"), 7)
    assert answer.whole()["choices"][0]["message"].get("reasoning_content", "") == reasoning
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: ")) for event in answer.stream() if b"DONE" not in event]
    assert "".join(getattr(chunk.choices[0].delta, "reasoning_content", "") for chunk in chunks) == reasoning


def test_a_template_that_opens_the_reasoning_is_known() -> None:
    assert ChatText(lambda messages, tools: "<assistant><think>\n").opens_thinking and not chat_text().opens_thinking


# -- completions ---------------------------------------------------------------------------------------------------------

def complete(talk: Talk, prompt: Any, **fields: Any) -> Any:
    text = json.dumps({"model": "any", "prompt": prompt, **fields}).encode()
    return talk.chat.ask(text, read_completion(text), lambda: False)


def test_a_completion_goes_on_token_for_token() -> None:
    async def steps(talk: Talk) -> None:
        first = await complete(talk, "r: a")
        assert first.whole()["choices"][0]["text"] == "r1" and first.num_prompt_tokens == 4
        again = await complete(talk, "r: ar1\0 r: b")  # the text of the token that ends a turn, then something new
        assert again.num_prompt_tokens == len("r: ar1\0 r: b")
        await complete(talk, [*b"r: ar1\0 r: br2\0!"])
    assert Talk(steps).texts() == ["r: a[r1\0] r: b[r2\0]![r2\0"]


def test_a_token_of_no_vocabulary_is_the_requests_fault() -> None:
    async def steps(talk: Talk) -> None:
        with pytest.raises(ApiError, match="prompt: it holds a token that is not in the tokenizer's vocabulary"):
            await complete(talk, [97, 50000])
        await complete(talk, [97])
    assert Talk(steps).texts() == ["a[r0\0"]


def test_a_completion_that_was_cut_goes_on_at_once_and_others_begin_anew() -> None:
    async def steps(talk: Talk) -> None:
        await complete(talk, "a", max_tokens=3)
        await complete(talk, "aabc!", max_tokens=3)
        await complete(talk, "aabx!", max_tokens=3)
    assert Talk(steps, Chatter(says=lambda prompt: "abcdef"), stop=["d"]).texts() == ["a[abc]![abc", "aabx![abc"]


@pytest.mark.parametrize(("fields", "words"), [
    ({"prompt": ""}, "must not be empty"), ({"prompt": []}, "must not be empty"), ({"prompt": [-1]}, "Expected `int` >= 0"), ({"n": 2}, "n: must be"),
    ({"echo": True}, "echo: must be"), ({"suffix": "x"}, "suffix: must be"), ({"best_of": 3}, "best_of"), ({"logprobs": 5}, "logprobs: must be"),
    ({"max_tokens": 0}, "at least 1"), ({"messages": []}, "unknown field `messages`")])
def test_completions_that_cannot_be_done_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        read_completion(json.dumps({"model": "any", "prompt": "a", **fields}).encode())


# -- the episode's side --------------------------------------------------------------------------------------------------

def chat_text() -> TextFormat:
    return ChatText(lambda messages, tools: "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")


@given(st.text(max_size=20))
def test_an_agent_gets_the_question_as_it_stands_in_the_data(text: str) -> None:
    assert question(chat_text().opening(text), chat_text()) == text and question(text, PlainText()) == text
    several = "<system>S" + chat_text().opening(text)
    assert question(several, chat_text()) == several
    assert question("<user>", chat_text()) == "<user>"


@pytest.mark.parametrize(("changes", "words"), [
    ({}, "must be given, or else workflow.agent_command"), ({"agent": "a:b", "agent_command": ["x"]}, "not both"), ({"agent": "a.b"}, "import path"),
    ({"agent_command": [""]}, "must begin with a program"), ({"agent": "a:b", "agent_timeout_s": 0}, "greater than 0"),
    ({"agent": "a:b", "agent_timeout_s": float("inf")}, "finite"), ({"agent": "a:b", "max_agents": 0}, "at least 1"),
    ({"agent": "a:b", "agent_failures": "maybe"}, "must be error or zero"), ({"name": "multi_turn", "agent": "a:b"}, "only counts for agent"),
    ({"name": "single_turn", "agent_command": ["x"]}, "must be left at its default")])
def test_a_config_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        WorkflowConfig(**{"name": "agent", **changes}).check()


def test_an_agent_is_one_function_or_one_program() -> None:
    for changes in ({"agent": "a.b:c"}, {"agent_command": ["python", "x.py"]}):
        WorkflowConfig(name="agent", **changes).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "words"), [
    ("no.such:agent", "No module named 'no'"), ("tests.support.agent_programs:nothing", "has no function 'nothing'"),
    ("tests.support.agent_programs:not_async", "not async is a program of its own")])
def test_a_function_that_is_not_there_is_refused(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_agent(path)
