"""Token ids to text, one at a time: the pieces join to exactly what decoding all ids at once gives.

A character whose bytes are not all there yet is held back; if the text ends inside one, `flush` gives one U+FFFD.
"""

import codecs
from typing import Protocol

from serve.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def add(self, token_id: int) -> str:
        """The text that has become certain with this token, maybe empty."""

    def flush(self) -> str:
        """What was held back. No token may follow."""


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, keep: frozenset[int] = frozenset()
) -> Detokenizer:
    """`keep`: special tokens that are shown in any case."""
    skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
    return ByteDetokenizer(tokenizer, skipped) if tokenizer.byte_level else WindowDetokenizer(tokenizer, skipped)


class ByteDetokenizer:
    """For byte-level BPE, where every token is a run of bytes: O(bytes of the token), holds at most 3 bytes."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For other decoders (SentencePiece), whose text of a token depends on its neighbours: decodes a short window.

    The window starts at tokens already shown, so that rules for the start of a text do not apply to its new part.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._shown: list[int] = []  # the ids of the last piece shown
        self._held: list[int] = []  # ids since then

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._shown, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        after = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=False)
        return after[len(before) :]
