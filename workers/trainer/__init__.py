"""The trainer: batches, packing, the Megatron engine and the worker that drives it."""
