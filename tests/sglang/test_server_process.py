"""SGLang itself as a worker's engine: started, interrupted, killed, hung, refusing, ended. `make test-sglang` says where it is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from tests.conformance.engines import CPU, SGLANG, sglang_here
from tests.conformance.models import prompt_of
from tests.wire.workers.rollout.engines import test_sampler
from tests.wire.workers.rollout.engines.test_engine import raised, restarted
from tests.wire.workers.rollout.engines.test_sampler import CONTEXT, Following, Rig, cuts_of, lease, running, until, write_endless_model
from workers.config import EngineConfig, Server
from workers.messages.parts import Version
from workers.rollout.engines.client import EngineError, SamplingParams
from workers.rollout.engines.engine import Weights
from workers.rollout.engines.sampler import Sample
from workers.rollout.engines.servers.process import ServerProcess
from workers.weights.manifest import MANIFEST

pytestmark = [sglang_here, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
LENGTH = 400
PARAMS, SHORT = SamplingParams(LENGTH, 1.0), SamplingParams(20, 1.0)
ON_CPU = {"server": Server.sglang, "python": SGLANG, "device": "cpu", "mem_fraction": 0.2, "extra_args": ["--max-total-tokens=16384"],
          "start_timeout_s": 300.0}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of a CPU machine; where servers put what is temporary."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CPU, "TMPDIR": str(folder), "SGLANG_HEALTH_CHECK_TIMEOUT": "3"}.items():
            patch.setenv(name, value)
        patch.setattr(test_sampler, "DEADLINE_S", 300.0)
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    models = [write_endless_model(folder / str(seed), seed) for seed in range(2)]
    async with running(folder, models, **ON_CPU, health_timeout_s=10.0) as rig:
        yield rig


async def test_the_longest_answer_is_as_long_as_the_context_lets_it(rig: Rig) -> None:
    assert len((await rig.sample("whole", prompt_of(CONTEXT - 50), SamplingParams(50, 1.0), seed=0)).tokens) == 50


def group(pid: int) -> list[psutil.Process]:
    """The processes of a server."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def main_of(pid: int) -> int:
    """SGLang's main process: the only child of the one that attends to it."""
    (main,) = psutil.Process(pid).children()
    return main.pid


def main_pid(rig: Rig) -> int:
    assert rig.server._process is not None
    return main_of(rig.server._process.pid)


def scheduler(rig: Rig) -> psutil.Process:
    return next(process for process in group(main_pid(rig)) if "sglang::scheduler" in " ".join(process.cmdline()))


async def generating(rig: Rig, sampling: asyncio.Task) -> None:
    """Wait until what samples has tokens, as far as that can be seen from outside."""
    used = scheduler(rig).cpu_times().user

    async def computes() -> bool:
        await asyncio.sleep(0.05)
        return sampling.done() or scheduler(rig).cpu_times().user > used + 0.5

    await until(computes)


async def test_running_samples_go_on_under_new_weights(rig: Rig) -> None:
    first, second = rig.publish(0), rig.publish(1)
    async with Following(rig) as following:
        await following.load(first)
        sampling = asyncio.create_task(rig.sample("across", prompt_of(12), PARAMS, seed=1))
        await generating(rig, sampling)
        await following.load(second)
        sample = await sampling
    (before, cut), (after, end) = cuts_of(sample)
    assert (before, after, end, sample.num_interruptions) == (first.version, second.version, LENGTH, 1) and 0 < cut < LENGTH
    assert rig.error(first.version, prompt_of(12), sample.tokens, sample.logprobs, end=cut) <= TOLERANCE
    assert rig.error(second.version, prompt_of(12), sample.tokens, sample.logprobs, start=cut) <= TOLERANCE
    assert rig.engine.interruption.pause_s > 0 and rig.engine.interruption.load_s > 0


