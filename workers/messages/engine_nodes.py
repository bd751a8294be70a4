"""Messages between the rollout worker of a replica over several nodes and the tasks on its other nodes (rollout/nodes/).

Rollout worker -> node    WorkerLives  StartRank  StopRank  FetchVersion  Leave
Node -> rollout worker    NodeLives  RankEnded  VersionFetched

A number names a start, or a fetch; what answers it repeats it, so that what is said of an earlier one is known as such.
"""

from __future__ import annotations

from workers.messages.parts import Announcement, Count, EndpointOrNone, Message, Name, Text, Version


class WorkerLives(Message, frozen=True):
    """A heartbeat, which is answered by another one."""


class StartRank(Message, frozen=True):
    """Start the server's part on this node, with the starting weights named `version`; all parts meet at `address`:`port`."""

    number: Count
    address: Name
    port: Count
    version: Version


class StopRank(Message, frozen=True):
    """End it."""

    number: Count


class FetchVersion(Message, frozen=True):
    """Bring the announced weights to this node: from `source`, an endpoint that streams them; '': they lie on storage that all nodes share. `held`:
    the version of the first node, which stays until this one is there."""

    number: Count
    announcement: Announcement
    source: EndpointOrNone
    held: Version | None = None


class Leave(Message, frozen=True):
    """The rollout worker leaves, and this node with it."""


class NodeLives(Message, frozen=True):
    """The answer to `WorkerLives`."""


class RankEnded(Message, frozen=True):
    """The server's part on this node has ended, or could not be started; `cause` says how."""

    number: Count
    cause: Text


class VersionFetched(Message, frozen=True):
    """The announced weights are on this node, verified; or, with a `cause`, cannot be."""

    number: Count
    cause: Text


ToNode = WorkerLives | StartRank | StopRank | FetchVersion | Leave
FromNode = NodeLives | RankEnded | VersionFetched
