"""Rewards beside generation: `python -m benchmarks.rewards`."""
