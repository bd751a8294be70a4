"""Training with Megatron-core: the model, its packed attention, conversion from and to Hugging Face, and the engine."""

import logging

# Megatron-core 0.19 warns that a model is a GPTModel, and that its wrapper works out its own layout: both are meant.
for _name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)
