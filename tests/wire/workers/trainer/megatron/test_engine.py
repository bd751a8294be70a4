"""Training with several ranks, in real processes over gloo: the same results as with one, to the order of additions."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import write_model
from tests.wire.gangs import await_ranks, start_rank
from tests.wire.ports import free_port
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.process_group import GangError

DEADLINE_S = 800.0
Results = dict[str, np.ndarray]


def run(folder: Path, world: int, *scenarios: str, codes: list[int] | None = None) -> None:
    """Run scenarios, one after the other in the same processes, to their end."""
    port, logs = str(free_port()), [folder / f"{scenarios[0]}.{rank}of{world}.log" for rank in range(world)]
    module = "tests.wire.ranks.trainer_rank"
    processes = [start_rank(module, log, str(folder), str(rank), str(world), port, *scenarios) for rank, log in enumerate(logs)]
    ends = await_ranks(processes, DEADLINE_S)
    assert ends == (codes or [0] * world), "\n".join(log.read_text() for log in logs)


def found(folder: Path, scenario: str, world: int) -> list[Results]:
    """What each rank of a gang of `world` has found."""
    return [dict(np.load(folder / f"{scenario}.{rank}of{world}.npz")) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the model, and the results of one rank and of two."""
    folder = tmp_path_factory.mktemp("gang")
    write_model("qwen3-tied", folder / "model")
    run(folder, 1, "train", "bfloat16", "save")
    run(folder, 2, "train", "save", "stop")
    return folder


def assert_equal(first: Results, second: Results) -> None:
    """The same to the bit."""
    assert first.keys() == second.keys()
    assert [name for name in first if not np.array_equal(first[name], second[name])] == []


def assert_close(result: Results, expected: Results, tolerance: float) -> None:
    """Weights by their norm, all else by value; counts of tokens are exact."""
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        kind = name.split(":")[-2] if ":" in name else name
        if name.endswith("metric:num_tokens"):
            assert result[name] == value
        elif kind == "weight":
            assert np.linalg.norm(result[name] - value) <= tolerance * np.linalg.norm(value), name
        elif not name.endswith(("num_microbatches", "num_packed_tokens")):
            assert result[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_two_ranks_train_like_one(folder: Path) -> None:
    alone, gang = found(folder, "train", 1), found(folder, "train", 2)
    assert_equal(*gang)
    assert_close(gang[0], alone[0], 1e-6)


def test_three_ranks_in_bfloat16(folder: Path) -> None:
    run(folder, 3, "broadcast", "bfloat16")
    assert [str(result["text"]) for result in found(folder, "broadcast", 3)] == ["é of 1"] * 3
    alone, gang = found(folder, "bfloat16", 1), found(folder, "bfloat16", 3)
    assert_equal(gang[0], gang[1])
    assert_equal(gang[0], gang[2])
    for name, value in alone[0].items():
        if "weight:" in name:  # a weight in bfloat16 is right to 2**-8
            assert np.linalg.norm(gang[0][name] - value) <= 2**-8 * np.linalg.norm(value), name


def test_states_are_loaded_by_other_processes_and_numbers_of_ranks(folder: Path) -> None:
    assert "differs" not in (folder / "train.1of2.log").read_text(), "Megatron warns of state that is not the same on all ranks"
    shutil.copytree(folder / "state.2", folder / "broken")
    # Files are divided among the ranks in the order of their names, so this one is the second rank's.
    with (folder / "broken" / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    for world in (1, 2):
        run(folder, world, "load")
        loaded = found(folder, "load", world)
        for number in (1, 2):
            expected = found(folder, "save", number)[0]
            part = {name[2:]: value for name, value in loaded[0].items() if name.startswith(f"{number}:")}
            if number == world:
                assert_equal(part, expected)
            else:
                assert_close(part, expected, 1e-6)
        assert all(f"{folder}/broken: is broken, __0_0.distcp has 1000 bytes instead of" in str(result["refused"]) for result in loaded)
    assert_equal(*loaded)


def test_all_ranks_abandon_a_step_or_none(folder: Path) -> None:
    gang = found(folder, "stop", 2)
    assert_equal(*gang)
    assert gang[0]["abandoned"] >= 6, "at the beginning, before its micro-batches, at the boundaries"


def test_the_death_of_a_rank_ends_the_others(folder: Path) -> None:
    run(folder, 2, "death", codes=[0, 9])
    error = str(np.load(folder / "death.0of2.npz")["error"])
    assert "closed" in error or "reset" in error


@pytest.fixture
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "RENDEZVOUS_TIMEOUT_S", 0.5)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_alone_says_so(without_patience: None, rank: int) -> None:
    gang = Gang(rank, 2, rank, "127.0.0.1", free_port(), "lo")
    with pytest.raises(GangError, match=f"rank {rank}: the 2 ranks did not meet at 127.0.0.1:{gang.master_port} over lo .*all ranks were started"):
        process_group.initialize(gang)


def test_a_port_that_is_taken_is_named(without_patience: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(GangError, match=f"127.0.0.1:{port} .*Address already in use.*that the port is free"):
            process_group.initialize(Gang(0, 2, 0, "127.0.0.1", port))


@pytest.mark.parametrize(("values", "text"), [((2, 2, 0, "a", 1), "rank 2 of 2"), ((0, 1, -1, "a", 1), "local_rank=-1"),
                                             ((0, 1, 0, "", 1), "must be a host"), ((0, 1, 0, "a", 0), "port from 1")])
def test_gangs_that_cannot_be(values: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Gang(*values)
