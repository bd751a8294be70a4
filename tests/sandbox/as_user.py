"""A sandbox that belongs to another user: `python -m tests.sandbox.as_user UID PYTHON`, one JSON object a line in and out, till the input ends."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.sandbox.host import ENVIRONMENT_SECRET
from workers.config import SandboxConfig
from workers.sandbox.sandbox import Limits, Outcome, Sandbox

ROOT = Path(__file__).resolve().parents[2]


class UsersSandbox:
    """The same calls as `Sandbox`, carried out as user `uid` by interpreter `python`."""

    def __init__(self, uid: int, python: str) -> None:
        self._popen = subprocess.Popen([sys.executable, "-m", "tests.sandbox.as_user", str(uid), python], cwd=ROOT, stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, env={**os.environ, ENVIRONMENT_SECRET: "x"})

    def run(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> Outcome:
        return self._ask({"source": source, "stdin": base64.b64encode(stdin).decode(), "limits": limits and dataclasses.asdict(limits)})[0]

    def left(self) -> list[str]:
        """What lies in the sandbox's folder between two runs."""
        return self._ask({"source": "", "stdin": "", "limits": None})[1]

    def _ask(self, message: dict[str, Any]) -> tuple[Outcome, list[str]]:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(message).encode() + b"\n")
        self._popen.stdin.flush()
        answer = json.loads(self._popen.stdout.readline())
        outcome = answer["outcome"]
        return Outcome(**{**outcome, **{name: base64.b64decode(outcome[name]) for name in ("stdout", "stderr")}}), answer["left"]

    def close(self) -> None:
        self._popen.communicate(timeout=120)


def main(uid: int, python: str) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with Sandbox(SandboxConfig(python=python)) as sandbox:
        for line in sys.stdin:
            message = json.loads(line)
            limits = Limits(**message["limits"]) if message["limits"] else None
            outcome = dataclasses.asdict(sandbox.run(message["source"], base64.b64decode(message["stdin"]), limits))
            outcome |= {name: base64.b64encode(outcome[name]).decode() for name in ("stdout", "stderr")}
            print(json.dumps({"outcome": outcome, "left": sorted(path.name for path in sandbox._folder.work.iterdir())}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
