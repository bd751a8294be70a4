"""The state machine as its process drives it."""

from __future__ import annotations

import pytest

from tests.support.small_run import Prompts, make_config
from workers.config import Bound
from workers.coordinator.core import Coordinator
from workers.coordinator.process.machine import Machine
from workers.coordinator.recording.inputs import AnyInput, Arrived, Ticked
from workers.messages.from_worker import Heartbeat, Register
from workers.messages.parts import Role


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
