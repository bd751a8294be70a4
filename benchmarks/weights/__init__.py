"""Weights on their way: `python -m benchmarks.weights`."""
