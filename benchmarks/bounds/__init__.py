"""Staleness bounds in simulation and in small real runs: `python -m benchmarks.bounds`."""
