"""Config of what happens on inference devices: model, prompts, samples, rewards, engine, evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from workers.config.choices import DataKind, Dtype, Interrupt, ModelSource, Server
from workers.config.rules import require


@dataclass
class ModelConfig:
    """The starting model: a Hugging Face folder, or one that is made on the spot."""

    source: ModelSource = ModelSource.folder
    path: str = ""

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work; the folder is checked by workers/prepare.py."""
        require(bool(self.path), "model.path", self.path, "must name a folder",
                "Give the Hugging Face folder of the starting model (config.json, *.safetensors, tokenizer.json)")


@dataclass
class DataConfig:
    """Prompts. Training and held-out prompts are disjoint; order depends on `run.seed` only.

    `response_field`: the column of JSONL files with the answers that a supervised run learns.
    """

    kind: DataKind = DataKind.arithmetic
    num_heldout: int = 200
    digits: int = 2
    num_examples: int = 2
    task: str = "chain_sum"
    options: dict[str, str | int | float | bool] = field(default_factory=dict)
    path: str = ""
    heldout_path: str = ""
    response_field: str = "response"
    chat_template: bool = False

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.num_heldout >= 1, "data.num_heldout", self.num_heldout, "must be at least 1", "200 or more give a useful figure")
        require(1 <= self.digits <= 6, "data.digits", self.digits, "must be from 1 to 6", "It is the number of digits of each summand")
        require(0 <= self.num_examples <= 16, "data.num_examples", self.num_examples, "must be from 0 to 16",
                "It is the number of worked examples in front of each question")
        if self.kind is DataKind.jsonl:
            for key, value in (("path", self.path), ("heldout_path", self.heldout_path)):
                require(bool(value), f"data.{key}", value, "must name a JSONL file when data.kind=jsonl",
                        'Each line: {"prompt": ..., "answer": ...}')
        require(self.response_field not in ("", "prompt", "id", "verifier"), "data.response_field", self.response_field,
                "must name a column, and not one that has another meaning", "Use response, or answer where that is the whole answer")


@dataclass
class WorkflowConfig:
    """How one group of samples is generated.

    The log-probs that are recorded, and that training reckons with, are those of the distribution at `temperature`, before any
    cut by `top_p` or `top_k` (as in SGLang): leave those two at 1 and -1 for training that is exact.
    """

    group_size: int = 8
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.group_size >= 1, "workflow.group_size", self.group_size, "must be at least 1",
                "Group-normalised advantages need 2 or more")
        require(self.max_new_tokens >= 1, "workflow.max_new_tokens", self.max_new_tokens, "must be at least 1", "Give the longest answer")
        require(self.temperature > 0, "workflow.temperature", self.temperature, "must be greater than 0",
                "Training samples need a distribution; evaluation is greedy by itself")
        require(0 < self.top_p <= 1, "workflow.top_p", self.top_p, "must be in (0, 1]", "Use 1 for no nucleus cut")
        require(all(self.stop), "workflow.stop", self.stop, "must not hold an empty string", "Leave it out")
        require(self.top_k == -1 or self.top_k >= 1, "workflow.top_k", self.top_k, "must be -1 or at least 1", "Use -1 for no cut")


@dataclass
class RewardConfig:
    """The verifier and the pool of processes that runs it beside generation."""

    verifier: str = "numeric"
    correct: float = 5.0
    wrong: float = -5.0
    num_processes: int = 1
    timeout_s: float = 10.0
    memory_mb: int = 1024
    max_retries: int = 2

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.correct > self.wrong, "reward.correct", self.correct, f"must be greater than reward.wrong={self.wrong}",
                "The paper uses +5 and -5")
        require(self.num_processes >= 1, "reward.num_processes", self.num_processes, "must be at least 1", "Give 1 or more")
        require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "must be positive", "A verifier is killed after this time")
        require(self.memory_mb >= 128, "reward.memory_mb", self.memory_mb, "must be at least 128", "It bounds each verifier process")
        require(self.max_retries >= 0, "reward.max_retries", self.max_retries, "must not be negative", "Give 0 or more")


@dataclass
class RolloutConfig:
    """Leases and failures of rollout workers."""

    concurrency: int = 16
    max_attempts: int = 3
    max_idle_minutes: float = 10.0

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.concurrency >= 1, "rollout.concurrency", self.concurrency, "must be at least 1",
                "It is the number of groups in flight over all workers")
        require(self.max_attempts >= 1, "rollout.max_attempts", self.max_attempts, "must be at least 1",
                "A group that fails this often is set aside")
        require(self.max_idle_minutes > 0, "rollout.max_idle_minutes", self.max_idle_minutes, "must be positive",
                "A worker without a coordinator exits after this time")


@dataclass
class EngineParallelConfig:
    """How one SGLang server is spread over the devices of a replica; a replica of more devices has several servers.

    `tp` split every matrix, `pp` hold a part of the layers each. Within the `tp` devices, `ep` share the experts of a mixture, and
    `dp_attention` groups do the attention of requests of their own (for models with few key-value heads).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_attention: int = 1

    @property
    def unit(self) -> int:
        """Devices of one server."""
        return self.tp * self.pp

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work whatever the model."""
        for name in ("tp", "pp", "ep", "dp_attention"):
            require(getattr(self, name) >= 1, f"engine.parallel.{name}", getattr(self, name), "must be at least 1", "1 does not split")
        for name in ("ep", "dp_attention"):
            require(self.tp % getattr(self, name) == 0, f"engine.parallel.{name}", getattr(self, name),
                    f"must divide engine.parallel.tp={self.tp}", "These devices are shared once more")


