"""Beside which values a key counts: a line of `RULES` for every pair. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.config.schema import FullConfig
from workers.config import (
    Advantage,
    ClusterKind,
    Control,
    DataKind,
    OffPolicy,
    Placement,
    Schedule,
    Server,
    Surrogate,
    Tracker,
    Transport,
)
from workers.config.alarms import SUPERVISED_ALARMS
from workers.config.data import FILE_KINDS
from workers.config.judge import JUDGE
from workers.config.reward import REWARD_MODEL, names


@dataclass(frozen=True)
class Rule:
    """`keys` (or all below them) count where `counts`; `why` not: `instead` is what to do, where that is refused ('': it is only said)."""

    keys: str
    counts: Callable[[FullConfig], bool]
    why: str
    instead: str = ""

    def covers(self, key: str) -> bool:
        """Whether the rule is about `key`."""
        return any(key == one or key.startswith(f"{one}.") for one in self.keys.split())


def _with_alarm(name: str) -> Callable[[FullConfig], bool]:
    return lambda config: name not in config.alarms.off and (not config.supervised or name in SUPERVISED_ALARMS)


def _runs_programs(config: FullConfig) -> bool:
    """Whether programs may be run in the sandbox: by a verifier, also one that rows name, by a workflow or an agent, or a function of the user's."""
    names = [*config.data.verifiers(config.reward.verifier), *config.reward.parts, config.workflow.name]
    return not judged_by_workflow(config) and (config.data.kind in (*FILE_KINDS, DataKind.mixture)
                                             or any(":" in name or "code" in name or name in ("python_tool", "agent") for name in names))


def _verifier_counts(config: FullConfig) -> bool:
    return config.reward.verifier in config.data.verifiers(config.reward.verifier)


def judged_by_workflow(config: FullConfig) -> bool:
    return not config.supervised and config.workflow.scores_itself


def _may_ask(part: str) -> Callable[[FullConfig], bool]:
    """Whether verifier `part` may be asked: of the config, also one that rows name, or by a workflow of the user's."""
    def counts(config: FullConfig) -> bool:
        named = [*config.data.verifiers(config.reward.verifier), *config.reward.parts, config.workflow.name]
        read = config.data.kind in (*FILE_KINDS, DataKind.mixture) and not judged_by_workflow(config)
        return read or any(":" in name or names(name, part) for name in named)

    return counts


_SUPERVISED = ("with run.kind=supervised nothing is generated and nothing judged",
               lambda config: not config.supervised)
