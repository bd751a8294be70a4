"""The update of TRL's GRPOTrainer on given samples, for systems.py. Needs the extra `benchmark`.

The trainer runs its own loop. Its rollout function waits for a turn and hands over the samples; the time counts from when they
have been scored, so neither generation nor rewards are in it, to the end of the optimizer step. TRL pads a whole batch to its
longest prompt and its longest answer, and shuffles it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trainer.samples import MODEL, SAMPLES, Task
from benchmarks.trainer.turns import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Turns
from workers.trainer.batch.group import TrainGroup

MAX_STEPS = 10_000


class _Answers(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.end()

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.turns.answer(more["logs"]["grad_norm"])


class _Trainer(GRPOTrainer):
    turns: Turns

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        self.turns.begin()
        return scored


def trl(folder: Path, task: Task, groups: list[TrainGroup], turns: Turns) -> None:
    """Steps of TRL's trainer, until standard input ends."""
    model = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=getattr(torch, task.dtype), attn_implementation="sdpa")
    num_samples = len(groups) * SAMPLES

    def rollout(prompts: list[str], _: Any) -> dict[str, list]:
        turns.wait()
        assert len(prompts) == num_samples
        return {"prompt_ids": [group.prompt.tolist() for group in groups for _ in range(SAMPLES)],
                "completion_ids": [response.tolist() for group in groups for response in group.responses],
                "logprobs": [values.tolist() for group in groups for values in group.behavior_logprobs],
                "advantage": [float(reward) for group in groups for reward in group.rewards]}

    def reward(advantage: list[float | None], **_: Any) -> list[float | None]:
        return advantage

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, use_cpu=not torch.cuda.is_available(), per_device_train_batch_size=task.sequences,
            gradient_accumulation_steps=num_samples // task.sequences, num_generations=SAMPLES, max_completion_length=task.max_answer,
            max_steps=MAX_STEPS, learning_rate=LR, lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS,
            weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP, beta=0.0, scale_rewards="none", temperature=1.0, logging_steps=1, save_strategy="no",
            report_to=[], bf16=False, fp16=False, gradient_checkpointing=False, disable_tqdm=True)
        prompts = Dataset.from_list([{"prompt": str(number)} for number in range(len(groups))])
        trainer = _Trainer(model=model, reward_funcs=reward, args=config, train_dataset=prompts, processing_class=_tokenizer(),
                           callbacks=[_Answers(turns)], rollout_func=rollout)
        trainer.turns = turns
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes: TRL wants a tokenizer, though the samples come as tokens."""
    vocabulary = {text: index for index, text in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")
