"""How answers will be generated, in the plan's words, and what of that is clearly unsuited. Pure, but for `has_chat_template`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from launcher.config.cluster import GpuRequest
from launcher.config.schema import FullConfig
from workers.config import ClusterKind, ModelSource, Server
from workers.config.data import FILE_KINDS

WORKED_OUT = ("gsm8k", "math", "aime", "deepscaler", "livecodebench", "human_eval")
"""Adapters of data sets whose answers take a solution."""
SHORT = 256
"""Fewer new tokens than that cut solutions off before their result."""


def has_chat_template(folder: Path) -> bool:
    """Whether the model's tokenizer brings one."""
    if (folder / "chat_template.jinja").exists():
        return True
    with contextlib.suppress(OSError, ValueError):  # told by the preparation
        content = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        return isinstance(content, dict) and bool(content.get("chat_template"))
    return False


def generation(config: FullConfig) -> str:
    """One line for the plan."""
    engine, chat = config.engine, any(source.chat_template for source in config.data.sources())
    prompts = "prompts in the model's chat template" if chat else "prompts as they are, without a chat template"
    if config.supervised:
        return f"examples: up to {engine.context_length} tokens (engine.context_length), {prompts}"
    return (f"generation: {engine.server.value} engine in {engine.dtype.value}, up to {config.workflow.max_new_tokens} new tokens a turn "
            f"(workflow.max_new_tokens) in a context of {engine.context_length} (engine.context_length), {prompts}")


def warnings(config: FullConfig, with_template: bool) -> list[str]:
    """What is hardly meant. `with_template`: whether the model's tokenizer has a chat template."""
    parts, found = config.data.sources(), []
    worked_out = [part.adapter for part in parts if part.adapter in WORKED_OUT]
    if worked_out and config.workflow.max_new_tokens < SHORT and not config.supervised:
        found.append(f"workflow.max_new_tokens={config.workflow.max_new_tokens}: data.adapter={worked_out[0]} has solutions of hundreds of tokens, "
                     "and one that is cut off before its result scores nothing. Give 512 or more, and engine.context_length with room for it")
    if with_template and config.model.source is ModelSource.folder and any(part.kind in FILE_KINDS for part in parts) and not any(
            part.chat_template for part in parts):
        found.append("data.chat_template=false: the model has a chat template, and its prompts come without it. An instruction-tuned model needs it: "
                     "data.chat_template=true; a base model does not")
    on_slurm = config.cluster.kind is ClusterKind.slurm
    on_gpus = on_slurm and config.cluster.inference.gpus is not GpuRequest.none
    if on_gpus and config.engine.server is Server.embedded and not config.supervised:
        found.append("engine=embedded: it computes on CPUs, and cluster.inference asks for GPUs, which would stand idle. Use engine=sglang, or "
                     "cluster.inference.gpus=none")
    if on_slurm and config.cluster.train.gpus is GpuRequest.gpus_per_task and not config.evaluates and config.plan().num_train_devices > 1:
        found.append("cluster.train.gpus=gpus_per_task: each rank is shown its own GPU alone, and NCCL may then not use NVLink between them. Where "
                     "the site allows it, cluster.train.gpus=gres shows all ranks of a node all of its GPUs")
    return [f"WARNING: {text}" for text in found]
