"""Prompt sources: determinism, order, disjointness, and what each refuses."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.config.choices import DataFilter
from workers.config.data import StageConfig
from workers.data.limits import MAX_CHARACTERS, SPARE, Limits, Replaced
from workers.data.prompt import Prompt, PromptSource
from workers.data.prompts import open_prompts
from workers.messages.codec import encode, from_coordinator
from workers.messages.from_coordinator import Leases
from workers.messages.parts import Lease, Purpose, Version
from workers.model.initialize import make_tiny
from workers.reward.verifiers import registry
from workers.reward.verifiers.registry import check_name, numeric

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
    score = registry.load("reasoning_gym")
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
    ({"task": "ransom_note"}, "no such task"),
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


STAGES = [StageConfig(until=3, options={"min_numbers": 2, "max_numbers": 2}), StageConfig(until=700, options={"min_numbers": 3, "max_numbers": 3})]


def test_gym_options_change_at_the_declared_prompts() -> None:
    source = gym(task="gcd", options={"min_numbers": 4, "max_numbers": 4}, stages=STAGES)

    def numbers(prompt: Prompt) -> int:
        return len(json.loads(prompt.reference)["entry"]["metadata"]["numbers"])

    assert [numbers(source.train(index)) for index in (0, 2, 3, 699, 700, 10**6)] == [2, 2, 3, 3, 4, 4]
    assert {numbers(prompt) for prompt in source.heldout()} == {4}, "held out is what the curriculum leads to"
    assert {numbers(source.train(index + SPARE)) for index in range(3)} == {2}, "what stands in for a prompt is of its stage"
    assert [numbers(prompt) for prompt in source.preview(9)] == [2, 2, 2, 3, 3, 3, 4, 4, 4]
    again = gym(task="gcd", options={"min_numbers": 4, "max_numbers": 4}, stages=STAGES)
    assert [again.train(index) for index in (700, 3, 2)] == [source.train(index) for index in (700, 3, 2)]
    score = registry.load("reasoning_gym")
    for prompt in (source.train(0), source.train(5)):
        assert score(prompt.text, json.loads(prompt.reference)["entry"]["answer"], prompt.reference) == 1.0


@pytest.mark.parametrize(("stages", "message"), [
    ([StageConfig(until=5, options={"max_number": 2})], r"data.stages\[0\].options.max_number=2: .*did you mean 'max_numbers'"),
    ([StageConfig(until=5), StageConfig(until=9, options={"min_numbers": 50})], "min_numbers.: 50.*refuses them"),
])
def test_gym_refuses_stages_at_once(stages: list[StageConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gym(task="gcd", stages=stages)


def test_gym_needs_the_tasks_own_verifier() -> None:
    with pytest.raises(ConfigError, match="Set reward.verifier=reasoning_gym"):
        open_prompts(DataConfig(kind=DataKind.reasoning_gym), RewardConfig(), 1)
    sums = open_prompts(DataConfig(kind=DataKind.reasoning_gym, num_heldout=1, verifier="0.5*reasoning_gym+0.5*boxed"), RewardConfig(), 1)
    assert sums.train(0).verifier == "0.5*reasoning_gym+0.5*boxed"


class Files:
    """A training and a held-out file."""

    def __init__(self, folder: Path) -> None:
        self.train, self.heldout = folder / "train.jsonl", folder / "heldout.jsonl"
        self.train.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": i + 1}) + "\n" for i in range(10)))
        self.heldout.write_text('{"prompt": "a", "answer": "x", "id": "one", "verifier": "math_verify"}\n\n{"prompt": "b", "answer": 1.5}')

    def open(self, seed: int = 1, model: Path | None = None, **changes: object) -> PromptSource:
        config = DataConfig(**{"kind": DataKind.jsonl, "path": str(self.train), "heldout_path": str(self.heldout), **changes})  # type: ignore[arg-type]
        return open_prompts(config, RewardConfig(), seed, model)


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
    ('{"prompt": "x"}', "train.jsonl:11: no answer for the verifier in a column 'answer'"),
    ('{"prompt": "x", "answer": null}', "train.jsonl:11: no answer"),
    ('{"answer": 1}', "train.jsonl:11: no prompt in a column 'prompt'"),
    ('{"prompt": "x", "answer": 1, "weight": 2}', "train.jsonl:11: unknown column 'weight'.*data.columns must say"),
    ('{"prompt": "x", "answr": 1}', "train.jsonl:11: unknown column 'answr'; did you mean 'answer'"),
    ('{"prompt": 3, "answer": 1}', "train.jsonl:11: the column 'prompt' holds int; it must be text, or a chat"),
    ('{"prompt": [], "answer": 1}', "train.jsonl:11: the column 'prompt' holds list"),
    ('{"prompt": [{"role": "user"}], "answer": 1}', "train.jsonl:11: the prompt is a list with .*each entry of a chat must be"),
    ('{"prompt": [{"role": "user", "content": "x"}], "answer": 1}', "train.jsonl:11: the prompt is a chat.*Set data.chat_template=true"),
    ('{"prompt": "x", "answer": true}', "train.jsonl:11: 'answer' holds bool; it must be text or a number"),
    ('{"prompt": "x", "answer": [1]}', "train.jsonl:11: 'answer' holds list"),
    ('{"prompt": "x", "answer": 1, "response": {}}', "train.jsonl:11: 'response' holds dict"),
    ('{"prompt": "", "answer": 1}', "train.jsonl:11: the prompt is empty"),
    ('["x", 1]', "train.jsonl:11: Expected `object`"),
    ('{"prompt": "x", "answer', "train.jsonl:11: Input data was truncated"),
    ('{"prompt": "x", "answer": 1} {}', "train.jsonl:11: JSON is malformed"),
    ('{"prompt": "x", "answer": 1e999}', "train.jsonl:11: Number out of range"),
    pytest.param('{"prompt": "x", "answer": ' + "[" * 100000, "train.jsonl:11: .*(truncated|recursion)", id="deep"),
    ('{"prompt": "x", "answer": 1, "verifier": "numerics"}', "train.jsonl:11: verifier='numerics': no such verifier.*did you mean 'numeric'"),
    ('{"prompt": "x", "answer": 1, "verifier": 5}', "train.jsonl:11: the verifier is 5; it must be a name"),
    ('{"prompt": "x", "answer": 1, "id": "line/2"}', "train.jsonl:11: id 'line/2' is also that of .*train.jsonl:2"),
    ('{"prompt": "x", "answer": 1, "id": ""}', "train.jsonl:11: the id has 0 characters"),
    ('{"prompt": "x", "answer": 1, "id": 1.5}', "train.jsonl:11: the id is 1.5"),
    ('{"prompt": "x", "answer": {}, "verifier": "code"}', "train.jsonl:11: the answer cannot be used by verifier 'code'"),
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
    with pytest.raises(ConfigError, match=r"holds no file that ends in \.jsonl"):
        (files.train.parent / "empty").mkdir()
        files.open(path=str(files.train.parent / "empty"))
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


def tokens_of(folder: Path, text: str) -> int:
    return len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model: one token a character."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, 1)
    return folder


def test_prompts_that_are_too_long_are_refused_or_left_out(files: Files, model: Path) -> None:
    files.train.write_text("".join(json.dumps({"prompt": f"{10**i} + 1 =", "answer": 10**i + 1}) + "\n" for i in range(10)))
    longest = tokens_of(model, "100000 + 1 =")
    with pytest.raises(ConfigError, match=rf"train.jsonl:7: it has {longest + 1} tokens, more than data.max_prompt_tokens={longest}.*filter=drop"):
        files.open(model=model, max_prompt_tokens=longest)
    source = files.open(model=model, max_prompt_tokens=longest, filter=DataFilter.drop)
    assert {source.train(index).text for index in range(6)} == {f"{10**i} + 1 =" for i in range(6)}
    assert [prompt.text for prompt in source.preview(0)] == [f"{10**i} + 1 =" for i in range(6)]
    first, second = source.notes()
    assert first.startswith("6 training prompts of ") and first.endswith("2 held out") and second.startswith("4 of 10 prompts of ")
    with pytest.raises(ConfigError, match="all 10 prompts are over the limits"):
        files.open(model=model, max_prompt_tokens=1, filter=DataFilter.drop)
    with pytest.raises(ConfigError, match="Set model.path"):
        files.open(max_prompt_tokens=1)


def test_prompts_with_more_characters_than_a_lease_carries_are_refused_or_left_out(files: Files) -> None:
    rows = [*({"prompt": f"{number} + 1 =", "answer": number + 1} for number in range(4)),
            {"prompt": "7" * (MAX_CHARACTERS + 1), "answer": 1}, {"prompt": "8" * MAX_CHARACTERS, "answer": 2}]
    files.train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="train.jsonl:5: it has 1000001 characters, and no prompt may have more than 1000000. Leave"):
        files.open()
    source = files.open(filter=DataFilter.drop)
    [prompt] = [prompt for prompt in source.preview(0) if len(prompt.text) > 100]
    name = "+".join(f"{0.1}*{letter * 90}.module:{'function' * 12}" for letter in "abcdefghij")
    check_name(name)
    lease = Lease("g1", 0, Purpose.training, Version(1, 0), prompt.id, prompt.text, name, prompt.reference, 1)
    assert from_coordinator(1 << 24).decode(encode(Leases([lease]))) == Leases([lease])


def test_the_rendered_prompt_is_measured(files: Files, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    (folder / "chat_template.jinja").write_text("{% for message in messages %}==={{ message.content }}{% endfor %}")
    assert files.open(model=folder, max_prompt_tokens=7).train(0)
    with pytest.raises(ConfigError, match="has 10 tokens"):
        files.open(model=folder, max_prompt_tokens=7, chat_template=True)


def test_references_that_are_too_large_are_refused_or_left_out(files: Files) -> None:
    with files.train.open("a") as file:
        file.write(json.dumps({"prompt": "big", "answer": "1" * 2048}))
    with pytest.raises(ConfigError, match="train.jsonl:11: its reference for the verifier has 2 KiB, more than data.max_reference_kb=1"):
        files.open(max_reference_kb=1)
    assert "big" not in {prompt.text for prompt in files.open(max_reference_kb=1, filter=DataFilter.drop).preview(0)}


class Lengths:
    """An endless source of texts whose lengths its own seed decides."""

    def train(self, index: int) -> Prompt:
        return Prompt(str(index), "x" * random.Random(index).randrange(1, 9), "numeric", "1" * (random.Random(-index).randrange(4) << 10))

    def heldout(self) -> list[Prompt]:
        return [self.train(-index) for index in range(1, 20)]

    def preview(self, count: int) -> Iterator[Prompt]:
        return map(self.train, range(count))

    def notes(self) -> list[str]:
        return ["source"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**12), st.integers(2, 3))
def test_other_prompts_stand_in_for_those_over_a_limit(index: int, most: int) -> None:
    limits = Limits(DataConfig(max_reference_kb=most, filter=DataFilter.drop), None, None)
    source = Replaced(Lengths(), limits)
    prompt = source.train(index)
    assert limits.problem(prompt) == "" and source.train(index) == prompt and (int(prompt.id) - index) % SPARE == 0
    assert prompt == Lengths().train(index) or limits.problem(Lengths().train(index))
    kept = [held for held in Lengths().heldout() if not limits.problem(held)]
    assert source.heldout() == kept and source.notes()[0] == "source" and len(source.notes()) == (1 if len(kept) == 19 else 2)
    assert all(not limits.problem(each) for each in source.preview(20))


def test_an_endless_source_without_a_prompt_that_fits_is_refused(model: Path) -> None:
    config = DataConfig(digits=6, max_prompt_tokens=3, filter=DataFilter.drop)
    with pytest.raises(ConfigError, match="none of the 200 held-out prompts is within the limits"):
        open_prompts(config, RewardConfig(), 1, model)
    with pytest.raises(ConfigError, match=r"held-out prompt \d+\+\d+: it has \d+ tokens, more than data.max_prompt_tokens=3"):
        open_prompts(dataclasses.replace(config, filter=DataFilter.refuse), RewardConfig(), 1, model)
    with pytest.raises(ConfigError, match="64 prompts in a row are over the limits"):
        Replaced(Never(), Limits(DataConfig(max_reference_kb=1, filter=DataFilter.drop), None, None)).train(0)


class Never(Lengths):
    """Only its held-out prompts fit."""

    def train(self, index: int) -> Prompt:
        return Prompt(str(index), "x", "numeric", "1" * (0 if index < 0 else 4096))
