"""Which functions the reward processes of a run will be asked for, as far as its config tells."""

from __future__ import annotations

from workers.config import Config
from workers.reward.messages import PYTHON_TOOL
from workers.reward.verifiers import composed


def functions(config: Config) -> list[str]:
    """The verifiers, with their parts for training and alone for evaluation; and the Python tool, where the workflow's models write programs."""
    tool = [PYTHON_TOOL] if config.workflow.name == "python_tool" else []
    verifiers = config.data.verifiers(config.reward.verifier)
    return [*dict.fromkeys(composed(name, parts) for name in verifiers for parts in (config.reward.parts, {})), *tool]
