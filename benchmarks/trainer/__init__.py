"""The trainer's step against other systems: `python -m benchmarks.trainer`."""
