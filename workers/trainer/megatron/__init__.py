"""Training with Megatron-core: the model, its packed attention, conversion from and to Hugging Face, and the engine."""

import logging
import sys

import torch

# Megatron-core 0.19 warns that a model is a GPTModel, and that its wrapper works out its own layout: both are meant.
for _name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

if not torch.backends.cuda.is_built():
    # It wraps its fused operations with torch.compile when it is imported, and torch's optimizers ask the compiler to leave them alone. On CPUs
    # nothing is compiled, and the compiler takes as long to be imported as torch itself. Its own inference and timers look for wandb, and take
    # long to find it.
    _compile = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment,misc]
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = _compile  # type: ignore[misc]
        if sys.modules["wandb"] is None:
            del sys.modules["wandb"]
    for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):  # torch/_compile.py
        if (_plain := getattr(getattr(torch.optim.Optimizer, _name), "__wrapped__", None)) is not None:
            setattr(_plain, "__dynamo_disable", _plain)
