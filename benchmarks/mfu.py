"""How much of a device's arithmetic the training step uses (model FLOPs utilisation), and what it spends its time on.

    python -m benchmarks.mfu [--tokens 8192 32768] [--length 4096] [--steps 5] [--mixture]

A Llama of 1.24 billion parameters, with `--mixture` four of the 48 layers of Qwen3-30B-A3B, with random weights, bfloat16 (on a CPU one of 50
million, or with 8 experts, float32, by default 512 tokens), and `MegatronEngine.train_step` as it is in a run: packed samples that share nothing, one
minibatch of four micro-batches of `tokens` each. The limit: the maker's figure (`mfu`), and products of a plain MLP's matrices alone (`of_matmul`),
in turn with the steps. Model FLOPs count 6 per parameter that a token passes (without the embedding), and for causal attention
6 * layers * hidden * length per token (forward and backward, half of the square: arXiv 2204.02311, appendix B); what is computed again counts not.
Prints one JSON object on its last line.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Dense bfloat16, by the makers' data sheets; the first that a device's name holds.
PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
NUM_MICROBATCHES = 4
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("LlamaConfig", {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                              "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True},
              {"intermediate_size": 2048, "num_hidden_layers": 8, "num_key_value_heads": 8}),
    "mixture": ("Qwen3MoeConfig", {"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 128,
                                   "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                                   "norm_topk_prob": True, "max_position_embeddings": 40960, "tie_word_embeddings": False},
                {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2})}
"""Llama 3.2 1B's shape, and four of the 48 layers of Qwen3-30B-A3B's; what is smaller on CPUs."""
CPU_SIZES: dict[str, Any] = {"vocab_size": 32768, "hidden_size": 512, "num_attention_heads": 8}
KINDS = {"attention": ("flash", "fmha"), "matrices": ("gemm", "cutlass", "nvjet", "xmma"), "optimizer": ("adam", "multi_tensor", "l2norm")}
"""Kinds of kernel by words in their names; the first that fits (a flash kernel names the library of its matrices, too)."""


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch (8192 32768)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--mixture", action="store_true", help="a mixture of experts")
    arguments = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "mixture" if arguments.mixture else "dense")
        runs = [measure(Path(folder), tokens, arguments) for tokens in arguments.tokens or ([8192, 32768] if cuda else [512])]
    print(json.dumps({"benchmark": "mfu", "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "CPU", "runs": runs}))


def write_model(folder: Path, name: str = "dense") -> None:
    """A model of MODELS, or on a CPU a smaller one."""
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    kind, sizes, small = MODELS[name]
    shape = getattr(transformers, kind)(**sizes | ({} if cuda else CPU_SIZES | small))
    with torch.device("cuda" if cuda else "cpu"):
        transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16 if cuda else torch.float32).cpu().save_pretrained(folder)


def measure(folder: Path, tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds and utilisation of a training step with micro-batches of `tokens`; the steps in turn with the plain products."""
    import torch

    from launcher.prediction.costs import Shapes
    from workers.config import Config, Dtype, Recompute, TrainerConfig
    from workers.trainer.megatron.engine import MegatronEngine
    from workers.trainer.megatron.parallel import process_group

    config = Config()
    cuda = torch.cuda.is_available()
    config.trainer = TrainerConfig(microbatch_tokens=tokens, num_minibatches=1, dtype=Dtype.bfloat16 if cuda else Dtype.float32,
                                   recompute=Recompute(arguments.recompute))
    engine = MegatronEngine(config, folder)
    length = min(arguments.length, tokens)
    groups, advantages = samples(NUM_MICROBATCHES * (tokens // length), length, engine.architecture.vocab_size)
    step_once = partial(engine.train_step, groups, [list(range(len(groups)))], None, advantages)
    seconds, limits = list[float](), list[float]()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments.steps + 1):
        seconds.append(timed(step_once))
        limits.append(matmul_tflops(tokens, engine.architecture))
    found: dict[str, Any] = {}
    if cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            timed(step_once)
        found = {"shares": shares(profile, float(np.median(seconds[1:]))), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    process_group.close()
    step, limit = float(np.median(seconds[1:])), float(np.median(limits[1:]))
    processed = sum(len(group.prompt) + len(group.responses[0]) - 1 for group in groups)
    done = 3 * processed * Shapes.of(engine.architecture).operations(length / 2)  # the backward pass takes twice as many as the forward pass
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if cuda and name in torch.cuda.get_device_name(0)), None)
    return {"tokens": tokens, "length": length, "step_s": step, "tokens_per_s": processed / step, "tflops": done / step / 1e12,
            "mfu": done / step / 1e12 / peak if peak else None, "matmul_tflops": limit, "of_matmul": done / step / 1e12 / limit, **found}


def timed(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes, with what it has started on the device."""
    import torch

    started = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def matmul_tflops(tokens: int, architecture: Any, num_products: int = 8) -> float:
    """TFLOP/s of plain products of `tokens` hidden states with a matrix of a plain MLP, in the dtype of the steps."""
    import torch

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    hidden = torch.randn(tokens, architecture.hidden_size, device=device, dtype=dtype)
    matrix = torch.randn(architecture.hidden_size, 4 * architecture.hidden_size, device=device, dtype=dtype)
    timed(lambda: hidden @ matrix)
    seconds = timed(lambda: [hidden @ matrix for _ in range(num_products)])
    return 2 * num_products * tokens * matrix.numel() / seconds / 1e12


def samples(number: int, length: int, vocab_size: int) -> tuple[list[Any], list[np.ndarray]]:
    """Groups of one sample each, with `length` input tokens."""
    from workers.trainer.batch.group import TrainGroup

    rng = np.random.default_rng(0)
    prompt = 64
    answer = length - prompt + 1

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocab_size, count).astype(np.int32)

    groups = [TrainGroup(
        group_id=str(index), prompt=tokens(prompt), responses=[tokens(answer)], behavior_logprobs=[np.full(answer, -11.0, np.float32)],
        loss_mask=[np.ones(answer, bool)], rewards=np.ones(1, np.float32), versions=[np.zeros(answer, np.int32)])
        for index in range(number)]
    return groups, [np.array([1.0 if index % 2 else -1.0], np.float32) for index in range(number)]


def shares(profile: Any, step_s: float) -> dict[str, float]:
    """Shares of a step by kind of kernel, and the share in which the GPU did nothing."""
    spent = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in profile.key_averages():
        kind = next((kind for kind, words in KINDS.items() if any(word in event.key.lower() for word in words)), "other")
        spent[kind] += event.self_device_time_total / 1e6
    found = {kind: seconds / step_s for kind, seconds in spent.items()}
    return found | {"idle": max(0.0, 1.0 - sum(found.values()))}


if __name__ == "__main__":
    main()
