"""The values that can be chosen by name."""

from __future__ import annotations

import enum


class RunKind(str, enum.Enum):
    """What a run does: reinforcement learning; supervised fine-tuning on prompts with their answers; or nothing but an evaluation."""

    rl = "rl"
    supervised = "supervised"
    evaluation = "evaluation"


class ClusterKind(str, enum.Enum):
    """Where jobs run."""

    local = "local"
    slurm = "slurm"


class Bound(str, enum.Enum):
    """How staleness is bounded; see docs/bounds.md."""

    admission = "admission"
    hard = "hard"


class Control(str, enum.Enum):
    """What says how far rollouts may run ahead within eta: eta alone, or besides how far the policies that sampled lie from the one in training."""

    eta = "eta"
    divergence = "divergence"


class Tracker(str, enum.Enum):
    """Which trackers of experiments a run may be shown in, besides TensorBoard."""

    wandb = "wandb"
    mlflow = "mlflow"
    trackio = "trackio"
    prometheus = "prometheus"


class Server(str, enum.Enum):
    """Which inference server a rollout worker starts."""

    embedded = "embedded"
    sglang = "sglang"
    synthetic = "synthetic"


class Interrupt(str, enum.Enum):
    """What a weight update does to running generations (SGLang's pause modes)."""

    retract = "retract"
    abort = "abort"
    in_place = "in_place"


class Transport(str, enum.Enum):
    """How new weights reach the rollout workers: streamed from the trainer and from each other; as files on shared storage; broadcast into
    the engines' memory. Where one fails, the next of zmq, disk takes over. `auto` is settled before a run starts."""

    auto = "auto"
    zmq = "zmq"
    disk = "disk"
    nccl = "nccl"


class Security(str, enum.Enum):
    """How streamed weights are protected: each chunk against the digest that came encrypted; or encrypted themselves as well (CURVE)."""

    digest = "digest"
    curve = "curve"


class SelfTestAction(str, enum.Enum):
    """What a failed self-test does to the run; see `SelfTestConfig`."""

    auto = "auto"
    fail = "fail"
    warn = "warn"
    off = "off"


class ModelSource(str, enum.Enum):
    """Where the starting model comes from."""

    folder = "folder"
    smollm2 = "smollm2"
    tiny = "tiny"


class Device(str, enum.Enum):
    """What training runs on. `auto` is settled before a run starts (preflight/device_choice.py): GPUs where its jobs ask for them, or where this
    machine has some."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Dtype(str, enum.Enum):
    """Arithmetic of a model's parameters and activations. `auto` is settled before a run starts, by preflight/device_choice.py."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DataKind(str, enum.Enum):
    """Where prompts come from: made up (arithmetic, reasoning_gym), from files (jsonl, parquet, hf: Hugging Face's folders), from
    an environment (workflow.env), or from several."""

    arithmetic = "arithmetic"
    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"
    parquet = "parquet"
    hf = "hf"
    verifiers = "verifiers"
    mixture = "mixture"


class DataFilter(str, enum.Enum):
    """What is done with a prompt that is over a limit: nothing starts, or it is left out."""

    refuse = "refuse"
    drop = "drop"


class Placement(str, enum.Enum):
    """Where verifiers run: beside each rollout worker, on its node; or in a job array of their own."""

    node = "node"
    array = "array"


class Advantage(str, enum.Enum):
    """How rewards become advantages; docs/algorithms.md has the formulas."""

    group_norm = "group_norm"
    group_center = "group_center"
    leave_one_out = "leave_one_out"
    batch_norm = "batch_norm"
    reinforce_pp = "reinforce_pp"
    reinforce_pp_baseline = "reinforce_pp_baseline"
    gae = "gae"
    none = "none"


class Proximal(str, enum.Enum):
    """Where the proximal policy's log-probs come from; see `AlgorithmConfig`."""

    recompute = "recompute"
    loglinear = "loglinear"
    reuse = "reuse"


class ImportanceLevel(str, enum.Enum):
    """What a ratio of probabilities is of: a token; its response, the product over its tokens; that product's length-th root."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class Surrogate(str, enum.Enum):
    """What bounds a step of the policy: PPO's clipped objective, clipped weights, soft gates, nothing."""

    clip = "clip"
    cispo = "cispo"
    sapo = "sapo"
    none = "none"


class OffPolicy(str, enum.Enum):
    """What is done with extreme behaviour weights: tokens outside the bounds are dropped, or their weights brought to them; or tokens are dropped
    until the second moment of the rest is within its limit."""

    mask = "mask"
    clamp = "clamp"
    second_moment = "second_moment"


class RouterReplay(str, enum.Enum):
    """Whose choice of experts the trainer of a mixture computes with: its own router's, or the inference engine's (R3, arXiv 2510.11370)."""

    off = "off"
    rollout = "rollout"


class KlEstimator(str, enum.Enum):
    """How a divergence is estimated from sampled tokens."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlace(str, enum.Enum):
    """Where the divergence from the starting model, or a teacher, stands: in the loss; in the rewards, before they become advantages; or in the
    advantages, token by token."""

    loss = "loss"
    reward = "reward"
    advantage = "advantage"


class Aggregation(str, enum.Enum):
    """How the loss of tokens becomes one: their mean, the mean over responses of their means, or their sum over a fixed length for each."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    fixed_length = "fixed_length"


class Recompute(str, enum.Enum):
    """Which activations the backward pass makes again instead of keeping them: none, some (on GPUs
    the inside of the MLP or of the experts, on CPUs that of attention), or all within a layer."""

    none = "none"
    selective = "selective"
    full = "full"


class LoraTarget(str, enum.Enum):
    """Matrices of a layer that can have adapters, by Hugging Face's names."""

    q_proj = "q_proj"
    k_proj = "k_proj"
    v_proj = "v_proj"
    o_proj = "o_proj"
    gate_proj = "gate_proj"
    up_proj = "up_proj"
    down_proj = "down_proj"


class Schedule(str, enum.Enum):
    """Learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
