"""A batch as tensors: groups, their layout with shared beginnings, packing into micro-batches, context parallelism.
Start with group.py."""
