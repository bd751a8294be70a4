"""Which checkpoints stay: the newest ones, and the one whose step has the best held-out accuracy, or loss (evaluations.jsonl). Pure.

That of a step becomes known later, so one whose evaluation is due or under way is kept until then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workers.messages.version import Version


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep`, and with `best` the best evaluated one. `evaluated_every`: steps between evaluations (0:
    none). `restored`: what this incarnation went on from; newer ones of earlier epochs are broken, and of a lineage that is lost."""

    keep: int
    best: bool = True
    evaluated_every: int = 0
    restored: Version | None = None

    def choose(self, versions: Collection[Version], accuracies: Mapping[int, float]) -> set[Version]:
        """Those of `versions`, of which the newest has just been published, that stay; `accuracies` by step, as far as they are known."""
        epoch = max(versions).epoch
        ours = sorted(version for version in versions if self.restored is None or version.epoch == epoch or version <= self.restored)
        chosen = set(ours[-self.keep:])
        if self.best:
            best = best_of(ours, accuracies)
            chosen |= {version for version in ours if version == best or self._awaited(version.step, accuracies)}
        return chosen

    def _awaited(self, step: int, accuracies: Mapping[int, float]) -> bool:
        """Evaluations end in the order of their steps; one that is due while another goes on is left out."""
        return bool(self.evaluated_every) and step % self.evaluated_every == 0 and step > max(accuracies, default=-1)


def best_of(versions: Collection[Version], accuracies: Mapping[int, float]) -> Version | None:
    """The version whose step has the best accuracy, the newest of equals; None where none has any."""
    evaluated = [version for version in versions if version.step in accuracies]
    return max(evaluated, key=lambda version: (accuracies[version.step], version), default=None)


def scores(evaluations: Collection[Mapping]) -> dict[int, float]:
    """By step the held-out accuracy, or minus the loss of a supervised run: the more the better. `evaluations`: the lines of
    evaluations.jsonl, which are of the run's present lineage."""
    found = {line["step"]: line["accuracy"] if "accuracy" in line else line["heldout_loss"] and -line["heldout_loss"] for line in evaluations}
    return {step: score for step, score in found.items() if score is not None}
