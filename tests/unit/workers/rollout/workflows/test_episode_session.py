"""Episodes: every token that the model is given or samples stands in the group as it was, once, whoever generated it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.episodes import END, PROMPT, Chatter, Judge, leaf, make_lease, make_workflow, run_or_park
from workers.config import RewardConfig, WorkflowConfig
from workers.messages.from_worker import GroupFailed
from workers.messages.groups import check_group, check_partial, group_episodes, samples
from workers.messages.parts import Group, Lease, Message, Partial, Purpose, Version
from workers.rollout.engines.client import BadRequest
from workers.rollout.leases.lease_runner import LeaseRunner
from workers.rollout.leases.outbox import Results
from workers.rollout.workflows.episode import LLM, MAX_EMPTY_TURNS, Conversation, Episode, Reward, WorkflowError
from workers.rollout.workflows.group_filter import GroupFilter
from workers.rollout.workflows.rendering import ChatText
from workers.rollout.workflows.workflow import Parts, Workflow

NEW = Version(2, 5)


@dataclass(frozen=True)
class Step:
    """What a function does: `verb` with the `place`-th conversation."""

    verb: str
    place: int
    text: str = ""
    limit: int | None = None


@dataclass
class Expected:
    """A conversation as the function itself sees it: each token, and whether the model sampled it there. `length`: up to the last turn's end."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    length: int = 0

    def add(self, tokens: Any, sampled: bool) -> None:
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)
        self.length = len(self.tokens) if sampled and tokens else self.length


TEXTS = st.text(st.sampled_from("ab é\n"), max_size=6)
STEPS = st.lists(st.builds(Step, st.sampled_from(["generate"] * 4 + ["append", "fork", "conversation", "both"]), st.integers(0, 5), TEXTS,
                           st.none() | st.integers(1, 12)), max_size=12)


