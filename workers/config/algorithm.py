"""Config of the objective: what rewards, ratios and old tokens become in the policy's loss. docs/algorithms.md has the formulas."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from workers.config.choices import Advantage, Aggregation, ImportanceLevel, KlEstimator, KlPlace, OffPolicy, Proximal, Surrogate
from workers.config.rules import require

GROUP_ESTIMATORS = (Advantage.group_norm, Advantage.group_center, Advantage.leave_one_out, Advantage.reinforce_pp_baseline)
"""Advantages that compare a prompt's responses with each other."""
CLIPPING = (Surrogate.clip, Surrogate.cispo)


class RouterReplay(str, enum.Enum):
    """Whose choice of experts the trainer of a mixture computes with: its own router's, or the inference engine's (R3, arXiv 2510.11370)."""

    off = "off"
    rollout = "rollout"


@dataclass
class AlgorithmConfig:
    """The objective: decoupled PPO (AReaL, arXiv 2505.24298, Eq. 5), or plain PPO with `decoupled=false`; or other parts in its places.

    `proximal` says where the proximal policy's log-probs come from for all minibatches of a step but the first, whose own pass has them
    exactly: `recompute` makes a forward pass before the step; `loglinear` goes from the behaviour policy's towards the current ones, by
    a token's age (A-3PO, arXiv 2512.06547); `reuse` takes the current ones, so that nothing is clipped. The last two need no extra pass.

    `ratio` and `surrogate` are the trust region around the proximal policy: `clip_epsilon` below 1, `clip_epsilon_high` above (0: the same);
    `dual_clip` bounds what a negative advantage can do (0: it does not). `off_policy`, `behavior_level`, `behavior_floor`, `behavior_cap` say what
    is done with the weights of old tokens; `second_moment` is the limit of off_policy=second_moment, which has no floor and cap.

    `kl_weight` times the divergence from the starting model, or from `teacher`, is added to the loss (GRPO, arXiv 2402.03300, Eq. 4), or taken from
    the rewards or from each token's advantage, as `kl_in` says; 0 holds no such model. `entropy_weight` times the entropy is taken from the loss.
    `aggregation` makes one loss of all tokens; `aggregation_length` is fixed_length's L (0: workflow.max_new_tokens).

    `advantage=gae` trains a critic beside the policy: GAE (arXiv 1506.02438) by `gamma` and `gae_lambda` over a response's tokens. It
    begins as the starting model, learns with `critic_lr` on the trainer's schedule, alone for the first `critic_warmup_steps` steps (which
    count for the policy's schedule too). Its loss is clipped (PPO, arXiv 1707.06347, as in OpenAI's baselines): in one step a value is not
    moved further than `value_clip`, in units of the reward (baselines: 0.2, where returns are about 1); 0 does not clip.
    """

    decoupled: bool = True  # true: a proximal policy between behaviour and current one (the paper's Eq. 5); false: plain PPO
    proximal: Proximal = Proximal.recompute  # where the proximal log-probs come from: a pass of their own, an interpolation, or the current ones
    advantage: Advantage = Advantage.group_norm  # how rewards become advantages; docs/algorithms.md
    ratio: ImportanceLevel = ImportanceLevel.token  # what a probability ratio is of: a token, or the root over a response (GSPO)
    surrogate: Surrogate = Surrogate.clip  # what bounds a step of the policy
    clip_epsilon: float = 0.2  # how far a ratio may fall below 1
    clip_epsilon_high: float = 0.0  # how far it may rise above 1; 0: as clip_epsilon
    dual_clip: float = 0.0  # bounds what a negative advantage can do; 0: not
    sapo_tau_positive: float = 1.0  # temperature of the soft gate for positive advantages, of surrogate=sapo
    sapo_tau_negative: float = 1.05  # the same for negative ones
    off_policy: OffPolicy = OffPolicy.mask  # what is done with tokens whose behaviour weight is extreme
    behavior_level: ImportanceLevel = ImportanceLevel.token  # what a behaviour weight is of
    behavior_cap: float = 5.0  # the greatest behaviour weight that is not extreme
    behavior_floor: float = 0.0  # the least; 0: none
    second_moment: float = 0.04  # the limit of off_policy=second_moment
    router_replay: RouterReplay = RouterReplay.off  # rollout: the trainer of a mixture sends tokens to the experts that the engine chose (R3)
    teacher: str = ""  # Hugging Face folder of the model that the divergence is from; empty: the starting model
    kl_weight: float = 0.0  # weight of the divergence from the starting model, or from the teacher; 0: none is held
    kl_estimator: KlEstimator = KlEstimator.k3  # how that divergence is estimated
    kl_in: KlPlace = KlPlace.loss  # whether it stands in the loss, in the rewards, or in each token's advantage
    entropy_weight: float = 0.0  # weight of the entropy bonus; 0: none
    aggregation: Aggregation = Aggregation.token_mean  # how the losses of tokens become one
    aggregation_length: int = 0  # [tokens] by which aggregation=fixed_length divides; 0: workflow.max_new_tokens
    gamma: float = 1.0  # discount of advantage=gae and reinforce_pp
    gae_lambda: float = 1.0  # lambda of advantage=gae
    critic_lr: float = 1e-5  # learning rate of the critic, of advantage=gae
    critic_warmup_steps: int = 0  # [training steps] in which the critic learns alone
    value_clip: float = 1.0  # [reward] that a value may move by in one step; 0: any

    @property
    def critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage is Advantage.gae

    @property
    def compares_groups(self) -> bool:
        """Whether advantages come from comparing a prompt's responses, so that it takes at least two."""
        return self.advantage in GROUP_ESTIMATORS

    @property
    def penalizes(self) -> bool:
        """Whether a divergence is taken from the rewards or from the advantages."""
        return self.kl_weight > 0 and self.kl_in is not KlPlace.loss

    @property
    def regularizes(self) -> bool:
        """Whether the loss moves the policy where all advantages are zero."""
        return self.entropy_weight > 0 or (self.kl_weight > 0 and self.kl_in is KlPlace.loss)

    @property
    def needs_proximal(self) -> bool:
        """Whether the proximal policy's log-probs are needed for all tokens before the step begins."""
        return self.decoupled and (self.penalizes or self.off_policy is OffPolicy.second_moment)

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work, or that has no meaning beside the others."""
        self._check_trust_region()
        self._check_off_policy()
        self._check_regularization()
        self._check_advantage()
        self._check_critic()

    def _check_trust_region(self) -> None:
        cispo, where = self.surrogate is Surrogate.cispo, f"with algorithm.surrogate={self.surrogate.value}"
        require(0 < self.clip_epsilon < 1 or (cispo and self.clip_epsilon == 1), "algorithm.clip_epsilon", self.clip_epsilon,
                "must be in (0, 1]" if cispo else "must be in (0, 1)", "1 sets no lower bound, as in the paper" if cispo else "The paper uses 0.2")
        require(self.clip_epsilon_high >= 0, "algorithm.clip_epsilon_high", self.clip_epsilon_high, "must not be negative",
                "0 takes algorithm.clip_epsilon; DAPO uses 0.28")
        require(self.surrogate in CLIPPING or not self.clip_epsilon_high, "algorithm.clip_epsilon_high", self.clip_epsilon_high,
                f"must be 0 {where}", "Nothing is clipped; use algorithm.surrogate=clip or cispo")
        require(self.dual_clip == 0 or self.dual_clip > 1, "algorithm.dual_clip", self.dual_clip, "must be 0 or more than 1",
                "3 is usual; 0 sets no such bound")
        require(self.surrogate is Surrogate.clip or not self.dual_clip, "algorithm.dual_clip", self.dual_clip, f"must be 0 {where}",
                "It bounds PPO's clipped objective; use algorithm.surrogate=clip")
        for key in ("sapo_tau_positive", "sapo_tau_negative"):
            require(getattr(self, key) > 0, f"algorithm.{key}", getattr(self, key), "must be positive", "The paper uses 1 and 1.05")
        require(self.ratio is not ImportanceLevel.sequence, "algorithm.ratio", self.ratio.value, "must be token or geometric",
                "The product over a response leaves every trust region; its length-th root is GSPO's ratio, geometric")
        require(self.ratio is ImportanceLevel.token or self.surrogate in (Surrogate.clip, Surrogate.none), "algorithm.ratio", self.ratio.value,
                f"must be token {where}", "It weighs every token by its own ratio; use algorithm.surrogate=clip for GSPO")

    def _check_off_policy(self) -> None:
        require(self.behavior_cap >= 1, "algorithm.behavior_cap", self.behavior_cap, "must be 1 or more",
                "Tokens whose proximal/behaviour ratio is above it are masked or clamped")
        require(0 <= self.behavior_floor <= 1, "algorithm.behavior_floor", self.behavior_floor, "must be from 0 to 1",
                "0 sets no lower bound; IcePop uses 0.5")
        require(self.second_moment > 0, "algorithm.second_moment", self.second_moment, "must be positive", "The paper uses 0.04")
        if not self.decoupled:
            where, remedy = "with algorithm.decoupled=false", "The ratio is to the behaviour policy itself; use algorithm.decoupled=true"
            require(self.behavior_level is ImportanceLevel.token, "algorithm.behavior_level", self.behavior_level.value, f"must be token {where}",
                    remedy)
            require(self.behavior_floor == 0, "algorithm.behavior_floor", self.behavior_floor, f"must be 0 {where}", remedy)
            require(self.off_policy is OffPolicy.mask, "algorithm.off_policy", self.off_policy.value, f"must be mask (the default) {where}", remedy)
        if self.off_policy is OffPolicy.second_moment:
            where = "with algorithm.off_policy=second_moment"
            require(self.proximal is Proximal.recompute, "algorithm.proximal", self.proximal.value, f"must be recompute {where}",
                    "The mask is made of all tokens of a step, before it")
            require(self.behavior_level is ImportanceLevel.token, "algorithm.behavior_level", self.behavior_level.value, f"must be token {where}",
                    "The mask is one of tokens")
            require(self.behavior_floor == 0, "algorithm.behavior_floor", self.behavior_floor, f"must be 0 {where}",
                    "The second moment alone decides; use algorithm.off_policy=mask for a floor")

    def _check_regularization(self) -> None:
        require(self.kl_weight >= 0, "algorithm.kl_weight", self.kl_weight, "must not be negative", "GRPO uses 0.04; 0 needs no reference model")
        require(self.entropy_weight >= 0, "algorithm.entropy_weight", self.entropy_weight, "must not be negative", "0 adds no bonus; try 0.001")
        require(self.kl_weight == 0 or self.kl_in is not KlPlace.loss or self.kl_estimator is not KlEstimator.k1, "algorithm.kl_estimator",
                self.kl_estimator.value, "must be k2 or k3 with algorithm.kl_in=loss",
                "The gradient of k1 is that of log pi, 0 on average: it draws nowhere. Use k2, or algorithm.kl_in=reward or advantage")
        require(not self.penalizes or not self.decoupled or self.proximal is Proximal.recompute, "algorithm.kl_in", self.kl_in.value,
                f"must be loss with algorithm.proximal={self.proximal.value}",
                "The penalty is that of the policy before the step; use algorithm.proximal=recompute")
        require(self.kl_weight > 0 or not self.teacher, "algorithm.teacher", self.teacher, "must be empty with algorithm.kl_weight=0",
                "Nothing is learned from it then; algorithm=distillation has a weight of 1")

    def _check_advantage(self) -> None:
        where = f"with algorithm.advantage={self.advantage.value}"
        require(self.advantage is not Advantage.none or (self.kl_weight > 0 and self.kl_in is not KlPlace.reward), "algorithm.kl_in",
                self.kl_in.value, f"must be advantage or loss {where}, with a kl_weight above 0", "Rewards do not count then, and nothing else would")
        require(not self.critic or self.kl_in is not KlPlace.advantage or not self.kl_weight, "algorithm.kl_in", self.kl_in.value,
                f"must be loss or reward {where}", "The critic makes advantages of rewards")
        for key in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, key) <= 1, f"algorithm.{key}", getattr(self, key), "must be from 0 to 1", "The paper uses 1")
        require(self.gamma == 1 or self.advantage in (Advantage.gae, Advantage.reinforce_pp), "algorithm.gamma", self.gamma, f"must be 1 {where}",
                "All tokens of a response have one advantage; only gae and reinforce_pp discount")
        require(self.gae_lambda == 1 or self.critic, "algorithm.gae_lambda", self.gae_lambda, f"must be 1 {where}", "There are values with gae only")
        require(self.aggregation_length >= 0, "algorithm.aggregation_length", self.aggregation_length, "must not be negative",
                "0 takes workflow.max_new_tokens")
        require(self.aggregation is Aggregation.fixed_length or not self.aggregation_length, "algorithm.aggregation_length", self.aggregation_length,
                f"must be 0 with algorithm.aggregation={self.aggregation.value}", "It is fixed_length's divisor")

    def _check_critic(self) -> None:
        require(0 <= self.critic_lr < 1, "algorithm.critic_lr", self.critic_lr, "must be from 0 to less than 1", "Try 1e-5")
        require(self.critic_warmup_steps >= 0, "algorithm.critic_warmup_steps", self.critic_warmup_steps, "must not be negative",
                "0 trains the policy from the first step")
        require(self.critic or not self.critic_warmup_steps, "algorithm.critic_warmup_steps", self.critic_warmup_steps,
                f"must be 0 with algorithm.advantage={self.advantage.value}", "There is a critic with algorithm.advantage=gae only")
        require(self.value_clip >= 0, "algorithm.value_clip", self.value_clip, "must not be negative", "0 does not limit the values' changes")
