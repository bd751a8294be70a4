"""The user's own functions are tried before anything is submitted, on prompts of the data set, with answers made up in place of the model's.

    data.adapter            the first rows of its files
    verifiers               as answers the reference and nothing at all, in a process like those of the run, with its limits
    workflow, agent, keep   one group; the model answers with the response, or the reference, of the prompt

What is built in is not tried: nodes look themselves whether they can run it. Everything has a time limit, and what hangs is told by the line at which
it did. An error of an agent that may fail (workflow.agent_failures=zero) is told, and no obstacle; nor is one that only takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from workers.config import ClusterKind, Config, ConfigError, DataConfig
from workers.config.workflow import WORKFLOWS
from workers.data.adapters import ADAPTERS, Adapter, load_adapter
from workers.data.examples import end_token
from workers.data.limits import CHARACTERS_A_TOKEN
from workers.data.prompt import Prompt
from workers.data.prompt_files import training_files
from workers.data.rows import Row, read_rows
from workers.messages.from_worker import GroupFailed
from workers.messages.parts import Lease, Purpose, Version
from workers.model.tokenizer import open_tokenizer
from workers.reward.pool.pool import RewardPool, VerifierError
from workers.reward.verifiers.registry import check_reference, own
from workers.rollout.engines.client import BadRequest, Generation, SamplingParams
from workers.rollout.engines.sampler import Sample
from workers.rollout.workflows import shell_agent
from workers.rollout.workflows.agent import load_agent
from workers.rollout.workflows.episode import WorkflowError
from workers.rollout.workflows.group_filter import GroupFilter
from workers.rollout.workflows.rendering import text_of, texts_of_parts
from workers.rollout.workflows.workflow import Parts, Workflow
from workers.rollout.workflows.workflow import load as load_workflow
from workers.run.user_code import TookTooLong, first, in_time, told

NUM_PROMPTS = 3
GROUP_SIZE = 2
IMPORT_S, ROW_S, GROUP_S = 60.0, 10.0, 60.0
LATER_S = 2.0
"""What blocks the event loop is interrupted so much later than what waits in it is cancelled."""
SKIP = "It was tried on this machine; where it can only run on the nodes, leave that out with launch.try_functions=false"
VERIFIED = ("single_turn", "multi_turn", "python_tool", "self_verification")
"""Workflows that ask the verifier of the prompt, with its reference; others may ask another."""
VERIFIER = "A verifier is a function (prompt, completion, reference) -> score from 0 to 1"


def try_adapters(data: DataConfig) -> None:
    """Import the adapters of the user's own, and give each the first rows that it will get. Raises `ConfigError`."""
    for part in data.sources():
        if not part.adapter or part.adapter in ADAPTERS:
            continue
        what = f"data.adapter={part.adapter!r}"
        with imported(what):
            adapter = load_adapter(part.adapter)
        rows = itertools.chain.from_iterable(read_rows(path, "data.path") for path in training_files(part))
        for row in itertools.islice(rows, NUM_PROMPTS):
            with _timely(ROW_S, f"{row.place}: {what}"):
                _adapt(adapter, row, what)


def _adapt(adapter: Adapter, row: Row, what: str) -> None:
    try:
        adapter(row.columns)
    except TookTooLong:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ConfigError(f"{row.place}: {what} raised {told(error)}\nCorrect it, or the row") from error


def check_functions(config: Config, folder: Path, prompts: list[Prompt], tried: bool) -> None:
    """Check that the functions of the user's own that workers will import are there, and try them; and that built-in verifiers can judge by the
    references. Raises `ConfigError`."""
    with imported("workflow"):
        load_workflow(config.workflow.name)
        if config.workflow.name == "agent" and config.workflow.agent:
            load_agent(config.workflow.agent)
        GroupFilter(config.workflow.keep)
    if config.workflow.name == "shell_agent":
        shell_agent.check(config.workflow.container, prompts, here=config.cluster.kind is ClusterKind.local)
    for prompt in prompts if config.workflow.name in VERIFIED else ():
        _check_reference(prompt)
    for note in try_functions(config, folder, prompts) if tried else ():
        print(note, flush=True)


def try_functions(config: Config, folder: Path, prompts: Sequence[Prompt]) -> list[str]:
    """Try the verifiers, the workflow, its agent and its filter on `prompts`, with the model's `folder`. Returns what is worth saying; raises
    `ConfigError` with what is wrong."""
    workflow = config.workflow
    for prompt in prompts:
        config.reward.check_named(prompt.verifier, prompt.where)
    names = dict.fromkeys(name for prompt in prompts for name in own(prompt.verifier)) | dict.fromkeys(
        () if config.evaluates else (part for name in config.reward.parts for part in own(name)))
    for name in names:
        judged = [prompt for prompt in prompts if name in own(prompt.verifier)] or prompts
        asyncio.run(_try_verifier(config, name, judged[:NUM_PROMPTS]))
    away = workflow.name == "shell_agent" and config.cluster.kind is not ClusterKind.local  # its containers are on the nodes
    if away or (workflow.name in WORKFLOWS and workflow.name not in ("agent", "verifiers") and ":" not in workflow.keep):
        return []
    return _try_workflow(config, folder, prompts[0])


def _check_reference(prompt: Prompt) -> None:
    try:
        check_reference(prompt.verifier, prompt.reference)
    except ValueError as error:
        raise ConfigError(f"{prompt.where}: verifier {prompt.verifier!r}: {error}. Correct the row, or name another reward.verifier") from error


