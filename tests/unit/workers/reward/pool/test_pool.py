"""The reward pool against real, hostile verifiers in real processes."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from workers.config import ConfigError, RewardConfig
from workers.reward.pool import process_handle
from workers.reward.pool.messages import PYTHON_TOOL
from workers.reward.pool.pool import RewardPool, VerifierError
from workers.reward.shaping import scale

HOSTILE = "tests.support.hostile_verifiers:"
PATIENCE_S = 300.0


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, PATIENCE_S)

    asyncio.run(bounded())


@asynccontextmanager
async def opened(**changes: object) -> AsyncIterator[RewardPool]:
    """A pool of one process without retries, unless `changes` say otherwise; afterwards nothing of it may be left."""
    config = RewardConfig(**{"verifier": HOSTILE + "good", "timeout_s": 20.0, "max_retries": 0, **changes})  # type: ignore[arg-type]
    gc.collect()  # what earlier tests have let go of
    descriptors, children = len(os.listdir("/proc/self/fd")), set(psutil.Process().children(recursive=True))
    async with RewardPool(config) as pool:
        yield pool
    assert set(psutil.Process().children(recursive=True)) <= children
    assert len(os.listdir("/proc/self/fd")) <= descriptors


async def score(pool: RewardPool, verifier: str, completion: str = "1", reference: str = "") -> float:
    return await pool.score("prompt", completion, reference, HOSTILE + verifier)


async def read(pipe: Path) -> int:
    """The process id that a verifier writes to `pipe`."""
    return int(await asyncio.to_thread(pipe.read_text))


def is_gone(pid: int) -> bool:
    """Whether process `pid` has ended; one that was just killed gets its time."""
    try:
        psutil.Process(pid).wait(60)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_scores_and_scale() -> None:
    async def test() -> None:
        async with opened() as pool:
            assert await score(pool, "good", "0.25") == 0.25
            assert await score(pool, "truth") == 1.0
            assert await score(pool, "runs_program") == 0.5
            assert await pool.score("", " 57\n12 +", "57", "numeric") == 1.0
            assert await score(pool, "good", "0." + "0" * 3_000_000) == 0.0
            assert (pool.num_scored, pool.num_failed, pool.num_killed) == (5, 0, 0)
            assert pool.busy_s > 0

    run(test())
    assert [scale(value, RewardConfig()) for value in (0.0, 0.5, 1.0)] == [-5.0, 0.0, 5.0]


@pytest.mark.parametrize(("verifier", "cause"), [
    ("raises", r"LookupError: no such thing\n  /.+/hostile_verifiers.py, line \d+, in raises: raise LookupError"),
    ("exits", "exited with status 7"),
    ("leaves", "SystemExit: done"),
    ("segfaults", "killed by SIGSEGV"),
    ("memory_bomb", "MemoryError"),
    ("text", "'1.0', which is not a number"),
    ("nothing", "None, which is not a number"),
    ("not_a_number", "returned nan"),
    ("too_much", "returned 1.5"),
    ("absent", "has no function 'absent'"),
])
def test_failures_are_errors_and_never_scores(verifier: str, cause: str) -> None:
    async def test() -> None:
        async with opened() as pool:
            with pytest.raises(VerifierError, match=cause):
                await score(pool, verifier)
            assert (pool.num_scored, pool.num_failed, pool.num_killed) == (0, 1, 1)
            assert await score(pool, "good", "0.5") == 0.5

    run(test())


def test_unknown_names_and_modules() -> None:
    async def test() -> None:
        async with opened() as pool:
            with pytest.raises(ConfigError, match="no such verifier"):
                await pool.score("", "", "", "unheard_of")
            with pytest.raises(VerifierError, match="module no_such_module cannot be imported"):
                await pool.score("", "", "", "no_such_module:function")

    run(test())
    with pytest.raises(ConfigError, match="no such verifier"):
        RewardPool(RewardConfig(verifier="unheard_of"))


def test_a_hung_verifier_is_killed_and_replaced() -> None:
    async def test() -> None:
        async with opened(timeout_s=0.2, max_retries=1) as pool:
            (before,) = pool.pids
            with pytest.raises(VerifierError, match="2 attempts.*reward.timeout_s=0.2"):
                await score(pool, "hangs")
            assert is_gone(before)
            assert pool.num_killed == 2

    run(test())


def test_a_verifier_that_hangs_on_import_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process_handle, "LOAD_TIMEOUT_S", 0.3)

    async def test() -> None:
        async with opened() as pool:
            with pytest.raises(VerifierError, match="of starting and importing it"):
                await pool.score("", "", "", "slow_import:function")

    run(test())


def test_a_retry_on_a_fresh_process_may_succeed(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(max_retries=1) as pool:
            assert await score(pool, "raises_once", reference=str(tmp_path / "mark")) == 1.0
            assert (pool.num_scored, pool.num_failed, pool.num_killed) == (1, 0, 1)

    run(test())


@pytest.mark.parametrize("verifier", ["forks_and_returns", "hangs_with_children"])
def test_what_a_verifier_started_dies_with_its_request(verifier: str, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def test() -> None:
        async with opened(timeout_s=10.0 if verifier == "hangs_with_children" else 20.0) as pool:
            if verifier == "hangs_with_children":
                with pytest.raises(VerifierError, match="no answer within reward.timeout_s"):
                    await score(pool, verifier, reference=str(note))
            else:
                assert await score(pool, verifier, reference=str(note)) == 1.0
                assert pool.num_killed == 0
            assert [is_gone(int(pid)) for pid in note.read_text().split()] == [True, True]
            assert await score(pool, "good") == 1.0

    run(test())


def test_a_forked_copy_does_not_answer() -> None:
    async def test() -> None:
        async with opened() as pool:
            assert [await score(pool, "both_return"), await score(pool, "good", "0.5")] == [0.75, 0.5]

    run(test())


def test_printing_does_not_disturb_the_exchange() -> None:
    async def test() -> None:
        async with opened() as pool:
            assert [await score(pool, "prints") for _ in range(2)] == [1.0, 1.0]
            assert pool.num_killed == 0

    run(test())


def test_an_idle_process_killed_from_outside_costs_no_attempt() -> None:
    async def test() -> None:
        async with opened() as pool:
            assert await score(pool, "good") == 1.0
            os.kill(pool.pids[0], signal.SIGKILL)
            os.waitid(os.P_PID, pool.pids[0], os.WEXITED | os.WNOWAIT)  # dead, but not reaped
            assert await score(pool, "good", "0.5") == 0.5

    run(test())


def test_a_busy_process_killed_from_outside_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def test() -> None:
        async with opened() as pool:
            busy = asyncio.create_task(score(pool, "hangs", reference=str(pipe)))
            os.kill(await read(pipe), signal.SIGKILL)
            with pytest.raises(VerifierError, match="killed by SIGKILL"):
                await busy

    run(test())


def test_cancelling_replaces_the_busy_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def test() -> None:
        async with opened() as pool:
            busy = asyncio.create_task(score(pool, "hangs", reference=str(pipe)))
            waiting = asyncio.create_task(score(pool, "good", "0.5"))
            given_up = asyncio.create_task(score(pool, "good"))
            pid = await read(pipe)
            given_up.cancel()
            busy.cancel()
            with pytest.raises(asyncio.CancelledError):
                await busy
            assert await waiting == 0.5
            assert is_gone(pid)
            assert (pool.num_scored, pool.num_failed, pool.num_killed) == (1, 0, 1)

    run(test())


def test_closing_ends_busy_and_waiting_requests(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def test() -> None:
        async with opened(max_retries=3) as pool:
            requests = [asyncio.create_task(score(pool, "hangs", reference=str(pipe))) for _ in range(3)]
            pid = await read(pipe)
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert [str(result) for result in results] == ["the reward pool is closed"] * 3
        assert is_gone(pid)
        with pytest.raises(VerifierError, match="closed"):
            await score(pool, "good")

    run(test())


def test_processes_work_side_by_side(tmp_path: Path) -> None:
    """Two requests that wait for each other can both be answered only if they run at once."""
    address = str(tmp_path / "meeting")

    async def test() -> None:
        async with opened(num_processes=2) as pool:
            with socket.socket(socket.AF_UNIX) as meeting:
                meeting.bind(address)
                meeting.listen()
                meeting.setblocking(False)
                loop = asyncio.get_running_loop()
                requests = [asyncio.create_task(score(pool, "meets", reference=address)) for _ in range(2)]
                guests = [(await loop.sock_accept(meeting))[0] for _ in range(2)]
                for guest in guests:
                    guest.close()
                assert await asyncio.gather(*requests) == [1.0, 1.0]

    run(test())


def test_processes_die_with_a_killed_worker() -> None:
    """SIGKILL of the worker leaves it no time to clean up; the kernel does it."""
    program = ("import asyncio\nfrom workers.config import RewardConfig\nfrom workers.reward.pool.pool import RewardPool\n"
               "async def main():\n  async with RewardPool(RewardConfig()) as pool:\n"
               "    await pool.score('', '1', '1', 'numeric')\n    print(pool.pids[0], flush=True)\n    await asyncio.sleep(3600)\n"
               "asyncio.run(main())\n")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        worker.kill()
    assert is_gone(pid)


def test_a_process_imports_no_heavy_library() -> None:
    program = "import sys, workers.reward.pool.worker_process\nprint([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_loading_says_early_what_is_wrong() -> None:
    async def test() -> None:
        async with opened() as pool:
            await pool.load("numeric")
            await pool.load(HOSTILE + "good")
            with pytest.raises(VerifierError, match="verifier 'no_such_module:function'.*cannot be imported.*PYTHONPATH"):
                await pool.load("no_such_module:function")
            with pytest.raises(VerifierError, match="has no function 'absent'"):
                await pool.load(HOSTILE + "absent")
            with pytest.raises(ConfigError, match="no such verifier"):
                await pool.load("unheard_of")
            assert (pool.num_scored, pool.num_failed) == (0, 2)

    run(test())


def test_programs_run_beside_verifiers_and_leave_the_sandbox_for_the_next() -> None:
    async def test() -> None:
        async with opened() as pool:
            try:
                await pool.load(PYTHON_TOOL)
            except VerifierError as error:
                pytest.skip(f"no sandbox on this machine: {error}")
            answers = [await pool.execute("print(6 * 7)"), await score(pool, "good", "0.5"), await pool.execute("print('again')")]
            assert answers == ["42", 0.5, "again"]
            assert "ZeroDivisionError" in await pool.execute("1 / 0")
            assert (pool.num_executed, pool.num_scored, pool.num_killed) == (3, 1, 0)

    run(test())


def test_requests_that_wait_are_counted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def test() -> None:
        async with opened() as pool:
            busy = asyncio.create_task(score(pool, "hangs", reference=str(pipe)))
            await read(pipe)
            assert pool.num_waiting == 0
            waiting = [asyncio.create_task(score(pool, "good")) for _ in range(3)]
            while pool.num_waiting < 3:
                await asyncio.sleep(0)
            before = pool.wait_s
            waiting.pop().cancel()
            while pool.num_waiting > 2:
                await asyncio.sleep(0)
            busy.cancel()
            assert await asyncio.gather(*waiting) == [1.0, 1.0]
            assert pool.num_waiting == 0 and pool.wait_s > before

    run(test())


def test_what_is_kept_survives_the_sweep_and_dies_with_the_process(tmp_path: Path) -> None:
    async def test() -> int:
        async with opened() as pool:
            note = str(tmp_path / "note")
            assert await score(pool, "keeps_a_server", reference=note) == 1.0
            kept, orphan = (int(pid) for pid in Path(note).read_text().split())
            assert is_gone(orphan)
            assert await score(pool, "good") == 1.0
            assert await score(pool, "runs_program") == 0.5
            assert psutil.pid_exists(kept) and pool.num_killed == 0
            return kept

    async def and_then() -> None:
        assert is_gone(await test())

    run(and_then())


def test_a_burst_is_scored_whole() -> None:
    async def test() -> None:
        async with opened(verifier="numeric") as pool:
            assert await asyncio.gather(*(pool.score("", "1", str(number % 2), "numeric") for number in range(300))) == [0.0, 1.0] * 150
            assert pool.num_scored == 300

    run(test())


def test_half_a_surrogate_pair_is_judged_as_any_other_text() -> None:
    async def test() -> None:
        async with opened(verifier="exact") as pool:
            for completion, reference, right in (("\ud800", "x", 0.0), ("\ud83d\ude00", "😀", 1.0), ("<answer>\udfff</answer>", "x", 0.0)):
                assert await pool.score("\ud800", completion, reference, "exact") == right
            with pytest.raises(VerifierError, match="ValueError: mine \ufffd"):
                await score(pool, "raises_its_completion", "mine ")
            assert pool.num_killed == 1, "what a verifier says of it comes back"

    run(test())
