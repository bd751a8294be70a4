"""The embedded engine's own: what it refuses though SGLang takes it, its counters, seeds, and its life as a process.

What every engine does stands in tests/conformance. The tests poll GET /server_info for the number of generated tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine.child import ROOT
from tests.conformance.endpoint import DEADLINE_S, TOLERANCE, Client, Endpoint, Json
from tests.conformance.engines import embedded, start_embedded
from tests.conformance.models import CONTEXT, VOCAB, broken_folders, diverged_folder, prompt_of
from tests.conformance.test_weight_group import group_of, send
from workers.run.paths import MEMORY


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """An engine."""
    with embedded(tmp_path_factory.mktemp("one"), "llama") as endpoint:
        yield endpoint


def test_what_a_pause_and_an_update_leave_running(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        prompts = [prompt_of(20 + 5 * index, index) for index in range(10)]  # two of them queue
        tasks = [client.generate(prompt, 300) for prompt in prompts]
        await client.until(lambda info: info["generated_tokens"] > base + 200)
        await client.post("/pause_generation", mode="retract")
        still = await client.info()
        assert still["paused"] and still["num_running"] == 0 and still["num_queued"] == 10
        await client.update(one.second, "second")
        assert (await client.info())["generated_tokens"] == still["generated_tokens"]
        await client.post("/continue_generation")
        replies = await asyncio.gather(*tasks)
        interrupted = [reply for reply in replies if reply["meta_info"]["num_retractions"]]
        assert len(interrupted) == 8 and all(len(reply["meta_info"]["weight_versions"]) == 2 for reply in interrupted)
        assert all(len(reply["output_ids"]) == 300 for reply in replies)

    one.run(scenario)


def test_a_prefix_of_the_old_weights_is_not_reused_after_an_update_in_place_either(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        prompt = prompt_of(30)
        task = client.generate(prompt, 600)
        await client.until(lambda info: info["generated_tokens"] > base + 50)
        await client.post("/pause_generation", mode="in_place")
        await client.update(one.second, "second", flush_cache=False)
        prefilled = (await client.info())["prefill_tokens"]
        await client.post("/continue_generation")
        fresh = await client.generate(prompt, 20)
        assert fresh["meta_info"]["cached_tokens"] == 0 and one.error(one.second, prompt, fresh) < TOLERANCE
        await task
        assert (await client.info())["prefill_tokens"] == prefilled + 29  # the fresh request's only

    one.run(scenario)


def test_what_would_hang_sglang_is_refused(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        task = client.generate(prompt_of(30), 600)
        await client.until(lambda info: info["generated_tokens"] > base + 5)
        await client.post("/pause_generation", mode="in_place")
        refused = await client.post("/pause_generation", 400, mode="abort")
        assert "paused in place" in refused["error"]["message"]
        await client.post("/pause_generation", mode="retract")
        updates = [client.session.post("/update_weights_from_disk", json={"model_path": str(one.second)}) for _ in range(4)]
        statuses = [reply.status for reply in await asyncio.gather(*updates)]
        assert set(statuses) == {200, 400}
        await client.post("/continue_generation")
        assert len((await task)["output_ids"]) == 600

    one.run(scenario)


def test_siblings_that_come_together_prefill_their_prompt_once(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        before = await client.info()
        replies = await asyncio.gather(*(client.generate(prompt_of(70), 6) for _ in range(8)))
        after = await client.info()
        assert sorted(reply["meta_info"]["cached_tokens"] for reply in replies) == [0] + [69] * 7
        assert after["prefill_tokens"] - before["prefill_tokens"] == 69 and after["cached_tokens"] - before["cached_tokens"] == 7 * 69

    one.run(scenario)


def test_a_seed_fixes_the_tokens_whatever_the_batch(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(15)
        alone = await client.generate(prompt, 30, sampling_seed=5)
        tasks = [client.generate(prompt_of(8 + index, index), 40) for index in range(5)]
        seeded = await client.generate(prompt, 30, sampling_seed=5)
        other = await client.generate(prompt, 30, sampling_seed=6)
        await asyncio.gather(*tasks)
        assert alone["output_ids"] == seeded["output_ids"] != other["output_ids"]

    one.run(scenario)


@pytest.mark.parametrize(("body", "word"), [
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature=-1.0"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p=0.0"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k=0"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0"),
    ({"input_ids": [1], "sampling_params": {"min_new_tokens": 500}}, "min_new_tokens=500"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 8}}, "max_tokens"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "n=2"),
    ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p=0.1"),
    ({"input_ids": [1], "sampling_params": {"stop": ""}}, "stop=''"),
    ({"input_ids": [1], "sampling_params": {"stop": ["a", ""]}}, "stop="),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [VOCAB]}}, f"stop_token_ids holds {VOCAB}"),
    ({"input_ids": [1, VOCAB]}, f"input_ids holds {VOCAB}"),
    ({"input_ids": [1, -1]}, "input_ids holds -1"),
    ({"input_ids": []}, "input_ids=[]"),
    ({"input_ids": [[1]]}, "input_ids"),
    ({}, "exactly one"),
    ({"input_ids": [1], "text": "a"}, "exactly one"),
    ({"input_ids": [1] * CONTEXT}, f"{CONTEXT} + 128"),
    ({"input_ids": [1], "stream": True}, "stream=True"),
    ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num=2"),
    ({"input_ids": [1], "surprise": 1}, "surprise"),
])
def test_bad_requests_are_refused(one: Endpoint, body: Json, word: str) -> None:
    async def scenario(client: Client) -> None:
        refused = await client.post("/generate", 400, **body)
        assert word in refused["error"]["message"]
        assert (await client.info())["num_running"] == 0

    one.run(scenario)


def test_other_bad_requests_are_refused(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        await client.post("/pause_generation", 400, modus="abort")
        await client.post("/update_weights_from_disk", 400, model_path=str(one.first), load_format="pickle")
        await client.post("/update_weights_from_tensor", 404, serialized_named_tensors=[])  # a pickle: not served at all
        await client.post("/begin_weight_update")
        await client.post("/update_weights_from_distributed", 400, names=[], dtypes=[], shapes=[], group_name="none")
        await client.post("/end_weight_update")

    one.run(scenario)


def test_tensors_come_in_slices_too(one: Endpoint) -> None:
    tensors = load_file(one.second / "model.safetensors")
    halves = [{name: tensor.chunk(2)[half] for name, tensor in tensors.items()} for half in range(2)]

    async def scenario(client: Client) -> None:
        async def slices(half: int, shift: int = 0, status: int = 200) -> None:
            starts = [[half * len(halves[0][name]) + shift, *[0] * (tensor.dim() - 1)] for name, tensor in halves[half].items()]
            await send(group, [client], halves[half], flattened=True, status=status, starts=starts, weight_version="second")

        async with group_of(client) as group:
            for parts, complete in (((0,), False), ((1, 0), True)):
                await client.post("/begin_weight_update")
                for half in parts:
                    await slices(half)
                ended = await client.post("/end_weight_update", 200 if complete else 400)
                assert ended["success"] is complete and (complete or "must make up the whole tensor" in ended["message"])
                assert one.error(one.second if complete else one.first, prompt_of(9), await client.generate(prompt_of(9), 9)) < TOLERANCE
            await client.post("/begin_weight_update")
            await slices(1, shift=1, status=400)
            await client.post("/end_weight_update")

    one.run(scenario)


def test_the_key_is_in_no_command_line_and_no_other_header_will_do(one: Endpoint) -> None:
    async def body() -> None:
        async with aiohttp.ClientSession(one.base_url, headers={"Authorization": "Bearer wröng"}) as session, session.get("/model_info") as reply:
            assert reply.status == 401

    asyncio.run(body())
    assert one.api_key not in Path(f"/proc/{one.pid}/cmdline").read_text()


def test_a_failing_update_leaves_the_old_weights_serving(one: Endpoint, tmp_path: Path) -> None:
    """SGLang takes most of these for a success."""
    async def scenario(client: Client) -> None:
        prompt = prompt_of(40)
        base = (await client.info())["generated_tokens"]
        task = client.generate(prompt, 800)
        await client.until(lambda info: info["generated_tokens"] > base + 20)
        await client.post("/pause_generation", mode="in_place")
        for folder in broken_folders(one.first, tmp_path).values():
            refused = await client.post("/update_weights_from_disk", 400, model_path=str(folder), weight_version="broken", flush_cache=False)
            assert refused["success"] is False and str(folder) in refused["message"]
        await client.post("/continue_generation")
        reply = await task
        assert reply["meta_info"]["weight_versions"] == [{"version": "first", "start": 0, "end": 800}]
        assert reply["meta_info"]["num_retractions"] == 0
        assert one.error(one.first, prompt, reply) < TOLERANCE

    one.run(scenario)


def test_exchanges_take_turns_and_each_is_whole(one: Endpoint) -> None:
    """Of a version that comes while another one is loaded, nothing is mixed into it. In a pause they change nothing of the pause."""
    async def scenario(client: Client) -> None:
        prompt, base = prompt_of(20), (await client.info())["generated_tokens"]
        task = client.generate(prompt, 900)
        await client.until(lambda info: info["generated_tokens"] > base + 20)
        folders = {f"v{number}": (one.second, one.first)[number % 2] for number in range(4)}
        await asyncio.gather(*(client.post("/swap_weights", model_path=str(folder), weight_version=name) for name, folder in folders.items()))
        loaded = (await client.info())["generated_tokens"]
        await client.until(lambda info: info["generated_tokens"] > loaded)  # by the last of them
        await client.post("/pause_generation", mode="retract")
        still = await client.info()
        await client.post("/swap_weights", model_path=str(one.second), weight_version="paused", mode="in_place")
        assert (await client.info())["generated_tokens"] == still["generated_tokens"] and still["weight_version"] in folders
        await client.post("/continue_generation")
        reply = await task
        found = [(span["version"], span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]]
        assert found[0][0] == "first" and found[-1][0] == "paused" and len({name for name, _, _ in found}) == len(found) > 2
        for name, start, end in found:
            folder = {"first": one.first, "paused": one.second, **folders}[name]
            assert one.error(folder, prompt, reply, start, end) < TOLERANCE

    one.run(scenario)


def test_a_failing_exchange_is_told_and_the_old_weights_serve_on(one: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        prompt, base = prompt_of(40), (await client.info())["generated_tokens"]
        task = client.generate(prompt, 800)
        await client.until(lambda info: info["generated_tokens"] > base + 20)
        for folder in broken_folders(one.first, tmp_path).values():
            refused = await client.post("/swap_weights", 400, model_path=str(folder), weight_version="broken")
            assert refused["success"] is False and str(folder) in refused["message"]
        await client.post("/swap_weights", 400, model_path=str(one.second), mode="abort")
        assert (await client.request("GET", "/model_info"))["weight_version"] == "first"
        reply = await task
        assert reply["meta_info"]["weight_versions"] == [{"version": "first", "start": 0, "end": 800}]
        assert reply["meta_info"]["num_retractions"] == 0 and one.error(one.first, prompt, reply) < TOLERANCE

    one.run(scenario)


def test_diverged_weights_give_no_numbers_and_good_ones_mend_it(one: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        await client.update(diverged_folder(one.first, tmp_path / "nan"), "nan")
        for reply in await asyncio.gather(*(client.generate(prompt_of(40, index), 5) for index in range(3))):
            assert [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] == [None] * 5
            assert reply["meta_info"]["weight_version"] == "nan"
        await client.update(one.second, "second")
        reply = await client.generate(prompt_of(10), 30)
        assert one.error(one.second, prompt_of(10), reply) < TOLERANCE

    one.run(scenario)


def test_a_client_that_leaves_frees_its_slot(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        tasks = [client.generate(prompt_of(5, index), 1000) for index in range(9)]
        await client.until(lambda info: info["num_running"] == 8 and info["num_queued"] == 1)
        for task in tasks:
            task.cancel()
        await client.until(lambda info: info["num_running"] == 0 and info["num_queued"] == 0)
        assert len((await client.generate(prompt_of(5), 3))["output_ids"]) == 3

    one.run(scenario)
def is_gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pid: int, seconds: float) -> bool:
    """Poll until the process has ended."""
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_engine_dies_with_its_parent(one: Endpoint) -> None:
    code = ("import sys; from pathlib import Path; from benchmarks.engine.child import EngineChild\n"
            "child = EngineChild.start(Path(sys.argv[1]), num_slots=1); print(child.process.pid, flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", code, str(one.first)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not is_gone(pid)
    parent.kill()
    parent.communicate()
    assert wait_gone(pid, 60)


def test_sigterm_ends_a_busy_engine_at_once(one: Endpoint) -> None:
    child = start_embedded(one.first)
    busy = Endpoint("embedded", child.base_url, child.api_key, one.first, one.second, child.process.pid)

    async def scenario(client: Client) -> None:
        task = client.generate(prompt_of(5), 1000)
        await client.until(lambda info: info["generated_tokens"] > 10)
        child.process.send_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientError):
            await task

    busy.run(scenario)
    assert child.process.wait(60) == -signal.SIGTERM
    child.stop()


def test_an_engine_that_is_ended_in_the_middle_of_loading_leaves_nothing(one: Endpoint, tmp_path: Path) -> None:
    """All that it has is its own: no process, nothing in memory that processes share. The folder is as it was."""
    folder = Path(shutil.copytree(one.first, tmp_path / "large"))
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    child = start_embedded(folder)
    busy = Endpoint("embedded", child.base_url, child.api_key, folder, folder, child.process.pid)

    async def scenario(client: Client) -> None:
        task = client.generate(prompt_of(5), 1000)
        await client.until(lambda info: info["generated_tokens"] > 2)
        swap = asyncio.create_task(client.post("/swap_weights", model_path=str(folder)))
        await client.until(lambda info: info["updating"] or swap.done())  # on a busy machine it may have ended already, and did no harm either
        assert str(MEMORY) not in Path(f"/proc/{child.process.pid}/maps").read_text() and not psutil.Process(child.process.pid).children()
        child.process.send_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientError):
            await task
        await asyncio.gather(swap, return_exceptions=True)

    busy.run(scenario)
    assert child.process.wait(60) == -signal.SIGTERM
    child.stop()
    assert files == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_failure_in_the_engine_ends_the_process(one: Endpoint) -> None:
    code = ("import runpy, torch; from workers.rollout.engines.servers.embedded.model import Model\n"
            "def decode(self, ids, positions): raise ArithmeticError('injected fault')\n"
            "Model.decode = decode; runpy.run_module('workers.rollout.engines.servers.embedded', run_name='__main__')")
    process = subprocess.Popen([sys.executable, "-c", code, "--model-path", str(one.first), "--parent-pid", str(os.getpid())], cwd=ROOT,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "HEADWAY_ENGINE_API_KEY": "key"}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = json.loads(process.stdout.readline())["port"]

    async def scenario() -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer key"}) as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "injected fault" in errors


def test_an_engine_that_cannot_start_says_why(one: Endpoint, tmp_path: Path) -> None:
    for folder, options, word in ((tmp_path / "none", {}, "config.json"), (one.first, {"context_length": 5000}, "5000"),
                                  (one.first, {"num_slots": 0}, "num-slots")):
        with pytest.raises(RuntimeError, match=word):
            start_embedded(folder, **options)
    environment = {key: value for key, value in os.environ.items() if key != "HEADWAY_ENGINE_API_KEY"}
    command = [sys.executable, "-m", "workers.rollout.engines.servers.embedded", "--model-path", str(one.first), "--parent-pid"]
    for pid, word in ((os.getpid(), "HEADWAY_ENGINE_API_KEY"), (os.getpid() + 1, "parent")):
        ended = subprocess.run([*command, str(pid)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode != 0 and word in ended.stderr


MALFORMED = [b"\xff\xfe", b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[" * 100_000, b"{" * 100_000, b'{"input_ids": [' + b"9" * 100_000 + b"]}",
             b'{"input_ids": [1], "sampling_params": {"top_k": 9223372036854775807}}', b'{"input_ids": [99999999999999999999999]}', b"null", b"[]",
             b'{"input_ids": [1], "sampling_params": {"temperature": 1e400}}', b'{"input_ids": [1], "sampling_params": {"temperature": 1e-300}}',
             b'{"input_ids": [1], "sampling_params": {"sampling_seed": 99999999999999999999}}', b'{"input_ids": [1], "rid": ""}',
             b'{"input_ids": [1], "sampling_params": {"stop": "' + b"x" * 2000 + b'"}}', b'{"text": "' + b"12 + 30 = " * 1_000_000 + b'"}',
             b'{"model_path": "/\\u0000"}', b'{"input_ids": [1], "text": "' + b"x" * 1_000_000 + b'"}']


def test_every_malformed_body_is_a_400_that_names_the_rule(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        for path in ("/generate", "/pause_generation", "/abort_request", "/update_weights_from_disk", "/swap_weights", "/init_weights_update_group"):
            for body in MALFORMED:
                async with client.session.post(path, data=body) as answer:
                    told = await answer.json()
                    message = told["error"]["message"] if "error" in told else told["message"]
                    assert answer.status == 400 and 10 < len(message) < 2000, (path, body[:80], answer.status, message[:300])
        async with client.session.post("/generate", data=b"x" * (17 << 20)) as answer:
            assert answer.status == 413 and "bytes" in (await answer.json())["error"]["message"]
        assert len((await client.generate(prompt_of(5), 3))["output_ids"]) == 3, "it serves on"

    one.run(scenario)


def test_without_the_key_no_body_is_read_at_health_either(one: Endpoint) -> None:
    url = urlsplit(one.base_url)
    with socket.create_connection((url.hostname, url.port), DEADLINE_S) as stranger:
        stranger.sendall(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\n" + bytes(1000))
        assert stranger.recv(100).startswith(b"HTTP/1.1 "), "it is answered at once, and not when all has come"
