"""One rank that hands a training state from layout to layout: python -m tests.wire.ranks.resharding_rank FOLDER RANK WORLD PORT FROM LAYOUT...

Each layout loads the state of the one before it (first FROM), saves it again beside the next training step, and notes what that step came to.
"""

from __future__ import annotations

import errno
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.megatron_case import config, make_groups, train
from tests.wire.gangs import in_turn
from workers.config import Advantage, Config, Dtype, LoraConfig
from workers.trainer.megatron.checkpoint import checkpoint
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives, process_group
from workers.trainer.megatron.parallel.gang import Gang

KINDS = {"qwen3-tied": Dtype.float32, "qwen2-deep": Dtype.bfloat16, "qwen3moe": Dtype.float32, "llama": Dtype.float32}
WITH_CRITIC, MIXTURE, ADAPTED = "qwen2-deep", "qwen3moe", "llama"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "pp2": {"pp": 2}, "pp2vpp2": {"pp": 2, "vpp": 2}, "dp2": {}, "cp2": {"cp": 2}, "ep2": {"ep": 2},
    "tp2pp2": {"tp": 2, "pp": 2}, "tp2dp2": {"tp": 2}}


def layouts_of(kind: str, layouts: list[str]) -> list[str]:
    """Those of `layouts` that a model of `kind` can be in."""
    return [layout for layout in layouts if (kind == MIXTURE or "ep" not in LAYOUTS[layout]) and (kind.endswith("-deep") or "vpp" not in layout)]


def setup(kind: str, layout: str = "") -> Config:
    """The config of a layout; one process has none."""
    result = config(dtype=KINDS[kind], lr=1e-3, adam_eps=1e-5)
    if kind == WITH_CRITIC:
        result.algorithm.advantage = Advantage.gae
    if kind == ADAPTED:
        result.trainer.lora = LoraConfig(rank=4)
    for name, value in LAYOUTS.get(layout, {}).items():
        setattr(result.trainer.parallel, name, value)
    return result


def step(engine: MegatronEngine) -> dict[str, float]:
    """The next training step; its batch depends on nothing but its number."""
    return train(engine, make_groups(6, seed=engine.num_steps))


def found(engine: MegatronEngine, metrics: dict[str, float]) -> dict[str, Any]:
    """A step's figures and the weights after it; the weights on rank 0 only."""
    weights = {f"weight:{name}": tensor.float().numpy().copy() for name, tensor in engine.iter_hf_tensors()}
    return weights | {name: np.array(metrics[name]) for name in ("loss", "grad_norm", "num_tokens")}


def make_folder(folder: Path) -> Path:
    if process_group.rank() == 0:
        folder.mkdir(mode=0o700)
    collectives.broadcast_bytes(b"" if process_group.rank() == 0 else None)
    return folder


def hand_on(folder: Path, gang: Gang, kind: str, before: str, layout: str) -> dict[str, Any]:
    engine = MegatronEngine(setup(kind, layout), folder / kind, gang)
    engine.load_state(folder / f"{before}.{kind}.state")
    saving = engine.begin_save(make_folder(folder / f"{layout}.{kind}.state"))
    writing = threading.Thread(target=saving.write)
    writing.start()
    metrics = step(engine)
    writing.join()
    return found(engine, metrics)


def full_disk(folder: Path, gang: Gang) -> None:
    """The last rank cannot write: rank 0 says so, in the background and at once."""
    kind = next(iter(KINDS))
    engine, real = MegatronEngine(setup(kind, "dp2"), folder / kind, gang), checkpoint.write_part

    def no_space(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if gang.rank == gang.world_size - 1:
        checkpoint.write_part = no_space  # type: ignore[assignment]
    refused = []
    for name, save in (("beside", lambda path: engine.begin_save(path).write()), ("at once", engine.save_state)):
        try:
            save(make_folder(folder / name))
        except CheckpointError as error:
            refused.append(str(error))
        collectives.any_rank(False)
    checkpoint.write_part = real
    np.savez(folder / f"refused.{gang.rank}.npz", refused=np.array(refused))


def main() -> None:
    folder, rank, world, port, first, *layouts = sys.argv[1:]
    before = dict.fromkeys(KINDS, first)
    for layout, gang in in_turn(layouts, int(rank), int(world), int(port)):
        for kind in KINDS:
            if layouts_of(kind, [layout]):
                result = hand_on(Path(folder), gang, kind, before[kind], layout)
                before[kind] = layout
                if gang.rank == 0:
                    np.savez(Path(folder) / f"{layout}.{kind}.npz", **result)
        if layout == "dp2":
            full_disk(Path(folder), gang)


if __name__ == "__main__":
    main()
