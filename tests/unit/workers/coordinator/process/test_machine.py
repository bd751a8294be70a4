"""The state machine as its process drives it."""

from __future__ import annotations

import pytest

from tests.support.small_run import Prompts, make_config
from workers.config import Bound
from workers.coordinator.core import Coordinator
from workers.coordinator.process.machine import Machine
from workers.coordinator.reconciliation import RETURN_S
from workers.coordinator.recording.inputs import AnyInput, Arrived, Ticked
from workers.coordinator.weights.broadcast_group import JOIN_S, Phase
from workers.messages.from_worker import Heartbeat, Register
from workers.messages.parts import Role, Version


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_after_a_pause_of_its_own_the_time_passes_before_what_waited(pause_s: float) -> None:
    """As where the run folder stalls while messages come in: nothing is measured of that time."""
    noted: list[AnyInput] = []
    core = Coordinator(make_config(4, 2, Bound.admission, 9), Prompts(), 1, 0.0)
    machine, held_back = Machine(core, lambda given, _: noted.append(given)), core.office.held_back
    machine.do(Arrived(0.0, b"rollout", Register(Role.rollout, "node", 1)))
    for second in range(1, 6):
        machine.do(Ticked(float(second)))
    held_back.restart(0.0)
    held_back.look(5.0, 1.0)  # from now on
    then = Arrived(6.0 + pause_s, b"rollout", Heartbeat())
    machine.do(then)
    assert held_back.mean(then.now) == pytest.approx(1 / 6) and core.ticked == (then.now if pause_s else 5.0)
    assert noted[6:] == ([Ticked(then.now), then] if pause_s else [then])


def test_what_came_during_a_pause_is_not_too_late() -> None:
    """Words about a group for broadcasts, about loading, and of workers after a restart, that waited in a socket for longer than they may take."""
    core = Coordinator(make_config(4, 2, Bound.admission, 9), Prompts(), 1, 0.0)
    group, permits, machine = core.broadcasts.group, core.delivery.permits, Machine(core)
    machine.do(Ticked(0.5))
    group.announced(0.5)
    assert group.consider(b"trainer", {b"rollout": 1}, True, 0.5) and group.phase is not Phase.none
    permits.ask(b"rollout", Version(1, 0), True, 0.5)
    core.reconciliation.expected = {b"another"}
    pause_s = 10 * max(JOIN_S, core.config.weights.timeout_s, RETURN_S)
    machine.do(Arrived(1.0 + pause_s, b"rollout", Register(Role.rollout, "node", 1)))
    assert group.phase is not Phase.none and b"rollout" in permits.loading and core.reconciliation.expected == {b"another"}
    for second in range(int(pause_s)):
        machine.do(Ticked(2.0 + pause_s + second))
    assert group.phase is Phase.none and not permits.loading and not core.reconciliation.expected, "it is as ever after that"
