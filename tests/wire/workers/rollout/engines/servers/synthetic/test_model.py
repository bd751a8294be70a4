"""The synthetic engine: the tests of every engine and of the embedded one that do not look at the model, and its latency and length model.

`engine` and `one` take the place of those files' fixtures of the same names, so their tests run here against this engine.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.engine.child import ROOT, EngineChild
from tests.conformance import test_pauses as pauses
from tests.conformance import test_surroundings as surroundings
from tests.conformance import test_updates as updates
from tests.conformance import test_weight_group as weight_group
from tests.conformance.endpoint import DEADLINE_S, Client, Endpoint
from tests.conformance.models import CONTEXT, EOS, SECOND_EOS, VOCAB, prompt_of, write_pair
from tests.wire.workers.rollout.engines.servers.embedded import test_server as api
from workers.config import EngineConfig, Server
from workers.messages.parts import Version
from workers.model.architecture import ModelError, read_architecture
from workers.rollout.engines.client import SamplingParams
from workers.rollout.engines.servers.embedded.requests import Request, Sampling
from workers.rollout.engines.servers.process import ServerProcess
from workers.rollout.engines.servers.synthetic.model import SyntheticModel

MEAN = 40.0


class SyntheticEndpoint(Endpoint):
    """An endpoint whose reference is the uniform distribution."""

    def logprobs(self, folder: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        """-log(vocabulary) for every token."""
        return torch.full((len(output),), -math.log(VOCAB))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A synthetic engine with 8 slots, slow enough that a sample outlives several calls on a busy machine."""
    folder = tmp_path_factory.mktemp("synthetic")
    first, second = write_pair(folder, "llama")
    with EngineChild.start(first, server="synthetic", more=["--tokens-per-s", "2000", "--mean-tokens", str(MEAN)],
                           num_slots=8, context_length=CONTEXT, prefill_chunk=32, weight_version="first") as child:
        yield SyntheticEndpoint("synthetic", child.base_url, child.api_key, first, second, child.process.pid)


test_what_a_pause_leaves_running = api.test_what_a_pause_and_an_update_leave_running
test_what_would_hang_sglang = api.test_what_would_hang_sglang_is_refused
test_siblings = api.test_siblings_that_come_together_prefill_their_prompt_once
test_a_seed_fixes_the_tokens = api.test_a_seed_fixes_the_tokens_whatever_the_batch
test_bad_requests = api.test_bad_requests_are_refused
test_other_bad_requests = api.test_other_bad_requests_are_refused
test_the_key = api.test_the_key_is_in_no_command_line_and_no_other_header_will_do
test_a_failing_update = api.test_a_failing_update_leaves_the_old_weights_serving
test_a_client_that_leaves = api.test_a_client_that_leaves_frees_its_slot
test_every_call_asks_for_the_key = surroundings.test_every_call_but_health_asks_for_the_key
test_information = surroundings.test_information
test_nonsense_is_refused = surroundings.test_nonsense_is_refused
test_abort = pauses.test_abort_brings_back_what_there_is_and_new_requests_wait
test_abort_in_the_queue = pauses.test_what_is_aborted_in_the_queue_has_lost_its_tokens_and_what_waits_at_the_door_stays
test_abort_request = pauses.test_abort_request_ends_a_request_and_those_whose_id_begins_with_its_id
test_updates_take_turns = updates.test_updates_outside_a_pause_take_turns
test_the_order_of_group_calls = weight_group.test_the_order_of_calls_is_kept


@pytest.fixture
def engine(one: Endpoint) -> Endpoint:
    """The engine, as the conformance tests call it."""
    return one


