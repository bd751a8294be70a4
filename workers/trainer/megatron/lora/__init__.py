"""Low-rank adapters of a model whose own weights stay (`trainer.lora`): start with low_rank.py."""
