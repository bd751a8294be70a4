"""The files that belong to this code: conf/ and slurm/. In a checkout these are links to the folders at its top; a wheel holds copies."""

from __future__ import annotations

from pathlib import Path

CONF = (Path(__file__).parent / "conf").resolve()
"""What Hydra composes from. Configs name files in it as `${conf:prompts/code_tiny.jsonl}`, wherever they are run from."""
SLURM = (Path(__file__).parent / "slurm").resolve()
"""Scripts for SLURM."""
