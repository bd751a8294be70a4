"""A rank's training step with tensors that have shapes only: its memory, operators, waits of the host and exchanges, without a GPU or other ranks.
Nothing of training imports it. Start with step.py; `python -m workers.trainer.fake_device` is what `headway --dry-run --fake-step` asks."""

import workers.trainer.megatron  # noqa: F401  (before Megatron-core: on CPU builds it is imported without torch's compiler)
