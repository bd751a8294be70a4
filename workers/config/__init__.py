"""The workers' part of the one typed config: plain dataclasses, no torch, no Hydra.

The launcher composes these with Hydra, checks them (`check`), and writes them to the run folder as JSON; every worker
reads that file back with `load` and from then on holds these objects only. Units stand in the names (`_s`, `_mb`,
`num_`). A value that cannot work raises `ConfigError` naming the key, the value, the rule and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from workers.config.choices import (
    Advantage,
    Bound,
    ClusterKind,
    DataKind,
    Dtype,
    Interrupt,
    ModelSource,
    OffPolicy,
    Proximal,
    Recompute,
    RunKind,
    Schedule,
    Security,
    Server,
    Transport,
)
from workers.config.generation import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    WorkflowConfig,
)
from workers.config.rules import (
    ConfigError,
    require,
)
from workers.config.system import (
    AllocationConfig,
    CheckpointConfig,
    ClusterConfig,
    RunConfig,
    TransportConfig,
)
from workers.config.training import (
    AlgorithmConfig,
    ParallelConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)

__all__ = [
    "Advantage",
    "AlgorithmConfig",
    "AllocationConfig",
    "Bound",
    "CheckpointConfig",
    "ClusterConfig",
    "ClusterKind",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataKind",
    "Dtype",
    "EngineConfig",
    "EvaluationConfig",
    "Interrupt",
    "ModelConfig",
    "ModelSource",
    "OffPolicy",
    "ParallelConfig",
    "Proximal",
    "Recompute",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RunKind",
    "Schedule",
    "Security",
    "Server",
    "StalenessConfig",
    "TrainerConfig",
    "Transport",
    "TransportConfig",
    "WeightsConfig",
    "WorkflowConfig",
    "load",
    "require",
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
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)

    def check(self) -> None:
        """Check every part, then what holds between parts. Raises `ConfigError`."""
        for name in ("run", "allocation", "cluster", "model", "data", "workflow", "reward", "rollout", "engine", "staleness",
                     "algorithm", "trainer", "weights", "evaluation", "checkpoint", "transport"):
            getattr(self, name).check()
        require(self.trainer.microbatch_tokens >= self.engine.context_length, "trainer.microbatch_tokens", self.trainer.microbatch_tokens,
                f"must be at least engine.context_length={self.engine.context_length}", "The longest sample must fit into a micro-batch")
        require(self.trainer.warmup_steps <= self.run.num_steps, "trainer.warmup_steps", self.trainer.warmup_steps,
                f"must be at most run.num_steps={self.run.num_steps}", "Shorten the warm-up")
        require(self.algorithm.critic_warmup_steps <= self.run.num_steps, "algorithm.critic_warmup_steps", self.algorithm.critic_warmup_steps,
                f"must be at most run.num_steps={self.run.num_steps}", "The policy is not trained before")
        if self.supervised:
            self._check_supervised()
        else:
            self._check_rl()

    @property
    def supervised(self) -> bool:
        """Whether this run trains on answers of the data set, and generates none."""
        return self.run.kind is RunKind.supervised

    def _check_rl(self) -> None:
        require(self.workflow.max_new_tokens < self.engine.context_length, "workflow.max_new_tokens", self.workflow.max_new_tokens,
                f"must be less than engine.context_length={self.engine.context_length}", "The prompt needs room too")
        require(self.algorithm.advantage is not Advantage.group_norm or self.workflow.group_size >= 2, "workflow.group_size",
                self.workflow.group_size, "must be 2 or more with algorithm.advantage=group_norm",
                "A group of one has no spread; use algorithm.advantage=batch_norm")

    def _check_supervised(self) -> None:
        """What has no meaning without generated answers and their rewards."""
        where = "with run.kind=supervised"
        require(not self.algorithm.critic, "algorithm.advantage", self.algorithm.advantage.value, f"must not be gae {where}",
                "There are no rewards whose advantages a critic could estimate; leave algorithm at its default")
        require(not self.algorithm.kl_weight, "algorithm.kl_weight", self.algorithm.kl_weight, f"must be 0 {where}",
                "The loss is the negative log-likelihood of the answers alone")
        require(self.run.target_accuracy is None, "run.target_accuracy", self.run.target_accuracy, f"must be null {where}",
                "Nothing is generated that could be judged; run.num_steps ends the run")
        require(self.workflow.temperature == 1, "workflow.temperature", self.workflow.temperature, f"must be 1 {where}",
                "The likelihood is that of the model itself")


def load(path: Path) -> Config:
    """Read the config that the launcher wrote. Raises `ConfigError` if it is not valid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config, strict=True)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not a readable run config ({error}). Start the run again with the launcher") from error