SGLANG_FLAGS = (
    "--model-path", "--model", "--tokenizer-path", "--host", "--port", "--api-key", "--admin-api-key", "--tp-size", "--tensor-parallel-size",
    "--pp-size", "--pipeline-parallel-size", "--dp-size", "--data-parallel-size", "--attn-dp-size", "--attention-data-parallel-size",
    "--enable-dp-attention", "--ep-size", "--expert-parallel-size", "--ep", "--dtype", "--context-length", "--max-running-requests",
    "--mem-fraction-static", "--weight-version", "--sleep-on-idle", "--skip-server-warmup", "--device", "--base-gpu-id", "--gpu-id-step", "--nnodes",
    "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--nccl-port", "--log-level-http", "--tokenizer-worker-num", "--config", "--use-ray")
"""What Headway sets itself, or what would take the server out of its hands."""


@dataclass
class EngineConfig:
    """The inference servers that a rollout worker starts and owns: one for each engine.parallel.tp * pp devices of its replica.

    A server that dies, or shows no sign of life for `health_timeout_s`, is started again, `max_restarts` times within `restart_minutes`; then
    the worker fails. `load_timeout_s`: for pausing, and for loading weights that are on the node.

    For SGLang: `python` is the interpreter of an environment that has it ('': the workers' own), `device` as in its --device ('': what it
    finds), `mem_fraction` the share of a GPU's memory for weights and KV cache (0: SGLang decides), `extra_args` further flags of
    `sglang.launch_server`.
    """

    server: Server = Server.embedded
    dtype: Dtype = Dtype.float32
    num_slots: int = 64
    context_length: int = 256
    prefill_chunk: int = 512
    interrupt: Interrupt = Interrupt.retract
    start_timeout_s: float = 120.0
    request_timeout_s: float = 600.0
    load_timeout_s: float = 300.0
    health_timeout_s: float = 60.0
    max_restarts: int = 3
    restart_minutes: float = 60.0
    num_threads: int = 1
    parallel: EngineParallelConfig = field(default_factory=EngineParallelConfig)
    python: str = ""
    device: str = ""
    mem_fraction: float = 0.0
    extra_args: list[str] = field(default_factory=list)
    synthetic_tokens_per_s: float = 2000.0
    synthetic_mean_tokens: float = 64.0

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        for key in ("num_slots", "context_length", "prefill_chunk", "num_threads"):
            require(getattr(self, key) >= 1, f"engine.{key}", getattr(self, key), "must be at least 1", "Give 1 or more")
        for key in ("start_timeout_s", "request_timeout_s", "load_timeout_s", "health_timeout_s", "restart_minutes", "synthetic_tokens_per_s",
                    "synthetic_mean_tokens"):
            require(0 < getattr(self, key) < math.inf, f"engine.{key}", getattr(self, key), "must be positive", "Give a positive number")
        require(self.max_restarts >= 0, "engine.max_restarts", self.max_restarts, "must not be negative", "0 lets the worker end with its server")
        require(0 <= self.mem_fraction < 1, "engine.mem_fraction", self.mem_fraction, "must be from 0 to less than 1", "0 lets SGLang decide")
        self.parallel.check()
        if self.server is Server.sglang:
            self._check_extra_args()
        else:
            self._check_plain()

    def _check_extra_args(self) -> None:
        for argument in self.extra_args:
            name = argument.partition("=")[0].replace("_", "-")
            # SGLang takes the beginning of a flag for the flag.
            own = [flag for flag in SGLANG_FLAGS if name.startswith("--") and len(name) > 2 and flag.startswith(name)]
            require(not own, "engine.extra_args", argument, f"must hold none of the flags that Headway sets itself (here {', '.join(own)})",
                    "Use the keys of engine.*")

    def _check_plain(self) -> None:
        """What only SGLang knows."""
        where = f"with engine.server={self.server.value}"
        for name in ("tp", "pp", "ep", "dp_attention"):
            require(getattr(self.parallel, name) == 1, f"engine.parallel.{name}", getattr(self.parallel, name), f"must be 1 {where}",
                    "It runs on one device; a replica of several devices has a server on each")
        for name in ("python", "device", "extra_args", "mem_fraction"):
            require(not getattr(self, name), f"engine.{name}", getattr(self, name), f"must be empty {where}", "It is for engine.server=sglang")


@dataclass
class EvaluationConfig:
    """Held-out evaluation through the same fleet: before, every `every_steps`, after; never unless `enabled`."""

    enabled: bool = True
    every_steps: int = 0

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.every_steps >= 0, "evaluation.every_steps", self.every_steps, "must not be negative", "0 evaluates only before and after")
        require(self.enabled or not self.every_steps, "evaluation.every_steps", self.every_steps, "must be 0 with evaluation.enabled=false",
                "Leave one of them out")
