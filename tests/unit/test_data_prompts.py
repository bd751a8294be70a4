"""Prompt sources: determinism, order, disjointness, and what each refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.data.prompts import PromptSource, open_prompts
from workers.reward import verifiers
from workers.reward.verifiers import numeric

GYM = RewardConfig(verifier="reasoning_gym")


def arithmetic(seed: int = 1, **changes: object) -> PromptSource:
    return open_prompts(DataConfig(**changes), RewardConfig(), seed)  # type: ignore[arg-type]


def gym(seed: int = 1, **changes: object) -> PromptSource:
    return open_prompts(DataConfig(**{"kind": DataKind.reasoning_gym, "num_heldout": 5, **changes}), GYM, seed)  # type: ignore[arg-type]


def operands(text: str) -> tuple[int, int]:
    a, b = text.rsplit("\n", 1)[-1].removesuffix(" =").split(" + ")
    return int(a), int(b)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 16), st.integers(1, 14), st.integers(0, 2**40), st.integers(0, 2**60))
def test_arithmetic(digits: int, num_examples: int, num_heldout: int, seed: int, index: int) -> None:
    source = arithmetic(seed, digits=digits, num_examples=num_examples, num_heldout=num_heldout)
    prompt = source.train(index)
    a, b = operands(prompt.text)
    assert len(str(a)) == len(str(b)) == digits
    assert 0 not in (a, b)
    assert prompt.reference == str(a + b)
    *examples, question = prompt.text.split("\n")
    assert len(examples) == num_examples
    for example in examples:
        left, right = example.split(" = ")
        assert sum(map(int, left.split(" + "))) == int(right)
    assert question == f"{a} + {b} ="
    assert numeric(prompt.text, f" {a + b}\n1 + 1 = 2", prompt.reference) == 1.0
    again = arithmetic(seed, digits=digits, num_examples=num_examples, num_heldout=num_heldout)
    assert again.train(index) == prompt
    assert again.heldout() == source.heldout()
    assert len({held.text for held in source.heldout()}) == num_heldout
    assert {held.text.rsplit("\n", 1)[0] for held in source.heldout() if examples} <= {"\n".join(examples)}


def test_arithmetic_heldout_is_disjoint_even_where_space_is_scarce() -> None:
    source = arithmetic(digits=1, num_heldout=28)
    train = {operands(source.train(index).text) for index in range(5000)}
    heldout = [operands(prompt.text) for prompt in source.heldout()]
    examples = [tuple(map(int, line.split(" = ")[0].split(" + "))) for line in source.train(0).text.split("\n")[:-1]]
    reserved = {pair for a, b in [*heldout, *examples] for pair in ((a, b), (b, a))}
    assert len(heldout) == 28
    assert train == {(a, b) for a in range(1, 10) for b in range(1, 10)} - reserved, "neither a held-out sum nor its mirror is trained on"


def test_arithmetic_depends_on_the_seed_and_is_uniform() -> None:
    assert [arithmetic(1).train(index) for index in range(5)] != [arithmetic(2).train(index) for index in range(5)]
    source = arithmetic(digits=2, num_heldout=1)
    first = [operands(source.train(index).text)[0] for index in range(4500)]
    counts = [first.count(value) for value in range(10, 100)]
    assert min(counts) > 20 and max(counts) < 90  # 50 expected each, standard deviation 7


def test_arithmetic_refuses_too_small_a_space() -> None:
    with pytest.raises(ConfigError, match="data.num_heldout=200: must be at most 28 with data.digits=1"):
        arithmetic(digits=1)


def test_negative_indices_are_refused(tmp_path: Path) -> None:
    for source in (arithmetic(), gym()):
        with pytest.raises(IndexError, match="start at 0"):
            source.train(-1)


def test_gym_is_deterministic_across_processes() -> None:
    program = ("from workers.config import *\nfrom workers.data.prompts import open_prompts\n"
               "s = open_prompts(DataConfig(kind=DataKind.reasoning_gym, num_heldout=5), RewardConfig(verifier='reasoning_gym'), 1)\n"
               "import json\nprint(json.dumps([s.train(i).text for i in (0, 499, 500, 10**9)] + [p.text for p in s.heldout()]))")
    printed = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "5"})
    source = gym()
    assert json.loads(printed) == [source.train(i).text for i in (0, 499, 500, 10**9)] + [p.text for p in source.heldout()]
    assert source.train(0).text != gym(seed=2).train(0).text


def test_gym_scores_its_own_answers() -> None:
    source = gym(task="gcd", options={"max_numbers": 2})
    score = verifiers.load("reasoning_gym")
    for prompt in [source.train(0), *source.heldout()]:
        answer = json.loads(prompt.reference)["entry"]["answer"]
        assert score(prompt.text, f"<answer>{answer}</answer>", prompt.reference) == 1.0
        assert score(prompt.text, f" {answer}\n", prompt.reference) == 1.0
        assert score(prompt.text, "x", prompt.reference) < 1.0


def test_gym_heldout_is_disjoint_where_questions_repeat() -> None:
    source = gym(num_heldout=100, options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})  # 200 questions in all
    heldout = {prompt.text for prompt in source.heldout()}
    train = {source.train(index).text for index in range(1000)}
    assert len(heldout) == 100
    assert len(train) > 90
    assert not heldout & train


@pytest.mark.parametrize(("changes", "message"), [
    ({"task": "chain_sums"}, "no such task; did you mean 'chain_sum'.*Use one of ab, "),
    ({"task": "composite"}, "no such task"),
    ({"options": {"max_term": 3}}, "no such option; did you mean 'max_terms'.*min_terms, max_terms, min_digits, max_digits, allow_negation"),
    ({"options": {"seed": 3}}, "it follows from run.seed"),
    ({"options": {"min_terms": 9}}, "refuses them .max_terms must be"),
    ({"options": {"min_terms": "many"}}, "refuses them"),
    ({"options": {"min_terms": 1, "max_terms": 1, "max_digits": 1}, "num_heldout": 11}, "data.num_heldout=11: .*too few different questions"),
    ({"task": "rearc"}, "do not survive JSON"),
])
def test_gym_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gym(**changes)


def test_gym_refuses_to_train_on_nothing_but_heldout_questions() -> None:
    source = gym(options={"min_terms": 1, "max_terms": 1, "max_digits": 1}, num_heldout=10)
    with pytest.raises(ConfigError, match="too few different questions"):
        source.train(0)


def test_gym_needs_the_tasks_own_verifier() -> None:
    with pytest.raises(ConfigError, match="Set reward.verifier=reasoning_gym"):
        open_prompts(DataConfig(kind=DataKind.reasoning_gym), RewardConfig(), 1)


class Files:
    """A training and a held-out file."""

    def __init__(self, folder: Path) -> None:
        self.train, self.heldout = folder / "train.jsonl", folder / "heldout.jsonl"
        self.train.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": i + 1}) + "\n" for i in range(10)))
        self.heldout.write_text('{"prompt": "a", "answer": "x", "id": "one", "verifier": "math_verify"}\n\n{"prompt": "b", "answer": 1.5}')

    def open(self, seed: int = 1, **changes: object) -> PromptSource:
        config = DataConfig(**{"kind": DataKind.jsonl, "path": str(self.train), "heldout_path": str(self.heldout), **changes})  # type: ignore[arg-type]
        return open_prompts(config, RewardConfig(), seed)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_jsonl(files: Files) -> None:
    source = files.open()
    texts = [source.train(index).text for index in range(30)]
    passes = [texts[:10], texts[10:20], texts[20:]]
    assert all(sorted(each) == sorted(f"{i} + 1 =" for i in range(10)) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [files.open().train(index).text for index in reversed(range(30))] == texts[::-1]
    assert [files.open(seed=2).train(index).text for index in range(10)] != passes[0]
    first, second = source.heldout()
    assert (first.id, first.verifier, first.reference) == ("one", "math_verify", "x")
    assert (second.id, second.verifier, second.reference) == ("line/3", "numeric", "1.5")
    assert len(files.open(num_heldout=1).heldout()) == 1


@pytest.mark.parametrize(("line", "message"), [
    ('{"prompt": "x"}', "train.jsonl:11: .*missing required field `answer`"),
    ('{"prompt": "x", "answer": 1, "weight": 2}', "train.jsonl:11: .*unknown field `weight`"),
    ('{"prompt": 3, "answer": 1}', r"train.jsonl:11: Expected `str`, got `int` - at `\$.prompt`"),
    ('{"prompt": "x", "answer": true}', r"train.jsonl:11: .*got `bool` - at `\$.answer`"),
    ('{"prompt": "x", "answer": [1]}', r"train.jsonl:11: .*got `array`"),
    ('{"prompt": "", "answer": 1}', "train.jsonl:11: the prompt is empty"),
    ('["x", 1]', "train.jsonl:11: Expected `object`"),
    ('{"prompt": "x", "answer', "train.jsonl:11: Input data was truncated"),
    ('{"prompt": "x", "answer": 1} {}', "train.jsonl:11: JSON is malformed"),
    ('{"prompt": "x", "answer": 1, "verifier": "numerics"}', "train.jsonl:11: verifier='numerics': no such verifier.*did you mean 'numeric'"),
    ('{"prompt": "x", "answer": 1, "id": "line/2"}', "train.jsonl:11: id 'line/2' is also that of line 2"),
    ('{"prompt": "b", "answer": 1}', "heldout.jsonl:3: the same prompt is .*train.jsonl:11"),
])
def test_jsonl_refuses_a_line(files: Files, line: str, message: str) -> None:
    with files.train.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=message):
        files.open()


def test_jsonl_refuses_files(files: Files) -> None:
    with pytest.raises(ConfigError, match="data.path='/nowhere/x.jsonl': not readable .No such file"):
        files.open(path="/nowhere/x.jsonl")
    files.heldout.write_bytes(b'{"prompt": "\xff", "answer": 1}')
    with pytest.raises(ConfigError, match=r"heldout.jsonl:1: "):
        files.open()
    files.heldout.write_text("\n")
    with pytest.raises(ConfigError, match="data.heldout_path=.*holds no prompt"):
        files.open()


def test_unknown_verifier_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="reward.verifier='x': no such verifier"):
        open_prompts(DataConfig(), RewardConfig(verifier="x"), 1)


def test_opening_arithmetic_imports_nothing_heavy() -> None:
    program = ("import sys\nfrom workers.config import *\nfrom workers.data.prompts import open_prompts\n"
               "open_prompts(DataConfig(), RewardConfig(), 1)\n"
               "print([name for name in ('torch', 'numpy', 'reasoning_gym', 'transformers', 'jinja2') if name in sys.modules])")
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
