"""Whether engines and trainer compute the same log-probs, and why not.
Start with self_test.py."""
