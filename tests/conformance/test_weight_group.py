"""Weights by broadcast: the test is a training rank, rank 0, or two of them; the engine is rank 1, and in one test a second engine is rank 2."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.engine.child import ROOT
from tests.conformance.endpoint import TOLERANCE, Client, Endpoint
from tests.conformance.engines import start_embedded
from tests.conformance.models import prompt_of
from tests.conformance.test_pauses import spans
from tests.wire.ports import free_port
from workers.weights.update_group import BroadcastGroup, GroupError

TIMEOUT_S = 60.0
Tensors = dict[str, torch.Tensor]


@contextlib.asynccontextmanager
async def group_of(*clients: Client) -> AsyncIterator[BroadcastGroup]:
    """A group of this process and every client's engine, which is left in the end."""
    name, port = f"weights-{secrets.token_hex(4)}", free_port()
    joining = [client.post("/init_weights_update_group", master_address="127.0.0.1", master_port=port, rank_offset=rank,
                           world_size=len(clients) + 1, group_name=name, backend="gloo") for rank, client in enumerate(clients, 1)]
    group, *_ = await asyncio.gather(asyncio.to_thread(BroadcastGroup, "127.0.0.1", port, 0, len(clients) + 1, name, "gloo", TIMEOUT_S), *joining)
    yield group
    for client in clients:
        assert (await client.post("/destroy_weights_update_group", group_name=name))["success"] is True
    await asyncio.to_thread(group.close)


def announced(group: BroadcastGroup, tensors: Tensors) -> dict:
    """The fields of a call that takes `tensors`."""
    return {"names": list(tensors), "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()], "group_name": group.name}


async def send(group: BroadcastGroup, clients: list[Client], tensors: Tensors, flattened: bool = False, status: int = 200, **more: object) -> list:
    """One bucket: the call to every engine, and the broadcast."""
    fields = announced(group, tensors) | ({"load_format": "flattened_bucket"} if flattened else {}) | more
    sent = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])] if flattened else list(tensors.values())
    *replies, _ = await asyncio.gather(*(client.post("/update_weights_from_distributed", status, **fields) for client in clients),
                                       asyncio.to_thread(group.broadcast, sent))
    return replies


async def update(group: BroadcastGroup, clients: list[Client], folder: Path, version: str, flattened: bool, dtype: torch.dtype | None = None) -> None:
    """A whole update in three buckets, between begin and end."""
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    names = list(tensors)
    for client in clients:
        assert (await client.post("/begin_weight_update", selector="target"))["success"] is True
    for part in range(3):
        bucket = {name: tensors[name] for name in names[part::3]}
        await send(group, clients, bucket, flattened, weight_version=version if part == 2 else None, flush_cache=part == 2)
    for client in clients:
        assert (await client.post("/end_weight_update"))["success"] is True


@pytest.mark.parametrize("flattened", [False, True], ids=["one by one", "flattened bucket"])
def test_new_weights_in_the_middle_of_requests(engine: Endpoint, flattened: bool) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(24)
        async with group_of(client) as group:
            task = client.generate(prompt, 900)
            await client.pace(10)
            await client.post("/pause_generation", mode="retract")
            await update(group, [client], engine.second, "second", flattened)
            await client.post("/continue_generation")
            await client.pace(10)
            await client.post("/abort_request", abort_all=True)
            reply = await task
            (old, _, cut), (new, _, _) = spans(reply)
            assert (old, new) == ("first", "second")
            assert engine.error(engine.first, prompt, reply, end=cut) < TOLERANCE
            assert engine.error(engine.second, prompt, reply, start=cut) < TOLERANCE
            assert (await client.request("GET", "/model_info"))["weight_version"] == "second"
            await update(group, [client], engine.first, "first again", flattened)
            fresh = await client.generate(prompt, 5)
            assert fresh["meta_info"]["cached_tokens"] == 0 and spans(fresh) == [("first again", 0, 5)]
            assert engine.error(engine.first, prompt, fresh) < TOLERANCE

    engine.run(scenario)


