"""Tokens per second: the embedded engine, through its HTTP server, against Hugging Face generate().

    python -m benchmarks.engine [--model DIR] [--dtype float32] [--repetitions 3] [--max-new-tokens 256]

Both serve the same requests with one thread: ragged prompts and ragged answer lengths, sampled at temperature 1, no early
end. The engine batches continuously; generate() takes a left-padded batch, which runs until its longest request is done.
Only the tokens that were asked for count. The two alternate within one process, and the best repetition of each counts.
The engine's time includes HTTP, JSON and log-probs; generate() returns no log-probs.

The last line is one JSON object: name, value (engine, tokens/s), unit, against (generate(), tokens/s), ratio: of the case
(32 or 64 requests) with the smaller ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.child import EngineChild
from benchmarks.engine.models import make_model

CASES = (32, 64)


@dataclass(frozen=True)
class Job:
    """One request: a prompt and the exact number of tokens to generate."""

    prompt: list[int]
    length: int


def make_jobs(count: int, vocab_size: int, max_new_tokens: int, seed: int) -> list[Job]:
    """`count` requests with prompts of 8 to 64 tokens and answers of max_new_tokens / 16 to max_new_tokens."""
    draw = random.Random(seed)
    shortest = max(1, max_new_tokens // 16)
    return [Job([draw.randrange(3, vocab_size) for _ in range(draw.randint(8, 64))], draw.randint(shortest, max_new_tokens))
            for _ in range(count)]


async def _engine_seconds(child: EngineChild, jobs: list[Job]) -> float:
    headers = {"Authorization": f"Bearer {child.api_key}"}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(child.base_url, headers=headers, connector=connector, timeout=timeout) as session:

        async def one(job: Job) -> None:
            params = {"max_new_tokens": job.length, "temperature": 1.0, "ignore_eos": True}
            request = {"input_ids": job.prompt, "sampling_params": params, "return_logprob": True}
            async with session.post("/generate", json=request) as reply:
                body = await reply.json()
                assert reply.status == 200 and len(body["output_ids"]) == job.length, body

        async with session.post("/flush_cache") as reply:
            assert reply.status == 200
        start = time.perf_counter()
        await asyncio.gather(*(one(job) for job in jobs))
        return time.perf_counter() - start


def engine_seconds(child: EngineChild, jobs: list[Job]) -> float:
    """Wall seconds for all of `jobs`, sent at once."""
    return asyncio.run(_engine_seconds(child, jobs))


@torch.inference_mode()
def generate_seconds(model: Any, jobs: list[Job]) -> float:
    """Wall seconds of one generate() call over all of `jobs`."""
    width, longest = max(len(job.prompt) for job in jobs), max(job.length for job in jobs)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs])
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
    start = time.perf_counter()
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0)
    assert output.shape[1] == width + longest
    return time.perf_counter() - start


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run every case; one dict of figures for each."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    results = []
    context = 64 + options.max_new_tokens
    with EngineChild.start(folder, dtype=options.dtype, num_slots=max(CASES), context_length=context, num_threads=1) as child:
        for count in CASES:
            warm = [Job(job.prompt, 8) for job in make_jobs(count, model.config.vocab_size, options.max_new_tokens, seed=99)]
            engine_seconds(child, warm), generate_seconds(model, warm)
            jobs = make_jobs(count, model.config.vocab_size, options.max_new_tokens, seed=count)
            tokens = sum(job.length for job in jobs)
            ours, theirs = [], []
            for repetition in range(options.repetitions):
                ours.append(tokens / engine_seconds(child, jobs))
                theirs.append(tokens / generate_seconds(model, jobs))
                print(f"{count} requests, {tokens} tokens, repetition {repetition + 1}: engine {ours[-1]:.0f} tokens/s, "
                      f"generate() {theirs[-1]:.0f} tokens/s, ratio {ours[-1] / theirs[-1]:.2f}", flush=True)
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            results.append({"requests": count, "tokens": tokens, "engine": max(ours), "generate": max(theirs),
                            "ratio": max(ours) / max(theirs),
                            "ratio_min": min(ratios), "ratio_max": max(ratios)})
    return results


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: a random Qwen3 of 7M parameters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary)
        if options.model is None:
            make_model(folder)
        results = measure(folder, options)
    worst = min(results, key=lambda result: result["ratio"])
    print(json.dumps({
        "name": "embedded engine over Hugging Face generate()", "value": round(worst["engine"], 1), "unit": "tokens/s",
        "against": round(worst["generate"], 1), "ratio": round(worst["ratio"], 3), "dtype": options.dtype,
        "cases": [{key: round(value, 3) for key, value in result.items()} for result in results],
    }))


if __name__ == "__main__":
    main()
