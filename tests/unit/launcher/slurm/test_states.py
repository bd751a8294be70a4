"""Every state of SLURM in every spelling, and what is done about it."""

from __future__ import annotations

import pytest

from launcher.slurm.states import Action, Meaning, State, parse


@pytest.mark.parametrize("state", [state for state in State if state is not State.UNKNOWN])
def test_every_state_is_read_by_its_name_and_by_its_code(state: State) -> None:
    assert parse(state.name) is state and parse(f" {state.name.lower()} ") is state
    if state.value.code:
        assert parse(state.value.code) is state


@pytest.mark.parametrize(("text", "state"), [
    ("CANCELLED by 1000", State.CANCELLED), ("CANCELLED+", State.CANCELLED), ("CANCELLE+", State.CANCELLED), ("OUT_OF_ME+", State.OUT_OF_MEMORY),
    ("NODE_FAIL", State.NODE_FAIL), ("COMPLETI+", State.COMPLETING), ("COMPLET+", State.UNKNOWN), ("REQUEUE_H+", State.REQUEUE_HOLD),
    ("", State.UNKNOWN), ("FROBNICATED", State.UNKNOWN), ("F", State.FAILED), ("CG", State.COMPLETING), ("oom", State.OUT_OF_MEMORY)])
def test_spellings(text: str, state: State) -> None:
    assert parse(text) is state


def test_what_follows() -> None:
    for state in State:
        assert state.words
        if state.meaning is Meaning.fault:
            assert state.action in (Action.next_element, Action.blame_node, Action.tell_user) and state.over
        if state.meaning in (Meaning.alive, Meaning.ending, Meaning.unknown):
            assert state.action is Action.nothing and not state.over and not state.waiting
        if state.meaning in (Meaning.queued, Meaning.held):
            assert state.waiting and not state.over
        assert (state.meaning is Meaning.held) == (state.action is Action.release)
    assert State.NODE_FAIL.action is State.BOOT_FAIL.action is Action.blame_node
    assert State.OUT_OF_MEMORY.action is State.TIMEOUT.action is Action.tell_user
    assert State.FAILED.action is State.COMPLETED.action is Action.next_element
    assert not State.UNKNOWN.over, "what we do not know may live: nothing is submitted a second time"
