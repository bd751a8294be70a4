"""Every state that SLURM gives a job, what it means for an element of a run, and what is done about it. Pure.

    meaning    what that is                                           states
    queued     waits for its turn                                     PENDING REQUEUED REQUEUE_FED EXPEDITING UPDATE_DB
    held       waits until somebody releases it                       REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT
    alive      has its nodes                                          RUNNING CONFIGURING POWER_UP_NODE SUSPENDED STOPPED RESIZING SIGNALING
    ending     its processes may still be there                       COMPLETING STAGE_OUT
    in_order   over, as somebody wanted it                            COMPLETED CANCELLED PREEMPTED REVOKED
    fault      over, and something was wrong                          FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE LAUNCH_FAILED
                                                                      RECONFIG_FAIL
    unknown    a state that this table does not know yet: taken for alive, so that nothing is submitted twice

    action         who does what after it
    nothing        it goes on, or it is over for good
    slurm          SLURM puts the same element into the queue again by itself (sbatch --requeue)
    next_element   the array's next element takes over: any element can go on from the newest checkpoint
    release        somebody must say `scontrol release`: a starting training element does, and so does `headway watch`
    blame_node     the next element takes over, and the failure counts against its nodes; after two `headway watch` excludes the node
    tell_user      the next element takes over, but will end in the same way until somebody changes something

An exit status other than 0 (FAILED) may be a node's fault or the program's: it counts against the node only if it came soon
after the start (launcher/monitoring/supervisor_policy.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Meaning(enum.Enum):
    """What a state means for an element."""

    queued = "queued"
    held = "held"
    alive = "alive"
    ending = "ending"
    in_order = "over in order"
    fault = "over by a fault"
    unknown = "unknown"


class Action(enum.Enum):
    """What follows a state."""

    nothing = "nothing"
    slurm = "SLURM requeues"
    next_element = "next element"
    release = "release"
    blame_node = "blame the node"
    tell_user = "tell the user"


@dataclass(frozen=True)
class Row:
    """One line of the table: squeue's short code (where it has one), the meaning, what follows, and the words for people."""

    code: str
    meaning: Meaning
    action: Action
    words: str


class State(enum.Enum):
    """SLURM's job states, base states and flags; `UNKNOWN` for what later versions may add."""

    PENDING = Row("PD", Meaning.queued, Action.nothing, "waits in the queue")
    RUNNING = Row("R", Meaning.alive, Action.nothing, "runs")
    SUSPENDED = Row("S", Meaning.alive, Action.nothing, "is suspended by SLURM and goes on later")
    COMPLETED = Row("CD", Meaning.in_order, Action.next_element, "ended in order")
    CANCELLED = Row("CA", Meaning.in_order, Action.next_element, "was cancelled")
    FAILED = Row("F", Meaning.fault, Action.next_element, "failed")
    TIMEOUT = Row("TO", Meaning.fault, Action.tell_user,
                  "reached its time limit before it had saved its state: give a longer cluster.signal_delay_s")
    NODE_FAIL = Row("NF", Meaning.fault, Action.blame_node, "lost its node")
    PREEMPTED = Row("PR", Meaning.in_order, Action.slurm, "was preempted by a job of higher priority")
    BOOT_FAIL = Row("BF", Meaning.fault, Action.blame_node, "could not start: its node did not boot")
    DEADLINE = Row("DL", Meaning.fault, Action.tell_user, "was removed: its deadline could not be met")
    OUT_OF_MEMORY = Row("OOM", Meaning.fault, Action.tell_user, "ran out of memory: ask for more (cluster.*.mem), or use smaller micro-batches")
    CONFIGURING = Row("CF", Meaning.alive, Action.nothing, "has its nodes, which are getting ready")
    COMPLETING = Row("CG", Meaning.ending, Action.nothing, "is ending")
    EXPEDITING = Row("", Meaning.queued, Action.nothing, "waits in the queue, with priority")
    LAUNCH_FAILED = Row("", Meaning.fault, Action.blame_node, "could not be launched on its node (prolog?)")
    POWER_UP_NODE = Row("", Meaning.alive, Action.nothing, "has its nodes, which are being powered up")
    RECONFIG_FAIL = Row("", Meaning.fault, Action.blame_node, "could not start: its node could not be configured")
    REQUEUED = Row("RQ", Meaning.queued, Action.slurm, "goes back into the queue")
    REQUEUE_FED = Row("RF", Meaning.queued, Action.slurm, "goes back into the queue of its federation")
    REQUEUE_HOLD = Row("RH", Meaning.held, Action.release, "is back in the queue, held")
    RESIZING = Row("RS", Meaning.alive, Action.nothing, "is changing its size")
    RESV_DEL_HOLD = Row("RD", Meaning.held, Action.release, "is held: its reservation was deleted")
    REVOKED = Row("RV", Meaning.in_order, Action.nothing, "runs on another cluster of the federation")
    SIGNALING = Row("SI", Meaning.alive, Action.nothing, "is being sent a signal")
    SPECIAL_EXIT = Row("SE", Meaning.held, Action.release, "is back in the queue, held for a special exit status")
    STAGE_OUT = Row("SO", Meaning.ending, Action.nothing, "is ending: its files are being staged out")
    STOPPED = Row("ST", Meaning.alive, Action.nothing, "is stopped and keeps its nodes")
    UPDATE_DB = Row("", Meaning.queued, Action.nothing, "is being recorded by SLURM")
    UNKNOWN = Row("", Meaning.unknown, Action.nothing, "is in a state that Headway does not know")

    @property
    def meaning(self) -> Meaning:
        """What it means for the element."""
        return self.value.meaning

    @property
    def action(self) -> Action:
        """What follows."""
        return self.value.action

    @property
    def words(self) -> str:
        """For people: '... lost its node'."""
        return self.value.words

    @property
    def over(self) -> bool:
        """The element, or this incarnation of it, has ended."""
        return self.meaning in (Meaning.in_order, Meaning.fault)

    @property
    def waiting(self) -> bool:
        """It has no nodes yet."""
        return self.meaning in (Meaning.queued, Meaning.held)


_BY_CODE = {state.value.code: state for state in State if state.value.code}


def parse(text: str) -> State:
    """The state in squeue's or sacct's spelling: 'RUNNING', 'R', 'CANCELLED by 1000', 'CANCELLED+', 'OUT_OF_ME+'; `State.UNKNOWN`
    for a state of which no name begins so."""
    words = text.strip().split()
    name = words[0].upper() if words else ""
    if name in State.__members__:
        return State[name]
    if name in _BY_CODE:
        return _BY_CODE[name]
    if name.endswith("+"):  # sacct cuts what does not fit into its column
        found = [state for state in State if state.name.startswith(name[:-1])]
        if len(found) == 1:
            return found[0]
    return State.UNKNOWN
