"""Whether engines and trainer compute the same log-probs, and why not.
Start with selftest.py."""
