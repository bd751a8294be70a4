"""The main program inside the sandbox, and the libraries that LiveCodeBench gives to programs. Sent there as text (sources.py)."""

import sys
import types
from typing import Any

RECURSION_LIMIT = INTEGER_DIGITS = 50_000
LIBRARIES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools",
             "operator", "io", "sys", "json", "builtins", "typing")
"""What programs may use without an import, as in lcb_runner/evaluation/testing_util.py: `from X import *` of each in turn, then `import X`."""


def import_libraries(namespace: dict[str, Any]) -> None:
    """Put `LIBRARIES` into `namespace`, and let programs recurse as deep as LiveCodeBench does."""
    stars = "".join(f"from {name} import *\n" for name in LIBRARIES)
    exec(f"{stars}import {', '.join(LIBRARIES)}", namespace)
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(INTEGER_DIGITS)


def run(program: str) -> None:
    """Run `program` as the main program, with `LIBRARIES`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    import_libraries(main.__dict__)
    exec(compile(program, "solution.py", "exec"), main.__dict__)
