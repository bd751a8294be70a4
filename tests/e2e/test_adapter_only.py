"""A whole run whose engines get adapters alone (weights.adapter_only), while an engine dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import START_S, live_run
from workers.run.files import read_lines

OVERRIDES = ("run.num_steps=24", "data.num_heldout=4", "evaluation.every_steps=0", "trainer.lora.rank=4", "trainer.lr=5e-3",
             "weights.adapter_only=true")


@pytest.mark.long  # the same bits: wire/workers/rollout/weights/test_merging.py; what ranks send: test_gang_run.py; an engine dies: test_faults.py
def test_engines_that_merge_agree_with_training_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *OVERRIDES) as run:
        run.after_steps(2).process("engine").kill()
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        run.assert_nothing_left()
        steps = read_lines(run.run.metrics)
        compared = [step["logprob_gap_max"] for step in steps if step["num_tokens_compared"]]
        assert len(steps) == 24 and len(compared) >= 2 and max(compared) < 1e-4, "before the first update, and after one"
        assert steps[-1]["engine_restarts"] == 1 and steps[-1]["weight_updates"] > 1 and steps[-1]["weight_fallbacks"] == 0
        adapters = (run.run.final_adapter / "adapter_model.safetensors").stat().st_size
        whole = sum(path.stat().st_size for path in run.run.final_model.glob("*.safetensors"))
        assert adapters <= steps[-1]["weights_bytes"] <= adapters + 4096 < whole / 3
        assert not any(path.exists() for path in (run.run.store("auto"), run.run.merged("auto")))
