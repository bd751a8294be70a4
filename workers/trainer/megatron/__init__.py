"""Training with Megatron-core: the model, its packed attention, conversion from and to Hugging Face, and the engine."""
