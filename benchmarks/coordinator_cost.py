"""What a message costs the coordinator, by the size of the fleet: CPU time for a heartbeat, a finished group, the status, a version of the weights.

    python -m benchmarks.coordinator_cost [--workers 64 512 4096] [--leases 4] [--rounds 5]

The real state machine without sockets: every worker holds so many leases, beats, and ends one group after the other, whose place is leased anew; the
trainer takes a batch whenever there is one. Groups have few tokens: what a token costs does not depend on the fleet. Fleets take turns, round by
round; times are medians over rounds.

The last line is one JSON object: name, value (milliseconds for a finished group in the largest fleet), unit, against (in the smallest), ratio, ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from benchmarks.bounds.simulation import Prompts
from workers.config import Config
from workers.coordinator.core import Coordinator
from workers.coordinator.monitoring import reporting
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.from_coordinator import Leases, LoadGranted
from workers.messages.from_worker import BatchRequest, GroupFinished, Heartbeat, LoadRequest, Register, SourcesRequest, StepFinished
from workers.messages.parts import Announcement, Group, HeldLease, Lease, Message, Role, Version

EPOCH, SAMPLES, TOKENS = 1, 4, 8


def make_config(num_workers: int, leases_each: int) -> Config:
    """Of a run in which nothing holds leases back; a batch is a quarter of what runs."""
    config = Config()
    config.run.num_steps, config.evaluation.enabled = 1_000_000, False
    config.trainer.batch_groups, config.trainer.num_minibatches = max(1, num_workers * leases_each // 4), 1
    config.staleness.eta, config.rollout.concurrency, config.workflow.group_size = 8, num_workers * leases_each, SAMPLES
    return config


class Fleet:
    """A coordinator whose workers have all the leases that they can take. `now` is its clock, `spent_s` its CPU time for messages."""

    def __init__(self, num_workers: int, leases_each: int) -> None:
        self.core, self.now, self._leases_each = Coordinator(make_config(num_workers, leases_each), Prompts(), EPOCH, 0.0), 0.0, leases_each
        self.leases: dict[bytes, dict[str, Lease]] = {b"w%d" % number: {} for number in range(num_workers)}
        self.granted: list[bytes] = []
        self.spent_s, self._step = 0.0, -1
        self.say(b"trainer", Register(Role.trainer, "train0", 1))
        for number, peer in enumerate(self.leases):
            self.say(peer, Register(Role.rollout, f"node{number}", number, serves=f"tcp://node{number}:4000"))
        self._publish()
        for peer in self.leases:
            self.beat(peer)

    def say(self, peer: bytes, message: Message) -> None:
        """Have the coordinator take a message, and take its answers."""
        began = time.process_time()
        self.core.handle(peer, message, self.now)
        self.spent_s += time.process_time() - began
        sent, self.core.outbox = self.core.outbox, []
        self.core.training.records.clear()
        for receiver, answer in sent:
            if isinstance(answer, Leases) and receiver is not None:
                self.leases[receiver] |= {lease.group_id: lease for lease in answer.leases}
            elif isinstance(answer, LoadGranted) and receiver is not None:
                self.granted.append(receiver)

    def beat(self, peer: bytes) -> None:
        """One heartbeat."""
        held = [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in self.leases[peer].values()]
        version, capacity = Version(EPOCH, max(0, self._step)), self._leases_each * SAMPLES
        self.say(peer, Heartbeat(held=version, capacity=capacity, leases=held, tokens_in_flight=100 * len(held)))

    def finish(self, peer: bytes) -> None:
        """The oldest lease of a worker has its result."""
        lease = self.leases[peer].pop(next(iter(self.leases[peer])))
        self.say(peer, GroupFinished(make_group(lease)))
        if len(self.core.ledger.finished) < self.core.policy.batch_groups and self.core.training.in_training:
            self._publish()

    def deliver(self) -> None:
        """A new version goes to all, each on a host of its own: who fetches from whom, who may load, who has loaded."""
        self._publish()
        version = Version(EPOCH, self._step)
        for request in (SourcesRequest(version), LoadRequest(version)):
            for peer in self.leases:
                self.say(peer, request)
        num_loaded = 0
        while self.granted:
            self.beat(self.granted.pop())
            num_loaded += 1
        assert num_loaded == len(self.leases), f"{num_loaded} of {len(self.leases)} workers could load"

    def _publish(self) -> None:
        self._step += 1
        self.say(b"trainer", StepFinished(Announcement(Version(EPOCH, self._step), "/weights", "digest"), {}))
        self.say(b"trainer", BatchRequest(self._step))

    def peers(self) -> Iterator[bytes]:
        """Those with leases, in turn."""
        while True:
            yield from (peer for peer in self.leases if self.leases[peer])


def make_group(lease: Lease) -> Group:
    """A small result."""
    total = SAMPLES * TOKENS
    return Group(
        group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, prompt_id=lease.prompt_id, prompt=Int32.of([1, 2]),
        lengths=Int32.of([TOKENS] * SAMPLES), tokens=Int32.of(np.ones(total, np.int32)), logprobs=Float32.of(-np.ones(total, np.float32)),
        loss_mask=Bool.of(np.ones(total, bool)), rewards=Float32.of([0.0, 1.0] * (SAMPLES // 2)), scores=Float32.of([0.0, 1.0] * (SAMPLES // 2)),
        epochs=Int32.of([EPOCH]), steps=Int32.of([lease.version.step]), run_lengths=Int32.of([total]))


def measure(fleet: Fleet, what: Callable[[bytes], None], count: int) -> float:
    """CPU milliseconds of the coordinator for one of `count` messages, each of another worker; with what the trainer says meanwhile."""
    peers, before = fleet.peers(), fleet.spent_s
    for _ in range(count):
        what(next(peers))
    return (fleet.spent_s - before) / count * 1000


def clocked(what: Callable[[], object], count: int) -> float:
    """CPU milliseconds for something."""
    began = time.process_time()
    for _ in range(count):
        what()
    return (time.process_time() - began) / count * 1000


def main(arguments: list[str]) -> None:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator_cost")
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--leases", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1000)
    options = parser.parse_args(arguments)
    times: dict[int, dict[str, list[float]]] = {}
    fleets, first_leases = {}, {}
    for num_workers in sorted(options.workers):
        began = time.process_time()
        fleets[num_workers] = Fleet(num_workers, options.leases)
        times[num_workers] = {"heartbeat": [], "group": [], "tick": [], "status": [], "version": []}
        first_leases[num_workers] = time.process_time() - began
    for _ in range(options.rounds):
        for num_workers, fleet in fleets.items():
            for name, what in (("heartbeat", fleet.beat), ("group", fleet.finish)):
                times[num_workers][name].append(measure(fleet, what, options.messages))
            before = fleet.spent_s
            fleet.deliver()
            times[num_workers]["version"].append((fleet.spent_s - before) * 1000)
            times[num_workers]["tick"].append(clocked(lambda fleet=fleet: fleet.core.tick(fleet.now), 10))  # type: ignore[misc]
            times[num_workers]["status"].append(clocked(
                lambda fleet=fleet: msgspec.json.encode(reporting.status(fleet.core, fleet.now, 0.0, 0.0, 0, 0)), 2))  # type: ignore[misc]
    medians = {num_workers: {name: statistics.median(found) for name, found in each.items()} for num_workers, each in times.items()}
    for num_workers, each in medians.items():
        told = ", ".join(f"{name} {value:.3f} ms" for name, value in each.items())
        print(f"{num_workers:6d} workers of {options.leases} leases: {told}; the first leases to all of them {first_leases[num_workers]:.2f} s")
    small, large = medians[min(medians)], medians[max(medians)]
    print(json.dumps({
        "name": f"CPU time of the coordinator for a finished group, {max(medians)} workers over {min(medians)}", "value": round(large["group"], 4),
        "unit": "ms", "against": round(small["group"], 4), "ratio": round(large["group"] / small["group"], 3),
        "heartbeat_ratio": round(large["heartbeat"] / small["heartbeat"], 3), "heartbeat_ms": round(large["heartbeat"], 4),
        "status_ms": round(large["status"], 2), "tick_ms": round(large["tick"], 3),
        "version_s": round(large["version"] / 1000, 3), "first_leases_s": round(first_leases[max(medians)], 3)}))


if __name__ == "__main__":
    main(sys.argv[1:])
