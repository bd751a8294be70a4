"""Two-digit sums by TRL's GRPOTrainer, for the benchmark beside it. Needs the extra `benchmark`.

    python -m benchmarks.time_to_accuracy.peer ORDER.json

ORDER.json has the model's folder, prompts with their references, the sizes and optimizer settings of the runs that it stands beside, and where
the weights of every so many steps go. A step is a batch, sampled by the newest weights and trained on in `num_minibatches` optimizer steps: that is
eta=0. Loss and advantages are TRL's defaults. TRL has no stop strings: the stop token is made an end of sequence. Weights are float32, passes
are in bfloat16 (autocast), with micro-batches of 64: of what was tried (float32 throughout, micro-batches of 16) the fastest on two cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from workers.reward.verifiers import registry

MICRO_BATCH = 64
"""Samples of a forward pass."""


class _Keeper(TrainerCallback):
    """Writes weights after every so many steps, and ends training when the last are written."""

    def __init__(self, order: dict[str, Any], model: Any) -> None:
        self._order, self._model = order, model

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, rest = divmod(state.global_step, self._order["num_minibatches"])
        if not rest and step % self._order["every"] == 0:
            self._model.save_pretrained(Path(self._order["exports"]) / str(step))
            control.should_training_stop = step >= self._order["stop_after"]


def train(order: dict[str, Any]) -> None:
    """The whole run. Raises what TRL raises."""
    tokenizer = AutoTokenizer.from_pretrained(order["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32, attn_implementation="sdpa")
    [stop] = tokenizer.encode(order["stop"], add_special_tokens=False)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, stop]
    judge = registry.load(order["verifier"])

    def reward(prompts: list[str], completions: list[str], reference: list[str], **_: Any) -> list[float | None]:
        return [float(judge(prompt, completion.split(order["stop"], 1)[0], right))
                for prompt, completion, right in zip(prompts, completions, reference, strict=True)]

    minibatch = order["batch_groups"] * order["group_size"] // order["num_minibatches"]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=True, per_device_train_batch_size=MICRO_BATCH, seed=order["seed"],
            gradient_accumulation_steps=minibatch // MICRO_BATCH, generation_batch_size=minibatch * order["num_minibatches"],
            num_generations=order["group_size"], max_completion_length=order["max_new_tokens"], temperature=order["temperature"],
            max_steps=order["num_steps"] * order["num_minibatches"], learning_rate=order["lr"], lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"lr_end": order["min_lr"], "power": 1.0}, warmup_steps=order["warmup_steps"] * order["num_minibatches"],
            adam_beta1=order["adam_beta1"], adam_beta2=order["adam_beta2"], adam_epsilon=order["adam_eps"], weight_decay=order["weight_decay"],
            max_grad_norm=order["clip_grad"], beta=0.0, logging_steps=order["num_minibatches"], save_strategy="no", report_to=[],
            gradient_checkpointing=False, disable_tqdm=True, shuffle_dataset=False)
        prompts = Dataset.from_list([{"prompt": prompt, "reference": reference} for prompt, reference in order["prompts"]])
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=prompts, processing_class=tokenizer,
                              callbacks=[_Keeper(order, model)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
