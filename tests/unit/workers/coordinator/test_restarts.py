"""Runs that are interrupted in every way that is known: nothing is trained on twice, nothing is lost, and every run gets to its end.

A history is a list of events (an event that cannot happen just then is passed over); small_run.py plays it and checks after each.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.small_run import World, make_config
from workers.config import Bound
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.recording.inputs import Paused, Unreachable
from workers.messages.from_coordinator import Acknowledged, HeartbeatReply, Leases
from workers.messages.from_worker import Heartbeat

LOSSES = (Acknowledged, Heartbeat, HeartbeatReply, Leases)


class Play:
    """Applies events to a world. Each event has a number, which chooses the worker and whatever else there is to choose."""

    def __init__(self, world: World) -> None:
        self.world = world

    def happen(self, name: str, number: int) -> None:
        world = self.world
        if world.ended is not None:
            return
        world.now += 0.1
        getattr(self, name)(number)
        world.check()

    def _rollout(self, number: int):
        living = self.world.living
        return living[number % len(living)] if living else None

    # -- an ordinary second, whole or in pieces

    def nothing(self, number: int) -> None:
        pass

    def second(self, number: int) -> None:
        self.world.talk()
        self.world.check()
        if self.world.ended is None:
            self.world.work(pace=number % 3, picky=bool(number // 8 % 2))

    def deliver(self, number: int) -> None:
        if self.world.rollouts:
            rollout = self.world.rollouts[number % len(self.world.rollouts)]
            if rollout.connected or not rollout.alive:
                self.world.deliver(rollout, number // 8 % 3 or 1_000_000)

    def receive(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            self.world.receive(rollout, number // 8 % 3 or 1_000_000)

    def beat(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            rollout.beat()
            if number // 8 % 2:
                rollout.send_results()

    def load(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            rollout.load()

    def _work(self, number: int, what: str, *arguments: int) -> None:
        if (rollout := self._rollout(number)) is not None and (able := rollout.able()):
            getattr(rollout, what)(able[number // 8 % len(able)], *arguments)

    def generate(self, number: int) -> None:
        self._work(number, "generate", number)

    def finish(self, number: int) -> None:
        self._work(number, "finish")
        self.world.failures = 0

    def reject(self, number: int) -> None:
        self._work(number, "reject")

    def park(self, number: int) -> None:
        self._work(number, "park")

    def fail(self, number: int) -> None:
        if self.world.failures < 5:  # more in a row end the run, and rightly
            self.world.failures += 1
            self._work(number, "fail")

    def train(self, number: int) -> None:
        if self.world.trainer is not None:
            self.world.trainer.go_on()

    def announce(self, number: int) -> None:
        if self.world.trainer is not None:
            self.world.trainer.announce()

    def save(self, number: int) -> None:
        trainer = self.world.trainer
        if trainer is not None and trainer.between_steps:
            trainer.announce()
            if self.world.ended is None:
                self.world.save(final=False)

    def wait(self, number: int) -> None:
        """Time passes: hidden workers are given up, those that have not come back too."""
        world = self.world
        if world.core is None:
            return
        world.now += (25.0, 70.0)[number % 2]
        for worker in world.core.registry.workers.values():
            if all(rollout.peer != worker.peer or rollout.connected for rollout in world.rollouts):
                worker.last_heard = world.now
        world.notes.begin(world.core, world.now)
        world.tick()

    # -- trouble

    def join(self, number: int) -> None:
        if len(self.world.living) < 4:
            self.world.join()

    def die(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            rollout.die(with_a_word=bool(number // 8 % 2))

    def hide(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            rollout.hidden = not rollout.hidden

    def cut(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            rollout.break_connection()
            if self.world.core is not None:
                self.world.happen(Unreachable(self.world.now, rollout.peer))

    def lose(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            queue = rollout.sending if number // 8 % 2 else rollout.receiving
            if queue and isinstance(queue[0], LOSSES):
                queue.popleft()

    def leave(self, number: int) -> None:
        if (rollout := self._rollout(number)) is not None:
            rollout.leave("told by SIGUSR2")

    def depart(self, number: int) -> None:
        rollout = self._rollout(number)
        if rollout is not None and rollout.leaving:
            rollout.depart()

    def kill(self, number: int) -> None:
        if self.world.core is not None:
            self.world.kill()
            if number % 2:
                self.world.begin()

    def begin(self, number: int) -> None:
        if self.world.core is None:
            self.world.begin()

    def spoil(self, number: int) -> None:
        """The newest checkpoint cannot be read any more."""
        if len([saved for saved in self.world.saves if not saved.broken]) > 1:
            self.world.saves[-1].broken = True

    def drain(self, number: int) -> None:
        """The training job's time is up: it saves and leaves; workers stay. No token may be lost."""
        world = self.world
        if world.core is None or world.trainer is None or not world.trainer.published:
            return
        if world.trainer.batch is not None and number % 2:
            world.trainer.finish_step()
            if world.ended is not None:
                return
        world.trainer.announce()
        if world.ended is not None:
            return
        wanted = world.tokens()
        world.save(final=True)
        if number // 2 % 2:
            for rollout in world.rollouts:  # what arrives after that
                world.deliver(rollout)
        world.suspend("time limit")
        if number // 4 % 2:
            for rollout in world.living:
                world.receive(rollout)
        self._come_back(wanted)

    def pause(self, number: int) -> None:
        """The run is stopped with --drain and taken up later, by others."""
        world = self.world
        if world.core is None or world.trainer is None or not world.trainer.published:
            return
        world.trainer.announce()
        if world.ended is not None:
            return
        wanted, joined = world.tokens(), world.num_rollouts
        world.send(world.happen(Paused(world.now, "stop --drain")))
        for _ in range(100):
            if world.trainer.told_to_drain:
                break
            world.talk()
            if world.ended is not None:
                return
            for rollout in world.living:
                if rollout.leaving and not rollout.results:
                    rollout.depart()
            world.check()
        assert world.trainer.told_to_drain, "the run does not pause"
        assert world.num_rollouts == joined
        world.save(final=True)
        world.suspend("stop --drain")
        for rollout in world.living:
            rollout.leave("the run has ended")
            rollout.depart()
        world.rollouts = []
        world.join()
        world.join()
        self._come_back(wanted)

    def _come_back(self, wanted: set[int]) -> None:
        world = self.world
        world.begin()
        for rollout in world.rollouts:
            rollout.hidden = False
        for _ in range(3):
            world.talk()
            world.check()
        if world.core is None or world.ended is not None:
            return
        ledger = world.core.ledger
        finished = world.consumed.keys() | {index_of(group_id) for part in (ledger.finished, ledger.in_training) for group_id in part}
        lost = [number for number in wanted - world.tokens() if index_of(world.born[number][0]) not in finished]
        assert not lost, f"tokens were lost on the way: of {sorted({world.born[number][0] for number in lost})}"


