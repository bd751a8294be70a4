"""The sandboxes of a reward process: two, since a judge and the program that it judges live at the same time.

    verifier -- run --------------------------> seat: thread + sandbox -> one program, to its end
             -- converse: ask, ask, ask, end -> seat: thread + sandbox -> one program that answers request by request

A seat's sandbox is made when it is first used, by the seat's thread, whose life its server shares; it serves all later requests, and is closed at
exit. Nothing waits without a deadline: each wait is for a program, and the sandbox bounds that one's time.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from workers.config import RewardConfig, SandboxConfig
from workers.run import process_tree
from workers.sandbox.sandbox import Limits, Outcome, Sandbox

Result = TypeVar("Result")


class Seat:
    """A thread and its sandbox. `SandboxError` of either is passed on: it is trouble of the machine, never the program's doing."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sandbox: Sandbox | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox")

    def start(self) -> None:
        """Make the sandbox, unless it is there."""
        self._do(lambda sandbox: None)

    def run(self, source: str, stdin: bytes, limits: Limits) -> Outcome:
        """Run `source` to its end."""
        return self._do(lambda sandbox: sandbox.run(source, stdin, limits))

    @contextlib.contextmanager
    def converse(self, source: str, limits: Limits, request_s: float) -> Iterator[Conversation]:
        """A conversation with the program `source`, each of whose answers may take `request_s` seconds. It is killed at the end."""
        conversation = Conversation()
        future = self._thread.submit(self._with_sandbox, lambda sandbox: conversation.hold(sandbox, source, limits, request_s))
        future.add_done_callback(lambda _: conversation.has_ended())
        try:
            yield conversation
        finally:
            conversation.end()
            future.result()

    def close(self) -> None:
        """Close the sandbox and end the thread."""
        if self._sandbox is not None:
            self._sandbox.close()
        self._thread.shutdown()

    def _do(self, action: Callable[[Sandbox], Result]) -> Result:
        return self._thread.submit(self._with_sandbox, action).result()

    def _with_sandbox(self, action: Callable[[Sandbox], Result]) -> Result:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._config)
        self._keep(self._sandbox)
        try:
            return action(self._sandbox)
        finally:
            self._keep(self._sandbox)  # its server may be another one now

    @staticmethod
    def _keep(sandbox: Sandbox) -> None:
        if sandbox.pid is not None:
            process_tree.keep(sandbox.pid)


class Conversation:
    """A program that is asked one request after the other, each of which may depend on the answers before. What it answers is untrusted."""

    def __init__(self) -> None:
        self._requests = _Requests()
        self._replies: SimpleQueue[bytes | None] = SimpleQueue()
        self._ended = False

    def ask(self, request: bytes) -> bytes | None:
        """The program's reply, None if it has ended, out of time included."""
        if not self._ended:
            self._requests.put(request)
            if (reply := self._replies.get()) is not None:
                return reply
            self._ended = True
        return None

    def end(self) -> None:
        """There are no more requests."""
        self._requests.put(None)

    def has_ended(self) -> None:
        """The program has ended: whoever waits for a reply waits in vain."""
        self._replies.put(None)

    def hold(self, sandbox: Sandbox, source: str, limits: Limits, request_s: float) -> None:
        """In the seat's thread: pass on requests and replies until either side ends."""
        sandbox.session(source, self._requests, self._heard, limits, request_s)

    def _heard(self, number: int, reply: bytes) -> bool:
        if self._requests.answered(number):
            self._replies.put(reply)
        return True


class _Requests(Sequence[bytes]):
    """The requests of a session while they are being made. The length is known once the next one, or the end, is: `len` waits for it."""

    def __init__(self) -> None:
        self._coming: SimpleQueue[bytes | None] = SimpleQueue()
        self._known: list[bytes] = []
        self._num_answered = 0
        self._complete = False

    def put(self, request: bytes | None) -> None:
        """Add a request; None: that was the last."""
        self._coming.put(request)

    def answered(self, number: int) -> bool:
        """Note that request `number` was answered; whether for the first time (a new server is asked all of them again)."""
        first = number == self._num_answered
        self._num_answered += first
        return first

    def __getitem__(self, number: int) -> bytes:  # type: ignore[override]
        return self._known[number]

    def __len__(self) -> int:
        if self._num_answered == len(self._known) and not self._complete:
            request = self._coming.get()
            if request is None:
                self._complete = True
            else:
                self._known.append(request)
        return len(self._known)


class Seats:
    """What one reward process runs programs with. `timeout_s` is its `reward.timeout_s`."""

    def __init__(self, config: SandboxConfig, timeout_s: float) -> None:
        self.limits, self.timeout_s = Limits.of(config), timeout_s
        self.program, self.judge = Seat(config), Seat(config)

    def close(self) -> None:
        """Close both."""
        self.program.close()
        self.judge.close()


_seats: list[Seats] = []


def configure(config: SandboxConfig, timeout_s: float) -> None:
    """Set how programs are run from here on; without it, as by the defaults of the config."""
    close()
    _seats.append(Seats(config, timeout_s))


def seats() -> Seats:
    """This process's seats."""
    if not _seats:
        configure(SandboxConfig(), RewardConfig().timeout_s)
    return _seats[0]


def check_node() -> None:
    """Make the sandbox that programs run in. Raises `SandboxError` naming what this machine lacks and the remedy."""
    seats().program.start()


@atexit.register
def close() -> None:
    """Close this process's sandboxes."""
    while _seats:
        _seats.pop().close()
