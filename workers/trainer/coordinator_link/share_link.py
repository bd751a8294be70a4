"""A leader's own connection to the coordinator: its copy's share of every batch comes over it, without passing through rank 0.

    main thread   ask(step) --BatchRequest--> coordinator --Batch--> kept here until fetch(step) takes it
    link thread   heartbeats; the loss of the coordinator

The leader of copy 0 is rank 0, whose connection (client.py) carries all the rest. A leader asks for the next share when it begins a step, and
the coordinator sends it once rank 0 has asked too and the batch is formed. When the connection is lost, `fetch` says so: then this
process fails, and with it the element.
"""

from __future__ import annotations

import queue
import time

from workers.config import TransportConfig
from workers.messages.from_coordinator import Batch, Refused, Welcome
from workers.messages.from_worker import BatchRequest, Heartbeat
from workers.messages.parts import Message, Role
from workers.run.folder import RunFolder
from workers.run.processes import first_cause
from workers.trainer.coordinator_link.endings import RunEnded
from workers.trainer.coordinator_link.inbox import Inbox
from workers.trainer.coordinator_link.threaded_peer import ThreadedPeer
from workers.transport.client import CoordinatorLost
from workers.transport.peer import Peer

ASK_AGAIN_S = 60.0
FETCH_S = 600.0


class ShareLink:
    """Connects copy number `share` of `num_shares` to the coordinator of `epoch`, from a thread of its own."""

    def __init__(self, run: RunFolder, config: TransportConfig, epoch: int, share: int, num_shares: int) -> None:
        self._epoch, self._share, self._num_shares = epoch, share, num_shares
        self._inbox: Inbox[Batch] = Inbox()
        peer = Peer(run, config, Role.trainer_shard, config.heartbeat_timeout_s, heartbeat=Heartbeat, on_message=self._on_message,
                    on_announcement=lambda _: None, min_epoch=epoch)
        self._peer = ThreadedPeer(peer, "share-link", lambda cause: self._inbox.end(RunEnded(cause)), self._lost)
        self._peer.start()

    # -- main thread ---------------------------------------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """Ask for the share of the batch of `step`, which may not be formed yet."""
        self._peer.send(BatchRequest(step, self._share, self._num_shares))

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
        self._peer.leave(parting, finish=True)

    # -- link thread ---------------------------------------------------------------------------------------------------

    def _lost(self, error: BaseException) -> None:
        lost = ConnectionError(f"share {self._share}: this rank lost the coordinator: {first_cause(error)}")
        lost.__cause__ = error
        self._inbox.end(lost)

    def _on_message(self, message: Message) -> None:
        match message:
            case Batch():
                self._inbox.put(message)
            case Refused():
                raise CoordinatorLost(f"the coordinator refused its request: {message.reason}")
            case Welcome() if message.epoch != self._epoch:
                raise CoordinatorLost(f"epoch {message.epoch} has begun, this is one of epoch {self._epoch}")
