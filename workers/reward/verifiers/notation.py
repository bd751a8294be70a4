r"""How answers are written, made uniform before a parser sees them: what people and models write, in plain LaTeX.

    "−3"  "1,234"  "1\,234"  "1.5e3"  "50%"  "$5$"  "18 dollars"  "5."
     -3    1234     1234      1500     50\%    5     18\text{ dollars}  5

Each of these is read wrongly, or not at all, by the math-verify library in one place or another: "1\,234" as 1 + 234,
"1.5e3" as 1.5 times Euler's number times 3, "18 dollars" as a product of letters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

MAX_CHARS = 2000
MAX_DEPTH = 25
MAX_DIGITS = 1000
HARMLESS_CHARS = 100
HARMLESS_DEPTH = 5
MAX_PROSE_CHARS = 500
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp", "sqrt", "pi", "mod",
    "gcd", "lcm", "det", "max", "min"})
CONNECTORS = frozenset({"and", "or"})

_SIGNS = str.maketrans("−﹣－", "---")
_DASH = re.compile(r"(?<![\d%$)\]}])(?<![\d%$)\]}]\s)–(?=[\d.$€£])")
_CHARACTERS = str.maketrans({
    "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm ", "°": r"^{\circ}", "％": "%",
    "∅": r"\emptyset ", "²": "^{2}", "³": "^{3}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "~": " "})
_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_MIXED = re.compile(r"(?<![\w./^}])(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\w./^])")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:(?:,|\{,\}|\\[,!;: ]| )\d{3})+(?![\d,/])")
_EXPONENT = re.compile(r"(?<![\w.])(\d{1,50}(?:\.\d{1,50})?)[eE]([+-]?\d{1,2})(?!\w)")
_UNIT = re.compile(r"([-+]?\\?\$?[\d.,/]*\d)\s+([A-Za-z]{2,}\.?(?: [A-Za-z]+\.?)*)")
_PRODUCT = re.compile(r"[xyz]{2,3}|abc?|bc|pq|uv|d[xyzrtu]")  # no units, as mn and ac may be
_OPERATION = re.compile(r"[-+*/=^_]|\\[A-Za-z]")
_APART = re.compile(r"[A-Za-z\d](?:\s|\\[ ,;:!]|~)+[a-z]{2,3}(?![A-Za-z])|(?<![A-Za-z])[a-z]{2,3}\s+[A-Za-z\d]")
"""Letters beside a number or letters: words, or a unit."""
_LAST_UNIT = re.compile(r"[\d}@](?:\s|\\[ ,;:!]|~)+[A-Za-z]$|^[^A-Za-z]*[\d}][A-Za-z]$|=\s*[-+]?[\d.,]+[A-Za-z]$")
_BEHIND_NUMBERS = re.compile(r"[\d}](?:\s|\\[ ,;:!]|~)*([a-z]+)")
UNITS = frozenset({
    "km", "cm", "mm", "nm", "kg", "mg", "ml", "hr", "hrs", "min", "sec", "mph", "kph", "kmh", "ft", "in", "lb", "lbs", "oz", "yd", "mi", "am", "pm",
    "st", "nd", "rd", "th", "cal", "gal", "px", "gb", "mb", "kb", "hz", "deg", "rad"})
_SCALE = re.compile(r"(?<![\d./}])(\d{1,50}(?:\.\d{1,50})?)(?:\s|\\[ ,;:]|~)*(\\text\{\s*)?(?<![A-Za-z])(thousand|million|billion|trillion)s?\b")
_NAME = re.compile(r"(?<![\\A-Za-z])(?=(?:arc)?(?:sin|cos|tan)|cot|csc|log|ln)([A-Za-z]+)")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_NUMBER_AS_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{\s*([-+]?[\d.,/]*\d)([^{}\d]*)\}")
_LABEL = re.compile(r"\\text\s*\{[^{}\d]*\}\s*[:=]\s*|\\text\s*\{[^{}\d]*[:=]\s*\}\s*")
_SPACES = (r"\,", r"\;", r"\:", r"\!")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,50})\.(\d{0,50})\\(?:overline|bar)\s*\{(\d{1,50})\}")
_RATIO = re.compile(r"\d{1,50}(?:\s*:\s*\d{1,50}){2,9}")
_MEASURE = re.compile(r"[\d.,]+\s*[A-Za-z]{1,20}\.?(?:\s+(?:and\s+)?|$)")
_MEASURES = re.compile(rf"\s*(?:{_MEASURE.pattern}){{2,9}}")
_LETTERS = re.compile(r"[A-Za-z]+(?:[ '-]+[A-Za-z]+)*")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]{1,20}\*?\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_DIGITS = re.compile(rf"\d{{{MAX_DIGITS}}}")
_NOTATION = re.compile(r"[\\$^\[]|\*\s*\*")
_HARMLESS_COMMAND = re.compile(r"\\(?:[dt]?frac|left|right|cdot|times|pi|infty|cup|pm|[,!;: %$])(?![A-Za-z])|\^\{?\\circ\}?")
_HARMLESS = re.compile(r"(?:[\d\s+\-/().,{}\[\]$\\%]|\*(?!\s*\*)|:(?!.*:))*")


def signed(text: str) -> str:
    """`text` with every sign that is meant for a minus as one: "−5", and "–5" where no number is before it, which a dash may follow."""
    return _DASH.sub("-", text.translate(_SIGNS))


def written(text: str) -> str:
    """`text` in plain LaTeX, without what surrounds a formula. Text that is longer than `MAX_CHARS` is left as it is."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return text
    text = _MIXED.sub(_improper, _bare(signed(text).translate(_CHARACTERS)))
    text = _NUMBER_AS_TEXT.sub(lambda found: found[1] + (f"\\text{{{found[2]}}}" if found[2].strip() else ""), text)
    text = text[found.end():] if (found := _LABEL.match(text)) else text
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _REPEATING.sub(_fraction, _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text))
    text = _EXPONENT.sub(lambda found: format(Decimal(found[0]), "f"), text)
    text = _SCALE.sub(lambda found: format(Decimal(found[1]).scaleb(_SCALES[found[3]]), "f") + (found[2] or ""), text)
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text.replace(r"\mathrm{i}", "i"))
    if _RATIO.fullmatch(text):  # two parts are a quotient
        text = f"({text.replace(':', ', ')})"
    text = re.sub(r"\binfinity\b", r"\\infty", text.replace(r"\varnothing", r"\emptyset"))
    if (found := _UNIT.fullmatch(text)) and not FUNCTIONS.intersection(found[2].split()) and not _PRODUCT.fullmatch(found[2]):
        text = f"{found[1]}\\text{{ {found[2]}}}"
    return _NAME.sub(lambda found: f"\\{found[1]}" if found[1] in FUNCTIONS else found[0], text) if formula(text) else text


