"""What the model costs on its devices: seconds of a decoding step, of a training step, of new weights.

A decoding step reads all weights once and each sample's keys and values, and computes: which of both takes longer is what it takes (roofline). A
training step computes 6 operations a parameter and token (arXiv 2204.02311, appendix B), 2 more for each further forward pass. What devices reach
of their data sheets is assumed (assumptions.py), or measured in an earlier run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.memory.activations import BYTES
from launcher.memory.estimate import SGLANG_SHARE, cache_copies, teacher_of
from launcher.memory.parameters import Weights, count_weights
from launcher.prediction.assumptions import Assumptions
from launcher.prediction.device_speeds import DeviceSpeed
from workers.config import Config, Recompute, Server
from workers.config.choices import Proximal
from workers.model.architecture import Architecture

GIB = 2**30
LAUNCH_S = {True: 3e-3, False: 1e-3}
"""Of a decoding step on GPUs and on CPUs: what launches it. A choice, not a measurement."""
OPTIMIZER_BYTES = 36
"""That an update of Adam moves for each parameter: it, its gradient and two moments in float32, read and written, and what the model computes in."""
EXCHANGE_S = 20e-6
"""Of two all-reduces a layer between the GPUs of a server, beyond what is read and computed."""
EXCHANGE_OVER_NODES_S = 100e-6
"""The same over a network. A choice, not a measurement."""


@dataclass(frozen=True)
class Shapes:
    """Numbers of the model that decide what it costs. `active`: parameters that a token passes; `cache`: numbers that attention keeps of a token;
    `attention`: operations a token for each token before it."""

    weights: Weights
    active: float
    cache: int
    attention: float
    architecture: Architecture

    @staticmethod
    def of(architecture: Architecture) -> Shapes:
        """From a model's architecture."""
        weights = count_weights(architecture)
        mixture = architecture.mixture
        used = mixture.experts_per_token / mixture.num_experts if mixture else 1.0
        layers = weights.of(range(architecture.num_layers))
        active = layers.split + layers.whole + layers.experts * used + weights.embedding  # of the output, not of the lookup
        attention = 4.0 * architecture.num_layers * architecture.num_heads * architecture.head_dim
        return Shapes(weights, active, architecture.num_layers * architecture.cache_width, attention, architecture)

    def operations(self, context: float) -> float:
        """Of a forward pass for a token with `context` tokens before it."""
        return 2 * self.active + self.attention * context


def decoding(config: Config, shapes: Shapes, device: DeviceSpeed, context: float, assumed: Assumptions,
             num_nodes: int = 1) -> tuple[float, float]:
    """Seconds of a decoding step of one server: those that do not grow with its samples, and those for each of them. `context`: tokens before the
    one that is sampled, on average; `num_nodes`: that the server is spread over."""
    engine, parallel = config.engine, config.engine.parallel
    if engine.server is Server.synthetic:
        return 0.0, 1.0 / engine.synthetic_tokens_per_s
    size, unit = BYTES[engine.dtype], parallel.unit if engine.server is Server.sglang else 1
    bandwidth, flops = unit * device.bandwidth * assumed.bandwidth_share, unit * device.flops * assumed.decode_share
    operations = shapes.operations(context)
    fixed = LAUNCH_S[engine.server is Server.sglang] + shapes.weights.total * size / bandwidth
    if parallel.tp > 1 and engine.server is Server.sglang:
        fixed += shapes.architecture.num_layers * (EXCHANGE_OVER_NODES_S if num_nodes > parallel.pp else EXCHANGE_S)
    cache = shapes.cache * (cache_copies(config, shapes.architecture) if engine.server is Server.sglang else 1)
    return fixed * assumed.engine_factor, (cache * context * size / bandwidth + operations / flops) * assumed.engine_factor


def slots(config: Config, shapes: Shapes, gpu_bytes: float, context: float) -> int:
    """Samples that a server runs at once: engine.num_slots, or as many as its GPUs have room for; `gpu_bytes` of one, 0: not known."""
    engine, size = config.engine, BYTES[config.engine.dtype]
    if engine.server is not Server.sglang or not gpu_bytes:
        return engine.num_slots
    room = (engine.mem_fraction or SGLANG_SHARE) * gpu_bytes * engine.parallel.unit - shapes.weights.total * size
    return max(1, min(engine.num_slots, math.floor(room / (shapes.cache * cache_copies(config, shapes.architecture) * size * context))))


def prompt_s(config: Config, shapes: Shapes, device: DeviceSpeed, tokens: float, assumed: Assumptions) -> float:
    """Seconds in which one server computes so many tokens that are there already: prompts, or what runs when new weights come."""
    if config.engine.server is Server.synthetic:
        return 0.0
    unit = config.engine.parallel.unit if config.engine.server is Server.sglang else 1
    return tokens * 2 * shapes.active / (unit * device.flops * assumed.prefill_share) * assumed.engine_factor


def training(config: Config, shapes: Shapes, device: DeviceSpeed, num_devices: int, assumed: Assumptions) -> float:
    """Seconds of a training step on so many devices, without the copying of weights."""
    trainer, prompts = config.trainer, 1 if config.trainer.share_prompts else config.workflow.group_size
    tokens = trainer.batch_groups * (prompts * assumed.prompt_tokens + config.workflow.group_size * assumed.lengths.mean)
    proximal = 0.0
    if config.algorithm.needs_proximal:
        proximal = 1.0
    elif config.algorithm.decoupled and config.algorithm.proximal is Proximal.recompute:
        proximal = 1.0 - 1.0 / trainer.num_minibatches  # the first minibatch's log-probs are the proximal policy's
    passes = 3.0 + proximal + (trainer.recompute is Recompute.full)
    context = assumed.prompt_tokens + assumed.lengths.mean / 2
    each = passes * shapes.operations(context) * (2 if config.algorithm.critic else 1)
    if config.algorithm.kl_weight:
        teacher = teacher_of(config)
        each += (shapes if teacher is None else Shapes.of(teacher)).operations(context)
    computing_s = tokens * each / (num_devices * device.flops * assumed.mfu) * assumed.trainer_factor
    return computing_s + updating(config, shapes, device, num_devices, assumed)


def updating(config: Config, shapes: Shapes, device: DeviceSpeed, num_devices: int, assumed: Assumptions) -> float:
    """Seconds of a step's updates, one a minibatch, whatever its tokens: the optimizer reads and writes its state, which all copies share."""
    moved = config.trainer.num_minibatches * OPTIMIZER_BYTES * shapes.weights.total * (2 if config.algorithm.critic else 1)
    return moved / (num_devices * device.bandwidth * assumed.bandwidth_share)


def weights_bytes(config: Config, shapes: Shapes) -> float:
    """Of the model, as engines load it."""
    return shapes.weights.total * BYTES[config.engine.dtype]
