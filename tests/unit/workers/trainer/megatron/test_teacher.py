"""A teacher of another architecture: what it says of the sampled tokens is what their advantages are made of; and which teachers are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.algorithm_files import algorithm_of
from tests.support.hf_reference import load_reference, reference_logprobs
from tests.support.megatron_case import VOCAB, config, make_groups, write_model
from workers.config import Config, ConfigError
from workers.model.architecture import ModelError, read_architecture
from workers.model.teacher import check_teacher
from workers.trainer.megatron.engine import MegatronEngine

pytestmark = pytest.mark.usefixtures("megatron_groups")


def write_tokenizer(folder: Path, names: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    student, teacher = (write_model(kind, tmp_path_factory.mktemp(kind), seed) for kind, seed in (("qwen3-tied", 1), ("llama", 2)))
    for folder in (student, teacher):
        write_tokenizer(folder, [f"word{number}" for number in range(VOCAB)])
    return student, teacher


def distilling(teacher: Path, **trainer: object) -> Config:
    setup = config(**trainer)
    setup.algorithm = algorithm_of("distillation")
    setup.algorithm.teacher = str(teacher)
    return setup


def test_what_the_teacher_finds_likelier_becomes_likelier(folders: tuple[Path, Path]) -> None:
    student, teacher = folders
    torch.set_num_threads(1)
    engine, groups = MegatronEngine(distilling(teacher, lr=1e-4), student), make_groups(4, seed=0)
    with torch.no_grad():
        own, other = ([row.numpy() for group in groups for row in reference_logprobs(load_reference(folder), group, 0.7)[0]] for folder in folders)
    masks = [mask for group in groups for mask in group.loss_mask]
    rows = iter(own)
    for group in groups:
        group.behavior_logprobs = [np.where(mask, next(rows), np.float32(0)) for mask in group.loss_mask]
        group.rewards = np.zeros_like(group.rewards)  # they do not count
    metrics = engine.train_step(groups, [[0, 1], [2, 3]])
    further = [(ours - theirs) * mask for ours, theirs, mask in zip(own, other, masks, strict=True)]
    assert metrics["reward_penalty"] == pytest.approx(np.mean([row.sum() for row in further]), rel=1e-4), "log student / teacher over a response"
    moved = [after - before for after, before in zip((row for rows in engine.logprobs(groups) for row in rows), own, strict=True)]
    assert sum(float((-far * by).sum()) for far, by in zip(further, moved, strict=True)) > 0
    engine.close()


def test_which_teachers_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = folders
    architecture = read_architecture(student)
    setup = distilling(teacher)
    setup.engine.context_length = 256
    check_teacher(setup, student, architecture)
    setup.engine.context_length = 1024
    with pytest.raises(ConfigError, match="must be at most the teacher's max_position_embeddings=512"):
        check_teacher(setup, student, architecture)
    setup.engine.context_length = 256
    with pytest.raises(ModelError):
        check_teacher(distilling(tmp_path / "nowhere"), student, architecture)
    with pytest.raises(ConfigError, match="algorithm.teacher='': must name a folder with algorithm.advantage=none"):
        check_teacher(_without(setup), student, architecture)
    other = tmp_path / "other"
    other.mkdir()
    for path in teacher.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    write_tokenizer(other, ["word0", "elsewhere", *(f"word{number}" for number in range(2, VOCAB))])
    setup.algorithm.teacher = str(other)
    with pytest.raises(ConfigError, match="its tokenizer is another one: only one of them has '(elsewhere|word1)' as 1"):
        check_teacher(setup, student, architecture)
    told = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(told | {"vocab_size": VOCAB - 1}))
    with pytest.raises((ConfigError, ModelError)):
        check_teacher(setup, student, architecture)


def _without(setup: Config) -> Config:
    found = distilling(Path("unused"))
    found.algorithm.teacher, found.engine = "", setup.engine
    return found
