"""What keeping tokens over weight updates gains: `python -m benchmarks.interruption`."""
