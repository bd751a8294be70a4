"""Log-probs, entropies, values and losses by Hugging Face models and autograd, straight from the definitions."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.utils import parametrize

from workers.config import Config, OffPolicy, TrainerConfig
from workers.trainer.batch.group import TrainGroup

TokenValues = list[list[np.ndarray]]


def load_reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def reference_logprobs(model: Any, group: TrainGroup, temperature: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every response on its own, unpacked and unpadded: log-probs and entropies."""
    logprobs, entropies = [], []
    for sample, response in enumerate(group.responses):
        tokens = torch.from_numpy(np.concatenate([group.prompt, response]).astype(np.int64))[:-1]
        with sent_to(model, None if group.routing is None else group.routing[sample]):
            logits = model(tokens[None]).logits[0, len(group.prompt) - 1:].float() / temperature
        table = torch.log_softmax(logits, dim=-1)
        logprobs.append(table.gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return logprobs, entropies


@contextlib.contextmanager
def sent_to(model: Any, experts: np.ndarray | None) -> Iterator[None]:
    """Have the routers of a mixture choose `experts` [tokens, layers with experts, experts per token], and weigh them by their own scores."""
    def weigh(gate: Any, _: Any, output: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = output[0]
        scores = (logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)).gather(1, chosen)
        return logits, getattr(gate, "routed_scaling_factor", 1.0) * scores / scores.sum(-1, keepdim=True), chosen

    gates = [] if experts is None else [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    layers = [] if experts is None else torch.from_numpy(experts.astype(np.int64)).unbind(1)
    hooks = [gate.register_forward_hook(partial(weigh, chosen=chosen)) for gate, chosen in zip(gates, layers, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reference_loss(model: Any, groups: list[TrainGroup], proximal: TokenValues | None, setup: Config, advantages: TokenValues | None = None,
                   starting: TokenValues | None = None) -> torch.Tensor:
    """Eq. 5 for the whole batch, straight from the definition: with rewards as advantages unless they are given for every token, with the
    current log-probs as proximal ones unless they are given, and with the divergence from `starting` log-probs where these are given."""
    algorithm, total = setup.algorithm, torch.zeros(())
    for index, group in enumerate(groups):
        current, _ = reference_logprobs(model, group, setup.workflow.temperature)
        for sample, logprobs in enumerate(current):
            centre = logprobs.detach().numpy() if proximal is None else proximal[index][sample]
            weight = np.exp(centre - group.behavior_logprobs[sample])
            capped = np.minimum(weight, algorithm.behavior_cap)
            weight = capped if algorithm.off_policy is OffPolicy.clamp else np.where(weight > algorithm.behavior_cap, 0, weight)
            ratio = (logprobs - torch.from_numpy(centre)).exp()
            clipped = ratio.clamp(1 - algorithm.clip_epsilon, 1 + algorithm.clip_epsilon)
            advantage = float(group.rewards[sample]) if advantages is None else torch.from_numpy(advantages[index][sample])
            loss = -torch.minimum(ratio * advantage, clipped * advantage) * torch.from_numpy(weight)
            if starting is not None:
                gap = torch.from_numpy(starting[index][sample]) - logprobs
                loss = loss + algorithm.kl_weight * (gap.exp() - gap - 1)
            total = total + loss[torch.from_numpy(group.loss_mask[sample])].sum()
    return total / sum(group.num_valid_tokens for group in groups)


class ReferenceCritic(torch.nn.Module):
    """The model in `folder` without its output layer, and a linear head of zeros."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.trunk = load_reference(folder).model
        self.head = torch.nn.Linear(self.trunk.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def values(self, group: TrainGroup) -> list[torch.Tensor]:
        """Of every state in which a response token was chosen, every response on its own."""
        found = []
        for response in group.responses:
            tokens = torch.from_numpy(np.concatenate([group.prompt, response]).astype(np.int64))
            found.append(self.head(self.trunk(tokens[None]).last_hidden_state[0, len(group.prompt) - 1:-1])[:, 0])
        return found

    @torch.no_grad()
    def estimates(self, groups: list[TrainGroup], setup: Config) -> tuple[TokenValues, TokenValues, TokenValues]:
        """Values, returns and normalised advantages by loops over tokens."""
        values = [[row.numpy() for row in self.values(group)] for group in groups]
        advantages = [[np.zeros(len(response), np.float32) for response in group.responses] for group in groups]
        for index, group in enumerate(groups):
            for sample, row in enumerate(values[index]):
                reward, following, advantage = float(group.rewards[sample]), 0.0, 0.0
                for token in np.flatnonzero(group.loss_mask[sample])[::-1]:
                    delta = reward + setup.algorithm.gamma * following - row[token]
                    advantage = delta + setup.algorithm.gamma * setup.algorithm.gae_lambda * advantage
                    advantages[index][sample][token] = advantage
                    reward, following = 0.0, row[token]
        actions = np.concatenate([row[mask] for rows, group in zip(advantages, groups, strict=True)
                                  for row, mask in zip(rows, group.loss_mask, strict=True)])
        normalized = [[((row - actions.mean()) / (actions.std() + 1e-6) * mask).astype(np.float32)
                       for row, mask in zip(rows, group.loss_mask, strict=True)] for rows, group in zip(advantages, groups, strict=True)]
        returns = [[(advantage + value) * mask for advantage, value, mask in zip(*rows, group.loss_mask, strict=True)]
                   for rows, group in zip(zip(advantages, values, strict=True), groups, strict=True)]
        return values, returns, normalized

    def loss(self, groups: list[TrainGroup], old: TokenValues, returns: TokenValues, clip: float) -> torch.Tensor:
        """The clipped value loss of a minibatch, straight from the definition."""
        total = torch.zeros(())
        for group, old_rows, return_rows in zip(groups, old, returns, strict=True):
            for value, before, target, mask in zip(self.values(group), old_rows, return_rows, group.loss_mask, strict=True):
                before, target = torch.from_numpy(before), torch.from_numpy(target)
                clipped = torch.clamp(value, before - clip, before + clip)
                error = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
                total = total + 0.5 * error[torch.from_numpy(mask)].sum()
        return total / sum(group.num_valid_tokens for group in groups)


class ReferenceLearner:
    """A model and its AdamW, trained as the engine says it does."""

    def __init__(self, model: torch.nn.Module, trainer: TrainerConfig, lr: float) -> None:
        self.model, self._trainer = model, trainer
        self._optimizer = adamw(model, replace(trainer, lr=lr))

    def step(self, loss: torch.Tensor) -> tuple[float, float]:
        """An optimizer step; returns loss and gradient norm."""
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._trainer.clip_grad)
        self._optimizer.step()
        return loss.item(), norm.item()


class ReferenceTraining:
    """Policy and critic in training, both begun as the model in `folder`."""

    def __init__(self, folder: Path, setup: Config) -> None:
        self._setup, self.critic, self._starting = setup, ReferenceCritic(folder), load_reference(folder)
        self.policy = ReferenceLearner(load_reference(folder), setup.trainer, setup.trainer.lr)
        self._value_learner = ReferenceLearner(self.critic, setup.trainer, setup.algorithm.critic_lr)

    def step(self, groups: list[TrainGroup], proximal: TokenValues) -> dict[str, float]:
        """A training step in `num_minibatches` parts; returns means over these."""
        setup, found = self._setup, []
        with torch.no_grad():
            starting = [[row.numpy() for row in reference_logprobs(self._starting, group, setup.workflow.temperature)[0]] for group in groups]
        values, returns, advantages = self.critic.estimates(groups, setup)
        for part in np.array_split(np.arange(len(groups)), setup.trainer.num_minibatches):
            own, prox, advantage, start, old, target = (
                [rows[index] for index in part] for rows in (groups, proximal, advantages, starting, values, returns))
            found.append((*self.policy.step(reference_loss(self.policy.model, own, prox, setup, advantage, start)),
                          *self._value_learner.step(self.critic.loss(own, old, target, setup.algorithm.value_clip))))
        return dict(zip(("loss", "grad_norm", "value_loss", "value_grad_norm"), np.mean(found, axis=0).tolist(), strict=True))


def adamw(model: Any, trainer: TrainerConfig) -> torch.optim.AdamW:
    """torch's AdamW, with no decay of biases and norms."""
    decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": trainer.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=trainer.lr, betas=(trainer.adam_beta1, trainer.adam_beta2), eps=trainer.adam_eps)


class _LowRank(torch.nn.Module):
    """The weight of a matrix with an adapter, by Equation 3 of LoRA (arXiv 2106.09685)."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone()), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def with_adapters(model: Any, adapters: dict[str, torch.Tensor], scale: float) -> Any:
    """`model`, in which nothing is trained but `adapters`, pairs of lora_A and lora_B by the names of its modules."""
    model.requires_grad_(False)
    for name in adapters:
        module, _, leaf = name.partition(".lora_")
        if leaf.startswith("A"):
            pair = _LowRank(adapters[name], adapters[f"{module}.lora_B.weight"], scale)
            parametrize.register_parametrization(model.get_submodule(module), "weight", pair)
    return model


def merged(model: Any) -> Any:
    """A model `with_adapters` as one without; it is changed."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
    return model


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model under the names that its files have; in memory, experts have others."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}
