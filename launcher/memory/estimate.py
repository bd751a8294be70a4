"""How much memory each part of a run takes, from its config and the model's shapes. Pure.

    a training rank        parameters + float32 gradients + its share of the optimizer's state
                           + max(activations + logits or a layer's gradients in a step, a tensor that is exported after it)
                           + what its process takes anyway
    an inference replica   weights, twice while new ones are loaded (both of weights.swap keep the old ones until then) + the KV cache
                           + what its process takes anyway

tests/unit/launcher/memory/test_estimate.py holds the estimate of a training rank against what a real engine takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.memory.activations import BYTES, GIB, MIB, Layout, kept_bytes, transient_bytes
from launcher.memory.parameters import Weights, count_weights, layers_of
from workers.config import Config, Dtype, LoraConfig, Server, Transport
from workers.model.adapter_shapes import INPUT_SPLIT, layer_shapes, pair_shapes
from workers.model.architecture import Architecture, read_architecture
from workers.trainer.batch.pipeline_schedule import most_ahead

PUBLISHED = 3
"""Versions of the weights in the memory of a training node: those kept (KEPT in workers/weights/publisher.py), and the next one's files."""
STAGED = 2
"""The same where they lie there only until they are on shared storage: one, and the next one's files."""
HELD = 2
"""Versions in the memory of a node with rollout workers: the one that is fetched, and the one before (workers/rollout/weights/streaming.py)."""
GPU_RESERVE, GPU_RESERVED_SHARE = 3 * GIB, 0.08
"""CUDA's context, cuBLAS's workspaces and NCCL's buffers; of the rest, what the allocator loses to fragments: choices, not measurements."""
TRAINER_PROCESS = 500 * MIB
"""A trainer's process on a CPU before it holds a model: Python, torch, Megatron-core (380 MiB measured), gloo."""
CUDA_PROCESS = 4 * GIB
"""The same in the host's memory where CUDA's libraries are loaded."""
REPLICA_PROCESSES = 700 * MIB
"""A rollout worker, its engine and one verifier with hardly any model and cache (620 MiB measured)."""
EMBEDDED_PROCESS, SYNTHETIC_PROCESS = 300 * MIB, 100 * MIB
"""One more engine on the same replica."""
MERGING_PROCESS = 200 * MIB
"""What torch takes in a rollout worker that merges adapters (190 MiB measured)."""
SGLANG_SHARE = 0.9
"""About what SGLang takes of a GPU for weights and cache where engine.mem_fraction does not say it."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one training rank; `transient`: logits, or what a layer needs while its backward pass runs. On a GPU `host` is what it takes of
    the host's memory besides; on a CPU there is no difference, and it is 0."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    checkpoint: float
    reserve: float
    export: float
    host: float

    def parts(self) -> dict[str, float]:
        """What it is made of at its highest: in the middle of a step, or while weights are exported."""
        in_step = self.activations + self.transient >= self.export
        names = ("parameters", "gradients", "optimizer", *(("activations", "transient") if in_step else ("export",)), "checkpoint", "reserve")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """All of that."""
        return sum(self.parts().values())


def rank_memory(config: Config, architecture: Architecture, weights: Weights, spread: Layout) -> RankMemory:
    """The estimate for the pipeline stage that takes most: the first keeps most micro-batches, the last makes the logits, and one in which all layers
    have experts may hold most."""
    dense = architecture.mixture.num_dense if architecture.mixture else 0
    stages = {0, spread.pp - 1, min(spread.pp - 1, math.ceil(dense * spread.pp / architecture.num_layers))}
    return max((stage_memory(config, architecture, weights, spread, stage) for stage in stages), key=lambda memory: memory.total)


def stage_memory(config: Config, architecture: Architecture, weights: Weights, spread: Layout, stage: int) -> RankMemory:
    """The estimate for a rank of one pipeline stage, counted from 0."""
    trainer, algorithm, last = config.trainer, config.algorithm, stage == spread.pp - 1
    size, in_flight = BYTES[trainer.dtype], (most_ahead(stage, spread.pp, spread.vpp) + 1) / spread.vpp
    layers = layers_of(architecture, spread.pp, stage, spread.vpp)
    policy = _held(weights, layers, spread, stage)
    critic = _held(weights, layers, spread, stage, head=False) if algorithm.critic else Held(0.0, 0.0, 0.0)  # its head is one row
    reference = _reference(config, policy, spread, stage)
    if trainer.lora.rank:
        adapters = len(layers) * adapters_of_a_layer(architecture, trainer.lora, spread.tp)
        policy, critic = policy.with_adapters(adapters, spread), critic.with_adapters(adapters if algorithm.critic else 0.0, spread)
    trained, state = policy.trained + critic.trained, (policy.updated + critic.updated) * (8 if trainer.dtype is Dtype.float32 else 12)
    offloaded = trainer.optimizer_offload if spread.gpu else 0.0
    largest = weights.largest * size
    saved = trained * size + state if config.checkpoint.background else 0.0  # copied to the host's memory, then written
    memory = RankMemory(
        parameters=(policy.here + critic.here + reference) * size,
        gradients=trained * 4,
        optimizer=state * (1 - offloaded),
        activations=kept_bytes(config, architecture, spread, layers, in_flight, last),
        transient=transient_bytes(config, architecture, spread, last),
        checkpoint=0.0 if spread.gpu else saved,
        reserve=0.0 if spread.gpu else TRAINER_PROCESS,
        export=largest if spread.gpu else 2 * largest,  # and once more as it is written
        # Offloaded state is a float32 copy of parameters and gradients and two moments (HybridDeviceOptimizer).
        host=CUDA_PROCESS + largest + saved + 16 * (policy.updated + critic.updated) * offloaded if spread.gpu else 0.0,
    )
    return dataclasses.replace(memory, reserve=GPU_RESERVE + GPU_RESERVED_SHARE * memory.total) if spread.gpu else memory


@dataclass(frozen=True)
class Held:
    """Numbers of parameters: those that a rank holds of a model, those of them that have gradients, and those that it updates.

    The optimizer's state is divided over all ranks with the same parameters (ZeRO-1, arXiv 1910.02054, Section 5.1): Megatron-core's
    distributed optimizer takes 6 + 12/d bytes a parameter in bfloat16, 8 + 8/d in float32 (the table in its user guide).
    """

    here: float
    trained: float
    updated: float

    def with_adapters(self, adapters: float, spread: Layout) -> Held:
        """The same where so many parameters of adapters are trained, and nothing else."""
        return Held(self.here + adapters, adapters, adapters / (spread.cp * spread.dp))


def teacher_of(config: Config) -> Architecture | None:
    """That of `algorithm.teacher`, where it lies on this machine."""
    folder = Path(config.algorithm.teacher).expanduser()
    return _teacher(folder)[0] if config.algorithm.teacher and (folder / "config.json").is_file() else None


@functools.lru_cache(maxsize=4)
def _teacher(folder: Path) -> tuple[Architecture, Weights]:
    """Read and counted once for all the layouts that are tried."""
    architecture = read_architecture(folder)
    return architecture, count_weights(architecture)


def _reference(config: Config, policy: Held, spread: Layout, stage: int) -> float:
    """Of the model that a divergence is from, which with adapters is the policy without them; a teacher that is not here counts as the policy."""
    if not config.algorithm.kl_weight or (config.trainer.lora.rank and not config.algorithm.teacher):
        return 0.0
    if (teacher := teacher_of(config)) is None:
        return policy.here
    return _held(_teacher(Path(config.algorithm.teacher).expanduser())[1], layers_of(teacher, spread.pp, stage, spread.vpp), spread, stage).here


def _held(weights: Weights, layers: list[int], spread: Layout, stage: int, head: bool = True) -> Held:
    """Of a stage: its layers, and the embedding or the output layer (`head`) where it has one."""
    own = weights.of(layers)
    tables = int(stage == 0) + int(head and stage == spread.pp - 1 and not (stage == 0 and weights.tied))
    dense = tables * weights.embedding / spread.tp + own.split / spread.tp + own.whole
    experts = own.experts / (spread.etp * spread.ep)
    copies = spread.tp * spread.cp * spread.dp / (spread.etp * spread.ep)
    return Held(dense + experts, dense + experts, dense / (spread.cp * spread.dp) + experts / copies)


def adapters_of_a_layer(architecture: Architecture, lora: LoraConfig, tp: int) -> float:
    """Parameters of `trainer.lora` in one layer, on a rank: of each pair one is divided as the weight, the other is whole."""
    number = 0.0
    for module, (outputs, inputs) in layer_shapes(architecture, lora.targets).items():
        by_inputs = module.rpartition(".")[2] in [target.value for target in INPUT_SPLIT]
        number += lora.rank * (inputs / tp + outputs if by_inputs else inputs + outputs / tp)
    return number


def replica_memory(config: Config, architecture: Architecture, weights: Weights, num_nodes: int = 1) -> dict[str, float]:
    """Bytes of one inference replica in the host's memory, on each of its nodes, by what takes them. The embedded engine runs on CPUs; SGLang's
    models are on GPUs, but for engine.device=cpu, which is not estimated."""
    merging = {"merging": MERGING_PROCESS + 12.0 * weights.largest} if config.weights.adapter_only and not config.evaluates else {}
    if config.engine.server is Server.synthetic:
        return merging | {"processes": REPLICA_PROCESSES + (config.num_servers - 1) * SYNTHETIC_PROCESS}
    if config.engine.server is Server.sglang:
        return merging | {"processes": REPLICA_PROCESSES + config.allocation.replica_size / num_nodes * CUDA_PROCESS}
    size, number = BYTES[config.engine.dtype], config.num_servers
    head = weights.embedding if weights.tied else 0  # packed for its kernel, besides the embedding
    cache = (config.engine.num_slots + 1) * cache_bytes(config, architecture)
    return merging | {"weights": number * 2 * (weights.total + head) * size, "KV cache": number * cache,
                      "processes": REPLICA_PROCESSES + (number - 1) * EMBEDDED_PROCESS}


def cache_bytes(config: Config, architecture: Architecture) -> float:
    """Bytes of what attention keeps of one request of the greatest length."""
    return architecture.num_layers * architecture.cache_width * BYTES[config.engine.dtype] * config.engine.context_length


def server_memory(config: Config, architecture: Architecture, weights: Weights) -> dict[str, float]:
    """Bytes that SGLang takes of each GPU at least: its weights, and the cache of one request; with more cache more requests run at once."""
    parallel = config.engine.parallel
    number = weights.total / parallel.unit
    if parallel.dp_attention > 1:  # each copy of the attention is whole, and the embedding is on every GPU
        shapes = architecture.tensor_shapes().items()
        attention = sum(math.prod(shape) for name, shape in shapes if ".self_attn." in name)
        number += attention * (parallel.dp_attention - 1) / parallel.unit + weights.embedding * (1 - 1 / parallel.unit)
    cache = cache_bytes(config, architecture) * cache_copies(config, architecture)
    return {"weights": number * BYTES[config.engine.dtype], "KV cache of one request": cache * parallel.dp_attention / parallel.unit}


def cache_copies(config: Config, architecture: Architecture) -> int:
    """How often an SGLang server keeps a request's keys and values: more than once where more ranks do its attention than there are heads."""
    heads = 1 if architecture.latent else architecture.num_kv_heads
    return max(1, config.engine.parallel.tp // config.engine.parallel.dp_attention // heads)


@dataclass(frozen=True)
class StoredWeights:
    """Bytes of weights in the memory of nodes, beside processes: on all training nodes together, and on each node with rollout workers."""

    published: float
    held: float


def stored_weights(config: Config, architecture: Architecture, weights: Weights, local: bool) -> StoredWeights:
    """What lies there (workers/trainer/weights/rank_publisher.py); `local`: all of it on one machine."""
    disk, in_memory = config.weights.transport is Transport.disk, config.weights.dir == "auto"
    version = published_bytes(config, architecture, weights)
    merged = HELD * weights.total * BYTES[config.engine.dtype] if config.weights.adapter_only else 0.0
    if disk:
        return StoredWeights((PUBLISHED if in_memory and local else STAGED) * version, merged)
    return StoredWeights(PUBLISHED * version, HELD * version + merged) if in_memory else StoredWeights(0.0, 0.0)


def published_bytes(config: Config, architecture: Architecture, weights: Weights) -> float:
    """Of one version: the model, or adapters alone."""
    if config.weights.adapter_only:
        return sum(map(math.prod, pair_shapes(architecture, config.trainer.lora).values())) * BYTES[config.trainer.dtype]
    return weights.total * BYTES[config.engine.dtype]


def node_share(num_ranks: int, ranks_per_node: int, num_stages: int) -> float:
    """The greatest share of what is published that lies on one node: each stage's first rank publishes it, `num_ranks / num_stages` apart."""
    return min(num_stages, math.ceil(ranks_per_node * num_stages / num_ranks)) / num_stages


def bytes_in_words(number: float) -> str:
    """12.3 GiB, 140 GiB, 35 MiB."""
    value, unit = (number / GIB, "GiB") if number >= GIB else (number / MIB, "MiB")
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def parts_in_words(parts: Iterable[tuple[str, float]]) -> str:
    """'parameters 3.1 GiB, gradients 6.2 GiB'; what is nothing is left out."""
    return ", ".join(f"{name} {bytes_in_words(number)}" for name, number in parts if number >= MIB / 10)
