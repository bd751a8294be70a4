"""Text in and out of the engine: the model folder's tokenizer.json, decoding, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workers.data.limits import CHARACTERS_A_TOKEN, CUT, LONG, stop_window
from workers.model.tokenizer import open_tokenizer


class Text:
    """A model folder's tokenizer. `vocab_size` is the model's, which may be larger than the tokenizer's."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = open_tokenizer(folder)

    def encode(self, text: str, limit: int) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds; of one with far more than `limit`, those of its beginning. Other
        threads go on meanwhile."""
        beginning = text[:max(LONG, CHARACTERS_A_TOKEN * (limit + 1))]
        if len(beginning) < len(text):
            [encoded] = self._tokenizer.encode_batch([beginning])
            if len(encoded.ids) > limit + CUT:
                return encoded.ids
        [encoded] = self._tokenizer.encode_batch([text])
        return encoded.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids that the tokenizer does not know give nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def find_stop(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The first of `stops` that the text of `ids` contains near its end.

        To be called after every token: it looks only as far back as a stop string that the last token completed can reach. A stop string may be a
        special token.
        """
        tail = self.decode(ids[-stop_window(stops):], skip_special_tokens=False)
        return next((stop for stop in stops if stop in tail), None)
