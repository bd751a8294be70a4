"""Learning against staleness: `python -m benchmarks.staleness`."""
