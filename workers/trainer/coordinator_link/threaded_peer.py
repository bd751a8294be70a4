"""A standing with the coordinator (transport/peer.py) in a thread of its own, so that heartbeats go on while the main thread computes.

    any thread    send(message), finish(cause)
    its thread    find the coordinator, register, serve --> `on_over(cause)`: the run has ended; `on_lost(error)`: the coordinator is lost
                  after a run that is complete: heartbeats, until the main thread has exported and leaves
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from workers.messages.parts import Message
from workers.transport.peer import Peer

JOIN_S = 35.0


class ThreadedPeer:
    """Serves `peer` from `start` on. `welcomed`: the coordinator has taken us in; `left`: we go, and what breaks from then on is told to nobody.

    Both are called in its thread, `on_over` before Goodbye is said, `on_lost` after the connection is closed, or, perhaps in the sender's, where
    something cannot be sent.
    """

    def __init__(self, peer: Peer, name: str, on_over: Callable[[str], None], on_lost: Callable[[BaseException], None]) -> None:
        self._peer, self._on_over, self._on_lost = peer, on_over, on_lost
        self.welcomed, self.left = threading.Event(), threading.Event()
        self._loop, self._ending, self._is_over = asyncio.new_event_loop(), threading.RLock(), False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send `message` once the coordinator has taken us in; when the thread has ended, nothing. From any thread."""
        with self._ending:
            sending = None if self._loop.is_closed() else asyncio.run_coroutine_threadsafe(self._send(message), self._loop)
        if sending is not None:
            sending.add_done_callback(self._sent)

    def finish(self, cause: str) -> None:
        """Talk with the coordinator no longer, because of `cause`. From any thread."""
        with self._ending:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._peer.finish, cause)

    def leave(self, parting: str, finish: bool) -> None:
        """Go, and wait until Goodbye is said. `parting`: why, where the run goes on; `finish`: even where the run has not ended."""
        self.left.set()
        self._peer.parting = parting
        if finish:
            self.finish(parting)
        self.join(JOIN_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._converse())
        except BaseException as error:  # noqa: BLE001 -- the main thread must learn of whatever ends this one
            if not self.left.is_set():
                self._on_lost(error)
        finally:
            with self._ending:
                self._loop.run_until_complete(self._cancel_what_is_left())
                self._loop.close()

    async def _converse(self) -> None:
        async with self._peer as peer:
            serving, welcoming = asyncio.create_task(peer.serve()), asyncio.create_task(peer.welcomed())
            try:
                await asyncio.wait([serving, welcoming], return_when=asyncio.FIRST_COMPLETED)
                if welcoming.done():
                    welcoming.result()  # raises where nobody has answered
                    self.welcomed.set()
                cause = await serving
            finally:
                self._is_over = True
                serving.cancel()
                welcoming.cancel()
            self._on_over(cause)
            while not cause and not self.left.is_set():
                await peer.beat()
                await asyncio.sleep(peer.config.heartbeat_s)

    async def _send(self, message: Message) -> None:
        await self._peer.welcomed()
        await self._peer.send(message)

    def _sent(self, sending: Future[None]) -> None:
        if sending.cancelled() or self._is_over or self.left.is_set() or not self.welcomed.is_set():  # nobody has answered: `_converse` says so
            return
        if (error := sending.exception()) is not None:
            self._on_lost(error)

    async def _cancel_what_is_left(self) -> None:
        await asyncio.sleep(0)  # what has just been asked for begins
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
