"""The program in a completion: what a model wrote, cut out of the text around it."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def extract(completion: str) -> str:
    """The last closed ```python block of `completion`; else the last closed block without a language; else all of it.

    A single fence leaves the block open: what follows ```python, or what precedes a bare ``` (the prompt then opened the block).
    """
    fences = list(_FENCE.finditer(completion))
    blocks = [(opening[1].lower(), completion[opening.end() + 1:closing.start()]) for opening, closing in _pairs(fences)]
    for languages in (_PYTHON, ("",)):
        found = [block for language, block in blocks if language in languages]
        if found:
            return found[-1]
    if len(fences) == 1:
        [fence] = fences
        return completion[fence.end() + 1:] if fence[1] else completion[:fence.start()]
    return completion


def _pairs(fences: list[re.Match[str]]) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Opening and closing fences. One with a language opens a block, even where the one before was never closed."""
    pairs, opening = [], None
    for fence in fences:
        if opening is None or fence[1]:
            opening = fence
        else:
            pairs.append((opening, fence))
            opening = None
    return pairs


def continued(prompt: str, completion: str, entry_point: str) -> list[str]:
    """The sources to run one after the other in one namespace, where `completion` continues or completes the code `prompt`.

    A completion that defines `entry_point` itself comes after the prompt, whose helpers it may use; any other goes on where the prompt ends.
    """
    program = extract(completion)
    if not prompt:
        return [program]
    return [helpers(prompt, entry_point), program] if _definition(program, entry_point) else [prompt + program]


def helpers(prompt: str, entry_point: str) -> str:
    """What `prompt` has before the function that it leaves open: by itself that one may be no Python (a `def` line without a body)."""
    found = _definition(prompt, entry_point)
    return prompt[:found.start()] if found else prompt


def _definition(source: str, name: str) -> re.Match[str] | None:
    return re.search(rf"^(async[ \t]+)?def[ \t]+{re.escape(name)}\b", source, re.MULTILINE)
