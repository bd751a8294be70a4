"""Benchmarks that compare Headway with the usual alternative; each prints one JSON object on its last line."""
