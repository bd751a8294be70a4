"""Agents written with the official openai client; as a program: `python agent_programs.py NAME`, with the task on stdin."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

ADD: dict[str, Any] = {"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
MODEL = "gpt-of-the-agent"


async def asks_twice(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Two turns; the verifier judges the second."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for feedback in ("Sure?", None):
            reply = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0.2)
            messages += [reply.choices[0].message, {"role": "user", "content": feedback}]


async def asks_often(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Many turns of one conversation."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for _ in range(14):
            reply = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "no"}]
    return 0.0


async def returns_half(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """One turn, and a score of its own."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"]}])
    return 0.5


async def breaks(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Fails after a turn."""
    await returns_half(task, base_url, api_key)
    raise KeyError("no such tool")


async def waits(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Never ends."""
    await asyncio.Event().wait()


async def lingers(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Sends its reward, and never ends; what it would return is too much."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"]}])
        await client.post("/reward", body={"reward": 0.25}, cast_to=object)
    await asyncio.Event().wait()
    return 9.0


async def fills(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Says more than there is room for."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for text in ("short", "long" * 1000):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])


async def silent(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Asks for nothing."""


def not_async(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Cannot be an agent in the worker."""


def rewards(task: dict[str, Any], client: OpenAI) -> None:
    """One turn; the reward is 0.75."""
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"] + task["reference"]}])
    client.post("/reward", body={"reward": 0.75}, cast_to=object)


def fails(task: dict[str, Any], client: OpenAI) -> None:
    """One turn, much output, and an error."""
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"]}])
    print("x" * 100_000)
    sys.exit("it is broken")


def dies(task: dict[str, Any], client: OpenAI) -> None:
    """One turn, and then SIGKILL."""
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"]}])
    os.kill(os.getpid(), signal.SIGKILL)


def ends_itself(task: dict[str, Any], client: OpenAI) -> None:
    """One turn, and then SIGTERM."""
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"]}])
    os.kill(os.getpid(), signal.SIGTERM)


def asks_and_hangs(task: dict[str, Any], client: OpenAI) -> None:
    """One turn, and then as `hangs`."""
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["prompt"]}])
    hangs(task, client)


def hangs(task: dict[str, Any], client: OpenAI) -> None:
    """Waits for ever, with a child in a session of its own; their ids are written down."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    note = Path(os.environ["AGENT_NOTE"])
    note.with_suffix(".new").write_text(json.dumps([os.getpid(), child.pid]))
    note.with_suffix(".new").rename(note)
    time.sleep(3600)


if __name__ == "__main__":
    functions = {function.__name__: function for function in (rewards, fails, dies, ends_itself, hangs, asks_and_hangs)}
    functions[sys.argv[1]](json.loads(sys.stdin.readline()), OpenAI(max_retries=0))
