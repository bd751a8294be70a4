"""The program in a completion: what a model wrote, cut out of the text around it."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^(?P<indent>[ \t]*)```[ \t]*(?P<language>[\w+-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def extract(completion: str, function: str = "", as_it_stands: bool = False) -> str:
    """The last closed ```python block of `completion`; else the last closed block without a language; else all of it.

    Where `function` is given, the last of these blocks that defines it, if one does: behind it may stand an example of its use. Blocks lose the
    indentation of their fences, but `as_it_stands`. A single fence leaves the block open: what follows ```python, or what precedes a bare ```
    (the prompt then opened the block).
    """
    fences = list(_FENCE.finditer(completion))
    blocks = [(opening["language"].lower(), _block(completion, opening, closing, as_it_stands)) for opening, closing in _pairs(fences)]
    for languages in (_PYTHON, ("",)):
        found = [block for language, block in blocks if language in languages]
        if found:
            return next((block for block in reversed(found) if function and _definition(block, function, r"[ \t]*")), found[-1])
    if len(fences) == 1:
        [fence] = fences
        return completion[fence.end() + 1:] if fence["language"] else completion[:fence.start()]
    return completion


def _block(completion: str, opening: re.Match[str], closing: re.Match[str], as_it_stands: bool) -> str:
    """What stands between two fences, `as_it_stands` or without the indentation of the first, as in the item of a list."""
    inside, width = completion[opening.end() + 1:closing.start()], len(opening["indent"])
    return re.sub(rf"^[ \t]{{1,{width}}}", "", inside, flags=re.MULTILINE) if width and not as_it_stands else inside


def _pairs(fences: list[re.Match[str]]) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Opening and closing fences. One with a language opens a block, even where the one before was never closed."""
    pairs, opening = [], None
    for fence in fences:
        if opening is None or fence["language"]:
            opening = fence
        else:
            pairs.append((opening, fence))
            opening = None
    return pairs


def continued(prompt: str, completion: str, entry_point: str) -> list[str]:
    """The sources to run one after the other in one namespace, where `completion` continues or completes the code `prompt`.

    A completion that defines `entry_point` itself comes after the prompt, whose helpers it may use; any other goes on where the prompt ends.
    """
    program = extract(completion, entry_point)
    if not prompt:
        return [program]
    if _definition(program, entry_point):
        return [helpers(prompt, entry_point), program]
    return [prompt + extract(completion, as_it_stands=True)]


def helpers(prompt: str, entry_point: str) -> str:
    """What `prompt` has before the function that it leaves open: by itself that one may be no Python (a `def` line without a body)."""
    found = _definition(prompt, entry_point)
    return prompt[:found.start()] if found else prompt


def _definition(source: str, name: str, before: str = "") -> re.Match[str] | None:
    return re.search(rf"^{before}(async[ \t]+)?def[ \t]+{re.escape(name)}\b", source, re.MULTILINE)
