"""The end of an evaluation alone: what all elements have judged becomes samples.jsonl and evaluation.json.

    evaluation/*.jsonl --chunk by chunk, in the order of the prompts--> samples.jsonl (a line a sample)
                                                                   --> figures (statistics.py) --> evaluation.json

Whoever finds all chunks done does this. Several may at the same time: they write the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from workers.config import Config
from workers.data.prompt import Prompt
from workers.evaluation.chunks import Chunks
from workers.evaluation.statistics import Judged, figures
from workers.run.files import write_once
from workers.run.folder import RunFolder


def conclude(run: RunFolder, config: Config, prompts: Sequence[Prompt], chunks: Chunks) -> str:
    """Write the result; returns why there is none ('' if there is): every prompt has failed. Raises OSError."""
    aside = run.samples.with_name(f".{run.samples.name}.{chunks.holder.name}.tmp")
    judged: list[Judged] = []
    failed: dict[str, str] = {}
    num_tokens = 0
    with aside.open("w") as file:
        for lines in chunks.read_all():
            for index, line in sorted(lines.items()):
                prompt = prompts[index]
                if "failed" in line:
                    failed[prompt.id] = line["failed"]
                    continue
                samples = line["samples"]
                judged.append(Judged([sample["score"] for sample in samples], [sample["answer"] for sample in samples]))
                num_tokens += sum(sample["tokens"] for sample in samples)
                for place, sample in enumerate(samples):
                    file.write(json.dumps({"id": prompt.id, "sample": place, "prompt": prompt.text, "reference": prompt.reference, **sample}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(run.samples)
    if not judged:
        return f"every one of the {len(failed)} prompts failed; one because: {next(iter(failed.values()), 'there is none')}"
    write_once(run.evaluation_result, json.dumps(_record(config, judged, failed, num_tokens), indent=2).encode())
    return ""


def _record(config: Config, judged: list[Judged], failed: dict[str, str], num_tokens: int) -> dict[str, Any]:
    evaluation = config.evaluation
    told = figures(judged, evaluation.ks, evaluation.confidence)
    sampling = {name: getattr(evaluation, name) for name in ("temperature", "top_p", "top_k")}
    return {
        "model": config.model.path, "run": evaluation.run, "checkpoint": evaluation.checkpoint if evaluation.run else "",
        "data": config.data.kind.value, "data_paths": config.data.paths(), "verifiers": config.data.verifiers(config.reward.verifier),
        "workflow": config.workflow.name, "max_new_tokens": config.workflow.max_new_tokens, "seed": config.run.seed, **sampling,
        "num_prompts": len(judged) + len(failed), "num_failed": len(failed), "failed": failed, **told,
        "tokens_per_sample": num_tokens / sum(len(one.scores) for one in judged)}