async def _try_verifier(config: Config, name: str, prompts: Iterable[Prompt]) -> None:
    async with _one_process(config, name) as pool:
        for prompt in prompts:
            for completion in (prompt.response or prompt.reference, ""):
                try:
                    await pool.score(prompt.text, completion, prompt.reference, name)
                except VerifierError as error:
                    raise ConfigError(f"reward.verifier={name!r}, tried on {prompt.where} with the completion "
                                      f"{completion[:80]!r}: {error.cause}\n{VERIFIER}. {SKIP}") from error


def _one_process(config: Config, name: str) -> RewardPool:
    return RewardPool(dataclasses.replace(config.reward, verifier=name, num_processes=1, max_retries=0), config.sandbox)


def _try_workflow(config: Config, folder: Path, prompt: Prompt) -> list[str]:
    """Run one group, without engines."""
    agent = config.workflow.name in ("agent", "verifiers")
    key = f"workflow.env={config.workflow.env!r}" if config.workflow.env else "workflow.agent" if agent else f"workflow.name={config.workflow.name!r}"
    shorter = dataclasses.replace(config.workflow, group_size=min(GROUP_SIZE, config.workflow.group_size),
                                  agent_timeout_s=min(GROUP_S, config.workflow.agent_timeout_s), agent_failures="error")
    may_fail = agent and config.workflow.agent_failures == "zero"
    config = dataclasses.replace(config, workflow=shorter, model=dataclasses.replace(config.model, path=str(folder)))
    place, patience_s = prompt.where, GROUP_S * (2 if agent else 1)
    try:
        with _timely(patience_s + LATER_S, key):
            asyncio.run(_run_group(config, folder, prompt, patience_s))
    except TimeoutError:
        cause = f"it had not come to its end after {patience_s:g} s: it waits for something"
    except (BaseExceptionGroup, BadRequest, WorkflowError, VerifierError) as raised:
        error = first(raised)
        if not isinstance(error, BadRequest | WorkflowError | VerifierError):
            raise
        if isinstance(error, VerifierError) and not own(prompt.verifier):  # not the user's, and perhaps only missing on this machine
            return [f"{key} was not tried to its end: {error.cause}"]
        cause = str(error)
        if may_fail or (agent and "workflow.agent_timeout_s" in cause):
            return [f"{key}, tried on {place}: {cause}"]
    else:
        return []
    raise ConfigError(f"{key}, tried on {place}: {cause}\nIts own settings are workflow.options. {SKIP}")


async def _run_group(config: Config, folder: Path, prompt: Prompt, limit_s: float) -> None:
    tokenizer = open_tokenizer(folder)
    answers = Answers(tokenizer, prompt.response or prompt.reference, end_token(folder, tokenizer))
    ends = asyncio.get_running_loop().time() + limit_s
    async with _one_process(config, prompt.verifier) as pool, asyncio.timeout_at(ends):  # what blocked the loop is told, although both are then late
        workflow = Workflow(Parts(answers, pool, config.workflow, config.reward, config.engine.context_length, text_of(config),
                                  config.transport.max_message_mb << 20, config.evaluation, texts_of_parts(config)))
        lease = Lease("g0", 1, Purpose.training, Version(0, 0), prompt.id, prompt.text, prompt.verifier, prompt.reference, config.run.seed)
        verdict = GroupFilter(config.workflow.keep).verdict(await workflow.run(lease))
    if isinstance(verdict, GroupFailed):
        raise ConfigError(verdict.cause)


class Answers:
    """Stands in for engines: every turn of the model is `answer`, as far as there is room for it."""

    def __init__(self, tokenizer: Tokenizer, answer: str, end: int) -> None:
        self._tokenizer, self._answer, self._end = tokenizer, answer, end

    def encode(self, text: str) -> list[int]:
        """As `Sampler.encode`."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def knows(self, tokens: Sequence[int]) -> bool:
        """As `Sampler.knows`."""
        return all(self._tokenizer.id_to_token(token) is not None for token in tokens)

    def text(self, tokens: list[int], stop: tuple[str, ...]) -> str:
        """As `Sampler.text`; no stop string is looked for."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    async def sample(self, lease: Lease, rid: str, prompt: list[int], params: SamplingParams, seed: int, sample: Sample | None = None) -> Sample:
        """Add the whole answer at once."""
        sample = Sample() if sample is None else sample
        tokens = [*self.encode(self._answer[:CHARACTERS_A_TOKEN * params.max_new_tokens]), self._end]
        sample.cut, tokens = len(tokens) > params.max_new_tokens, tokens[:params.max_new_tokens]
        sample.add(Generation(tokens, [-1.0] * len(tokens), [(lease.version, 0, len(tokens))], "stop"))
        sample.finished = True
        return sample


def imported(what: str) -> contextlib.AbstractContextManager[None]:
    """For the import of a user's function: raises `ConfigError` with the line at which it hangs."""
    return _timely(IMPORT_S, f"{what}: its import")


@contextlib.contextmanager
def _timely(seconds: float, what: str) -> Iterator[None]:
    """Raise `ConfigError` with the line at which the user's code hangs."""
    try:
        with in_time(seconds):
            yield
    except TookTooLong as error:
        raise ConfigError(f"{what}: {told(error)}\n{SKIP}") from error
