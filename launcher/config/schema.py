"""The one typed config: the launcher's parts around workers/config's, registered in Hydra's ConfigStore.

Hydra merges conf/ and the command line into these dataclasses, so an unknown key or a value of the wrong type fails at
compose time; `check` then applies the rules of workers/config and cluster.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
from dataclasses import dataclass, field

import msgspec
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from launcher.config.cluster import ROLES, ClusterConfig, GpuRequest, asks_for_gpus
from launcher.config.device_split import Plan, plan
from launcher.config.gpu_types import gib_of_type, microbatch_tokens
from launcher.config.sbatch_options import check_options
from launcher.share import CONF
from workers import config as workers
from workers.config import ClusterKind
from workers.config.training import check_broadcasts
from workers.run.folder import RunFolder


@dataclass
class LaunchConfig:
    """What the launcher does after composing. `max_concurrent_runs` is for sweeps on SLURM: so many runs at once (0: no limit). `selftest`: only
    test the config (launch/selftest.py), and `keep` the run folder of a test that was passed. `try_functions`: verifiers, workflows, agents and
    adapters of your own are tried on some prompts, on this machine, before anything is submitted."""

    dry_run: bool = False  # --dry-run: show the plan and what would be submitted, start nothing
    detach: bool = False  # --detach: return as soon as it is submitted
    fake_step: bool = False  # --dry-run --fake-step: count a training step on a GPU without one
    plain: bool = False  # --plain: lines instead of the live view
    selftest: bool = False  # headway selftest: only test the config
    keep: bool = False  # --keep: keep the folder of a self-test that passed
    max_concurrent_runs: int = 0  # runs of a sweep at once on SLURM; 0: no limit
    try_functions: bool = True  # false: functions of your own can only run on the nodes, and are not tried before

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        workers.require(self.dry_run or not self.fake_step, "launch.fake_step", self.fake_step, "is part of a dry run", "Give --dry-run too")
        workers.require(self.max_concurrent_runs >= 0, "launch.max_concurrent_runs", self.max_concurrent_runs, "must not be negative",
                        "0 lets SLURM run as many as fit")


@dataclass
class FullConfig(workers.Config):
    """Everything that can be set on the command line."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tokens_chosen = False  # no key: trainer.microbatch_tokens was left to the machine, and may be lowered to what fits

    def check(self) -> None:
        """Check all parts. Raises `ConfigError`."""
        super().check()
        self.launch.check()
        if self.cluster.kind is ClusterKind.slurm:
            if self.rewards_apart:
                self._check_rewards()
            check_options(self.cluster, roles=self.roles)

    def _check_rewards(self) -> None:
        """What a job that only judges asks for."""
        self.cluster.check_role("reward")
        part = self.cluster.reward
        workers.require(part.gpus is GpuRequest.none, "cluster.reward.gpus", part.gpus.value, "must be none", "Verifiers run on CPUs")
        workers.require(not part.devices_per_node, "cluster.reward.devices_per_node", part.devices_per_node, "must be 0",
                        "reward.num_processes says how many verifiers run side by side")

    def settle(self) -> None:
        """Replace defaults that go by the machine: micro-batches, replicas and weights by its GPUs, addresses by there being several, the day."""
        self._settle_sizes()
        if any(source.chat_template for source in self.data.sources()):
            self.data.chat_template_date = self.data.chat_template_date or datetime.date.today().isoformat()
        if self.weights.transport is workers.Transport.auto:
            self.weights.transport = workers.Transport.nccl if self._takes_broadcasts() else workers.Transport.zmq
        if self.cluster.kind is ClusterKind.slurm:
            for part in map(self.cluster.role, ROLES):
                part.env = {**self.cluster.env, **part.env}
                part.python = os.path.expanduser(part.python)
            if self.weights.dir == "auto" and self.weights.transport is workers.Transport.disk:
                self.weights.dir = "run"  # the one folder that all nodes share; otherwise each node has its own
            if self.rewards_apart:
                self.cluster.reward.cpus_per_task = self.cluster.reward.cpus_per_task or self.reward.num_processes
            if self.transport.interface == workers.TransportConfig.interface:
                self.transport.interface = "auto"  # the node's own address, as SLURM knows it

    def _settle_sizes(self) -> None:
        """Micro-batches by the memory of a training GPU, and whole nodes of inference where their size is known and comes out even."""
        train, parallel, allocation = self.cluster.train, self.engine.parallel, self.allocation
        on_slurm = self.cluster.kind is ClusterKind.slurm
        if self.trainer.microbatch_tokens == 0:
            on_gpus = on_slurm and self.gives_gpus("train") and self.trainer.device is not workers.Device.cpu
            usual = microbatch_tokens(on_gpus, train.gpu_memory_gb or gib_of_type(train.gpu_type))
            self.trainer.microbatch_tokens = max(usual, self.engine.context_length)
            self.tokens_chosen = True
        if allocation.replica_size == 0:
            unit = max(1, parallel.tp * parallel.pp)
            node = self.devices_per_node("inference") if on_slurm and self.gives_gpus("inference") else unit
            allocation.replica_size = node if node and node % unit == 0 and self._has_split(node) else unit

    def _has_split(self, replica_size: int) -> bool:
        """Whether whole replicas of so many devices leave training its share of the devices."""
        wanted = self.allocation.inference_fraction * self.allocation.num_devices
        if self.trainer.parallel.unit < 1:  # refused later, with its reason
            return False
        try:
            found = self._plan(replica_size)
        except workers.ConfigError:
            return False
        return not found.num_unused and (self.evaluates or found.num_inference_devices >= wanted)

    def _takes_broadcasts(self) -> bool:
        """Whether weights can go from GPU to GPU, as far as the config tells; the versions of NCCL are compared later, on both sides."""
        plain = self.weights.security is workers.Security.digest and not self.weights.delta and not self.weights.adapter_only
        on_gpus = self.cluster.kind is ClusterKind.slurm and self.gives_gpus("train") and self.gives_gpus("inference")
        try:
            check_broadcasts(self.engine)
        except workers.ConfigError:
            return False
        return (on_gpus and plain and self.trainer.device is not workers.Device.cpu and self.engine.server is workers.Server.sglang
                and self.engine.device != "cpu" and not self.supervised and not self.evaluates)

    def plan(self) -> Plan:
        """The split of the devices. Raises `ConfigError`."""
        return self._plan(self.allocation.replica_size)

    def _plan(self, replica_size: int) -> Plan:
        per_node = self.allocation.devices_per_node and (self.devices_per_node("inference") or self.allocation.devices_per_node)
        allocation = dataclasses.replace(self.allocation, replica_size=replica_size, devices_per_node=per_node)
        return plan(allocation, self.trainer.parallel, inference=not self.supervised, training=not self.evaluates)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have jobs: those of inference and rewards where anything is generated, and where that is what reward.placement says."""
        if self.evaluates:
            return ("inference",)
        absent = ("inference", "reward") if self.supervised else () if self.rewards_apart else ("reward",)
        return tuple(role for role in ROLES if role not in absent)

    def devices_per_node(self, role: str) -> int:
        """The devices of the nodes of a role's partition; 0: not known, or all is on this machine."""
        if self.cluster.kind is ClusterKind.local:
            return 0
        return self.cluster.role(role).devices_per_node or self.allocation.devices_per_node

    @property
    def replica_nodes(self) -> int:
        """Nodes that one rollout worker's replica takes (replica_nodes.py says whether it can)."""
        fits = self.devices_per_node("inference")
        return max(1, math.ceil(self.allocation.replica_size / fits)) if fits else 1

    def gives_gpus(self, role: str) -> bool:
        """Whether the jobs of a role have GPUs to compute on (on SLURM), also where they are asked for by hand."""
        part = self.cluster.role(role)
        return (part.gpus is not GpuRequest.none or asks_for_gpus(part.sbatch)) and not self.cluster.fake_gpus

    def for_workers(self) -> workers.Config:
        """The part that the workers read."""
        parts = {part.name: getattr(self, part.name) for part in dataclasses.fields(workers.Config)}
        names = [part.name for part in dataclasses.fields(workers.ClusterConfig)]
        return workers.Config(**{**parts, "cluster": workers.ClusterConfig(**{name: getattr(self.cluster, name) for name in names})})


