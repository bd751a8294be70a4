"""What a prediction takes for granted, each with where it is from: a table, the config, the command line, or an earlier run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from launcher.prediction.device_speeds import CPU_GFLOPS
from launcher.prediction.lengths import Lengths
from workers.config import Config, Server

SIGMA = 0.8
SHARE_OF_MOST, FEWEST = 0.25, 64
USUAL_PROMPT = 200
UNITS = {"mean_tokens": "tokens of an answer", "prompt_tokens": "tokens of a prompt", "sigma": "spread of lengths (of the logarithm)",
         "mfu": "of a device's arithmetic in training", "decode_share": "of it in decoding", "prefill_share": "of it in prompts",
         "bandwidth_share": "of memory's bandwidth in decoding", "load_gbs": "GB/s into an engine", "publish_gbs": "GB/s out of the trainer",
         "network_gbs": "GB/s to a node", "cpu_gflops": "GFLOP/s of a core of a CPU", "kept": "of what is generated is trained on"}
"""What somebody may say otherwise, with its meaning."""


@dataclass(frozen=True)
class Assumptions:
    """`lengths` of answers; `prompt_tokens`, mean. What devices reach of their data sheets: `mfu` in training, `decode_share` and `prefill_share`
    of their arithmetic, `bandwidth_share` of their memory's. `load_gbs`: GB/s at which a server takes weights that are on its node; `publish_gbs`:
    at which a training rank copies them; `network_gbs`: at which they come to a node. `cpu_gflops`: what a core computes
    of a linear layer where there are no GPUs, in GFLOP/s. `kept`: the share of what is generated that is trained on.
    `engine_factor`, `trainer_factor`: how much longer decoding and training took in an earlier run than these say; `pause_s`, `publish_s`: as
    measured there. `said`: where each is from, by its name."""

    lengths: Lengths
    prompt_tokens: float
    mfu: float = 0.35
    decode_share: float = 0.5
    prefill_share: float = 0.4
    bandwidth_share: float = 0.6
    load_gbs: float = 20.0
    publish_gbs: float = 10.0
    network_gbs: float = 5.0
    cpu_gflops: float = CPU_GFLOPS
    kept: float = 1.0
    engine_factor: float = 1.0
    trainer_factor: float = 1.0
    pause_s: float | None = None
    publish_s: float | None = None
    said: dict[str, str] = field(default_factory=dict)

    def for_answers_of(self, config: Config) -> Assumptions:
        """With answers cut off where this config does it; an earlier run's mean holds only below that."""
        most = config.workflow.max_new_tokens
        return dataclasses.replace(self, lengths=dataclasses.replace(self.lengths, most=most, mean=min(self.lengths.mean, float(most))))

    def given(self, name: str, value: float) -> Assumptions:
        """With one of them as somebody says."""
        said = self.said | {name: "given"}
        if name == "mean_tokens":
            return dataclasses.replace(self, lengths=dataclasses.replace(self.lengths, mean=value), said=said)
        if name == "sigma":
            return dataclasses.replace(self, lengths=dataclasses.replace(self.lengths, sigma=value), said=said)
        return dataclasses.replace(self, said=said, **{name: value})  # type: ignore[arg-type]


def usual(config: Config, cpu_gflops: float = 0.0) -> Assumptions:
    """Where no run has measured it. `cpu_gflops`: what was tried on this machine, for what runs there; 0: nothing was."""
    most = config.workflow.max_new_tokens
    if config.engine.server is Server.synthetic:
        mean, said = min(config.engine.synthetic_mean_tokens, float(most)), "engine.synthetic_mean_tokens"
    else:
        mean, said = max(min(FEWEST, most), SHARE_OF_MOST * most), "by workflow.max_new_tokens"
    prompt = min(USUAL_PROMPT, config.engine.context_length - most)
    return Assumptions(Lengths(mean, SIGMA, most), prompt, cpu_gflops=cpu_gflops or CPU_GFLOPS, said={
        "mean_tokens": said, "sigma": "usual", "prompt_tokens": "usual", "cpu_gflops": "tried on this machine" if cpu_gflops else "usual"})
