"""What replaying the engine's choice of experts is worth (algorithm.router_replay, docs/router_replay.md), on a small mixture of random weights.

    python -m benchmarks.router_replay [--seeds 10] [--tokens 48]

For each seed a Qwen3-MoE (4 layers, 8 experts, 2 a token, hidden size 64) answers 16 prompts 4 times each by the embedded engine in bfloat16. The
trainer, in float32 or bfloat16, computes the log-probs of the answers with its own routers' choice ("off") and with the engine's ("rollout"): with
the weights that sampled ("same weights"), and with those one training step later, which itself replays or not. d: trainer's minus engine's log-prob.

    |d|       mean, nats             k3        mean of e^d - d - 1, an estimate of the divergence of the two
    outside   share of tokens whose ratio e^d is not within 1 ± algorithm.clip_epsilon
    moved     share of tokens of which some layer would choose other experts (of the prompt's tokens, too)

Means over seeds with 95% intervals by Student's t. The last line is one JSON object: name, value (k3 without over with, float32, same weights), ...
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from megatron.core.transformer.moe.router import TopKRouter

from benchmarks.staleness.figures import Mean
from workers.config import Config, Dtype, EngineConfig, RouterReplay, RoutingShape, TrainerConfig
from workers.messages.parts import Version
from workers.model.architecture import read_architecture
from workers.rollout.engines.client import Generation, SamplingParams
from workers.rollout.engines.servers.process import ServerProcess
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine

NUM_PROMPTS, NUM_SAMPLES, PROMPT = 16, 4, 24
VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": None}
Figures = dict[str, float]


def setup(dtype: Dtype, replays: bool) -> Config:
    """The trainer's config."""
    config = Config()
    config.trainer = TrainerConfig(microbatch_tokens=1024, num_minibatches=1, lr=1e-4, warmup_steps=0, dtype=dtype)
    config.algorithm.router_replay = RouterReplay.rollout if replays else RouterReplay.off
    return config


def write_model(folder: Path, seed: int) -> RoutingShape:
    """A random model."""
    transformers.logging.disable_progress_bar()
    transformers.set_seed(seed)
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**SHAPE)).float().save_pretrained(folder)
    return read_architecture(folder).routing


async def sample(folder: Path, shape: RoutingShape, seed: int, length: int) -> list[TrainGroup]:
    """Answers of the engine to prompts by chance, with its choice of experts."""
    server = ServerProcess(EngineConfig(dtype=Dtype.bfloat16, num_slots=32), folder, folder / "log", tells_routing=True)
    client, draw = await server.start(Version(0, 0)), np.random.default_rng(seed)
    try:
        prompts = draw.integers(0, VOCAB, (NUM_PROMPTS, PROMPT)).tolist()
        answers = await asyncio.gather(*(
            client.generate(f"{number}.{index}", prompt, SamplingParams(length, 1.0), seed * 1000 + number * NUM_SAMPLES + index, shape)
            for number, prompt in enumerate(prompts) for index in range(NUM_SAMPLES)))
    finally:
        await client.close()
        await server.stop()
    return [_group(number, prompt, answers[number * NUM_SAMPLES : (number + 1) * NUM_SAMPLES], shape, draw) for number, prompt in enumerate(prompts)]


def _group(number: int, prompt: list[int], answers: list[Generation], shape: RoutingShape, draw: np.random.Generator) -> TrainGroup:
    def chosen(answer: Generation) -> np.ndarray:
        return np.frombuffer(answer.routing, shape.dtype).reshape(-1, shape.num_layers, shape.experts_per_token)

    lengths = [len(answer.tokens) for answer in answers]
    return TrainGroup(
        f"g{number}", np.array(prompt, np.int32), [np.array(answer.tokens, np.int32) for answer in answers],
        [np.array(answer.logprobs, np.float32) for answer in answers], [np.ones(length, np.bool_) for length in lengths],
        draw.normal(size=len(answers)).astype(np.float32), [np.zeros(length, np.int32) for length in lengths],
        routing=[chosen(answer) for answer in answers])


