"""The `reward_model` verifier: a Hugging Face sequence classifier on the CPU of a reward process.

    prompt, completion --the model's chat template, or one behind the other--> tokens --> outputs --sigmoid, or softmax--> score in [0, 1]

torch and transformers are imported with the model, so only processes that are asked for this verifier have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from workers.config.reward import RewardModelConfig

_config = RewardModelConfig()


def configure(config: RewardModelConfig) -> None:
    """Which model this process asks."""
    global _config
    _config = config


def check_node() -> None:
    """Load the model before the first answer is judged. Raises what transformers raises where it cannot be."""
    _classifier()


def score(prompt: str, completion: str, reference: str) -> float:
    """The model's score in [0, 1] of an answer; the reference is not looked at. Raises `RuntimeError` if its output is no number."""
    return _classifier()(prompt, completion)


@functools.cache
def _classifier() -> Callable[[str, str], float]:
    try:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ModuleNotFoundError as error:
        raise RuntimeError(f"verifier 'reward_model' needs {error.name}, which is not installed. Install headway[demo]") from None
    config = _config
    model = AutoModelForSequenceClassification.from_pretrained(config.path, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True, truncation_side="left")

    @torch.inference_mode()
    def classify(prompt: str, completion: str) -> float:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        plain = not tokenizer.chat_template
        text = prompt + completion if plain else tokenizer.apply_chat_template(turns, tokenize=False)
        longest = min(config.max_tokens, tokenizer.model_max_length)
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest, add_special_tokens=plain)
        outputs = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits[0].double()
        value = torch.sigmoid((outputs[0] - config.center) / config.scale) if len(outputs) == 1 else outputs.softmax(0)[config.label]
        if not value.isfinite():
            raise RuntimeError(f"reward.model.path={config.path!r} gave {outputs.tolist()}, which is no score. Give another model")
        return float(value)

    return classify
