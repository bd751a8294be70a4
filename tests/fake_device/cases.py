"""Models and layouts of the tests, and the process that runs them: `python -m tests.fake_device.cases` is given cases, and answers with figures."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.children import answer_orders
from launcher.preflight.fake_step import WITHOUT_GPU
from tests.support.documented import MODELS
from workers.config import Config, Dtype, LoraConfig, ParallelConfig, Recompute, TrainerConfig
from workers.trainer.fake_device.exchanges import mismatches

_COMMON = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
           "first_k_dense_replace": 1}
SIGMOID = {
    "GLM-4.5-Air": _COMMON | {
        "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "use_qk_norm": False,
        "partial_rotary_factor": 0.5, "rope_theta": 1000000, "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "Moonlight-16B-A3B": _COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 50000.0, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "routed_scaling_factor": 2.446},
}
"""config.json of two models, as their makers publish them."""


@dataclass(frozen=True)
class Case:
    """A step of some ranks: `parallel` are keys of trainer.parallel, `length` is a sequence's, of which 256 are its prompt's; micro-batches of
    `tokens`, which whole groups of `group` fill."""

    model: str
    world_size: int
    parallel: dict[str, Any]
    ranks: tuple[int, ...]
    tokens: int = 8192
    length: int = 4096
    group: int = 1
    recompute: str = "none"
    num_minibatches: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the model's config.json, such as fewer layers."""
    lora: int = 0
    """The rank of adapters of all matrices."""

    def config(self) -> Config:
        """The trainer's config, in bfloat16."""
        config = Config()
        config.trainer = TrainerConfig(
            microbatch_tokens=self.tokens, num_minibatches=self.num_minibatches, batch_groups=1024 * self.num_minibatches, dtype=Dtype.bfloat16,
            recompute=Recompute(self.recompute), parallel=ParallelConfig(**self.parallel), lora=LoraConfig(rank=self.lora))
        config.engine.dtype, config.engine.context_length = Dtype.bfloat16, self.length
        config.workflow.group_size, config.workflow.max_new_tokens = self.group, self.length - 256
        return config

    def write_model(self, folder: Path) -> Path:
        """Its config.json, in a folder that holds no more."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps((MODELS | SIGMOID)[self.model] | self.changes))
        return folder


def _run(case: Case, folder: Path) -> dict[str, Any]:
    from workers.trainer.fake_device.step import fake_step

    whole = len(case.ranks) == case.world_size > 1
    figures = [fake_step(case.config(), case.write_model(folder), rank, case.world_size, first=whole) for rank in case.ranks]
    calls = [found.calls for found in figures]
    return {"ranks": [msgspec.to_builtins(found) | {"calls": len(found.calls)} for found in figures],
            "mismatches": mismatches(calls) if whole else []}


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return _run(msgspec.convert(order, Case), Path(folder))


if __name__ == "__main__":
    os.environ.update(WITHOUT_GPU)  # before torch is there
    answer_orders(_answer)