def test_an_update_comes_from_several_ranks_in_turn(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        async with group_of(client) as one, group_of(client) as two:
            tensors = load_file(engine.second / "model.safetensors")
            await client.post("/begin_weight_update", selector="target")
            for part, group in enumerate((one, two, two, one, two)):
                bucket = {name: tensors[name] for name in list(tensors)[part::5]}
                await send(group, [client], bucket, flattened=True, weight_version="second" if part == 4 else None, flush_cache=part == 4)
            await client.post("/end_weight_update")
            reply = await client.generate(prompt_of(24), 9)
            assert spans(reply) == [("second", 0, 9)]
            assert engine.error(engine.second, prompt_of(24), reply) < TOLERANCE

    engine.run(scenario)


def test_several_engines_take_the_same_broadcast(engine: Endpoint) -> None:
    with start_embedded(engine.first) as child:
        other = Endpoint("embedded", child.base_url, child.api_key, engine.first, engine.second, child.process.pid)

        async def scenario(client: Client) -> None:
            async with aiohttp.ClientSession(other.base_url, headers={"Authorization": f"Bearer {other.api_key}"}) as session:
                clients = [client, Client(other, session)]
                async with group_of(*clients) as group:
                    await update(group, clients, engine.second, "second", flattened=False, dtype=torch.bfloat16)
                replies = [await member.generate(prompt_of(30), 20, temperature=0) for member in clients]
            assert replies[0]["output_ids"] == replies[1]["output_ids"]
            here, there = ([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] for reply in replies)
            assert max(abs(one - two) for one, two in zip(here, there, strict=True)) < TOLERANCE
            assert engine.error(engine.second, prompt_of(30), replies[0]) > 1e-3  # it is bfloat16's rounding that serves

        engine.run(scenario)


def test_the_order_of_calls_is_kept(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        bucket = {"model.norm.weight": load_file(engine.first / "model.safetensors")["model.norm.weight"]}
        for path, fields in (("/end_weight_update", {}), ("/destroy_weights_update_group", {"group_name": "none"}),
                             ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [], "group_name": "none"})):
            refused = await client.post(path, 400, **fields)
            assert refused["success"] is False and refused["message"]
        await client.post("/begin_weight_update")
        assert "already open" in (await client.post("/begin_weight_update", 400))["message"]
        refused = await client.post("/update_weights_from_distributed", 400, names=list(bucket), dtypes=["float32"], shapes=[[64]], group_name="none")
        assert "init_weights_update_group" in refused["message"]
        assert len((await client.generate(prompt_of(5), 3))["output_ids"]) == 3  # goes on in between
        await client.post("/end_weight_update")
        assert engine.error(engine.first, prompt_of(5), await client.generate(prompt_of(5), 9)) < TOLERANCE

    engine.run(scenario)


def test_a_tensor_of_the_wrong_shape_is_refused_and_a_folder_mends_it(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        async with group_of(client) as group:
            await client.post("/begin_weight_update")
            [refused] = await send(group, [client], {"model.norm.weight": torch.ones(65)}, status=400)
            assert refused["success"] is False and "65" in refused["message"]
            await client.post("/end_weight_update")
        await client.update(engine.second, "second")
        assert engine.error(engine.second, prompt_of(5), await client.generate(prompt_of(5), 9)) < TOLERANCE

    engine.run(scenario)


TRAINER = """
import sys, time
from workers.weights.update_group import BroadcastGroup
group = BroadcastGroup("127.0.0.1", int(sys.argv[1]), 0, 2, sys.argv[2], "gloo", 60.0)
print("joined", flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_dies_in_mid_broadcast_leaves_an_engine_that_serves(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        name, port = f"weights-{secrets.token_hex(4)}", free_port()
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port), name], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            await client.post("/init_weights_update_group", master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2,
                              group_name=name, backend="gloo")
            assert trainer.stdout is not None and trainer.stdout.readline() == b"joined\n"
            await client.post("/pause_generation", mode="retract")
            await client.post("/begin_weight_update")
            taking = asyncio.create_task(client.post("/update_weights_from_distributed", 400, names=["model.norm.weight"], dtypes=["float32"],
                                                     shapes=[[64]], group_name=name))
            await asyncio.wait([taking], timeout=0.5)
            assert not taking.done()  # it waits for the broadcast
        finally:
            trainer.send_signal(signal.SIGKILL)
            trainer.communicate()
        assert "Failed to receive weights" in (await taking)["message"]
        await client.post("/end_weight_update")
        await client.post("/destroy_weights_update_group", group_name=name)
        await client.update(engine.second, "second")
        await client.post("/continue_generation")
        assert engine.error(engine.second, prompt_of(5), await client.generate(prompt_of(5), 9)) < TOLERANCE

    engine.run(scenario)


def test_a_group_that_nobody_hosts_is_an_error_in_time() -> None:
    with pytest.raises(GroupError, match="could not join"):
        BroadcastGroup("127.0.0.1", free_port(), 1, 2, "lonely", "gloo", 1.0)
