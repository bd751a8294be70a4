"""The model in Megatron-core's terms: layers, attention over packed micro-batches, experts, heads.
Start with model.py."""
