"""Which weights: without the arrays of messages, for what only names checkpoints."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Version(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which weights: `epoch` counts incarnations of the trainer, `step` completed training steps. Groups hold both as int32."""

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    step: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @staticmethod
    def parse(text: str) -> Version:
        """Inverse of `str`; raises ValueError on anything else."""
        epoch, _, step = text.partition(".")
        if not (epoch.isdecimal() and step.isdecimal()):
            raise ValueError(f"version {text!r}: must be EPOCH.STEP, two whole numbers")
        return Version(int(epoch), int(step))
