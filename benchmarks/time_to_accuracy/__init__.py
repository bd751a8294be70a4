"""Time to accuracy, synchronous and asynchronous: `python -m benchmarks.time_to_accuracy`."""
