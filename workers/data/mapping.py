"""From a row to a prompt: adapter, then the declared columns, then checks of what came out.

    row --data.adapter--> fields --data.columns--> prompt, answer, id, verifier, response --> Prompt

Without adapter and columns a row is {"prompt": text or chat, "answer": text, number or object, "response", "id", "verifier" (optional)} and nothing
else, so that a misspelt column is found.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from workers.config import ConfigError, DataConfig
from workers.config.data import FIELDS
from workers.config.judge import JUDGE
from workers.config.reward import REWARD_MODEL
from workers.data.adapters import load_adapter
from workers.data.prompt import Message, Prompt
from workers.data.rows import Row
from workers.reward.code.tests import check_reference
from workers.reward.verifiers.registry import BUILT_IN, check_name, modules
from workers.run.user_code import told

MAX_ID = 200
ANSWERS = ("reference", "solution", "target", "label", "ground_truth", "gold")
"""What others call the answer."""
_EXAMPLE = '{"prompt": "1 + 1 =", "answer": 2}'
_IN_BRACES = re.compile(r"\{\{([^\W\d][\w.]*)\}\}|\{([^\W\d][\w.]*)\}")


class RowMapping:
    """What `data.adapter` and `data.columns` make of a row. `responses`: each must have one. Raises `ConfigError` for an unknown adapter."""

    def __init__(self, config: DataConfig, verifier: str, responses: bool) -> None:
        self._adapter = load_adapter(config.adapter) if config.adapter else None
        self._name, self._columns, self._response_field, self._responses = config.adapter, config.columns, config.response_field, responses
        self._verifier, self._chat = verifier, config.chat_template
        self._strict = not config.adapter and not config.columns

    def prompt(self, row: Row, name: str) -> Prompt:
        """The prompt of `row`; its id is `name` if the row has none of its own. Raises `ConfigError` with the row's place."""
        fields = self._fields(row)
        text, messages = _prompt(fields.get("prompt"), row.place)
        if messages and not self._chat:
            raise ConfigError(f"{row.place}: the prompt is a chat, which the model's chat template must render. Set data.chat_template=true")
        response = _plain(fields.get("response", ""), "response", row.place)
        if self._responses and response == "":
            if self._adapter is not None:
                raise ConfigError(f"{row.place}: data.adapter={self._name!r} makes no response of this row, and a supervised run needs one for every "
                                  "prompt. Name its column with data.columns.response=COLUMN")
            raise ConfigError(f"{row.place}: no text in the column {self._columns.get('response', self._response_field)!r} (data.response_field): a "
                              "supervised run needs a response for every prompt. "
                              'A line must be like {"prompt": "1 + 1 =", "' f'{self._response_field}": " 2"' "}")
        verifier = fields.get("verifier", self._verifier)
        if not isinstance(verifier, str):
            raise ConfigError(f"{row.place}: the verifier is {verifier!r}; it must be a name. Correct it or leave it out")
        check_name(verifier, f"{row.place}: verifier")
        if fields.get("answer") is None and "response" not in fields:
            raise ConfigError(f"{row.place}: no answer for the verifier in a column 'answer'. {self._remedy()}")
        reference = _reference(fields["response"] if fields.get("answer") is None else fields["answer"], verifier, row.place)
        return Prompt(_id(fields.get("id", name), row.place), text, verifier, reference, response, messages, row.place)

    def _fields(self, row: Row) -> dict[str, Any]:
        """The fields that the row has, before checks; None is as good as absent."""
        made = self._adapted(row)
        columns = {**row.columns, **made}
        if self._adapter is not None:
            fields = made
        else:
            if self._strict:
                self._check_known(row)
            named = {name: name for name in (FIELDS if self._strict else ("prompt", "answer"))} | {"response": self._response_field}
            fields = {name: columns[column] for name, column in named.items() if column in columns}
            if not (self._strict or self._responses or isinstance(fields.get("response"), str)) and "answer" in {*fields, *self._columns}:
                fields.pop("response", None)  # nobody has asked for a column of that name
        declared = {name: self._value(name, source, columns, row.place) for name, source in self._columns.items()}
        return {name: value for name, value in {**fields, **declared}.items() if value is not None}

    def _adapted(self, row: Row) -> dict[str, Any]:
        if self._adapter is None:
            return {}
        try:
            return dict(self._adapter(row.columns))
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(f"{row.place}: {error if isinstance(error, ValueError) else told(error)}. "
                              "Correct the row, or choose another data.adapter or data.columns") from error

    def _check_known(self, row: Row) -> None:
        known = ("prompt", "answer", "id", "verifier", self._response_field)
        for name in row.columns:
            if name not in known:
                near = ["answer"] if name in ANSWERS else difflib.get_close_matches(name, known, n=1)
                raise ConfigError(f"{row.place}: unknown column {name!r}{f'; did you mean {near[0]!r}?' if near else '.'} {self._remedy()}")

    def _remedy(self) -> str:
        return (f"A row must be like {_EXAMPLE}, of which `answer` is what verifiers and agents get as `reference`; or data.columns must say what "
                "its columns are, data.columns.answer=NAME for one (docs/data.md)")

    def _value(self, field: str, source: str, columns: Mapping[str, Any], place: str) -> Any:
        """A column, or text with columns in {braces}; {{name}} stands for {name} itself, other braces for themselves."""
        if not _IN_BRACES.search(source):
            return _column(columns, source, field, place)

        def put(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            return _plain(_column(columns, match[2], field, place), match[2], place)

        return _IN_BRACES.sub(put, source)


def _column(columns: Mapping[str, Any], name: str, field: str, place: str) -> Any:
    """Column `name`; "a.b" is b in the object of column a. An empty optional field is None."""
    value: Any = columns
    for part in [name] if name in columns else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            legal = list(value) if isinstance(value, Mapping) else []
            near = difflib.get_close_matches(part, legal, n=1)
            raise ConfigError(f"{place}: no column {name!r} (data.columns.{field}){f'; did you mean {near[0]!r}?' if near else '.'} "
                              f"Its columns are {', '.join(map(repr, columns))}")
        value = value[part]
    return value


def _prompt(value: Any, place: str) -> tuple[str, tuple[Message, ...]]:
    """Text, and the messages where the prompt is a chat."""
    if isinstance(value, list) and value:
        messages = []
        for message in value:
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                raise ConfigError(f"{place}: the prompt is a list with {message!r:.100}; each entry of a chat must be "
                                  '{"role": "user", "content": text}. Correct it')
            messages.append((role, content))
        if messages[-1][0] == "assistant":
            raise ConfigError(f"{place}: the prompt's last message is the assistant's; there is nothing to answer. Delete the message")
        if len(messages) > 1 or messages[0][0] != "user":
            return "\n\n".join(f"{role}: {content}" for role, content in messages), tuple(messages)
        value = messages[0][1]  # rendered as the text alone is: so it must be known for the same prompt
        return _not_empty(value, place), tuple(messages)
    if not isinstance(value, str):
        raise ConfigError(f"{place}: the column 'prompt' holds {type(value).__name__}; it must be text, or a chat as a list of messages. "
                          f"A row must be like {_EXAMPLE}" if value is not None else
                          f"{place}: no prompt in a column 'prompt'. A row must be like {_EXAMPLE}, or data.columns must say which it is")
    return _not_empty(value, place), ()


def _not_empty(text: str, place: str) -> str:
    if not text:
        raise ConfigError(f"{place}: the prompt is empty; there is nothing to continue. Give it text or delete the row")
    return text


def _plain(value: Any, name: str, place: str) -> str:
    """Text as it is, or a number as text."""
    usable = isinstance(value, (str, int, float, Decimal)) and not isinstance(value, bool)
    if not usable or (isinstance(value, float) and not math.isfinite(value)):
        found = value if isinstance(value, float) else type(value).__name__
        raise ConfigError(f"{place}: {name!r} holds {found}; it must be text or a number. Correct it")
    return str(value)


def _reference(value: Any, verifier: str, place: str) -> str:
    """What the verifier gets: text, or JSON of an object. That of the code verifiers is checked here, once."""
    try:
        reference = json.dumps(value, allow_nan=False) if isinstance(value, dict) else _plain(value, "answer", place)
        if verifier in BUILT_IN and verifier not in (JUDGE, REWARD_MODEL) and not reference.strip():
            raise ValueError("it is empty")
        if "workers.reward.code.verifier" in modules(verifier):
            check_reference(reference)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place}: the answer cannot be used by verifier {verifier!r}: {error}. Correct the row") from error
    return reference


def _id(value: Any, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{place}: the id is {value!r:.100}; it must be text or an integer. Correct it or leave it out")
    if not 1 <= len(str(value)) <= MAX_ID:
        raise ConfigError(f"{place}: the id has {len(str(value))} characters; it must have 1 to {MAX_ID}. Shorten it or leave it out")
    return str(value)
