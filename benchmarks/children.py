"""Processes of a benchmark that answer a line of JSON for every line that they are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from workers.run.processes import end_with_parent

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """`python -m module arguments`, running; a context manager that ends it. It must call `answer_orders`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._name = f"{module} {' '.join(arguments)}"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, "-m", module, *arguments, str(os.getpid())], cwd=ROOT, env=environment, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ready = self.answer()

    def order(self, **order: Any) -> None:
        """Give it something to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its answer to the oldest order. Raises RuntimeError if it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}: ended with status {self._process.wait()}; what it said stands above")
        return json.loads(line)

    def ask(self, **order: Any) -> dict[str, Any]:
        """Order and answer."""
        self.order(**order)
        return self.answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # which ends it
        self._process.wait()
        self._process.stdout.close()


def answer_orders(do: Callable[[dict[str, Any]], dict[str, Any]], **ready: Any) -> None:
    """In the child: say that it is ready, and answer each order by `do` until there are no more. Other output goes to standard error."""
    end_with_parent(int(sys.argv[-1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(do(json.loads(line))) + "\n")
