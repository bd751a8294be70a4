"""What tests of the trainer share."""

from __future__ import annotations

from tests.unit.conftest import megatron_groups

__all__ = ["megatron_groups"]