class Scripted:
    """A workflow that follows `steps`, after one answer, and notes what it saw of every episode."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self.seen: dict[int, list[Expected]] = {}

    async def __call__(self, episode: Episode, llm: LLM, reward: Reward) -> float:
        conversations: list[Conversation] = [llm]
        seen = self.seen[episode.index] = [Expected()]
        seen[0].add(list(episode.prompt.encode()), False)
        await self._generate(llm, seen[0], Step("generate", 0))
        for step in self._steps:
            place = step.place % len(conversations)
            chosen, expected = conversations[place], seen[place]
            match step.verb:
                case "generate":
                    await self._generate(chosen, expected, step)
                case "append":
                    chosen.append(step.text)
                    expected.add(list(step.text.encode()), False)
                case "fork" | "conversation":
                    text = PROMPT[:3] + step.text
                    conversations.append(chosen.fork() if step.verb == "fork" else llm.conversation(text))
                    seen.append(Expected())
                    seen[-1].add(list(expected.tokens if step.verb == "fork" else text.encode()), False)
                case "both":
                    other = (place + 1) % len(conversations)
                    turns = {place, other}
                    await asyncio.gather(*(self._generate(conversations[index], seen[index], step) for index in sorted(turns)))
        return await reward("done")

    async def _generate(self, conversation: Conversation, expected: Expected, step: Step) -> None:
        reply = await conversation.generate(step.text, max_new_tokens=step.limit)
        expected.add(list(step.text.encode()), False)
        expected.add(list(reply.tokens), True)
        assert len(reply.tokens) <= min(8, step.limit or 8) and len(reply.logprobs) == len(reply.tokens)
        assert (reply.finish == "stop") == (reply.tokens[-1:] == (END,))


def assert_exact(group: Group, seen: dict[int, list[Expected]]) -> None:
    """`group` holds exactly the conversations that were `seen`, token by token, up to their last turns."""
    check_group(group)
    expected = [(index, entry) for index in sorted(seen) for entry in seen[index] if any(entry.sampled)]
    views = samples(group)
    assert sorted(group_episodes(group).tolist()) == [index for index, _ in expected]
    prompt = group.prompt.tolist()
    found = sorted((int(episode), [*prompt, *view.tokens.tolist()], [False] * len(prompt) + view.loss_mask.tolist())
                   for episode, view in zip(group_episodes(group), views, strict=True))
    assert found == sorted((index, entry.tokens[: entry.length], entry.sampled[: entry.length]) for index, entry in expected)
    for view in views:
        assert (view.logprobs[~view.loss_mask] == 0).all() and (view.logprobs[view.loss_mask] < 0).all()
        before = view.steps[view.loss_mask][0]
        for step, trained in zip(view.steps, view.loss_mask, strict=True):
            assert trained or step == before, "a token from outside has the version of the sampled one before it, or of the first"
            before = step


def content(group: Group) -> list[Any]:
    return [(group.prompt.tolist(), view.tokens.tolist(), view.logprobs.tolist(), view.loss_mask.tolist(), view.reward) for view in samples(group)]


@settings(deadline=None, max_examples=150)
@given(STEPS, st.sampled_from([40, 400]))
def test_what_is_trained_on_is_what_was_said(steps: list[Step], context: int) -> None:
    scripted, chatter = Scripted(steps), Chatter()
    group = asyncio.run(make_workflow(chatter, run=scripted, name="tests.scripted:run", context=context).run(make_lease()))
    assert_exact(group, scripted.seen)
    assert int(group.loss_mask.sum()) == chatter.num_sampled == sum(sum(entry.sampled) for seen in scripted.seen.values() for entry in seen)
    assert len({len(rid) for rid in chatter.rids}) == 1 and all(len(entry.tokens[: entry.length]) <= context for entry in scripted.seen[0])


@settings(deadline=None, max_examples=150)
@given(STEPS.filter(lambda steps: all(step.verb != "both" for step in steps)), st.integers(0, 60), st.integers(0, 60))
def test_an_episode_that_is_given_back_goes_on_token_by_token(steps: list[Step], first: int, second: int) -> None:
    whole = asyncio.run(make_workflow(Chatter(), run=Scripted(steps), name="tests.scripted:run").run(make_lease()))
    lease, num_sampled = make_lease(), 0
    for budget, version in ((first, Version(1, 1)), (second, NEW), (None, NEW)):
        scripted, chatter = Scripted(steps), Chatter(budget, version)
        workflow = make_workflow(chatter, run=scripted, name="tests.scripted:run")
        result = asyncio.run(run_or_park(workflow, lease))
        num_sampled += chatter.num_sampled
        if isinstance(result, Group):
            break
        check_partial(result)
        lease = make_lease(attempt=lease.attempt + 1, partial=result)
    assert isinstance(result, Group)
    assert_exact(result, scripted.seen)
    assert content(result) == content(whole) and num_sampled == int(whole.loss_mask.sum()), "nothing is sampled twice"
    assert int((np.repeat(result.steps, result.run_lengths) == 1)[result.loss_mask].sum()) == min(first, num_sampled)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(0, 60))
def test_turns_beside_each_other_are_given_back_whole_too(steps: list[Step], budget: int) -> None:
    """Which of two calls with the same tokens before them gets which sample is open; that all is exact is not."""
    partial = asyncio.run(run_or_park(make_workflow(Chatter(budget), run=Scripted(steps), name="tests.scripted:run"), make_lease()))
    if isinstance(partial, Group):
        return
    check_partial(partial)
    assert partial.tokens.size == budget
    scripted = Scripted(steps)
    group = asyncio.run(make_workflow(Chatter(None, NEW), run=scripted, name="tests.scripted:run").run(make_lease(partial=partial)))
    assert_exact(group, scripted.seen)


async def test_a_record_that_does_not_come_again_is_left_behind_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    async def one(episode: Episode, llm: LLM, reward: Reward) -> float:
        await llm.generate()
        await llm.generate("first")
        return 1.0

    async def other(episode: Episode, llm: LLM, reward: Reward) -> float:
        await llm.generate()
        await llm.generate("second")
        return 1.0

    chatter = Chatter(20, ends_in=10**9)
    partial = await run_or_park(make_workflow(chatter, run=one, group_size=1, max_new_tokens=16), make_lease())
    assert isinstance(partial, Partial) and partial.lengths.tolist() == [16, 4]
    again = Chatter(version=NEW, ends_in=10**9)
    group = await make_workflow(again, run=other, group_size=1, max_new_tokens=16, name="my.module:other").run(make_lease(partial=partial))
    check_group(group)
    assert again.num_sampled == 16, "the first turn is not sampled again, the second is"
    assert bytes(group.tokens[16:22].tolist()) == b"second" and group.loss_mask.tolist() == [True] * 16 + [False] * 6 + [True] * 16
    assert "warning: group g7, episode 0: 1 recorded turns were not asked for again and are lost: workflow my.module:other does not" \
        in capsys.readouterr().out


async def test_a_turn_without_room_is_empty_and_ends_by_length() -> None:
    replies = []

    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        for _ in range(6):
            replies.append(await llm.generate("more"))
        assert llm.room == 0
        return 0.5

    chatter = Chatter(ends_in=10**9)
    group = await make_workflow(chatter, run=run, group_size=1, context=len(PROMPT) + 30).run(make_lease())
    check_group(group)
    assert [len(reply.tokens) for reply in replies] == [8, 8, 2, 0, 0, 0] and {reply.finish for reply in replies} == {"length"}
    assert group.prompt.size + group.lengths.tolist()[0] == len(PROMPT) + 30 and [params.max_new_tokens for params in chatter.params] == [8, 8, 2]

    async def never_looks(episode: Episode, llm: LLM, reward: Reward) -> float:
        while True:
            await llm.generate("more")

    with pytest.raises(BaseExceptionGroup) as caught:
        await make_workflow(Chatter(), run=never_looks, group_size=1).run(make_lease())
    assert f"{MAX_EMPTY_TURNS + 1} times without room for a token" in str(leaf(caught.value))


async def test_the_samples_of_an_episode_share_its_score_and_some_are_left_out() -> None:
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        await llm.generate()
        judging, asking = llm.fork(), llm.conversation("12 or not?")
        judging.trained = episode.index == 0
        await judging.generate(" right?")
        await asking.generate()
        llm.conversation("never used")
        return episode.index / 4

    group = await make_workflow(Chatter(), run=run, group_size=3).run(make_lease())
    check_group(group)
    assert group_episodes(group).tolist() == [0, 0, 0, 1, 1, 2, 2] and group.scores.tolist() == [0.0] * 3 + [0.25] * 2 + [0.5] * 2
    assert group.rewards.tolist() == [-5.0] * 3 + [-2.5] * 2 + [0.0] * 2 and bytes(group.prompt.tolist()) == b"12 "
    views = samples(group)
    assert bytes(views[0].tokens[: len(PROMPT) - 3].tolist()) == PROMPT[3:].encode()
    answer = views[0].tokens[views[0].loss_mask].tolist()
    start = len(PROMPT) - 3
    assert views[1].tokens[start: start + len(answer)].tolist() == answer and not views[1].loss_mask[: start + len(answer) + 7].any()


async def test_what_an_episode_is_told_and_may_ask() -> None:
    told: list[Episode] = []

    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        told.append(episode)
        reply = await llm.generate(max_new_tokens=3, stop=["x"] if episode.index else "x")
        assert await reward(reply) == 0.25 and await reward("42", reference="1", verifier="exact", prompt="q") == 0.25
        assert await episode.tools.python("print") == "PRINT"
        return 1

    judge, chatter = Judge(lambda _: 0.25), Chatter()
    workflow = make_workflow(chatter, judge, run, top_p=0.5, top_k=3, temperature=0.7)
    group = await workflow.run(make_lease())
    await workflow.run(make_lease(purpose=Purpose.evaluation, attempt=2))
    assert group.scores.tolist() == [1.0, 1.0] and [episode.index for episode in told] == [0, 1, 0] and told[0].seed != told[1].seed
    assert (told[0].prompt, told[0].reference, told[0].verifier, told[0].config.group_size) == (PROMPT, "42", "numeric", 2)
    assert ("q", "42", "1", "exact") in judge.asked and judge.asked[0][0] == PROMPT and judge.asked[0][2:] == ("42", "numeric")
    assert {params.stop for params in chatter.params} == {("x",)} and {params.max_new_tokens for params in chatter.params} == {3}
    assert [(params.temperature, params.top_p, params.top_k) for params in chatter.params] == [(0.7, 0.5, 3)] * 2 + [(0.0, 1.0, -1)]


async def failing(kind: str, llm: LLM, reward: Reward) -> Any:
    match kind:
        case "raises":
            raise KeyError("where is it")
        case "in a group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(failing("raises", llm, reward))
        case "nothing said":
            return 1.0
        case "none trained":
            await llm.generate()
            llm.trained = False
            return 1.0
        case "beside itself":
            await asyncio.gather(llm.generate(), llm.generate())
        case "not awaited":
            task = asyncio.ensure_future(llm.generate())
            await asyncio.sleep(0)
            assert not task.done()
            return 1.0
        case "cancels a turn":
            turn = asyncio.ensure_future(llm.generate())
            await asyncio.sleep(0)
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            return 1.0
        case "awaits what it cancelled":
            turn = asyncio.ensure_future(asyncio.Event().wait())
            turn.cancel()
            await turn
        case "another beginning":
            await llm.generate()
            await llm.conversation("Is it?").generate()
            return 1.0
    await llm.generate()
    return {"two": 2.0, "text": "1.0", "none": None, "nan": float("nan")}[kind]


@pytest.mark.parametrize(("kind", "words"), [
    ("raises", "raised KeyError: 'where is it'\n  {file}, line "), ("in a group", "raised KeyError: 'where is it'\n  {file}, line "),
    ("nothing said", "nothing to train on"), ("none trained", "nothing to train on"), ("beside itself", "still being sampled. Await it first"),
    ("not awaited", "returned while a turn"), ("cancels a turn", "after one was cancelled"), ("awaits what it cancelled", "raised CancelledError"),
    ("another beginning", "begin with different tokens"), ("two", "returned 2.0"),
    ("text", "returned '1.0'"), ("none", "returned None"), ("nan", "returned nan")])
async def test_a_function_that_does_wrong_is_named(kind: str, words: str) -> None:
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        return await failing(kind, llm, reward)

    with pytest.raises((BaseExceptionGroup, WorkflowError)) as caught:
        await make_workflow(Chatter(ends_in=10**9), run=run, group_size=1, name="my.module:run").run(make_lease())
    error = leaf(caught.value)
    assert isinstance(error, WorkflowError) and words.format(file=__file__) in str(error)
    assert "my.module:run" in str(error)


class Engines:
    """Stands for the engines of a lease runner."""

    def release(self, lease: Lease) -> None:
        pass


class NoLink:
    """No coordinator is in touch: results are kept."""

    in_touch = False

    async def send(self, message: Message) -> None:
        raise AssertionError(message)


async def test_a_function_that_raises_fails_its_lease_and_not_the_worker() -> None:
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        await llm.generate()
        raise KeyError("where is it")

    results = Results(NoLink())
    runner = LeaseRunner(results, make_workflow(Chatter(), run=run, name="my.module:run"), GroupFilter("all"), Engines())  # type: ignore[arg-type]
    runner.start(make_lease())
    async with asyncio.timeout(60):
        while not len(results):
            await asyncio.sleep(0)
    [message] = [kept.message for kept in results._kept.values()]
    assert isinstance(message, GroupFailed) and not message.fatal and "workflow my.module:run raised KeyError: 'where is it'" in message.cause
    assert __file__ in message.cause and not runner.broken.done() and runner.num_running == 0


async def test_a_failure_of_the_infrastructure_cannot_be_swallowed() -> None:
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        try:
            return await reward(await llm.generate())
        except Exception:  # noqa: BLE001 - what a careless user writes
            return 0.0

    with pytest.raises(BaseExceptionGroup) as caught:
        await make_workflow(Chatter(), Judge(fails=True), run).run(make_lease())
    assert str(leaf(caught.value)) == "no score"
    parked = await run_or_park(make_workflow(Chatter(3), run=run), make_lease())
    assert isinstance(parked, Partial) and parked.tokens.size == 3


@pytest.mark.parametrize("prompt", ["", "x" * 393, "x" * 1000])
async def test_a_prompt_must_leave_room_for_a_turn(prompt: str) -> None:
    with pytest.raises(BadRequest, match=r"prompt p9 has .* must have at least 1 and leave workflow.max_new_tokens=8 of engine.context_length=400"):
        await make_workflow(Chatter()).run(make_lease(prompt=prompt))


# -- chat templates ------------------------------------------------------------------------------------------------------

def render(messages: list[dict[str, Any]], tools: Any) -> str:
    """A template as usual: \\0 ends a turn."""
    head = "".join(f"[{tool['name']}]" for tool in tools or ())
    return "#" + head + "".join(f"<{message['role']}>{message['content']}\0\n" for message in messages) + "<assistant>"


async def test_the_templates_own_markers_stand_between_turns_and_the_sampled_one_stands_once() -> None:
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        chat = llm.conversation("Hi", tools=[{"name": "python"}])
        assert bytes(chat.tokens).decode() == "#[python]<user>Hi\0\n<assistant>"
        first = await chat.generate()
        second = await chat.fork().generate([{"role": "tool", "content": "4"}, {"role": "user", "content": "so?"}])
        cut = llm.conversation([{"role": "user", "content": "Hi"}])
        third = await cut.generate(max_new_tokens=2)
        await cut.generate("more")
        assert (first.finish, second.finish, third.finish) == ("stop", "stop", "length")
        return 1.0

    group = await make_workflow(Chatter(says=lambda _: "yes"), run=run, group_size=1, text=ChatText(render)).run(make_lease())
    texts = [bytes([*group.prompt.tolist(), *view.tokens.tolist()]).decode() for view in samples(group)]
    asked = "#[python]<user>Hi\0\n<assistant>yes\0"
    assert bytes(group.prompt.tolist()) == b"#" and texts == [
        asked, f"{asked}\n<tool>4\0\n<user>so?\0\n<assistant>yes\0", "#<user>Hi\0\n<assistant>ye\0\n<user>more\0\n<assistant>yes\0"]


@pytest.mark.parametrize(("prompt_id", "opened"), [("sums/1", b"#<user>Hi\0\n<assistant>"), ("other/1", b"Hi")])
async def test_a_prompt_of_a_mixture_goes_on_in_the_form_of_its_part(prompt_id: str, opened: bytes) -> None:
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        chat = llm.conversation("Hi")
        assert bytes(chat.tokens) == opened
        await chat.generate()
        return 1.0

    parts = Parts(Chatter(says=lambda _: "yes"), Judge(), WorkflowConfig(group_size=1, max_new_tokens=8), RewardConfig(), 400,  # type: ignore[arg-type]
                  texts={"sums": ChatText(render)})
    assert (await Workflow(parts, run).run(make_lease(prompt_id=prompt_id))).scores.tolist() == [1.0]


def test_a_template_that_hides_the_models_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out the assistant's turns"):
        ChatText(lambda messages, _: str(messages[-1]["content"])).following("more")
