"""Verifiers in processes that can be killed, one pool a worker.
Start with pool.py."""
