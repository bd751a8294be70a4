"""Small models, configs and groups for tests of the training engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from workers.config import Config, RoutingShape, TrainerConfig
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group

VOCAB = 97


def hf_config(kind: str) -> Any:
    """A model of two layers ("-deep": four): "llama", "mistral", "qwen2", "qwen3", "qwen3moe" or "glm4moe", or of four: "deepseek"; with "-tied"
    behind it or not."""
    tied = "-tied" in kind
    common: dict[str, Any] = dict(  # noqa: C408
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4 if kind.endswith("-deep") else 2,
        num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=tied, rms_norm_eps=1e-6, attention_dropout=0.0, initializer_range=0.2)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    sigmoid = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
               "routed_scaling_factor": 1.7, "norm_topk_prob": True}
    if kind.startswith("glm4moe"):
        return transformers.Glm4MoeConfig(head_dim=12, attention_bias=True, use_qk_norm=True, n_group=1, topk_group=1, rope_parameters=plain,
                                          **sigmoid, **common)
    if kind.startswith("deepseek"):
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        return transformers.DeepseekV3Config(q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=10, v_head_dim=12, n_group=4,
                                             topk_group=2, rope_parameters=yarn, **sigmoid,
                                             **{**common, "num_hidden_layers": 4, "num_key_value_heads": 4})
    if kind.startswith("qwen3moe"):
        return transformers.Qwen3MoeConfig(head_dim=16, rope_parameters=plain, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                                           norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **common)
    if kind.startswith("mistral"):
        return transformers.MistralConfig(head_dim=8, sliding_window=None, rope_parameters=plain, **common)
    if kind.startswith("qwen3"):
        return transformers.Qwen3Config(head_dim=16, rope_parameters=plain, **common)
    if kind.startswith("qwen2"):
        return transformers.Qwen2Config(rope_parameters=plain, **common)
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 16}
    return transformers.LlamaConfig(head_dim=8, rope_parameters=scaled, **common)


def write_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """A model of `kind` with random weights, norms and biases that matter among them, in float32; returns `folder`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(kind)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.9, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def config(**trainer: Any) -> Config:
    """The defaults, with small micro-batches and `trainer` on top."""
    result = Config()
    result.trainer = TrainerConfig(**{"microbatch_tokens": 64, "num_minibatches": 1, "lr": 1e-2, "adam_eps": 1e-8, **trainer})
    result.workflow.temperature = 0.7
    return result


def make_groups(num: int = 4, seed: int = 0) -> list[TrainGroup]:
    """Ragged groups, with a response of one token, equal ones, a shared beginning and masked tokens among them."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(num):
        lengths = rng.integers(1, 9, size=5).tolist()
        responses = [rng.integers(0, VOCAB, size=length).astype(np.int32) for length in lengths]
        responses[1] = responses[0].copy()
        responses[2] = responses[2][:1]
        responses[4] = np.concatenate([responses[3][:3], responses[4]])
        masks = [rng.random(len(response)) > 0.2 for response in responses]
        groups.append(TrainGroup(
            group_id=f"g{index}", prompt=rng.integers(0, VOCAB, size=int(rng.integers(3, 14))).astype(np.int32), responses=responses,
            behavior_logprobs=[rng.normal(-4, 0.3, size=len(response)).astype(np.float32) for response in responses],
            loss_mask=masks, rewards=rng.normal(size=5).astype(np.float32),
            versions=[np.zeros(len(response), np.int32) for response in responses]))
    return groups


def with_routing(groups: list[TrainGroup], shape: RoutingShape, seed: int = 0) -> list[TrainGroup]:
    """`groups` with experts by chance for every token: the same for the prompt, but of the last response, and for what responses have in common."""
    rng = np.random.default_rng(seed)

    def chosen(number: int) -> np.ndarray:
        return rng.random((number, shape.num_layers, shape.num_experts)).argsort(-1)[..., : shape.experts_per_token].astype(shape.dtype)

    for group in groups:
        prompt, longest = len(group.prompt), max(len(response) for response in group.responses)
        common = chosen(prompt + longest)
        group.routing = [common[: prompt + len(response) - 1].copy() for response in group.responses]
        for response, rows in zip(group.responses, group.routing, strict=True):
            rows[prompt + min(2, len(response) - 1):] = chosen(len(rows[prompt + min(2, len(response) - 1):]))
        group.routing[-1][:prompt] = chosen(prompt)
    return groups


def rewards_of(groups: list[TrainGroup]) -> list[np.ndarray]:
    """Rewards as advantages."""
    return [group.rewards for group in groups]


def train(engine: MegatronEngine, groups: list[TrainGroup], proximal: Any = None, advantages: list[np.ndarray] | None = None,
          **arguments: Any) -> dict[str, float]:
    """A training step with rewards as advantages, in `num_minibatches` parts; each copy of the model takes its part of every minibatch."""
    if advantages is None and not engine._config.algorithm.critic:
        advantages = rewards_of(groups)
    own: list[int] = []
    minibatches: list[list[int]] = []
    for part in np.array_split(np.arange(len(groups)), engine._config.trainer.num_minibatches):
        mine = part[process_group.copy_index()::process_group.num_copies()].tolist()
        minibatches.append(list(range(len(own), len(own) + len(mine))))
        own += mine
    proximal, advantages = (None if values is None else [values[index] for index in own] for values in (proximal, advantages))
    return engine.train_step([groups[index] for index in own], minibatches, proximal, advantages, **arguments)


class Asked:
    """Counts how often it is asked, and says yes from the `at`-th time on."""

    def __init__(self, at: int) -> None:
        self.at, self.times = at, 0

    def __call__(self) -> bool:
        self.times += 1
        return self.times >= self.at