_CLUSTER = "account qos time env fake_gpus setup python container inference train reward spare_chunks probe_s max_submit"
RULES = (
    Rule("data.path data.heldout_path data.adapter data.columns", lambda config: config.data.kind is not DataKind.mixture,
         "the parts of a mixture have files of their own", "Give data.parts.NAME.path"),
    Rule("data.verifier", lambda config: config.data.kind is not DataKind.mixture or not all(part.verifier for part in config.data.parts.values()),
         "every part of the mixture names its own"),
    Rule("data.path data.heldout_path data.adapter data.columns", lambda config: config.data.kind in FILE_KINDS,
         "these prompts are made up, not read from files", "Choose data=jsonl, data=parquet or data=hf"),
    Rule("data.split data.heldout_split data.subset", lambda config: config.data.kind is DataKind.hf, "only data.kind=hf has splits"),
    Rule("data.digits data.num_examples", lambda config: config.data.kind is DataKind.arithmetic, "only data.kind=arithmetic makes sums"),
    Rule("data.task data.options data.stages", lambda config: config.data.kind is DataKind.reasoning_gym, "only data.kind=reasoning_gym has tasks",
         "Choose data=reasoning_gym"),
    Rule("data.response_field", lambda config: (config.supervised and config.data.kind in FILE_KINDS and "response" not in config.data.columns
                                                and not config.data.adapter),
         "only supervised runs on files learn answers; data.adapter and data.columns.response come first"),
    Rule("data.chat_template_date", lambda config: any(source.chat_template for source in config.data.sources()),
         "no chat template renders these prompts"),
    Rule("data.bos", lambda config: not all(source.chat_template for source in config.data.sources()), "a chat template renders these prompts"),
    Rule("data.filter", lambda config: any(source.max_prompt_tokens or source.kind in (*FILE_KINDS, DataKind.verifiers)
                                           for source in config.data.sources()), "no limit is set here"),
    Rule("reward.verifier reward.parts data.verifier", lambda config: config.workflow.name != "verifiers", "the environment gives the rewards"),
    Rule("reward.verifier", lambda config: config.supervised or _verifier_counts(config), "data.verifier says what judges these prompts",
         "Give data.verifier instead"),
    Rule(" ".join(f"cluster.{name}" for name in _CLUSTER.split()), lambda config: config.cluster.kind is ClusterKind.slurm,
         "with cluster.kind=local all runs on this machine", "Choose cluster=slurm; a file of your own begins with `defaults: [slurm, _self_]`"),
    Rule("cluster.reward", lambda config: config.rewards_apart, "verifiers have jobs of their own with reward=array only"),
    Rule("cluster.inference", lambda config: not config.supervised, _SUPERVISED[0]),
    Rule("launch.max_concurrent_runs", lambda config: config.cluster.kind is ClusterKind.slurm, "runs on this machine come one after the other"),
    Rule("launch.keep", lambda config: config.launch.selftest, "only `headway selftest` removes folders"),
    Rule("allocation.inference_fraction allocation.replica_size allocation.min_replicas", *reversed(_SUPERVISED)),
    Rule("workflow reward sandbox rollout staleness algorithm weights selftest engine.server engine.num_slots engine.interrupt engine.parallel "
         "evaluation.num_samples evaluation.temperature evaluation.top_p evaluation.top_k evaluation.pass_at evaluation.confidence",
         *reversed(_SUPERVISED)),
    Rule("reward.judge", _may_ask(JUDGE), "no verifier of this run is the judge", "Choose reward.verifier=judge or reward.parts.judge=0.2"),
    Rule("reward.model", _may_ask(REWARD_MODEL), "no verifier of this run is reward_model",
         "Choose reward.verifier=reward_model or reward.parts.reward_model=0.2"),
    Rule("reward.judge.backoff_s", lambda config: config.reward.judge.max_retries > 0, "reward.judge.max_retries=0 calls once"),
    Rule("rollout.keep_mb", lambda config: config.rollout.keep > 0, "rollout.keep=0 keeps nothing"),
    Rule("reward.num_elements", lambda config: config.reward.placement is Placement.array, "only reward=array has elements of its own"),
    Rule("reward.overlong_buffer", lambda config: config.reward.overlong_penalty > 0, "reward.overlong_penalty=0 takes nothing off"),
    Rule("reward.verifier reward.parts data.verifier", lambda config: config.supervised or config.workflow.name != "shell_agent",
         "workflow=shell_agent scores by the repositories' tests"),
    Rule("sandbox", _runs_programs, "no verifier or workflow of this run runs programs"),
    Rule("workflow.max_rejected", lambda config: config.workflow.keep != "all", "workflow.keep=all rejects no group"),
    Rule("engine.prefill_chunk", lambda config: config.engine.server is Server.embedded, "only engine.server=embedded reads it"),
    Rule("engine.synthetic_tokens_per_s engine.synthetic_mean_tokens", lambda config: config.engine.server is Server.synthetic,
         "only engine.server=synthetic reads it"),
    Rule("weights.security weights.delta weights.streams weights.fanout", lambda config: config.weights.transport is not Transport.disk,
         "with weights=disk nothing is streamed"),
    Rule("tracking", lambda config: not config.evaluates, "an evaluation alone is shown in no tracker"),
    Rule("tracking.project tracking.url", lambda config: bool({*config.tracking.to} - {Tracker.prometheus}), "tracking.to names no tracker of them"),
    Rule("tracking.port tracking.interface", lambda config: Tracker.prometheus in config.tracking.to, "only tracking.to=[prometheus] listens"),
    Rule("tracking.offline", lambda config: Tracker.wandb in config.tracking.to, "only tracking.to=[wandb] can be offline"),
    Rule("trainer.optimizer_offload", lambda config: config.trainer.device.value != "cpu", "with trainer.device=cpu all is in one memory"),
    Rule("staleness.warmup_steps", lambda config: config.staleness.eta > 0, "staleness.eta=0 has nothing to grow to"),
    Rule("staleness.max_divergence staleness.max_divergence_p99 staleness.min_ess", lambda config: config.staleness.control is Control.divergence,
         "only staleness.control=divergence keeps a budget"),
    Rule("algorithm.clip_epsilon", lambda config: config.algorithm.surrogate in (Surrogate.clip, Surrogate.cispo),
         "only algorithm.surrogate=clip and cispo clip"),
    Rule("algorithm.sapo_tau_positive algorithm.sapo_tau_negative", lambda config: config.algorithm.surrogate is Surrogate.sapo,
         "only algorithm.surrogate=sapo has soft gates"),
    Rule("algorithm.proximal algorithm.behavior_cap", lambda config: config.algorithm.decoupled,
         "with algorithm.decoupled=false there is no proximal policy"),
    Rule("algorithm.behavior_cap", lambda config: config.algorithm.off_policy is not OffPolicy.second_moment,
         "with algorithm.off_policy=second_moment the second moment alone decides"),
    Rule("algorithm.proximal", lambda config: config.algorithm.needs_proximal or config.trainer.num_minibatches > 1,
         "with trainer.num_minibatches=1 the policy that is trained is the proximal one"),
    Rule("algorithm.second_moment", lambda config: config.algorithm.off_policy is OffPolicy.second_moment,
         "only algorithm.off_policy=second_moment reads it"),
    Rule("algorithm.kl_estimator algorithm.kl_in", lambda config: config.algorithm.kl_weight > 0, "algorithm.kl_weight=0 takes no divergence"),
    Rule("algorithm.critic_lr algorithm.value_clip", lambda config: config.algorithm.advantage is Advantage.gae,
         "only algorithm.advantage=gae has a critic"),
    Rule("trainer.lora.alpha trainer.lora.targets", lambda config: config.trainer.lora.rank > 0,
         "trainer.lora.rank=0 trains the whole model, without adapters"),
    Rule("trainer.min_lr", lambda config: config.trainer.lr_schedule is not Schedule.constant, "trainer.lr_schedule=constant does not fall"),
    Rule("trainer.export_keep", lambda config: config.trainer.export_every_steps > 0, "trainer.export_every_steps=0 exports at the end only"),
    Rule("trainer.parallel.sequence", lambda config: config.trainer.parallel.tp > 1, "trainer.parallel.tp=1 splits nothing"),
    Rule("run.target_accuracy", lambda config: config.evaluation.every_steps > 0,
         "evaluation.every_steps=0 judges nothing between the first step and the last"),
    Rule("checkpoint.keep_best", lambda config: config.evaluation.enabled and config.evaluation.every_steps > 0,
         "nothing is judged between the first and the last step (evaluation.every_steps)"),
    Rule("evaluation.num_samples evaluation.temperature evaluation.top_p evaluation.top_k evaluation.pass_at evaluation.confidence",
         lambda config: config.evaluation.enabled, "evaluation.enabled=false judges nothing"),
    Rule("evaluation.top_p evaluation.top_k", lambda config: config.evaluation.temperature > 0, "evaluation.temperature=0 is greedy"),
    Rule("evaluation.checkpoint", lambda config: bool(config.evaluation.run), "it says which model of evaluation.run=RUN is judged"),
    Rule("selftest.mean_tolerance", lambda config: config.selftest.action.value != "off", "selftest.action=off compares nothing"),
    Rule("alarms.loss", lambda config: config.supervised, "only supervised runs have that alarm"),
    *(Rule(f"alarms.{key}", _with_alarm(alarm), f"the alarm {alarm} is not judged here") for key, alarm in {
        "entropy": "entropy_collapse", "weight_ess": "exploding_weights", "weight_max": "exploding_weights", "weight_masked": "exploding_weights",
        "equal": "equal_rewards", "truncated": "growing_length", "length": "growing_length", "accuracy": "reward_collapse",
        "grad_norm": "gradient_spikes", "stale": "stale_data", "refused": "strangers"}.items()),
    Rule("run.num_steps run.target_accuracy trainer.lr trainer.min_lr trainer.lr_schedule trainer.warmup_steps trainer.num_minibatches "
         "trainer.export_final trainer.export_every_steps trainer.export_keep algorithm.critic_lr algorithm.critic_warmup_steps "
         "staleness.eta staleness.target staleness.control staleness.min_ess staleness.warmup_steps "
         "evaluation checkpoint.every_steps checkpoint.every_minutes tracking",
         lambda config: not config.launch.selftest, "a self-test sets it itself"),
)