@contextmanager
def choices(engine: MegatronEngine) -> Iterator[list[torch.Tensor]]:
    """What the trainer's routers choose meanwhile: bool [tokens, experts], layer by layer."""
    found: list[torch.Tensor] = []
    routers = [module for module in engine._policy.trained.model.modules() if isinstance(module, TopKRouter)]
    hooks = [router.register_forward_hook(lambda _, __, output: found.append(output[1])) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def figures(groups: list[TrainGroup], logprobs: list[list[np.ndarray]]) -> Figures:
    """See the top of this file."""
    gap = np.concatenate([row - behavior for group, rows in zip(groups, logprobs, strict=True)
                          for row, behavior in zip(rows, group.behavior_logprobs, strict=True)])
    epsilon = Config().algorithm.clip_epsilon
    outside = np.abs(np.exp(gap) - 1) > epsilon
    return {"|d|": float(np.abs(gap).mean()), "k3": float((np.exp(gap) - gap - 1).mean()), "outside": float(outside.mean())}


def moved(engine: MegatronEngine, groups: list[TrainGroup], shape: RoutingShape) -> float:
    """The share of tokens that the trainer's routers send elsewhere in some layer: one sample after the other."""
    different: list[np.ndarray] = []
    for group in groups:
        assert group.routing is not None
        for index, told in enumerate(group.routing):
            alone = replace(group, responses=[group.responses[index]], behavior_logprobs=[group.behavior_logprobs[index]],
                            loss_mask=[group.loss_mask[index]], versions=[group.versions[index]], rewards=group.rewards[:1], routing=None)
            with choices(engine) as found:
                engine.logprobs([alone])
            own = torch.stack(found, 1).nonzero()[:, 2].view(len(told), shape.num_layers, -1).numpy()
            different.append((np.sort(told, -1) != own).any((1, 2)))
    return float(np.concatenate(different).mean())


def one_seed(folder: Path, seed: int, length: int) -> dict[str, Figures]:
    """By weights and replay."""
    shape = write_model(folder, seed)
    groups = asyncio.run(sample(folder, shape, seed, length))
    plain = [replace(group, routing=None) for group in groups]
    found: dict[str, Figures] = {}
    for dtype, replays in itertools.product((Dtype.float32, Dtype.bfloat16), (False, True)):
        engine, batch = MegatronEngine(setup(dtype, replays), folder), groups if replays else plain
        share, name = {} if replays else {"moved": moved(engine, groups, shape)}, "rollout" if replays else "off"
        found[f"{dtype.value}, same weights, {name}"] = figures(batch, engine.logprobs(batch)) | share
        engine.train_step(batch, [list(range(len(batch)))], None, [group.rewards for group in batch])
        found[f"{dtype.value}, a step later, {name}"] = figures(batch, engine.logprobs(batch))
        engine.close()
    return found


def main() -> None:
    """Print a row for each, and a JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(one_seed(Path(folder), seed, options.tokens))
    means = {name: {key: Mean.of([each[name][key] for each in found]) for key in found[0][name]} for name in sorted(found[0])}
    for name, row in means.items():
        print(f"{name:32}" + "   ".join(f"{key} {mean.text(5)}" for key, mean in row.items()))
    off, on = (means[f"float32, same weights, {name}"]["k3"].value for name in ("off", "rollout"))
    shape = RoutingShape(SHAPE["num_hidden_layers"], 0, SHAPE["num_experts_per_tok"], SHAPE["num_experts"])
    print(json.dumps({"name": "router_replay", "value": round(off / on, 1), "unit": "k3 of engine and trainer, off over rollout",
                      "off": off, "rollout": on, "bytes_a_token": shape.token_bytes, "seeds": options.seeds}))


if __name__ == "__main__":
    main()
