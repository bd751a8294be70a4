"""How much one coordinator takes: groups a second, how long they wait for it, what it costs.

    python -m benchmarks.control_plane [--workers 1024] [--leases 2] [--rate 30] [--samples 16] [--tokens 8000] [--batch 64] [--shares 1]
        [--seconds 60] [--quick]

The real coordinator in a process of its own, with CURVE, files and the flight recorder; played workers with a socket each in another (fleet.py).
Every worker beats once a second (less often, where the coordinator says so) and ends its leases at random times, all of them together `rate`
groups a second. The machine is shared by both sides.

The last line is one JSON object: name, value (milliseconds, 99th percentile from a result to its acknowledgement), unit, groups_per_s, refused,
CPU milliseconds of the coordinator for a group, memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT
from benchmarks.control_plane.both_sides import fleet_command, make_run, start_coordinator
from benchmarks.control_plane.figures import Load

QUICK = Load(workers=8, leases_each=2, rate=50.0, samples=2, tokens=20, batch_groups=4)


def used(pid: int) -> tuple[float, float]:
    """CPU seconds so far, and the most memory that was resident, in MB, of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1000


def measure(load: Load, seconds: float) -> dict[str, Any]:
    """Both sides, for so long."""
    with tempfile.TemporaryDirectory(prefix="headway-benchmark-") as folder:
        run = make_run(Path(folder), load)
        coordinator = start_coordinator(run)
        started_s, _ = used(coordinator.pid)
        try:
            command = fleet_command(run, load, seconds)
            told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=seconds + 300).stdout
            cpu_s, peak_mb = used(coordinator.pid)
        finally:
            coordinator.kill()
            coordinator.wait()
    found = json.loads(told.splitlines()[-1])
    return found | {"cpu_ms_per_group": round(1000 * (cpu_s - started_s) / max(1, found["groups"]), 2),
                    "cpu_share": round((cpu_s - started_s) / seconds, 3), "memory_mb": round(peak_mb)}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--leases", type=int, default=2, help="of each worker")
    parser.add_argument("--rate", type=float, default=30.0, help="groups a second of all workers")
    parser.add_argument("--samples", type=int, default=16, help="of a group")
    parser.add_argument("--tokens", type=int, default=8000, help="of a sample")
    parser.add_argument("--batch", type=int, default=64, help="groups of a training step")
    parser.add_argument("--shares", type=int, default=1, help="copies of the model, which have a share of each batch")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    options = parser.parse_args()
    load = Load(options.workers, options.leases, options.rate, options.samples, options.tokens, options.batch, options.shares)
    load, seconds = (QUICK, 3.0) if options.quick else (load, options.seconds)
    found = measure(load, seconds)
    print(json.dumps({"name": f"from a result to its acknowledgement, {load.workers} workers, {load.samples} x {load.tokens} tokens",
                      "value": found["acknowledged_p99_ms"], "unit": "ms"} | found))


if __name__ == "__main__":
    main()
