"""The factory of prompts: opens the source that the config names.

    arithmetic, reasoning_gym: index, seed --> Prompt --> within the limits, or another in its place (limits.py) -----+
    jsonl, parquet, hf, verifiers: rows (rows.py) --> Prompt (mapping.py) --> within the limits, held out, in order (prompt_files.py) --+
    data.chat_template: rendered (chat.py), else behind data.bos <----------------------------------------------------+
    mixture: one of several such sources for each index (mixture.py)
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.data.limits import Limits, Replaced
from workers.data.prompt import PromptSource, Rewritten, begun, with_text
from workers.reward.verifiers.registry import check_name, composed

if TYPE_CHECKING:
    from workers.data.chat import ChatTemplate


def open_prompts(config: DataConfig, reward: RewardConfig, seed: int, model_folder: Path | None = None, responses: bool = False) -> PromptSource:
    """The prompt source that `config` names. `model_folder` holds chat template and tokenizer, needed for data.chat_template and
    data.max_prompt_tokens only. `responses`: prompts of files must have one.

    Raises `ConfigError` for data, options or files that cannot work.
    """
    check_name(composed(reward.verifier, reward.parts))
    if config.kind is DataKind.mixture:
        return _open_mixture(config, reward, seed, model_folder, responses)
    verifier = config.verifier or reward.verifier
    check_name(verifier, "data.verifier" if config.verifier else "reward.verifier")
    template = _template(config, model_folder)
    limits = Limits(config, model_folder, template)
    source = _open(config, verifier, seed, limits, responses)
    if template is not None:
        from workers.data.chat import rendered

        return Rewritten(source, functools.partial(rendered, template=template))
    bos = config.text_before
    return Rewritten(source, lambda prompt: with_text(prompt, begun(prompt.text, bos), prompt.response)) if bos else source


def _template(config: DataConfig, model_folder: Path | None) -> ChatTemplate | None:
    if not config.chat_template:
        return None
    if model_folder is None:
        raise ConfigError("data.chat_template=True: needs the model's folder, which is not known here. Set model.path")
    from workers.data.chat import ChatTemplate

    return ChatTemplate(model_folder, config.chat_template_kwargs, config.chat_template_date)


def _open(config: DataConfig, verifier: str, seed: int, limits: Limits, responses: bool) -> PromptSource:
    # Imported here, so that a run pays only for the source that it uses.
    if config.kind is DataKind.arithmetic:
        from workers.data.arithmetic import ArithmeticPrompts

        return Replaced(ArithmeticPrompts(config, verifier, seed), limits)
    if config.kind is DataKind.reasoning_gym:
        from workers.data.gym import GymPrompts

        return Replaced(GymPrompts(config, verifier, seed), limits)
    from workers.data.prompt_files import FilePrompts

    return FilePrompts(config, verifier, seed, limits, responses)


def _open_mixture(config: DataConfig, reward: RewardConfig, seed: int, model_folder: Path | None, responses: bool) -> PromptSource:
    """The parts of `config`, each with a seed of its own. Raises `ConfigError`, naming the part."""
    from workers.data.mixture import MixturePrompts

    sources = {}
    for name, part in config.settled_parts().items():
        own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")
        try:
            sources[name] = open_prompts(part, reward, own_seed, model_folder, responses)
        except ConfigError as error:
            raise ConfigError(f"data.parts.{name}: {error}") from error
    return MixturePrompts(sources, {name: part.weight for name, part in config.parts.items()}, seed)
