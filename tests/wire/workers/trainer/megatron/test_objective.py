"""Every algorithm in every layout, by real processes over gloo: what needs a whole response, batch or step is the same as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import write_model
from tests.wire.gangs import run_ranks
from tests.wire.ranks.objective_rank import LAYOUTS, NAMES, is_long

TWO = [layout for layout in LAYOUTS if layout != "alone"]
OF_THE_LAYOUT = {"num_microbatches", "num_packed_tokens", "pipeline_bubble"}
Results = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    folder = tmp_path_factory.mktemp("objectives")
    write_model("qwen3-tied", folder / "model")
    write_model("llama", folder / "teacher", seed=7)
    run_ranks("tests.wire.ranks.objective_rank", folder, 1, "alone")
    run_ranks("tests.wire.ranks.objective_rank", folder, 2, *TWO)
    return {layout: json.loads((Path(folder) / f"{layout}.json").read_bytes()) for layout in LAYOUTS}


@pytest.mark.parametrize(("layout", "name"), [
    pytest.param(layout, name, marks=pytest.mark.long if is_long(layout, name) else []) for layout in TWO for name in NAMES])
def test_two_ranks_train_like_one(results: dict[str, Results], layout: str, name: str) -> None:
    if name not in results[layout]:
        pytest.skip("only with HEADWAY_LONG=1")
    found, expected = results[layout][name], results["alone"][name]
    keys, of_found = ({key for key in values if key.split(":")[1] not in OF_THE_LAYOUT} for values in (expected, found))
    assert keys == of_found and expected["0:grad_norm"] > 0
    for key in sorted(keys):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def test_the_case_has_something_to_get_wrong(results: dict[str, Results]) -> None:
    alone = results["alone"]
    assert 0 < alone["m2po"]["0:behavior_masked_share"] < 1 and alone["gspo"]["0:clip_share"] > 0 and alone["tis"]["0:behavior_masked_share"] > 0
    assert alone["rloo"]["0:reward_penalty"] == pytest.approx(0.0, abs=1e-6), "the policy is the reference still"
    assert abs(alone["rloo"]["1:reward_penalty"]) > 1e-4 and abs(alone["reinforce_pp"]["1:reward_penalty"]) > 1e-5
    assert alone["others"]["1:kl_reference"] > 0 and alone["others"]["0:behavior_weight_max"] > 2
