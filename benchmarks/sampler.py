"""The embedded engine without the HTTP server in front, for benchmarks that load weights and sample in their own process."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import torch

from workers.config import Config
from workers.data.prompt import Prompt
from workers.model.architecture import read_architecture
from workers.model.tokenizer import open_tokenizer
from workers.rollout.engines.servers.embedded.engine_loop import Engine
from workers.rollout.engines.servers.embedded.model import Model
from workers.rollout.engines.servers.embedded.model_runner import Forward
from workers.rollout.engines.servers.embedded.requests import Request, Sampling
from workers.rollout.engines.servers.embedded.scheduler import Scheduler
from workers.rollout.engines.servers.embedded.text import Text

ANSWER_S = 300.0
"""So long the engine may take for a batch on a busy machine."""

Weights = dict[str, torch.Tensor]


class Sampler:
    """The embedded engine in this process, on its own thread, without the HTTP server in front."""

    def __init__(self, config: Config, folder: Path) -> None:
        engine = config.engine
        self._config = config
        self._tokenizer = open_tokenizer(folder)
        architecture = read_architecture(folder)
        self._eos = frozenset(architecture.eos_token_ids)
        model = Model(folder, architecture, getattr(torch, engine.dtype.value), engine.num_slots, engine.context_length)
        scheduler = Scheduler(engine.num_slots, engine.context_length, engine.prefill_chunk, "0")
        self._finished: SimpleQueue[Request] = SimpleQueue()
        self._engine = Engine(Forward(model, engine.num_threads), scheduler, Text(folder), self._finished.put)
        threading.Thread(target=self._engine.run, name="engine", daemon=True).start()

    def load(self, weights: Path | Weights, version: int) -> None:
        """Generate with `weights`, tensors by name or a Hugging Face folder, from now on. Raises `ModelError`, `TimeoutError`."""
        self._engine.update_weights(weights, str(version), flush=True).result(ANSWER_S)

    def sample(self, prompts: list[Prompt], size: int, temperature: float, seed: int) -> list[list[Request]]:
        """`size` finished requests for each prompt. Raises `queue.Empty` where the engine does not answer."""
        workflow = self._config.workflow
        groups = [[Request(f"{number}.{sample}", self.encode(prompt.text), workflow.max_new_tokens, stop_ids=self._eos,
                           stop_texts=tuple(workflow.stop), sampling=Sampling(temperature, seed=seed + number * size + sample))
                   for sample in range(size)] for number, prompt in enumerate(prompts)]
        for request in (request for group in groups for request in group):
            self._engine.submit(request)
        for _ in range(len(prompts) * size):
            self._finished.get(timeout=ANSWER_S)
        return groups

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, request: Request) -> str:
        """The answer up to the first stop string."""
        text = self._tokenizer.decode(request.output, skip_special_tokens=True)
        return min((text.split(stop, 1)[0] for stop in self._config.workflow.stop), key=len, default=text)
