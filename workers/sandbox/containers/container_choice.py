"""Which of the two makes containers on this machine: decided by trying them, with what must not be possible inside."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import replace

from workers.config import ContainerBackend, ContainerConfig
from workers.sandbox.confinement.syscalls import ARCHITECTURES
from workers.sandbox.containers.container import Container, pack
from workers.sandbox.outcome import SandboxError

PROGRAMS = {ContainerBackend.bubblewrap: ("bwrap",), ContainerBackend.apptainer: ("apptainer", "singularity")}
REMEDY = ("workflow=shell_agent needs bubblewrap 0.8 or newer where user namespaces are allowed (user.max_user_namespaces > 0; on Ubuntu "
          "kernel.apparmor_restrict_unprivileged_userns=0), or Apptainer with workflow.container.image")
PASSED = "confined"
_ATTEMPTS = """
[ -e {canary} ] && echo "files of others can be seen"
(: <> /dev/tcp/127.0.0.1/{port}) 2> /dev/null && echo "the network can be reached"
(: > /usr/.headway) 2> /dev/null && echo "the system can be written"
unshare --user true 2> /dev/null && echo "namespaces can be made, and in them file systems without a bound"
echo {passed}
"""


def choose(config: ContainerConfig) -> Container:
    """The containers of `config` here. Raises `SandboxError`, in one line, with what is missing and the remedy."""
    asked = config.backend
    reasons = []
    for backend in PROGRAMS if asked is ContainerBackend.auto else [asked]:
        program = next(filter(None, map(shutil.which, PROGRAMS[backend])), "")
        container = Container(replace(config, backend=backend), program)
        reason = _why_not(container) if program else f"{' or '.join(PROGRAMS[backend])} is not installed"
        if not reason:
            return container
        reasons.append(f"{backend.value}: {reason}")
    raise SandboxError(f"workflow.container.backend={asked.value}: no container can be made on this machine ({'; '.join(reasons)}). {REMEDY}")


def _why_not(container: Container) -> str:
    """What does not work, or could be done inside that must not be; '' for nothing."""
    if os.uname().machine not in ARCHITECTURES:
        return f"system calls cannot be filtered on {os.uname().machine}"
    if container.backend is ContainerBackend.apptainer and not container.config.image:
        return "workflow.container.image names no image"
    with tempfile.NamedTemporaryFile() as canary, socket.create_server(("127.0.0.1", 0)) as server:
        attempts = _ATTEMPTS.format(canary=canary.name, port=server.getsockname()[1], passed=PASSED)
        try:
            ran = container.run(pack({}), attempts)
        except OSError as error:
            return f"{container.program} cannot be started: {error.strerror}"
    found = ran.output.split("\n")[:-1]
    return "" if found == [PASSED] else "; ".join(filter(lambda line: line != PASSED, found)) or ran.failure or "it does not work here"
