"""How fast new weights reach the nodes: Headway's network transport against plain TCP, and against files on disk.

    python -m benchmarks.weights [--sizes 0.27 2] [--receivers 1 4 16] [--security digest curve] [--streams 4] [--repetitions 5] [--disk DIR]
                                 [--no-delta] [--quick]

All processes are real and on this machine, connected by loopback: one that serves as the trainer does, and receivers that fetch into
memory (/dev/shm), each with a store of its own, so each stands for a node. The tree is the coordinator's. Weights are random bytes.
- zmq      from the order to fetch until all receivers have all chunks, each checked by its digest, in files that an engine can load. The
           trainer's digests, made once a version while it trains on, are told apart (`publish_s`)
- lanes    the broadcasts of weights=nccl, over gloo: four training ranks that hold copies send a part each; engine ranks put it in their memory.
           Without digests; the trainer stands still as long. Its egress is what the kernel says
- limit    one plain TCP stream of the same bytes with the same digests into a file in memory, by one thread or two, whichever is faster
- streams  as many plain TCP streams as receivers, all from the trainer: the same work without the tree
- bare     as many plain TCP streams as there are connections (receivers times `--streams`) whose bytes are forgotten as they come, as iperf3
           does it: no digest, nothing put in its place. `bare_one`: a single one
- disk     written and synced by the trainer, with digests, then read and checked by each receiver from the storage itself (past this
           machine's memory, which nodes do not share). Here that is one local disk: shared storage is mostly slower, and serves all readers
Receivers of one machine share its cores: with many of them these, not the network, are what is measured. What does not depend on that is the
trainer's egress, in copies of the model, by its server's own count. The kinds alternate; the best repetition of each counts.

Then deltas: what a training step really changes (benchmarks.weights.delta, four minutes). What an update costs generation is
benchmarks.interruption's.

The last line is one JSON object: name, value (zmq, digest, one receiver, GB/s), unit, against (limit, GB/s), ratio, and all cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.quiet import QUIET, Others
from benchmarks.weights import delta as weights_delta
from benchmarks.weights.lanes import NUM_RANKS, Lanes
from benchmarks.weights.ways import Disk, Place, Plain, Zmq, make_weights
from workers.config import WeightsConfig
from workers.run.paths import MEMORY

RESERVE_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """So many bytes to so many receivers."""

    size: int
    receivers: int

    def room(self) -> str:
        """Why this machine has no room for it; '' where it has."""
        needed = self.size * (2 * self.receivers + 3) + RESERVE_BYTES  # of each rank and receiver, by broadcast and as files of a node
        free = min(psutil.virtual_memory().available, shutil.disk_usage(MEMORY).free)
        return "" if needed <= free else f"takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def measure(case: Case, place: Place, securities: list[str], repetitions: int, streams: int) -> dict[str, Any]:
    """All kinds in turn; seconds of the best repetition of each."""
    best: dict[str, float] = {}
    figures: dict[str, Any] = {"gb": case.size / 1e9, "receivers": case.receivers}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    with contextlib.ExitStack() as stack:
        ours = {security: Zmq(stack, place, case.receivers, security, streams) for security in securities}
        lanes = Lanes(stack, case.size, case.receivers)
        one, all_at_once, disk = Plain(stack, place, 1), Plain(stack, place, case.receivers), Disk(stack, place, case.receivers)
        beside = Others()
        for _ in range(repetitions):
            note("limit", min(one.turn(threads) for threads in (1, 2)))
            for security, nodes in ours.items():
                turn = nodes.turn()
                note(security, turn["seconds"])
                note("publish_s", turn["publish_s"])
                figures[f"{security}_egress_copies"] = turn["egress_copies"]
            turn = lanes.turn()
            note("lanes", turn["seconds"] * case.size / turn["bytes"])
            figures |= {"lanes_egress_copies": turn["egress_copies"], "lanes_most_of_mean": turn["most_of_mean"]}
            note("streams", min(all_at_once.turn(threads) for threads in (1, 2)))
            note("bare", all_at_once.bare(streams))
            note("bare_one", one.bare(1))
            written, read = disk.turn()
            note("disk_write", written)
            note("disk_read", read)
        figures["others_cores"] = beside.cores()
    if case.receivers == 1:  # the same thing, measured twice as often
        best["limit"] = best["streams"] = min(best["limit"], best["streams"])
    return figures | {f"{name}_s".replace("_s_s", "_s"): seconds for name, seconds in best.items()}


def explain(figures: dict[str, Any], securities: list[str]) -> dict[str, Any]:
    """Ratios of one case; printed. `_of_limit` is by all receivers' bytes a second, `_of_streams` by time."""
    copies = figures["receivers"]
    for security in securities:
        seconds = figures[f"{security}_s"]
        figures |= {
            f"{security}_gb_per_s": copies * figures["gb"] / seconds, f"{security}_of_limit": copies * figures["limit_s"] / seconds,
            f"{security}_of_streams": figures["streams_s"] / seconds, f"{security}_of_bare": figures["bare_s"] / seconds,
            f"{security}_over_disk": (figures["disk_write_s"] + figures["disk_read_s"]) / (figures["publish_s"] + seconds)}
        print(f"{figures['gb']:.2f} GB to {copies:2d}, {security:<6}: {seconds:.3f} s, {figures[f'{security}_gb_per_s']:.2f} GB/s in all, "
              f"{figures[f'{security}_of_limit']:.2f} of the limit, {figures[f'{security}_of_streams']:.2f} of plain streams, trainer sends "
              f"{figures[f'{security}_egress_copies']:.2f} copies; {figures[f'{security}_over_disk']:.1f} times as fast as disk", flush=True)
    figures["lanes_of_limit"] = copies * figures["limit_s"] / figures["lanes_s"]
    print(f"    lanes {figures['lanes_s']:.3f} s, {figures['lanes_of_limit']:.2f} of the limit; {NUM_RANKS} training ranks send "
          f"{figures['lanes_egress_copies']:.2f} copies, one of them at most {figures['lanes_most_of_mean']:.2f} of their mean", flush=True)
    names = ("limit", "streams", "bare", "bare_one", "disk_write", "disk_read", "publish")
    limit, streams, bare, bare_one, written, read, digests = (figures[f"{name}_s"] for name in names)
    print(f"    limit {limit:.3f} s; streams {streams:.3f} s; bare {bare:.3f} s, one {bare_one:.3f} s; disk {written:.2f} s to write and "
          f"{read:.2f} s to read; digests {digests:.3f} s; others used {figures['others_cores']:.2f} cores", flush=True)
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.269, 2.0], help="GB")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--security", nargs="+", choices=("digest", "curve"), default=["digest", "curve"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--streams", type=int, default=WeightsConfig().streams, help="connections of a receiver to each of its sources")
    parser.add_argument("--disk", type=Path, default=None, help="folder on the storage to compare with (default: $TMPDIR)")
    parser.add_argument("--no-delta", dest="delta", action="store_false", help="leave out the training runs")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs: the figures mean little")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.receivers, options.repetitions, options.delta = [0.01], [1, 3], 1, False
    cases, left_out = [], []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="headway-benchmark-") as memory, tempfile.TemporaryDirectory(dir=options.disk) as disk:
            place = Place(Path(memory), Path(disk), Path(memory) / "source")
            make_weights(place.source, int(size * 1e9))
            for case in [Case(int(size * 1e9), receivers) for receivers in options.receivers]:
                if room := case.room():
                    left_out.append(f"{size:g} GB to {case.receivers}: {room}")
                    print(f"left out: {left_out[-1]}", flush=True)
                else:
                    cases.append(explain(measure(case, place, options.security, options.repetitions, options.streams), options.security))
    if not cases:
        raise SystemExit("no case has room in this machine's memory: give smaller --sizes or fewer --receivers")
    delta = weights_delta.figures(weights_delta.LEARNING_RATES, weights_delta.STEPS, weights_delta.CHAIN) if options.delta else None
    first, security = cases[0], options.security[0]
    print(json.dumps({
        "name": f"weights by network ({security}) over one plain TCP stream", "value": round(first["gb"] / first[f"{security}_s"], 3), "unit": "GB/s",
        "against": round(first["gb"] / first["limit_s"], 3), "ratio": round(first[f"{security}_of_limit"], 3), "left_out": left_out,
        "quiet": all(case["others_cores"] <= QUIET for case in cases),
        "cases": [{name: float(f"{value:.4g}") for name, value in case.items()} for case in cases], "delta": delta}))


if __name__ == "__main__":
    main()
