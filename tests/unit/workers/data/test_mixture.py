"""Mixtures: exact shares, every part in its own order, the same after a restart, and nothing trained on that another part holds out."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.config.choices import DataFilter
from workers.config.data import PartConfig
from workers.data.mixture import BLOCK, Order, quotas
from workers.data.prompt import PromptSource
from workers.data.prompts import open_prompts

WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 10.0), min_size=1)


@settings(deadline=None)
@given(WEIGHTS)
def test_quotas_are_whole_and_in_proportion(weights: dict[str, float]) -> None:
    result = quotas(weights)
    total = sum(weights.values())
    assert sum(result.values()) == BLOCK and list(result) == list(weights)
    assert all(abs(result[name] - weights[name] / total * BLOCK) < 1 + 1e-6 for name in weights)


@pytest.mark.parametrize(("weights", "message"), [
    ({"a": 1, "b": 1e-9}, "data.parts.b.weight=1e-09"), ({"a": 5e-324, "b": 1e308}, "data.parts.a.weight")])
def test_a_weight_that_gives_nothing_is_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*less than 1 prompt in 1000"):
        quotas(weights)


def test_huge_weights_are_weights() -> None:
    assert quotas({"a": 1e308, "b": 1e308, "c": 1e308}) == {"a": 334, "b": 333, "c": 333}


@settings(max_examples=25, deadline=None)
@given(WEIGHTS, st.integers(0, 2**60), st.integers(0, 10**6))
def test_every_block_has_the_shares_and_every_part_goes_on_where_it_was(weights: dict[str, float], seed: int, block: int) -> None:
    order = Order(weights, seed)
    places = [order.place(index) for index in range(block * BLOCK, (block + 1) * BLOCK)]
    assert Counter(name for name, _ in places) == quotas(weights)
    for name, quota in quotas(weights).items():
        assert [own for each, own in places if each == name] == list(range(block * quota, (block + 1) * quota))


@settings(max_examples=50, deadline=None)
@given(WEIGHTS, st.integers(0, 2**60), st.lists(st.integers(0, 2**50), min_size=1, max_size=5))
def test_the_order_follows_from_index_and_seed_alone(weights: dict[str, float], seed: int, indices: list[int]) -> None:
    order = Order(weights, seed)
    forwards = [order.place(index) for index in indices]
    assert [Order(weights, seed).place(index) for index in reversed(indices)] == forwards[::-1]


def test_the_seed_shuffles_blocks() -> None:
    weights = {"a": 1.0, "b": 1.0}
    blocks = [tuple(name for name, _ in map(Order(weights, seed).place, range(start, start + BLOCK))) for seed in (1, 2) for start in (0, BLOCK)]
    assert len(set(blocks)) == 4
    with pytest.raises(IndexError, match="start at 0"):
        Order(weights, 1).place(-1)


def part(kind: DataKind = DataKind.arithmetic, **changes: object) -> PartConfig:
    return PartConfig(**{"kind": kind, "num_heldout": 4, "num_examples": 0, **changes})  # type: ignore[arg-type]


def mixture(parts: dict[str, PartConfig], seed: int = 1, **changes: object) -> PromptSource:
    config = DataConfig(**{"kind": DataKind.mixture, "parts": parts, **changes})  # type: ignore[arg-type]
    config.check()
    return open_prompts(config, RewardConfig(), seed)


def write(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in texts))
    return str(path)


def test_parts_are_data_sets_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(f"question {number}" for number in range(20)))
    parts = {"sums": part(weight=3), "puzzles": part(DataKind.reasoning_gym, task="gcd", verifier="reasoning_gym"),
             "words": part(DataKind.jsonl, path=path, verifier="math_verify", weight=0.5)}
    source = mixture(parts)
    prompts = [source.train(index) for index in range(300)]
    by_name = {name: [prompt for prompt in prompts if prompt.id.startswith(f"{name}/")] for name in parts}
    assert sum(map(len, by_name.values())) == 300 and len(by_name["sums"]) > len(by_name["puzzles"]) > len(by_name["words"]) > 0
    assert {name: {prompt.verifier for prompt in found} for name, found in by_name.items()} == {
        "sums": {"numeric"}, "puzzles": {"reasoning_gym"}, "words": {"math_verify"}}
    assert len({prompt.text for prompt in by_name["words"][:16]}) == 16, "a pass over the file before the next"
    assert [mixture(parts).train(index) for index in (299, 5)] == [prompts[299], prompts[5]]
    assert mixture(parts, seed=2).train(0) != prompts[0]
    heldout = source.heldout()
    assert Counter(prompt.id.split("/")[0] for prompt in heldout) == {"sums": 4, "puzzles": 4, "words": 4}
    assert not {prompt.text for prompt in heldout} & {prompt.text for prompt in prompts}
    assert any(note.startswith("words: 16 training prompts") for note in source.notes())
    preview = Counter(prompt.id.split("/")[0] for prompt in source.preview(30))
    assert preview == {"sums": 10, "puzzles": 10, "words": 16}, "all of a file"


def test_the_same_task_twice_is_drawn_apart() -> None:
    source = mixture({name: part(DataKind.reasoning_gym, verifier="reasoning_gym") for name in "ab"})
    texts = [[prompt.text for prompt in map(source.train, range(200)) if prompt.id[0] == name] for name in "ab"]
    assert texts[0][:50] != texts[1][:50]


def test_what_one_part_holds_out_no_other_trains_on() -> None:
    source = mixture({name: part(digits=1, num_heldout=20) for name in "ab"}, num_heldout=40)
    heldout = {prompt.text for prompt in source.heldout()}
    assert len(heldout) > 20, "the parts hold different sums out"
    assert not heldout & {source.train(index).text for index in range(3000)}


def test_too_few_questions_beside_those_held_out_are_refused(tmp_path: Path) -> None:
    everything = write(tmp_path / "all.jsonl", *(f"{a} + {b} =" for a, b in itertools.product(range(1, 10), repeat=2)))
    other = write(tmp_path / "other.jsonl", "x")
    file = part(DataKind.jsonl, path=other, heldout_path=everything, num_heldout=100)
    source = mixture({"sums": part(digits=1), "file": file}, num_heldout=200)
    index = next(index for index in range(100) if source_of(source, index, tmp_path) == "sums")
    with pytest.raises(ConfigError, match=r"data.parts.sums: has too few different questions"):
        source.train(index)


def source_of(source: PromptSource, index: int, folder: Path) -> str:
    """The part of a prompt; of one that cannot be had, the other."""
    try:
        return source.train(index).id.split("/")[0]
    except ConfigError:
        return "sums"


def test_a_file_with_another_parts_heldout_prompts_is_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", "a", "b"), write(tmp_path / "b.jsonl", "c", "d")
    heldout, other = write(tmp_path / "h.jsonl", "d"), write(tmp_path / "o.jsonl", "e")
    with pytest.raises(ConfigError, match=r"data.parts.b: its training \S+:2 is held out by data.parts.a;.*Delete one"):
        mixture({"a": part(DataKind.jsonl, path=first, heldout_path=heldout), "b": part(DataKind.jsonl, path=second, heldout_path=other)})


@pytest.mark.parametrize(("parts", "changes", "message"), [
    ({}, {}, "data.parts=.*must name the parts"),
    ({"a": part(weight=0)}, {}, "data.parts.a.weight=0: must be greater than 0"),
    ({"a": part(weight=float("inf"))}, {}, "data.parts.a.weight=inf"),
    ({"a": part(weight=float("nan"))}, {}, "data.parts.a.weight=nan"),
    ({"a b": part()}, {}, "data.parts.a b='a b': must be 1 to 40 letters"),
    ({"a": part(DataKind.mixture)}, {}, "data.parts.a.kind='mixture'"),
    ({"a": part(digits=9)}, {}, "data.parts.a.digits=9"),
    ({"a": part(), "b": part()}, {"num_heldout": 1}, "data.num_heldout=1: must be at least the number of parts, 2"),
    ({"a": part()}, {"kind": DataKind.arithmetic}, "data.parts=.*must be empty with data.kind=arithmetic"),
    ({"a": part(DataKind.jsonl, path="/nowhere")}, {}, "data.parts.a: data.path='/nowhere': not readable"),
    ({"a": part(verifier="numerics")}, {}, "data.parts.a: data.verifier='numerics': no such verifier"),
])
def test_what_cannot_be_mixed_is_refused(parts: dict[str, PartConfig], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(parts, **changes)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(1, 500), st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_heldout_prompts_are_shared_out(total: int, own: list[int]) -> None:
    total = max(total, len(own))
    config = DataConfig(num_heldout=total, parts={f"p{number}": part(num_heldout=count) for number, count in enumerate(own)})
    counts = [settled.num_heldout for settled in config.settled_parts().values()]
    assert sum(counts) <= total and all(1 <= count <= most for count, most in zip(counts, own, strict=True))
    if min(own) >= total:
        assert sum(counts) == total and max(counts) - min(counts) <= 1


def test_a_config_names_its_verifiers_and_paths() -> None:
    assert DataConfig().verifiers("numeric") == ["numeric"] and DataConfig(verifier="a:b", path="x").verifiers("numeric") == ["a:b"]
    config = DataConfig(verifier="exact", parts={"a": part(), "b": part(verifier="code", path="p"), "c": part(heldout_path="h")})
    assert config.verifiers("numeric") == ["exact", "code"] and config.paths() == ["p", "h"]


def test_parts_take_over_what_the_mixture_says() -> None:
    config = DataConfig(chat_template=True, max_prompt_tokens=7, verifier="numeric", filter=DataFilter.drop,
                        parts={"a": part(), "b": part(max_prompt_tokens=9, verifier="math_verify")})
    a, b = config.settled_parts().values()
    assert (a.chat_template, a.max_prompt_tokens, a.verifier, a.filter) == (True, 7, "numeric", DataFilter.drop)
    assert (b.chat_template, b.max_prompt_tokens, b.verifier, b.filter) == (True, 9, "math_verify", DataFilter.drop)


def test_parts_say_what_is_otherwise_than_in_the_mixture() -> None:
    own = part(chat_template=False, max_prompt_tokens=0, filter=DataFilter.refuse, max_reference_kb=4)
    config = DataConfig(kind=DataKind.mixture, chat_template=True, chat_template_kwargs={"enable_thinking": False}, max_prompt_tokens=7,
                        max_reference_kb=9, filter=DataFilter.drop, parts={"a": part(), "b": own, "c": part(chat_template_kwargs={"x": 1})})
    config.check()
    a, b, c = config.sources()
    assert (a.chat_template_kwargs, a.max_reference_kb, c.chat_template, c.chat_template_kwargs) == ({"enable_thinking": False}, 9, True, {"x": 1})
    assert (b.chat_template, b.chat_template_kwargs, b.max_prompt_tokens, b.filter, b.max_reference_kb) == (False, {}, 0, DataFilter.refuse, 4)
    own.chat_template_kwargs = {"x": 1}
    with pytest.raises(ConfigError, match="data.parts.b.chat_template_kwargs=.*must be empty with data.parts.b.chat_template=false"):
        config.check()
    assert DataConfig().sources() == [DataConfig()]


def test_what_is_held_out_in_one_form_is_not_trained_on_in_another(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("<u>{{ messages[0].content | trim }}<a>")
    parts = {"plain": part(digits=1, num_heldout=20), "begun": part(digits=1, num_heldout=20, bos="<s>"),
             "chat": part(digits=1, num_heldout=20, chat_template=True)}
    config = DataConfig(kind=DataKind.mixture, parts=parts, num_heldout=60)
    source = open_prompts(config, RewardConfig(), 1, tmp_path)
    heldout = {prompt.asked for prompt in source.heldout()}
    trained = [source.train(index) for index in range(1000)]
    assert {prompt.text[:3] for prompt in trained} >= {"<s>", "<u>"} and not heldout & {prompt.asked for prompt in trained}
    assert all(prompt.asked in prompt.text for prompt in trained)
    file = part(DataKind.jsonl, path=write(tmp_path / "a.jsonl", "a", "b"), heldout_path=write(tmp_path / "h.jsonl", "c"), chat_template=True)
    other = part(DataKind.jsonl, path=write(tmp_path / "b.jsonl", "c ", "d"), heldout_path=write(tmp_path / "o.jsonl", "e"))
    with pytest.raises(ConfigError, match=r"data.parts.b: its training \S+:1 is held out by data.parts.a"):
        open_prompts(DataConfig(kind=DataKind.mixture, parts={"a": file, "b": other}), RewardConfig(), 1, tmp_path)


@pytest.mark.parametrize("held_out", [False, True])
def test_ids_are_short_enough_with_the_parts_name(tmp_path: Path, held_out: bool) -> None:
    rows = [{"prompt": f"{number} + 1 =", "answer": 1, "id": f"{number}" * 199} for number in range(3)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long, short = str(tmp_path / "long.jsonl"), write(tmp_path / "short.jsonl", "a", "b")
    file = part(DataKind.jsonl, path=short if held_out else long, heldout_path=long if held_out else short)
    with pytest.raises(ConfigError, match=r"data.parts.words: \S+long.jsonl:\d: the id has 199 characters; with the part's name .* at most 200"):
        mixture({"words": file})
