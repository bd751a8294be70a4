"""Config of what happens on training devices: staleness, optimiser, weights. The objective: algorithm.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from workers.config.choices import (
    Bound,
    Control,
    Device,
    Dtype,
    Interrupt,
    LoraTarget,
    Recompute,
    Schedule,
    Security,
    SelfTestAction,
    Server,
    Swap,
    Transport,
)
from workers.config.generation import EngineConfig
from workers.config.rules import require


@dataclass
class StalenessConfig:
    """How far rollouts may run ahead of the trainer. `target`: the mean age in training steps up to which groups are admitted, at most `eta` (null:
    `eta` itself); room below `eta` is time for stragglers, which `bound=hard` would wait for (docs/staleness.md). `warmup_steps`: training steps in
    which that grows from 0, where the policy moves fastest. `control=divergence` admits less than that, where the trainer does not wait, or samples
    would come from policies farther from the one in training than the budget: `max_divergence`, `max_divergence_p99`, `min_ess`; null: none."""

    eta: int = 4  # [training steps] that rollouts may be older than the weights they train; 0: synchronous
    bound: Bound = Bound.admission  # how that is kept: by admission, or as a hard bound for every token
    target: float | None = None  # [training steps] of mean age up to which groups are admitted; null: eta
    warmup_steps: int = 0  # [training steps] in which eta grows from 0
    control: Control = Control.eta  # how far ahead within eta: all of it, or as far as trainer and engines need and divergence allows
    max_divergence: float | None = 0.1  # [nats a token] mean |log pi_prox - log pi_behav| of a batch, with control=divergence; null: any
    max_divergence_p99: float | None = None  # [nats] that 99% of a batch's tokens are to be within; null: any
    min_ess: float | None = None  # effective sample size of the behaviour weights, as a share of the tokens, to stay above; null: any

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.warmup_steps >= 0, "staleness.warmup_steps", self.warmup_steps, "must not be negative", "0 admits as far ahead from the start")
        require(self.eta >= 0, "staleness.eta", self.eta, "must be 0 or more",
                "0 is synchronous training, 4 the paper's choice for code, 8 for mathematics")
        require(self.target is None or 0 <= self.target <= self.eta, "staleness.target", self.target,
                f"must be from 0 to staleness.eta={self.eta}", "null admits as far ahead as eta allows")
        budgets = {"max_divergence": self.max_divergence, "max_divergence_p99": self.max_divergence_p99}
        for name, budget in budgets.items():
            require(budget is None or 0 < budget < math.inf, f"staleness.{name}", budget, "must be positive",
                    "0.1 nats a token is where uncorrected objectives begin to fail; null bounds nothing")
        require(self.max_divergence_p99 is None or 1 / 128 <= self.max_divergence_p99 <= 16, "staleness.max_divergence_p99", self.max_divergence_p99,
                "must be from 1/128 to 16", "Farther, and nearer, is not measured")
        require(self.min_ess is None or 0 < self.min_ess < 1, "staleness.min_ess", self.min_ess, "must be between 0 and 1, without these",
                "0.8 keeps four fifths of the tokens' worth; null bounds nothing")
        if self.control is Control.divergence:
            require(self.eta > 0, "staleness.control", self.control.value, "must be eta with staleness.eta=0", "Nothing runs ahead then; raise eta")
            require(any(budget is not None for budget in (*budgets.values(), self.min_ess)), "staleness.control", self.control.value,
                    "needs a budget", "Give staleness.max_divergence, max_divergence_p99 or min_ess")


@dataclass
class ParallelConfig:
    """How training is spread over devices (Megatron-core's terms; docs/trainer.md).

    One copy of the model takes tp * pp * cp devices: `tp` split every matrix, `pp` hold a part of the layers each, in `vpp` pieces (interleaved
    stages: arXiv 2104.04473, section 2.2), `cp` share the tokens of a micro-batch; `sequence` also splits what lies between the matrices over the
    tp devices. `dp` copies share a batch, and the optimizer's state (0: as many as training's devices hold). `ep` devices share the experts of a
    mixture.
    """

    tp: int = 1  # [devices] that split every matrix
    pp: int = 1  # [devices] that hold a part of the layers each
    vpp: int = 1  # pieces of the model on each of the pp devices: shorter waits, more exchanges
    cp: int = 1  # [devices] that share the tokens of a micro-batch
    ep: int = 1  # [devices] that share the experts of a mixture
    dp: int = 0  # copies of the model; 0: as many as fit
    sequence: bool = True  # what lies between the matrices is split over tp too

    @property
    def unit(self) -> int:
        """Devices of one copy of the model."""
        return self.tp * self.pp * self.cp

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work whatever the model."""
        for name in ("tp", "pp", "cp", "ep"):
            require(getattr(self, name) >= 1, f"trainer.parallel.{name}", getattr(self, name), "must be at least 1", "1 does not split")
        require(self.vpp >= 1, "trainer.parallel.vpp", self.vpp, "must be at least 1", "1 gives each device one piece")
        require(self.vpp == 1 or self.pp > 1, "trainer.parallel.vpp", self.vpp, "must be 1 with trainer.parallel.pp=1",
                "There are no stages to interleave")
        require(self.dp >= 0, "trainer.parallel.dp", self.dp, "must be 0 or more", "0 takes as many as training's devices hold")


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685; docs/lora.md): a matrix of `targets` is W + (alpha / rank) B A, where W is the starting model's,
    which stays, and A [rank, in] and B [out, rank] are trained. A critic has adapters too, beside its head, which is trained as a whole."""

    rank: int = 0  # of the adapters; 0: none, the whole model is trained
    alpha: float = 32.0  # what adapters add is multiplied by alpha / rank
    targets: list[LoraTarget] = field(default_factory=lambda: list(LoraTarget))  # matrices of a layer that have adapters

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.rank >= 0, "trainer.lora.rank", self.rank, "must not be negative", "16 is usual; 0 trains the whole model")
        require(0 < self.alpha < math.inf, "trainer.lora.alpha", self.alpha, "must be positive", "32 is usual, whatever the rank")
        named = [target.value for target in self.targets]
        require(bool(named), "trainer.lora.targets", named, "must not be empty",
                f"Name some of {', '.join(target.value for target in LoraTarget)}; trainer.lora.rank=0 trains the whole model")
        require(len(set(named)) == len(named), "trainer.lora.targets", named, "names a matrix twice", "Name each once")


@dataclass
class TrainerConfig:
    """The optimiser and the batch. Batches are counted in prompt groups. `prefetch`: the next batch is fetched while a step is computed.
    `optimizer_offload`: the share of the optimizer's state that is kept, and updated, in the host's memory."""

    batch_groups: int = 8  # [groups] of samples in a training step
    num_minibatches: int = 2  # updates in a training step
    microbatch_tokens: int = 2048  # [tokens] of one pass; bounds memory; 0: by the memory of a training GPU
    device: Device = Device.auto  # what training runs on; auto: GPUs where its jobs ask for them, or this machine has some
    dtype: Dtype = Dtype.float32  # arithmetic of training, whose optimizer keeps float32; auto: what the machine runs fastest
    lr: float = 2e-5  # learning rate
    lr_schedule: Schedule = Schedule.constant  # after the warm-up
    warmup_steps: int = 0  # [training steps] in which the learning rate grows from 0
    min_lr: float = 0.0  # learning rate at the end of a linear or cosine schedule
    adam_beta1: float = 0.9  # Adam's first moment
    adam_beta2: float = 0.95  # Adam's second moment
    adam_eps: float = 1e-5  # Adam's epsilon
    weight_decay: float = 0.05  # decoupled, as in AdamW
    clip_grad: float = 1.0  # greatest norm of the gradient
    share_prompts: bool = True  # the prompt of a group is computed once
    prefetch: bool = True  # the next batch is fetched while a step is computed
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    recompute: Recompute = Recompute.none  # which activations the backward pass makes again
    optimizer_offload: float = 0.0  # share of the optimizer's state in the host's memory
    export_final: bool = True  # the trained model is written to RUN/final_model
    export_every_steps: int = 0  # [training steps] between RUN/exports; 0: none
    export_keep: int = 2  # newest exports that stay
    num_threads: int = 1  # of one training process

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.batch_groups >= 1, "trainer.batch_groups", self.batch_groups, "must be at least 1", "Give the groups per training step")
        require(self.num_minibatches >= 1, "trainer.num_minibatches", self.num_minibatches, "must be at least 1", "The paper uses 4")
        require(self.batch_groups % self.num_minibatches == 0, "trainer.num_minibatches", self.num_minibatches,
                f"must divide trainer.batch_groups={self.batch_groups}",
                f"Use one of {[d for d in range(1, self.batch_groups + 1) if self.batch_groups % d == 0]}")
        require(self.microbatch_tokens >= 1, "trainer.microbatch_tokens", self.microbatch_tokens, "must be at least 1", "Give a token budget")
        require(0 <= self.lr < 1, "trainer.lr", self.lr, "must be from 0 to less than 1", "The paper uses 2e-5")
        for key in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, key) < 1, f"trainer.{key}", getattr(self, key), "must be in [0, 1)", "The paper uses 0.9 and 0.95")
        require(self.adam_eps > 0, "trainer.adam_eps", self.adam_eps, "must be positive", "The paper uses 1e-5")
        require(self.weight_decay >= 0, "trainer.weight_decay", self.weight_decay, "must not be negative", "The paper uses 0.05")
        require(0 <= self.min_lr <= self.lr, "trainer.min_lr", self.min_lr, f"must be from 0 to trainer.lr={self.lr}", "Use 0 to decay to nothing")
        require(self.warmup_steps >= 0, "trainer.warmup_steps", self.warmup_steps, "must not be negative", "Use 0 for no warm-up")
        require(self.clip_grad > 0, "trainer.clip_grad", self.clip_grad, "must be positive", "The paper uses 1.0")
        require(0 <= self.optimizer_offload <= 1, "trainer.optimizer_offload", self.optimizer_offload, "must be from 0 to 1",
                "0 keeps all of it on the devices, 1 nothing")
        require(self.export_every_steps >= 0, "trainer.export_every_steps", self.export_every_steps, "must not be negative",
                "0 exports at the end only")
        require(self.export_keep >= 1, "trainer.export_keep", self.export_keep, "must be at least 1", "Each takes the room of a model")
        require(self.dtype is not Dtype.float16, "trainer.dtype", self.dtype.value, "must be auto, float32 or bfloat16",
                "Gradients underflow in float16, and losses are not scaled here; engine.dtype may be float16")
        self.parallel.check()
        self.lora.check()
        require(self.num_threads >= 1, "trainer.num_threads", self.num_threads, "must be at least 1", "Give 1 or more")


MAX_STREAMS = 16


@dataclass
class WeightsConfig:
    """How new weights reach the rollout workers."""

    transport: Transport = Transport.zmq  # how new weights reach the rollout workers; auto: nccl from GPU to GPU, where that can be, else zmq
    dir: str = "auto"  # where weights lie: auto, run, or a folder; docs/weights.md
    security: Security = Security.digest  # of streamed weights: digests, or encryption too
    delta: bool = False  # only what has changed is sent
    adapter_only: bool = False  # adapters are sent without the model (trainer.lora), and merged on each node that generates
    chunk_mb: int = 4  # of one streamed piece
    streams: int = 4  # connections over which a node fetches from each source
    fanout: int = 2  # workers that fetch from the trainer, and from each worker
    rolling: bool = True  # never all workers load at once
    swap: Swap = Swap.pause  # engines stand still while they load; overlap: they load while they generate (engine.server=embedded)
    timeout_s: float = 120.0  # after which a transport that brings nothing has failed

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(bool(self.dir), "weights.dir", self.dir, "must name a folder",
                "'auto' takes memory-backed storage for what each node holds, and the run folder for what all nodes read")
        require(1 <= self.chunk_mb <= 256, "weights.chunk_mb", self.chunk_mb, "must be from 1 to 256", "4 suits most networks")
        require(1 <= self.fanout <= 64, "weights.fanout", self.fanout, "must be from 1 to 64",
                "So many workers fetch from the trainer, and as many from each worker")
        require(1 <= self.streams <= MAX_STREAMS, "weights.streams", self.streams, f"must be from 1 to {MAX_STREAMS}",
                "One connection brings 1 to 2 GB/s at most; each takes a thread on both sides")
        require(self.swap is Swap.pause or self.transport is not Transport.nccl, "weights.swap", self.swap.value, "must be pause with weights=nccl",
                "A broadcast is of one moment, for which all engines of the group stand still; use weights=zmq")
        require(not self.adapter_only or self.transport is not Transport.nccl, "weights.adapter_only", True, "must be false with weights=nccl",
                "A broadcast goes into the engines' own tensors; use weights=zmq")
        require(self.timeout_s > 0, "weights.timeout_s", self.timeout_s, "must be positive",
                "A transport that brings nothing for so long has failed")

    def check_engine(self, engine: EngineConfig) -> None:
        """Raise `ConfigError` on an inference server into which weights cannot be brought so."""
        if self.transport is Transport.nccl:
            check_broadcasts(engine)
        if self.swap is Swap.overlap:
            where = "with weights.swap=overlap"
            require(engine.server is not Server.sglang, "engine.server", engine.server.value, f"must not be sglang {where}",
                    "SGLang copies new weights over those that serve, which must stand still for it; use weights.swap=pause")
            require(engine.interrupt is not Interrupt.abort, "engine.interrupt", engine.interrupt.value, f"must not be abort {where}",
                    "Requests stay in the engine; use retract or in_place")


def check_broadcasts(engine: EngineConfig) -> None:
    """Raise `ConfigError` on an inference server into which weights cannot be broadcast."""
    where = "with weights.transport=nccl"
    require(engine.server is not Server.synthetic, "engine.server", engine.server.value, f"must not be synthetic {where}",
            "It holds no weights; use weights=zmq")
    for name in ("pp", "dp_attention"):
        require(getattr(engine.parallel, name) == 1, f"engine.parallel.{name}", getattr(engine.parallel, name), f"must be 1 {where}",
                "SGLang's servers take broadcasts with tensor parallelism only; use weights=zmq")


MEAN_TOLERANCE = {Dtype.float32: 1e-3, Dtype.bfloat16: 0.1, Dtype.float16: 0.1}


@dataclass
class SelfTestConfig:
    """Whether engines and trainer compute the same log-probs from the same weights; judged before the first update of a run or of one that goes
    on, and once more for the first weights that were published after an update.

    `action`: a failed test ends the run (`fail`) or is said in the training job's log (`warn`); `off` compares nothing. `auto` is `fail`, but
    `off` with engine.server=synthetic, which holds no model. `mean_tolerance`: the greatest mean of |difference|, in nats a token (0: 0.001 where
    engine and trainer compute in float32, else 0.1).
    """

    action: SelfTestAction = SelfTestAction.auto  # what follows when engine and trainer disagree on log-probs
    mean_tolerance: float = 0.0  # [nats per token] of difference that are allowed on average; 0: by dtype

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.mean_tolerance >= 0, "selftest.mean_tolerance", self.mean_tolerance, "must not be negative",
                "0 goes by engine.dtype and trainer.dtype")
