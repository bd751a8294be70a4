"""What SGLang does and the embedded engine does not: an update by tensors, and weights that it takes though they are wrong."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from benchmarks.engine.child import ROOT
from tests.conformance.endpoint import TOLERANCE, Client, Endpoint
from tests.conformance.engines import CPU, SGLANG, sglang_here
from tests.conformance.models import broken_folders, prompt_of

pytestmark = [sglang_here, pytest.mark.parametrize("engine", ["sglang-qwen3"], indirect=True)]


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_an_update_by_tensors(engine: Endpoint, load_format: str | None) -> None:
    """Headway does not use it: the payload is a pickle, and the node's weight store in shared memory is loaded like a disk."""
    async def scenario(client: Client) -> None:
        command = [SGLANG, str(ROOT / "tests/sglang/tensor_payload.py"), str(engine.second), load_format or "named"]
        maker = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**26, env=CPU)
        assert maker.stdin is not None and maker.stdout is not None
        payload = (await maker.stdout.readline()).decode().strip()
        fields = {"serialized_named_tensors": [payload], "load_format": load_format, "weight_version": "second", "flush_cache": True}
        refused = await client.post("/update_weights_from_tensor", 400, **fields)
        assert "begin_weight_update" in refused["message"]
        await client.post("/pause_generation", mode="retract")
        await client.post("/begin_weight_update", selector="target")
        await client.post("/update_weights_from_tensor", **fields)
        await client.post("/end_weight_update")
        await client.post("/continue_generation")
        maker.stdin.close()
        await maker.wait()  # not for the end of its output: torch's keeper of shared memory holds that open a little longer
        reply = await client.generate(prompt_of(9), 20)
        assert reply["meta_info"]["weight_version"] == "second" and engine.error(engine.second, prompt_of(9), reply) < TOLERANCE

    engine.run(scenario)


def test_without_a_flush_prefixes_of_the_old_weights_serve_on(engine: Endpoint) -> None:
    """The price of interrupting in place."""
    async def scenario(client: Client) -> None:
        prompt = prompt_of(40)
        await client.generate(prompt, 2)
        await client.update(engine.second, "second", flush_cache=False)
        reply = await client.generate(prompt, 20)
        assert reply["meta_info"]["cached_tokens"] == 39 and engine.error(engine.second, prompt, reply) > TOLERANCE
        await client.post("/flush_cache")
        assert engine.error(engine.second, prompt, await client.generate(prompt, 20)) < TOLERANCE

    engine.run(scenario)


@pytest.mark.parametrize("fault", ["missing", "shape", "type", "config"])
def test_wrong_weights_are_taken_for_good(engine: Endpoint, tmp_path: Path, fault: str) -> None:
    """Why the worker checks a version's digests and headers before it has it loaded. Where this fails, SGLang has mended it."""
    async def scenario(client: Client) -> None:
        reply = await client.update(broken_folders(engine.first, tmp_path)[fault], "wrong")
        assert reply["success"] is True
        assert (await client.generate(prompt_of(9), 3))["meta_info"]["weight_version"] == "wrong"

    engine.run(scenario)
