"""The workers' part of the one typed config: plain dataclasses, no torch, no Hydra.

The launcher composes these with Hydra, checks them (`check`), and writes them to the run folder as JSON; every worker
reads that file back with `load` and from then on holds these objects only. Units stand in the names (`_s`, `_mb`,
`num_`). A value that cannot work raises `ConfigError` naming the key, the value, the rule and the remedy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from workers.config.alarms import AlarmsConfig
from workers.config.algorithm import AlgorithmConfig, RouterReplay
from workers.config.choices import (
    Advantage,
    Aggregation,
    Bound,
    ClusterKind,
    Control,
    DataKind,
    Device,
    Dtype,
    ImportanceLevel,
    Interrupt,
    KlEstimator,
    KlPlace,
    LoraTarget,
    ModelSource,
    OffPolicy,
    Placement,
    Proximal,
    Recompute,
    RunKind,
    Schedule,
    Security,
    SelfTestAction,
    Server,
    Surrogate,
    Swap,
    Tracker,
    Transport,
)
from workers.config.container import ContainerBackend, ContainerConfig
from workers.config.data import DataConfig, bring_up
from workers.config.evaluation import EvaluationConfig
from workers.config.generation import EngineConfig, EngineParallelConfig, ModelConfig, RolloutConfig, RoutingShape
from workers.config.reward import RewardConfig
from workers.config.rules import ConfigError, require
from workers.config.sandbox import SandboxBackend, SandboxConfig, SandboxPolicy
from workers.config.system import AllocationConfig, CheckpointConfig, ClusterConfig, RunConfig, TransportConfig
from workers.config.tracking import TrackingConfig
from workers.config.training import (
    MEAN_TOLERANCE,
    LoraConfig,
    ParallelConfig,
    SelfTestConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from workers.config.workflow import WorkflowConfig

__all__ = [
    "Advantage", "Aggregation", "AlarmsConfig", "AlgorithmConfig", "AllocationConfig", "Bound", "CheckpointConfig", "ClusterConfig",
    "ClusterKind", "Config", "ConfigError", "ContainerBackend", "ContainerConfig", "Control", "DataConfig", "DataKind", "Device", "Dtype",
    "EngineConfig", "EngineParallelConfig", "EvaluationConfig", "ImportanceLevel", "Interrupt", "KlEstimator", "KlPlace", "LoraConfig",
    "LoraTarget", "ModelConfig", "ModelSource", "OffPolicy", "ParallelConfig", "Placement", "Proximal", "Recompute", "RewardConfig",
    "RolloutConfig", "RouterReplay", "RoutingShape", "RunConfig", "RunKind", "SandboxBackend", "SandboxConfig", "SandboxPolicy", "Schedule",
    "Security", "SelfTestAction", "SelfTestConfig", "Server", "StalenessConfig", "Surrogate", "Swap", "Tracker", "TrackingConfig",
    "TrainerConfig",
    "Transport", "TransportConfig", "WeightsConfig", "WorkflowConfig", "load", "require",
]


@dataclass
class Config:
    """Everything that the workers of one run need to know."""

    run: RunConfig = field(default_factory=RunConfig)
    allocation: AllocationConfig = field(default_factory=AllocationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    selftest: SelfTestConfig = field(default_factory=SelfTestConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def check(self) -> None:
        """Check every part, then what holds between parts. Raises `ConfigError`."""
        for name in ("run", "allocation", "cluster", "model", "data", "workflow", "reward", "sandbox", "rollout", "engine", "staleness",
                     "algorithm", "trainer", "weights", "evaluation", "checkpoint", "selftest", "alarms", "transport", "tracking"):
            getattr(self, name).check()
        require((self.data.kind is DataKind.verifiers) == (self.workflow.name == "verifiers"), "data.kind", self.data.kind.value,
                f"does not go with workflow.name={self.workflow.name}: an environment brings its prompts", "workflow=verifiers chooses both")
        if self.evaluates:
            self._check_inference()
            self._check_evaluation()
            return
        require(not self.evaluation.run, "evaluation.run", self.evaluation.run, "must be empty unless run.kind=evaluation",
                "Evaluate a model alone with eval=greedy or eval=sampled")
        require(self.trainer.microbatch_tokens >= self.engine.context_length, "trainer.microbatch_tokens", self.trainer.microbatch_tokens,
                f"must be at least engine.context_length={self.engine.context_length}", "The longest sample must fit into a micro-batch")
        require(self.trainer.warmup_steps <= self.run.num_steps, "trainer.warmup_steps", self.trainer.warmup_steps,
                f"must be at most run.num_steps={self.run.num_steps}", "Shorten the warm-up")
        require(self.algorithm.critic_warmup_steps <= self.run.num_steps, "algorithm.critic_warmup_steps", self.algorithm.critic_warmup_steps,
                f"must be at most run.num_steps={self.run.num_steps}", "The policy is not trained before")
        require(self.evaluation.enabled or self.run.target_accuracy is None, "run.target_accuracy", self.run.target_accuracy,
                "must be null with evaluation.enabled=false", "Nothing is judged on held-out prompts then")
        self.alarms.check_judged(self.supervised)
        if self.supervised:
            self._check_supervised()
        else:
            self._check_rl()

    @property
    def supervised(self) -> bool:
        """Whether this run trains on answers of the data set, and generates none."""
        return self.run.kind is RunKind.supervised

    @property
    def group_size(self) -> int:
        """Samples of a prompt that are trained on."""
        return 1 if self.supervised else self.workflow.group_size

    @property
    def broadcasts(self) -> bool:
        """Whether new weights are broadcast into the engines."""
        return self.weights.transport is Transport.nccl and not self.supervised

    @property
    def evaluates(self) -> bool:
        """Whether this run trains nothing, and judges the answers of a model to held-out prompts."""
        return self.run.kind is RunKind.evaluation

    @property
    def rewards_apart(self) -> bool:
        """Whether verifiers run in elements of their own."""
        return self.reward.placement is Placement.array and not self.supervised

    @property
    def batch_transport(self) -> TransportConfig:
        """`transport` of those that get batches: a share may be a whole batch, and each of its groups as large as a message may be."""
        return dataclasses.replace(self.transport, max_message_mb=self.transport.max_message_mb * self.trainer.batch_groups)

    @property
    def self_test_action(self) -> SelfTestAction:
        """`selftest.action`, settled."""
        if self.supervised or self.evaluates:
            return SelfTestAction.off
        if self.selftest.action is not SelfTestAction.auto:
            return self.selftest.action
        return SelfTestAction.off if self.engine.server is Server.synthetic else SelfTestAction.fail

    @property
    def mean_tolerance(self) -> float:
        """`selftest.mean_tolerance`, settled."""
        return self.selftest.mean_tolerance or max(MEAN_TOLERANCE[dtype] for dtype in (self.engine.dtype, self.trainer.dtype))

    @property
    def num_servers(self) -> int:
        """Inference servers of one rollout worker."""
        return max(1, self.allocation.replica_size // self.engine.parallel.unit)

    @property
    def replayed(self) -> RoutingShape | None:
        """The choices of experts that travel with the tokens that are trained on; None: there are none."""
        return self.model.routing if self.algorithm.router_replay is RouterReplay.rollout and not self.evaluates else None

    def _check_inference(self) -> None:
        """What holds wherever answers are generated."""
        unit = self.engine.parallel.unit
        require(self.allocation.replica_size % unit == 0, "allocation.replica_size", self.allocation.replica_size,
                f"must be a multiple of the {unit} devices of one server (engine.parallel.tp * pp)",
                f"Use {max(1, self.allocation.replica_size // unit) * unit}")
        require(self.workflow.max_new_tokens < self.engine.context_length, "workflow.max_new_tokens", self.workflow.max_new_tokens,
                f"must be less than engine.context_length={self.engine.context_length}", "The prompt needs room too")
        require(not (self.rewards_apart and self.workflow.scores_itself), "reward.placement", self.reward.placement.value,
                f"must be node with workflow={self.workflow.name}", "Its episodes are scored where they run: jobs for rewards would judge nothing")
        for name in (*self.data.verifiers(self.reward.verifier), *self.reward.parts):
            self.reward.check_named(name)

    def _check_evaluation(self) -> None:
        """What has no meaning where nothing is trained."""
        where = "with run.kind=evaluation"
        require(self.evaluation.enabled, "evaluation.enabled", False, f"must be true {where}", "There is nothing else to do")
        require(not self.evaluation.every_steps, "evaluation.every_steps", self.evaluation.every_steps, f"must be 0 {where}", "There are no steps")
        require(self.run.target_accuracy is None, "run.target_accuracy", self.run.target_accuracy, f"must be null {where}", "Nothing is trained")
        require(self.reward.placement is Placement.node, "reward.placement", self.reward.placement.value, f"must be node {where}",
                "There is one array, whose elements judge what they generate: use reward=node")

    def _check_rl(self) -> None:
        self._check_inference()
        require(self.reward.overlong_buffer <= self.workflow.max_new_tokens, "reward.overlong_buffer", self.reward.overlong_buffer,
                f"must be at most workflow.max_new_tokens={self.workflow.max_new_tokens}", "Shorten the buffer")
        require(self.staleness.min_ess is None or self.algorithm.decoupled, "staleness.min_ess", self.staleness.min_ess,
                "must be null with algorithm.decoupled=false", "There are no weights then; bound staleness.max_divergence")
        require(not self.algorithm.compares_groups or self.workflow.group_size >= 2, "workflow.group_size",
                self.workflow.group_size, f"must be 2 or more with algorithm.advantage={self.algorithm.advantage.value}",
                "A group of one has nothing to be compared with; use algorithm.advantage=batch_norm")
        if self.replayed is not None:
            self.engine.check_tells_routing()
        self.weights.check_engine(self.engine)
        require(not self.weights.adapter_only or self.trainer.lora.rank > 0, "weights.adapter_only", True, "must be false with trainer.lora.rank=0",
                "The whole model is trained, and there are no adapters: leave it out, or give trainer.lora.rank=16")

    def _check_supervised(self) -> None:
        """What has no meaning without generated answers and their rewards."""
        where = "with run.kind=supervised"
        require(not self.algorithm.critic, "algorithm.advantage", self.algorithm.advantage.value, f"must not be gae {where}",
                "There are no rewards whose advantages a critic could estimate; leave algorithm at its default")
        require(not self.algorithm.kl_weight, "algorithm.kl_weight", self.algorithm.kl_weight, f"must be 0 {where}",
                "The loss is the negative log-likelihood of the answers alone")
        require(not self.algorithm.entropy_weight, "algorithm.entropy_weight", self.algorithm.entropy_weight, f"must be 0 {where}",
                "The loss is the negative log-likelihood of the answers alone")
        require(self.replayed is None, "algorithm.router_replay", self.algorithm.router_replay.value, f"must be off {where}",
                "No engine chooses experts")
        require(self.run.target_accuracy is None, "run.target_accuracy", self.run.target_accuracy, f"must be null {where}",
                "Nothing is generated that could be judged; run.num_steps ends the run")
        require(self.workflow.temperature == 1, "workflow.temperature", self.workflow.temperature, f"must be 1 {where}",
                "The likelihood is that of the model itself")


def load(path: Path) -> Config:
    """Read the config that the launcher wrote. Raises `ConfigError` if it is not valid."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=dict)
        bring_up(stored.get("data"))
        return msgspec.convert(stored, Config, strict=True)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not a readable run config ({error}). Start the run again with the launcher") from error
