"""What the client makes of a server's answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from workers.rollout.engines.client import EngineClient


@pytest.mark.parametrize(("info", "tokens"), [
    ({"max_total_num_tokens": 100}, 100), ({"max_total_num_tokens": 100, "dp_size": 1, "attn_dp_size": 8}, 800),
    ({"max_total_num_tokens": 100, "dp_size": 8}, 800), ({"dp_size": 8}, 0), ([], 0)])
def test_the_caches_of_all_copies_count_under_either_name(monkeypatch: pytest.MonkeyPatch, info: Any, tokens: int) -> None:
    async def told(*_: object) -> Any:
        return info

    async def asked() -> int:
        client = EngineClient("http://127.0.0.1:1", "key", 1.0)
        monkeypatch.setattr(client, "_call", told)
        try:
            return await client.kv_tokens(1.0)
        finally:
            await client.close()

    assert asyncio.run(asked()) == tokens