def _improper(found: re.Match[str]) -> str:
    """3/2 for "1 1/2"."""
    whole, above, below = (int(part) for part in found.groups())
    return f"{whole * below + above}/{below}" if above < below else found[0]


def _fraction(found: re.Match[str]) -> str:
    """1/6 for "0.1\\overline{6}"."""
    whole, fixed, again = found.groups()
    above = int(whole + fixed + again) - int(whole + fixed or "0")
    return f"\\frac{{{above}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"


def _bare(text: str) -> str:
    """`text` without signs of mathematics or emphasis around the whole of it, and without punctuation after it."""
    before = None
    while text != before:
        before, text = text, text.strip()
        for space in _SPACES:
            text = text.removeprefix(space).removesuffix(space)
        text = text.removesuffix("\\").rstrip(".,;:")
        for opening, closing in _MATH:
            inside = text[len(opening):-len(closing)]
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing) and opening not in inside:
                text = inside
    return text[1:] if text.startswith("$") and text.count("$") == 1 else text


def formula(text: str) -> bool:
    """Whether `text` is all mathematics: has no words but in a LaTeX text command, or as names of functions, or between several answers."""
    plain = _TEXT.sub(" ", text)
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", plain)) if not _PRODUCT.fullmatch(word)]
    others = [word for word in words if word not in FUNCTIONS | CONNECTORS]
    return "\n" not in text and "$" not in text.replace(r"\$", "") and (not others or _products(plain, others))


def _products(text: str, words: Sequence[str]) -> bool:
    """Whether `words`, of a text with an operation, can only be products of variables: short ones, apart from other letters and numbers, or behind
    a number without a space where no unit is written so."""
    if not _OPERATION.search(text) or any(len(word) > 3 or not word.islower() for word in words):
        return False
    text = _COMMAND.sub("@", text)
    return UNITS.isdisjoint(_BEHIND_NUMBERS.findall(text)) and not _APART.search(text)


def has_variables(text: str) -> bool:
    """Whether the letters in a formula are variables, wherever they stand: "2r + s". One behind a number at the end may be a unit: "x = 5 m"."""
    letters = _COMMAND.sub("@", text)
    return (_TEXT.search(text) is None and _OPERATION.search(text) is not None and re.search("[A-Za-z]", letters) is not None
            and _LAST_UNIT.search(letters) is None and UNITS.isdisjoint(_BEHIND_NUMBERS.findall(letters)))


def wording(text: str) -> str | None:
    r"""The words that `text` consists of, in lower case; None if it holds anything else. "\text{No solution}" gives "no solution"."""
    plain = " ".join(_TEXT.sub(r"\1", text).split())
    return plain.casefold() if _LETTERS.fullmatch(plain) else None


def measures(text: str) -> int:
    r"""How many numbers with a unit `text` consists of: "3 \text{ hours } 30 \text{ minutes}" has two; 0 where it is anything else."""
    plain = _TEXT.sub(r" \1 ", text)
    return len(_MEASURE.findall(plain)) if _MEASURES.fullmatch(plain) else 0


def too_large(text: str) -> bool:
    """Whether `text` is longer, deeper, or of longer numbers than any answer."""
    return len(text) > MAX_CHARS or _DIGITS.search(text) is not None or _depth(text) > MAX_DEPTH


def harmless(text: str) -> bool:
    """Whether algebra on `text` is sure to end at once: short, flat, no powers, roots, factorials, functions, variables or relations."""
    return (len(text) <= HARMLESS_CHARS and _depth(text) <= HARMLESS_DEPTH
            and _HARMLESS.fullmatch(_HARMLESS_COMMAND.sub(" ", _TEXT.sub(" ", text))) is not None)


def harmless_prose(text: str) -> bool:
    """The same for a text out of which the library takes an expression: without LaTeX and powers that can only be arithmetic."""
    return len(text) <= MAX_PROSE_CHARS and _NOTATION.search(text) is None


def _depth(text: str) -> int:
    """How deep the brackets in `text` are nested, of whatever kind."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
