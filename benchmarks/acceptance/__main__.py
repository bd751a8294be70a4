"""`python -m benchmarks.acceptance [--gpus 8] [--small] [--only NAME ...] [--out FILE]`: does all that needs a GPU work here, and how well?

    checks.py --running.py--> a process for each --JSON--> table on the screen, and a file with the same figures

Without a GPU all checks are left out, and the table says so. `--small` runs on CPUs what also runs there, in small: it shows that the checks
work, and is held against nothing. Exit status 1: one has failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

from benchmarks.acceptance import checks
from benchmarks.acceptance.running import Result, left_out, run, table, write
from workers.run import gpus_seen


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 8], help="8: what takes a whole node besides")
    parser.add_argument("--small", action="store_true", help="on CPUs, in small")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--out", type=Path, default=Path("gpu-acceptance.json"))
    options = parser.parse_args()
    known = {check.name: check for check in (*checks.ONE, *(checks.EIGHT if options.gpus == 8 else ()))}
    if unknown := set(options.only or ()) - known.keys():
        parser.error(f"--only {' '.join(sorted(unknown))}: must be of {', '.join(known)} (with --gpus 8 of "
                     f"{', '.join(check.name for check in checks.EIGHT)}, too)")
    asked = [check for name, check in known.items() if not options.only or name in options.only]
    seen = gpus_seen.look()
    results = []
    for check in asked:
        why = left_out(check, len(seen["gpus"]), bool(os.environ.get("HEADWAY_SGLANG_PYTHON")), options.small)
        results.append(Result(check.name, check.what, check.reference, "skipped", "", why, 0.0) if why else run(check, options.small))
        print(f"{results[-1].status:<8} {check.name}: {check.what}", file=sys.stderr, flush=True)
        write(options.out, results, {"host": platform.node(), "at": time.strftime("%Y-%m-%d %H:%M:%S%z"), "small": options.small, **seen})
    print(f"\n{table(results)}")
    print(f"\nwritten to {options.out}")
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
