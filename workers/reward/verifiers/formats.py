r"""Where the answer stands in a completion, and verifiers that judge its form alone.

    <answer>18</answer>     the last pair of tags             tagged()
    \boxed{18}              the last box that is closed       boxed()
    The answer is 18.       the last such phrase, or ####     stated()

Only the last one counts, so that a completion cannot win by listing answers. All of this takes time linear in the length of
the completion, whatever stands in it.
"""

from __future__ import annotations

import re

from workers.reward.verifiers.notation import signed

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;]|\\[()\[\]]|\\[,;:! ]|\\q?quad|and|or|\\text\{\s*(?:and|or)\s*\}){0,20}")
_PHRASE = re.compile(r"(?:answers?(?:\s+(?:is|are)\s*:?|\s*[:=])|(?<!#)(?P<mark>####)(?!#))(?:\s*+\*\*(?=\s))?\s*", re.IGNORECASE)
"""With the end of its emphasis: "**Answer:** 18", and the answer on a line of its own."""
_MINUS_BEFORE = re.compile(r"(?:=[ \t]*-[ \t]*|(?:[$:]|\\[(\[]|\b(?:is|are))[ \t]*-)$")
"""Behind which nothing but "=" lets a space follow: a list's "- " is none."""
_LONE = re.compile(r"(?:[\d.,]|\{,\}|\\[,!;: ])+|[A-Za-z]|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}")
_WORDS = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_ANSWER = re.compile(r"[ \t]*(?:[$\\]|[-+−]?[$€£¥]?\.?\d[\d,./]{0,50}(?!\d|[.):]?[ \t]+[A-Z]|[):]))")
"""Behind ####: a formula, or a number that does not number a heading ("3. Add", "2 Solution")."""
_SENTENCE_END, _LINE_END = re.compile(r"\.\s|\n"), re.compile(r"\n")
_DISPLAY = re.compile(r"\$\$.*?\$\$|\\\[.*?\\\]", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def tagged(completion: str) -> str | None:
    """The text inside the last <answer>...</answer>, stripped; None without one."""
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else completion[start + len("<answer>"):end].strip()


def boxed(completion: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds, stripped; None without a closed one.

    Boxes joined by nothing but "and", "or" or a comma are one answer of several parts: "$\boxed{1}$ and $\boxed{2}$" gives
    "1, 2". Of boxes in one another the inner one counts. A minus before a box, and nothing before that, is part of the answer.
    """
    boxes = _boxes(completion)
    if not boxes:
        return None
    parts = [boxes.pop()]
    while boxes and _BETWEEN_BOXES.fullmatch(completion, boxes[-1][2], parts[-1][0]):
        parts.append(boxes.pop())
    contents = [_with_sign(completion[max(0, start - 20):start], completion[content:end - 1].strip()) for start, content, end in reversed(parts)]
    return ", ".join(dict.fromkeys(contents))


def _with_sign(before: str, content: str) -> str:
    if not content or not _MINUS_BEFORE.search(signed(before)):
        return content
    return f"-{content}" if _LONE.fullmatch(content) else f"-({content})"


def _boxes(completion: str) -> list[tuple[int, int, int]]:
    """Where each innermost closed box begins, where its content begins, and where it ends."""
    found: list[tuple[int, int, int]] = []
    opened: list[tuple[int, int] | None] = []  # braces that are not closed yet; None for those of no box
    for token in _BRACES.finditer(completion):
        if len(token[0]) > 2:
            opened.append((token.start(), token.end()))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()) is not None and not (found and found[-1][0] > box[0]):
            found.append((*box, token.end()))
    return found


def stated(completion: str, hollow: re.Pattern[str] | None = None) -> str | None:
    """The rest of the sentence, or the displayed formula, after the last "answer is", "answer:" or "####"; None without such a phrase.

    "####" is that of GSM8K's answers: before a number or formula, or on the last line. Elsewhere it begins a heading.
    """
    after = _last_phrase(completion, hollow)
    return None if after is None else _statement(completion, after, _SENTENCE_END)


def statements(completion: str) -> list[str]:
    """What `stated` may mean where names have dots ("St. Louis", "the U.S."): the sentence, and the line without and with its last dot."""
    after = _last_phrase(completion)
    if after is None:
        return []
    line = _LINE_END.search(completion, after)
    rest = completion[after:line.start() if line else None].strip()
    return [_statement(completion, after, _SENTENCE_END), _statement(completion, after, _LINE_END).strip("*"), rest]


def _last_phrase(completion: str, hollow: re.Pattern[str] | None = None) -> int | None:
    """Where the answer begins that the last such phrase announces."""
    last_line, after = completion.rstrip().rfind("\n"), None
    line_end = last_word = 0  # of the line in which a mark stands, looked at once
    for phrase in _PHRASE.finditer(completion):
        if phrase["mark"] and phrase.start() < last_line and not _ANSWER.match(completion, phrase.end("mark")):
            if phrase.end("mark") > line_end:
                line_end = completion.find("\n", phrase.end("mark"))  # there is one before the last line
                last_word = max((word.start() for word in _WORDS.finditer(completion, phrase.end("mark"), line_end)), default=0)
            if last_word >= phrase.end("mark"):
                continue
        if hollow is None or not hollow.match(completion, phrase.end()):
            after = phrase.end()
    return after


def _statement(completion: str, after: int, ending: re.Pattern[str]) -> str:
    if display := _DISPLAY.match(completion, after):
        return display[0]
    end = ending.search(completion, after)
    text = completion[after:end.start() if end else None].strip().removesuffix(".")
    if text.count("**") % 2:  # emphasis that began before the answer, or ends with the phrase
        text = text.removesuffix("**").removeprefix("**").strip().removesuffix(".")
    return text


def final_answer(completion: str, hollow: re.Pattern[str] | None = None) -> str | None:
    """The answer that a completion marks as its own: by tags, or else by a box, or else by a phrase; None if it marks none. `hollow`: what says
    nothing behind such a phrase."""
    inside = tagged(completion)
    box = boxed(completion if inside is None else inside)
    if box is not None:
        return box
    return stated(completion, hollow) if inside is None else inside


def has_box(prompt: str, completion: str, reference: str) -> float:
    r"""The `boxed` verifier: 1 if the completion holds a closed \boxed{...} that is not empty, else 0."""
    return float(bool(boxed(completion)))


def format_tags(prompt: str, completion: str, reference: str) -> float:
    """1 if the completion is <think>...</think><answer>...</answer> and nothing else, each tag once, the answer not blank; else 0.

    Where the prompt ends with <think>, as chat templates of reasoning models make it, the completion goes on after it. The form is
    that of the format reward of DeepSeek-R1 (arXiv 2501.12948, 2.2.2).
    """
    text = completion.strip()
    if prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    if any(text.count(tag) != 1 for tag in _TAGS) or not (text.startswith("<think>") and text.endswith("</answer>")):
        return 0.0
    before, _, after = text.partition("</think>")
    between, _, answer = after.partition("<answer>")
    return float("<answer>" not in before and not between.strip() and bool(answer.removesuffix("</answer>").strip()))
