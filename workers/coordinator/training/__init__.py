"""Batches and steps of training as the coordinator sees them, and how a batch is split among copies. Pure.
Start with steps.py."""