WEIGHTS = {
    "nothing": 1, "second": 16, "deliver": 2, "receive": 2, "beat": 2, "load": 1, "generate": 3, "finish": 3, "train": 4, "announce": 3, "save": 3,
    "wait": 1, "park": 1, "fail": 2, "reject": 3, "join": 2, "die": 1, "hide": 2, "cut": 1, "lose": 2, "leave": 1, "depart": 1, "kill": 2, "begin": 1,
    "spoil": 1, "drain": 1, "pause": 1}
NAMES = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
# The length is bounded from below, or most histories would be of five events; shrunk ones have `nothing` instead.
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 63)), min_size=25, max_size=75)


@given(eta=st.integers(0, 3), batch=st.integers(1, 3), bound=st.sampled_from(Bound), num_steps=st.integers(1, 5), every=st.integers(0, 2),
       concurrency=st.sampled_from([2, 16, "auto"]), capacity=st.sampled_from([1, 3]), prefetch=st.booleans(), num_shares=st.integers(1, 3),
       events=EVENTS)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_nothing_is_lost_or_used_twice(eta: int, batch: int, bound: Bound, num_steps: int, every: int, concurrency: int | str,
                                                        capacity: int, prefetch: bool, num_shares: int, events: list[tuple[str, int]]) -> None:
    play = Play(World(make_config(eta, batch, bound, num_steps, every, concurrency, prefetch), capacity, num_shares=num_shares))
    for name, number in events:
        play.happen(name, number)
    if play.world.ended is None:
        play.world.go_to_the_end()
    assert play.world.ended == ""
