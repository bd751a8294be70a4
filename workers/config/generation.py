"""Config of what happens on inference devices: model, leases, engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from workers.config.choices import Dtype, Interrupt, ModelSource, Server
from workers.config.rules import require


@dataclass
class RoutingShape:
    """The choice of experts for one token, in each of the mixture's layers `experts_per_token` of `num_experts`; the first `num_dense` layers have
    none. It travels as bytes: a number each, of one byte up to 256 experts, else of two (little-endian). All 0: not a mixture."""

    num_layers: int = 0  # layers with experts
    num_dense: int = 0  # layers before these
    experts_per_token: int = 0  # that a token goes to in each of them
    num_experts: int = 0  # of a layer

    @property
    def dtype(self) -> str:
        """Of an expert's number, in numpy's terms."""
        return "|u1" if self.num_experts <= 256 else "<u2"

    @property
    def token_bytes(self) -> int:
        """Of one token's."""
        return self.num_layers * self.experts_per_token * int(self.dtype[-1])


@dataclass
class ModelConfig:
    """The starting model: a Hugging Face folder, or one that is made on the spot."""

    source: ModelSource = ModelSource.folder  # a folder of your own, or a model that is made on the spot (model=smollm2, model=tiny)
    path: str = ""  # Hugging Face folder of the starting model
    vocab_size: int = 0  # [tokens] of the model; found when a run is prepared
    routing: RoutingShape = field(default_factory=RoutingShape)  # of a mixture; found when a run is prepared

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work; the folder is checked by workers/prepare.py."""
        require(bool(self.path), "model.path", self.path, "must name a folder",
                "Give the Hugging Face folder of the starting model (config.json, *.safetensors, tokenizer.json)")


AUTO = "auto"


@dataclass
class RolloutConfig:
    """Leases and failures of rollout workers, and what is kept of what they bring. `concurrency`: training groups in flight over all workers, or
    `auto`: as few as keep their engines saturated, found while the run goes on (docs/staleness.md)."""

    concurrency: int | str = 16  # [groups] in flight over all workers, or auto
    max_attempts: int = 3  # a group that fails this often is set aside
    max_idle_minutes: float = 10.0  # a worker without a training job exits after this time
    keep: int = 2  # [groups] of each step whose samples are kept to be read, and, unless it is 0, all held-out ones (docs/rollouts.md)
    keep_mb: int = 1000  # [MiB] that these files may come to; the oldest go first

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        known = self.concurrency >= 1 if isinstance(self.concurrency, int) else self.concurrency == AUTO
        require(known, "rollout.concurrency", self.concurrency,
                f"must be a whole number of at least 1, or {AUTO}", "It is the number of groups in flight over all workers")
        require(self.max_attempts >= 1, "rollout.max_attempts", self.max_attempts, "must be at least 1",
                "A group that fails this often is set aside")
        require(self.max_idle_minutes > 0, "rollout.max_idle_minutes", self.max_idle_minutes, "must be positive",
                "A worker without a coordinator exits after this time")
        require(0 <= self.keep <= 1000, "rollout.keep", self.keep, "must be from 0 to 1000", "0 keeps none")
        require(self.keep_mb >= 1, "rollout.keep_mb", self.keep_mb, "must be at least 1", "rollout.keep=0 keeps none")


@dataclass
class EngineParallelConfig:
    """How one SGLang server is spread over the devices of a replica; a replica of more devices has several servers, and one of more than a node
    has is spread over several nodes. (A synthetic server takes tp * pp devices, and does nothing with them.)

    `tp` split every matrix, `pp` hold a part of the layers each. Within the `tp` devices, `ep` share the experts of a mixture, and
    `dp_attention` groups do the attention of requests of their own (for models with few key-value heads).
    """

    tp: int = 1  # [devices] that split every matrix
    pp: int = 1  # [devices] that hold a part of the layers each
    ep: int = 1  # [devices] that share the experts of a mixture, within tp
    dp_attention: int = 1  # groups within tp that do the attention of requests of their own

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

    server: Server = Server.embedded  # the inference server that rollout workers start
    dtype: Dtype = Dtype.float32  # arithmetic of the inference servers; auto: what the machine runs fastest
    num_slots: int = 64  # [requests] generated at once by a server
    context_length: int = 256  # [tokens] of a prompt with all its answers
    prefill_chunk: int = 512  # [tokens] of prompts in one step of the embedded server
    interrupt: Interrupt = Interrupt.retract  # what new weights do to running generations
    start_timeout_s: float = 120.0  # for a server to start
    request_timeout_s: float = 600.0  # for one answer
    load_timeout_s: float = 300.0  # for pausing, and for loading weights that are on the node
    health_timeout_s: float = 60.0  # without a sign of life after which a server is started again
    max_restarts: int = 3  # how often that may happen within restart_minutes
    restart_minutes: float = 60.0  # over which restarts are counted
    num_threads: int = 1  # of a server's libraries on the CPU
    parallel: EngineParallelConfig = field(default_factory=EngineParallelConfig)
    python: str = ""  # interpreter of an environment that has SGLang; empty: this one
    device: str = ""  # SGLang's --device; empty: what it finds
    mem_fraction: float = 0.0  # SGLang's share of a GPU's memory; 0: SGLang decides
    extra_args: list[str] = field(default_factory=list)  # further flags of sglang.launch_server, as ["--flag=value"]
    synthetic_tokens_per_s: float = 2000.0  # [tokens per second] that a synthetic server makes up for each request
    synthetic_mean_tokens: float = 64.0  # [tokens] of its answers on average

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

    def check_tells_routing(self) -> None:
        """Raise `ConfigError` unless servers say which experts they choose, as algorithm.router_replay=rollout wants it."""
        where = "with algorithm.router_replay=rollout"
        require(self.server is not Server.synthetic, "engine.server", self.server.value, f"must be sglang or embedded {where}", "It has no experts")
        require(self.device != "cpu", "engine.device", self.device, f"must not be cpu {where}", "SGLang keeps the experts that it chose in memory "
                "pinned for a GPU; engine.server=embedded tells them on CPUs")
        require(self.parallel.pp == 1, "engine.parallel.pp", self.parallel.pp, f"must be 1 {where}", "Each stage tells its own layers' alone; use tp")

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
        for name in ("ep", "dp_attention", *(("tp", "pp") if self.server is Server.embedded else ())):
            require(getattr(self.parallel, name) == 1, f"engine.parallel.{name}", getattr(self.parallel, name), f"must be 1 {where}",
                    "It runs on one device; a replica of several devices has a server on each")
        for name in ("python", "device", "extra_args", "mem_fraction"):
            require(not getattr(self, name), f"engine.{name}", getattr(self, name), f"must be empty {where}", "It is for engine.server=sglang")
