"""Who may ask, what an engine tells of itself, and what it answers to nonsense."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.conformance.endpoint import Client, Endpoint

PATHS = ("/generate", "/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk", "/flush_cache",
         "/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed",
         "/end_weight_update")


@pytest.mark.parametrize("key", [None, "Bearer ", "Bearer wrong", "Basic KEY"])
def test_every_call_but_health_asks_for_the_key(engine: Endpoint, key: str | None) -> None:
    async def scenario(client: Client) -> None:
        headers = {} if key is None else {"Authorization": key.replace("KEY", engine.api_key)}
        async with aiohttp.ClientSession(engine.base_url, headers=headers) as session:
            for path in PATHS:
                async with session.post(path, json={}) as reply:
                    assert reply.status == 401, path
            for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/flush_cache"):
                async with session.get(path) as reply:
                    assert reply.status == 401, path
            async with session.get("/health") as reply:
                assert reply.status == 200

    engine.run(scenario)


def test_information(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        await client.request("GET", "/health")
        for path in ("/model_info", "/get_model_info"):
            info = await client.request("GET", path)
            assert info["model_path"] == str(engine.first) and info["weight_version"] == "first" and info["is_generation"]
        await client.update(engine.second, "second")
        info = await client.request("GET", "/model_info")
        assert Path(info["model_path"]) == engine.second and info["weight_version"] == "second"
        await client.post("/pause_generation", mode="retract")
        info = await client.request("GET", "/server_info")  # answers in a pause, which SGLang's /health does not
        assert info["max_total_num_tokens"] > 0
        await client.post("/continue_generation")

    engine.run(scenario)


def test_nonsense_is_refused(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        await client.post("/pause_generation", 400, mode="stop")
        await client.post("/update_weights_from_disk", 400, weight_version="x")
        await client.post("/begin_weight_update", 400, selector="nobody")
        await client.post("/init_weights_update_group", 400, master_address="127.0.0.1")
        await client.post("/update_weights_from_distributed", 400, names=["a"])
        async with client.session.post("/generate", data=b"{", headers={"Content-Type": "application/json"}) as reply:
            assert reply.status == 400
        async with client.session.post("/nothing") as reply:
            assert reply.status == 404
        await client.post("/abort_request", rid="nobody's")
        await client.post("/abort_request")
        assert len((await client.generate([1], 2))["output_ids"]) == 2

    engine.run(scenario)
