"""The rollout worker's side of rewards in elements of their own (`reward.placement=array`); the same calls as the pool's.

    coordinator --RewardElements--> listed()
    score(), execute() --> the element with the fewest in flight (load_balancer.py) --> its pool --> answer
           ^                  |  none there: waits, and says so         | lost with what was in flight
           +------------------+-----------------------------------------+  asked again elsewhere

A request that was in flight at `MAX_LOST` elements when their connections broke is given up: it may well be what ends them. Deadlines of verifiers
are kept by the element's pool; an element that does not answer at all is lost by its heartbeats, here or at the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import Self

from workers.config import RewardConfig, TransportConfig
from workers.config.judge import JUDGE
from workers.messages.codec import MessageError
from workers.messages.judging import FromElement, NoAnswer, OutputGiven, OutputWanted, ScoreGiven, ScoreWanted, Unwanted
from workers.reward.judges.judge_client import Judge
from workers.reward.pool.pool import VerifierError, look
from workers.reward.remote.load_balancer import Balance
from workers.reward.verifiers.registry import check_name
from workers.run.folder import RunFolder
from workers.run.texts import well_formed
from workers.transport.element_sockets import ElementLink, ElementLinks, LinkLost, Unreachable

LOG = logging.getLogger(__name__)
MAX_LOST = 3
LOOK_S = 1.0


class _Element:
    """The connection to one element, and the requests that are in flight there."""

    def __init__(self, link: ElementLink) -> None:
        self._link = link
        self._closed = False
        self._waiting: dict[int, asyncio.Future[FromElement]] = {}
        self._receiving = asyncio.create_task(self._receive())

    @property
    def is_lost(self) -> bool:
        """Nothing more will come from it."""
        return self._receiving.done()

    async def ask(self, request: ScoreWanted | OutputWanted) -> FromElement:
        """The answer. Raises `LinkLost`. Cancelling tells the element."""
        answer = self._waiting[request.number] = asyncio.get_running_loop().create_future()
        try:
            await self._link.send(request)
            await asyncio.wait([answer, self._receiving], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not (self.is_lost or self._closed):
                with contextlib.suppress(LinkLost):
                    await self._link.send(Unwanted(request.number))
            raise
        finally:
            del self._waiting[request.number]
        if answer.done():
            return answer.result()
        lost, why = (Unreachable, "the coordinator has given it up") if self._receiving.cancelled() else self._receiving.result()
        raise lost(why)

    async def _receive(self) -> tuple[type[LinkLost], str]:
        """Hand on answers until there will be no more; returns what that means for whoever waits."""
        while True:
            try:
                message = await self._link.receive()
            except (LinkLost, MessageError) as error:
                return Unreachable if isinstance(error, Unreachable) else LinkLost, str(error)
            answer = self._waiting.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def close(self) -> None:
        """Close the connection; whoever waits for an answer gets `LinkLost`. Harmless to repeat."""
        if not self._closed:
            self._closed = True
            self._receiving.cancel()
            self._link.close()


class RemoteRewards:
    """`async with RemoteRewards(run, config) as rewards: await rewards.score(...)`; requests wait until `listed` has said where to.

    Counters as the pool's; `num_waiting` and `wait_s` are of requests that wait for an element. What the elements' processes do stands in
    the elements' own status.
    """

    def __init__(self, run: RunFolder, config: TransportConfig, reward: RewardConfig) -> None:
        self._links, self._balance = ElementLinks(run, config, FromElement), Balance()
        self._elements: dict[str, _Element] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._closed, self._unreachable = False, ""
        self.judge = Judge(reward.judge)
        self.num_scored = self.num_executed = self.num_failed = self.num_late = self.num_killed = self.num_waiting = 0
        self.busy_s = self.wait_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await self.judge.close()
        self._changed.set()
        for endpoint in list(self._elements):
            self._elements.pop(endpoint).close()
        self._links.close()

    @property
    def waiting_for(self) -> str:
        """What requests wait for; '' if they do not."""
        if not self.num_waiting:
            return ""
        if self._unreachable and self._balance.any_listed:
            return f"a reward element that can be reached from here: {self._unreachable}. Look at transport.interface, and at firewalls"
        return "a reward element to start (reward.placement=array)"

    def listed(self, endpoints: list[str]) -> None:
        """The coordinator says, with every heartbeat, which elements there are."""
        now = time.monotonic()
        self._balance.listed(endpoints, now)
        for endpoint in self._balance.to_drop(now):
            if endpoint in self._elements:
                self._elements.pop(endpoint).close()
        self._changed.set()

    async def score(self, prompt: str, completion: str, reference: str, verifier: str) -> float:
        """The score in [0, 1]. Raises `ConfigError` if there is no such verifier, and `VerifierError` as the pool does."""
        check_name(verifier)
        answer = await self._ask(ScoreWanted(next(self._numbers), verifier, *map(well_formed, (prompt, completion, reference))))
        if not isinstance(answer, ScoreGiven):
            raise VerifierError(f"a reward element answered {type(answer).__name__} instead of a score")
        self.num_scored += 1
        return answer.score

    async def execute(self, code: str) -> str:
        """What the program prints, or how it fails. Raises `VerifierError` as the pool does."""
        answer = await self._ask(OutputWanted(next(self._numbers), well_formed(code)))
        if not isinstance(answer, OutputGiven):
            raise VerifierError(f"a reward element answered {type(answer).__name__} instead of a program's output")
        self.num_executed += 1
        return answer.text

    async def load(self, function: str) -> None:
        """Nothing runs on this node but a judge; the elements try theirs. Raises `ConfigError` if there is no such verifier, `VerifierError`."""
        check_name(function)
        if function == JUDGE:
            look(self.judge)

    async def _ask(self, request: ScoreWanted | OutputWanted) -> FromElement:
        cause, num_lost = "", 0
        while num_lost < MAX_LOST:
            endpoint, element = await self._choose()
            try:
                with self._balance.in_flight(endpoint):
                    answer = await element.ask(request)
            except LinkLost as error:
                cause = f"the reward element at {endpoint} was lost ({error})"
                LOG.warning("%s; what it was asked is asked elsewhere", cause)
                self._forget(endpoint, element)
                num_lost += not isinstance(error, Unreachable)
                self._unreachable = cause if isinstance(error, Unreachable) else ""
                continue
            except ValueError as error:  # it cannot be written as a message, wherever it is sent
                self.num_failed += 1
                raise VerifierError(f"a request to a reward element cannot be sent: {error}") from error
            self._unreachable = ""
            if isinstance(answer, NoAnswer):
                self.num_failed += 1
                raise VerifierError(answer.cause, hopeless=isinstance(request, ScoreWanted) and not self.num_scored)
            return answer
        self.num_failed += 1
        raise VerifierError(f"{MAX_LOST} reward elements were lost while they worked on this request; the last: {cause}. Look at their logs")

    async def _choose(self) -> tuple[str, _Element]:
        """The element that gets the next request; waits until there is one."""
        start = time.monotonic()
        self.num_waiting += 1
        try:
            while True:
                if self._closed:
                    raise VerifierError("the reward pool is closed")
                endpoint = self._balance.least_busy(time.monotonic())
                if endpoint is None:
                    await self._look_again()
                elif (element := self._element(endpoint)).is_lost:  # since it was asked last
                    self._forget(endpoint, element)
                else:
                    return endpoint, element
        finally:
            self.num_waiting -= 1
            self.wait_s += time.monotonic() - start

    def _element(self, endpoint: str) -> _Element:
        if endpoint not in self._elements:
            self._elements[endpoint] = _Element(self._links.open(endpoint))
        return self._elements[endpoint]

    def _forget(self, endpoint: str, element: _Element) -> None:
        """`element` is lost; unless somebody else has noticed, its endpoint rests for a while."""
        if self._elements.get(endpoint) is element:
            self._elements.pop(endpoint).close()
            self._balance.lost(endpoint, time.monotonic())

    async def _look_again(self) -> None:
        """Wait until the list of elements has changed, or one may have rested enough."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