def register() -> None:
    """Make known to Hydra the schema, under the name that conf/config.yaml begins with, and `${conf:FILE}`, a file in conf/."""
    OmegaConf.register_new_resolver("conf", lambda name: str(CONF / name), replace=True)
    ConfigStore.instance().store(name="headway_schema", node=FullConfig)


def to_object(composed: DictConfig) -> FullConfig:
    """The composed config as dataclasses, settled and checked. Raises `ConfigError`."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise missing(error) from error
    assert isinstance(config, FullConfig)
    config.settle()
    config.check()
    return config


def missing(error: OmegaConfBaseException) -> workers.ConfigError:
    """What is told of a key without a value, or one that refers to another which there is not."""
    key = error.full_key or "the configuration"
    if isinstance(error, MissingMandatoryValue):
        return workers.ConfigError(f"{key}: must be given. Write {key}=VALUE on the command line, or set it in a file of conf/")
    if isinstance(error, InterpolationResolutionError | InterpolationKeyError):
        return workers.ConfigError(f"{key}: refers to what there is not{_reference(str(error.msg))}. Name a key with its section, "
                                   "as ${cluster.time}, or an environment variable that is set, as ${oc.env:USER}")
    return workers.ConfigError(f"{key}: has no value that it can have ({str(error.msg).splitlines()[0]}). `headway config {key}` tells which it can")


def _reference(text: str) -> str:
    """The reference that an error is about, '' where it names none."""
    found = re.search(r"\$\{[^}]*\}", text)
    return f", {found[0]}" if found else ""


def as_yaml(config: FullConfig) -> bytes:
    """The content of the run folder's config.yaml."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False).encode()


def read_full(run: RunFolder) -> FullConfig:
    """The full config that a run was started with; the workers' part as its workers read it. Raises `ConfigError`."""
    try:
        config = msgspec.convert(yaml.safe_load(run.config_yaml.read_bytes()), FullConfig)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise workers.ConfigError(f"{run.config_yaml}: not a readable run config ({error}). Start the run again with the launcher") from error
    settled = workers.load(run.config)
    for part in dataclasses.fields(workers.Config):
        if part.name != "cluster":
            setattr(config, part.name, getattr(settled, part.name))
    config.check()
    return config