async def test_it_is_closed_to_others_and_outlives_the_signals_of_a_job(rig: Rig) -> None:
    key = rig.client._session.headers["Authorization"].removeprefix("Bearer ")
    processes = group(main_pid(rig))
    assert len(processes) >= 3
    for process in processes:
        assert key not in " ".join(process.cmdline()) and key not in str(process.environ())
        listening = {connection.laddr.ip for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1"}, process.cmdline()
    assert key not in (rig.folder / "engine-0.log").read_text()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        for process in processes:
            process.send_signal(number)
    sample = await rig.sample("survivor", prompt_of(5), SHORT, seed=0)
    assert len(sample.tokens) == 20 and rig.engine.num_restarts == 0


async def test_a_dead_scheduler_is_a_dead_server(rig: Rig) -> None:
    assert rig.newest is not None
    version, earlier = rig.newest.version, rig.engine.num_restarts
    sampling = asyncio.create_task(rig.sample("lost", prompt_of(9), PARAMS, seed=2))
    await generating(rig, sampling)
    scheduler(rig).kill()
    sample = await sampling
    await restarted(rig.engine, version, earlier + 1)
    assert cuts_of(sample) == [(version, LENGTH)]
    assert rig.error(version, prompt_of(9), sample.tokens, sample.logprobs) <= TOLERANCE


async def test_a_scheduler_that_hangs_behind_a_server_that_listens_is_noticed(rig: Rig) -> None:
    assert rig.newest is not None
    version, earlier, hung = rig.newest.version, rig.engine.num_restarts, main_pid(rig)
    scheduler(rig).suspend()
    sample = await rig.sample("waits", prompt_of(9), SHORT, seed=3)
    assert cuts_of(sample) == [(version, 20)] and rig.engine.num_restarts == earlier + 1 and not group(hung)


async def test_halting_brings_tokens_back(rig: Rig) -> None:
    assert rig.newest is not None
    sampler, part = rig.sampler, Sample()
    sampling = asyncio.create_task(sampler.sample(lease(), "halted", prompt_of(9), PARAMS, 4, part))
    await generating(rig, sampling)
    assert await sampler.halt(60.0) and await sampling is part
    assert 0 < len(part.tokens) < LENGTH and not part.finished
    rig.engines._closed = False
    await rig.client.resume()
    kept = list(part.tokens)
    sample = await rig.sample("goes-on", prompt_of(9), PARAMS, 4, part)
    assert sample.finished and sample.tokens[: len(kept)] == kept
    assert rig.error(rig.newest.version, prompt_of(9), sample.tokens, sample.logprobs) <= TOLERANCE


async def test_weights_that_it_refuses_twice_in_two_lives_end_the_worker(rig: Rig, tmp_path: Path) -> None:
    """The last test of this rig: its engine ends."""
    (tmp_path / MANIFEST).touch()
    rig.newest, last = Weights(Version(9, 9), tmp_path), main_pid(rig)
    await rig.engine.catch_up()
    with pytest.raises(EngineError, match="/update_weights_from_disk answered 400: .*Cannot find any model weights"):
        await raised(rig.living)
    assert rig.engine.held is None and not group(last) and rig.server._process is not None and not group(rig.server._process.pid)


async def test_a_flag_that_sglang_does_not_know_is_told_in_its_words(rig: Rig, tmp_path: Path) -> None:
    config = EngineConfig(**{**ON_CPU, "extra_args": ["--no-such-flag"]})  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"(?s)exited with status 2.*unrecognized arguments: --no-such-flag"):
        await ServerProcess(config, rig.model, tmp_path / "log").start(Version(0, 0))


WORKER = """
import asyncio, json, sys
from pathlib import Path
import msgspec
from workers.config import EngineConfig
from workers.messages.parts import Version
from workers.rollout.engines.servers.process import ServerProcess

async def work():
    server = ServerProcess(msgspec.json.decode(sys.argv[1], type=EngineConfig), Path(sys.argv[2]), Path(sys.argv[3]))
    await server.start(Version(0, 0))
    print(server._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(work())
"""


async def test_nothing_is_left_of_it_when_its_worker_is_killed(rig: Rig, surroundings: Path, tmp_path: Path) -> None:
    config = msgspec.json.encode(EngineConfig(num_slots=8, context_length=256, **ON_CPU)).decode()  # type: ignore[arg-type]
    others = set(surroundings.glob("headway-sglang-*"))
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, config, str(rig.model), str(tmp_path / "log"), cwd=ROOT,
                                                  stdout=subprocess.PIPE)
    assert worker.stdout is not None
    pid = main_of(int(await worker.stdout.readline()))
    left = {path for process in group(pid) for path in (*memory_of(process), *sockets_of(process))}
    assert any(path.startswith("/tmp/") for path in left)
    worker.kill()
    await worker.wait()

    async def gone() -> bool:
        await asyncio.sleep(0.05)
        return not group(pid) and set(surroundings.glob("headway-sglang-*")) <= others and not any(os.path.exists(path) for path in left)

    await until(gone)


def memory_of(process: psutil.Process) -> set[str]:
    try:
        return {entry.path for entry in process.memory_maps() if entry.path.startswith("/dev/shm/sgl")}
    except psutil.NoSuchProcess:
        return set()


def sockets_of(process: psutil.Process) -> set[str]:
    """Its local sockets outside the temporary folder."""
    try:
        return {entry.laddr for entry in process.net_connections("unix") if entry.laddr.startswith("/tmp/sglang_")}
    except psutil.NoSuchProcess:
        return set()
