"""Megatron-core's optimizer with its schedule and clipping, and AdamW for CPUs.
Start with optimizer.py."""
