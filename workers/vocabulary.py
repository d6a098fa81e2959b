"""What the tokens of a checkpoint's tokenizer.json stand for, without the rest of a tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from configs.base import ConfigError


def read_tokenizer(folder: Path) -> FastTokenizer:
    """Raises ConfigError when the folder has no usable tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json: Shoal reads that file alone; convert other formats with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read: {error}") from None


def is_byte_level(tokenizer: FastTokenizer) -> bool:
    """Whether every token is a run of bytes (GPT-2's BPE)."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def special_tokens(tokenizer: FastTokenizer) -> dict[int, str]:
    """Texts of the special tokens by id."""
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def bytes_of_token(tokenizer: FastTokenizer, token_id: int) -> bytes:
    """The bytes a token of a byte-level tokenizer stands for (empty for an id the vocabulary lacks)."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return bytes(token.encode())  # an added token, e.g. with U+FF5C, stands for itself


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet of byte-level BPE: printable characters stand for themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
