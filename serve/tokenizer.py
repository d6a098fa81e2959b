"""A checkpoint's tokenizer, read from tokenizer.json by the `tokenizers` library (transformers is slow to import)."""

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from configs.hf import read_json
from workers.vocabulary import bytes_of_token, is_byte_level, read_tokenizer, special_tokens

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A text that cannot be encoded."""


class Tokenizer:
    """Text to ids and back. Thread-safe; large texts release the GIL while they are encoded.

    `encode(..., add_special_tokens=True)` adds what tokenizer.json's post-processor adds, as transformers 5 does. Where
    that is nothing, `"add_bos_token": true` still adds bos if `tokenizer_class` is one of Llama's, for which the flag
    has always meant that (DeepSeek-V3 ships such a pair).

    Raises ConfigError when the folder has no usable tokenizer.json.
    """

    def __init__(self, folder: Path) -> None:
        self._fast: FastTokenizer = read_tokenizer(folder)
        self._fast.no_truncation()
        self._fast.no_padding()
        self.config = config = read_optional_json(folder / "tokenizer_config.json")
        self.special_tokens = _named_tokens(read_optional_json(folder / "special_tokens_map.json")) | _named_tokens(
            config
        )
        self.bos_token_id = self._id_of("bos_token")
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self.byte_level = is_byte_level(self._fast)
        self._specials = special_tokens(self._fast)
        self.special_ids = frozenset(self._specials)
        self._bytes: dict[int, bytes] = {}
        self._bos_prefix = self._bos_by_flag(config)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises TokenizerError for text that is not valid Unicode (a lone surrogate)."""
        try:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise TokenizerError("the text is not valid Unicode (it holds a lone surrogate)") from None
        return self._bos_prefix + ids if add_special_tokens else ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def special_ids_of(self, texts: frozenset[str]) -> frozenset[int]:
        """Those of these texts that are special tokens."""
        return frozenset(i for i, text in self._specials.items() if text in texts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (empty for an id the vocabulary lacks)."""
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    @cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest entry: no token covers more text."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)))

    def _find_bytes(self, token_id: int) -> bytes:
        if self.byte_level:
            return bytes_of_token(self._fast, token_id)
        text: str = self._fast.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._fast.token_to_id(token)

    def _bos_by_flag(self, config: dict[str, Any]) -> list[int]:
        llama = config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
        if self.bos_token_id is None or not llama or config.get("add_bos_token") is not True:
            return []
        return [] if self._fast.encode("", add_special_tokens=True).ids else [self.bos_token_id]


def read_optional_json(path: Path) -> dict[str, Any]:
    """A file that a checkpoint may lack: {} then. Raises ConfigError when it is no JSON object."""
    return read_json(path) if path.is_file() else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, which are strings or {"content": string}."""
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