def test_retract_keeps_tokens_and_marks_versions(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        whole = (await client.generate(prompt_of(9), 600, sampling_seed=3))["output_ids"]
        base = (await client.info())["generated_tokens"]
        task, *others = (client.generate(prompt_of(9), 600, sampling_seed=seed) for seed in range(3, 11))  # they share the rate, which leaves time
        await client.until(lambda info: info["generated_tokens"] > base + 400)
        await client.post("/pause_generation", mode="retract")
        await client.update(one.second, "second")
        await client.post("/continue_generation")
        reply = await task
        first, second = reply["meta_info"]["weight_versions"]
        assert (first["version"], second["version"], first["end"], second["end"]) == ("first", "second", second["start"], 600)
        assert reply["output_ids"] == whole
        await asyncio.gather(*others)

    one.run(scenario)


def test_lengths_are_ragged_around_the_mean_and_capped(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        tasks = [client.generate(prompt_of(5), 300, ignore_eos=False, sampling_seed=seed) for seed in range(200)]
        replies = [(await task)["output_ids"] for task in tasks]
        assert MEAN * 0.8 < statistics.mean(len(output) for output in replies) < MEAN * 1.25
        assert len({len(output) for output in replies}) > 40
        for output in replies:
            assert output[-1] in (EOS, SECOND_EOS) or len(output) == 300
            assert not {EOS, SECOND_EOS} & set(output[:-1]) and len(set(output)) > len(output) // 4
        short = await client.generate(prompt_of(5), 10, ignore_eos=False, sampling_seed=1, min_new_tokens=10)
        assert len(short["output_ids"]) == 10 and EOS not in short["output_ids"][:9]

    one.run(scenario)


def test_greedy_depends_on_the_prompt_only(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        async def greedy(prompt: list[int], seed: int) -> list[int]:
            return (await client.generate(prompt, 30, temperature=0, sampling_seed=seed))["output_ids"]

        assert await greedy(prompt_of(7), 1) == await greedy(prompt_of(7), 2) != await greedy(prompt_of(7, 1), 1)

    one.run(scenario)


@pytest.fixture
def model(one: Endpoint) -> tuple[SyntheticModel, list[float]]:
    """The model at 100 tokens/s on a clock that only sleeping moves; and that clock, as a list of one number."""
    now = [50.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return SyntheticModel(read_architecture(one.first), {EOS}, 100.0, 5.0, clock=lambda: now[0], sleep=sleep), now


def test_running_requests_share_the_rate(model: tuple[SyntheticModel, list[float]]) -> None:
    synthetic, now = model
    requests = [Request(str(seed), [1], 100, sampling=Sampling(seed=seed)) for seed in range(8)]
    for _ in range(10):
        synthetic.decode(requests)
    assert now[0] == pytest.approx(50.0 + 10 * 8 / 100)
    synthetic.decode(requests[:2])
    assert now[0] == pytest.approx(50.82)
    now[0] += 0.008  # a delay is made up for
    synthetic.decode(requests[:1])
    assert now[0] == pytest.approx(50.83)
    now[0] += 30.0  # an idle time is not
    synthetic.decode(requests[:1])
    assert now[0] == pytest.approx(80.84)


def test_a_model_that_could_only_end_is_refused(one: Endpoint) -> None:
    with pytest.raises(ModelError, match="whole vocabulary"):
        SyntheticModel(read_architecture(one.first), range(VOCAB), 100.0, 5.0)


def test_the_worker_starts_it_with_its_options(one: Endpoint, tmp_path: Path) -> None:
    config = EngineConfig(server=Server.synthetic, context_length=CONTEXT, synthetic_tokens_per_s=9000.0, synthetic_mean_tokens=3.0)

    async def body() -> None:
        process = ServerProcess(config, one.first, tmp_path / "log")
        client = await process.start(Version(1, 2))
        try:
            params = SamplingParams(200, 1.0)
            replies = [await client.generate(f"r{seed}", [1, 2], params, seed) for seed in range(40)]
            assert all(span[0] == Version(1, 2) for reply in replies for span in reply.spans)
            assert statistics.mean(len(reply.tokens) for reply in replies) < 8
        finally:
            await client.close()
            await process.stop()

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
    arguments = ServerProcess(config, one.first, tmp_path / "log")._command(Version(1, 2), 1)
    assert arguments[arguments.index("--tokens-per-s") + 1] == "9000.0"
    embedded = ServerProcess(EngineConfig(), one.first, tmp_path / "log")._command(Version(1, 2), 1)
    assert "--tokens-per-s" not in embedded and "--mean-tokens" not in embedded


@pytest.mark.parametrize(("option", "value"), [("--tokens-per-s", "0"), ("--mean-tokens", "-1"), ("--mean-tokens", "inf")])
def test_options_that_cannot_work_are_refused(option: str, value: str) -> None:
    module = "workers.rollout.engines.servers.synthetic"
    command = [sys.executable, "-m", module, "--model-path", "x", "--parent-pid", str(os.getpid()), option, value]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and f"{option}: {value}: must be greater than 0" in ended.stderr


def test_it_needs_no_torch() -> None:
    code = ("import sys, workers.rollout.engines.servers.synthetic.__main__, workers.rollout.engines.servers.embedded.serve\n"
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
