"""Messages between a rollout worker and a reward element (`reward.placement=array`).

Rollout worker -> element    ScoreWanted  OutputWanted  Unwanted
Element -> rollout worker    ScoreGiven  OutputGiven  NoAnswer

Each request has a number of its own, which its answer repeats. A request may be sent twice, to two elements, where one is lost:
judging twice does no harm, and the answer that nobody waits for any more is ignored. Texts may be as long as transport.max_message_mb allows.
"""

from __future__ import annotations

from workers.messages.parts import Count, Message


class ScoreWanted(Message, frozen=True):
    """Have `verifier` score `completion`."""

    number: Count
    verifier: str
    prompt: str
    completion: str
    reference: str


class OutputWanted(Message, frozen=True):
    """Run a model's program."""

    number: Count
    code: str


class Unwanted(Message, frozen=True):
    """Nobody waits for the answer any more."""

    number: Count


class ScoreGiven(Message, frozen=True):
    """The verifier's score, in [0, 1]."""

    number: Count
    score: float


class OutputGiven(Message, frozen=True):
    """What the program printed, or how it failed."""

    number: Count
    text: str


class NoAnswer(Message, frozen=True):
    """The element's processes gave none, retries included; `cause` names whose doing it is. Another element would fare no better."""

    number: Count
    cause: str


ToElement = ScoreWanted | OutputWanted | Unwanted
FromElement = ScoreGiven | OutputGiven | NoAnswer
