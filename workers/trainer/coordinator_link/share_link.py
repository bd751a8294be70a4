"""A leader's own connection to the coordinator: its copy's share of every batch comes over it, without passing through rank 0.

    main thread   ask(step) --BatchRequest--> coordinator --Batch--> kept here until fetch(step) takes it
    link thread   heartbeats; the loss of the coordinator

The leader of copy 0 is rank 0, whose connection (client.py) carries all the rest. A leader asks for the next share when it begins a step, and
the coordinator sends it once rank 0 has asked too and the batch is formed. When the connection is lost, `fetch` says so: then this
process fails, and with it the element.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time

from workers.config import TransportConfig
from workers.messages.types import Batch, BatchRequest, Heartbeat, Message, Refused, Role, Welcome
from workers.run.folder import RunFolder
from workers.run.processes import first_cause
from workers.trainer.coordinator_link.client import RunEnded
from workers.trainer.coordinator_link.inbox import Inbox
from workers.transport.client import CoordinatorLost
from workers.transport.peer import Peer

ASK_AGAIN_S = 60.0
FETCH_S = 600.0
JOIN_S = 20.0


class ShareLink:
    """Connects copy number `share` of `num_shares` to the coordinator of `epoch`, from a thread of its own."""

    def __init__(self, run: RunFolder, config: TransportConfig, epoch: int, share: int, num_shares: int) -> None:
        self._config, self._epoch, self._share, self._num_shares = config, epoch, share, num_shares
        self._inbox: Inbox[Batch] = Inbox()
        self._left = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._peer = Peer(run, config, Role.trainer_shard, config.heartbeat_timeout_s, heartbeat=Heartbeat, on_message=self._on_message,
                          on_announcement=lambda _: None, min_epoch=epoch)
        self._thread = threading.Thread(target=self._serve, name="share-link", daemon=True)
        self._thread.start()

    # -- main thread ---------------------------------------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """Ask for the share of the batch of `step`, which may not be formed yet."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._ask(step), self._loop)

    def fetch(self, step: int, timeout_s: float = FETCH_S) -> Batch:
        """Wait for the share of `step`, which has been asked for. Raises `RunEnded`; ConnectionError where the coordinator is lost, TimeoutError
        after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                batch = self._inbox.take(min(left, ASK_AGAIN_S))
            except queue.Empty:
                self.ask(step)  # request or answer may have been lost with a connection
                continue
            if batch.step == step:
                return batch
        raise TimeoutError(f"share {self._share} of the batch of step {step}: the coordinator has not sent it in {timeout_s:g} s. Look at the "
                           "training job's log")

    def close(self, parting: str) -> None:
        """Leave; `parting` says why, where the run goes on."""
        self._left.set()
        self._peer.parting = parting
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._peer.finish, parting)
        self._thread.join(JOIN_S)

    # -- link thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._inbox.end(RunEnded(self._loop.run_until_complete(self._converse())))
        except Exception as error:  # noqa: BLE001 -- the main thread must learn of whatever ends this one
            lost = ConnectionError(f"share {self._share}: this rank lost the coordinator: {first_cause(error)}")
            lost.__cause__ = error
            self._inbox.end(lost)

    async def _converse(self) -> str:
        async with self._peer as peer:
            serving = asyncio.create_task(peer.serve())
            welcoming = asyncio.create_task(peer.welcomed())
            try:
                await asyncio.wait([serving, welcoming], return_when=asyncio.FIRST_COMPLETED)
                if welcoming.done():
                    welcoming.result()  # raises where nobody has answered
                cause = await serving
            finally:
                serving.cancel()
                welcoming.cancel()
            while not cause and not self._left.is_set():  # complete: stay in touch until the trained model has been exported
                await peer.beat()
                await asyncio.sleep(self._config.heartbeat_s)
            return cause

    async def _ask(self, step: int) -> None:
        await self._peer.welcomed()
        await self._peer.send(BatchRequest(step, self._share, self._num_shares))

    def _on_message(self, message: Message) -> None:
        match message:
            case Batch():
                self._inbox.put(message)
            case Refused():
                raise CoordinatorLost(f"the coordinator refused its request: {message.reason}")
            case Welcome() if message.epoch != self._epoch:
                raise CoordinatorLost(f"epoch {message.epoch} has begun, this is one of epoch {self._epoch}")
