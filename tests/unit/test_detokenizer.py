"""Pieces join to the whole decode, and no piece shows half a character."""

import random

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from serve.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from serve.tokenizer import Tokenizer

TEXTS = ["né🔥日", "plain", "👩‍👩‍👧 family", "日本語のテキスト", " \n\t ", "a\ufffdb", "👋🏽", "Ωmega ½", ""]


@pytest.fixture(scope="module")
def byte_level(tiny_model):
    return Tokenizer(tiny_model)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tokenizer in SentencePiece's manner: word marks and byte fallback."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁he", "llo", "▁world", "!", "a", "<end>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    fast = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    fast.add_special_tokens(["<end>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    folder = tmp_path_factory.mktemp("sentencepiece")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder), vocab


def pieces(tokenizer, ids, skip=True):
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


def byte_ids(tokenizer, data):
    single = {tokenizer.token_bytes(i): i for i in range(7, tokenizer.vocab_size)}
    return [single[bytes([b])] for b in data]


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_split(byte_level, text):
    for end in range(len(text.encode()) + 1):
        ids = byte_ids(byte_level, text.encode()[:end])
        parts = pieces(byte_level, ids)
        assert "".join(parts) == byte_level.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts[:-1])
            assert parts[-1] in ("", "\ufffd")
    assert "".join(parts) == text


def test_characters_appear_with_their_last_byte(byte_level):
    assert pieces(byte_level, byte_ids(byte_level, "é🔥x".encode())) == ["", "é", "", "", "", "🔥", "x", ""]


def test_a_broken_character_is_shown_as_soon_as_it_is_known(byte_level):
    ids = byte_ids(byte_level, "🔥".encode()[:2] + b"no")
    assert pieces(byte_level, ids) == ["", "", "\ufffdn", "o", ""]


def test_random_tokens(byte_level):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    raw = byte_ids(byte_level, bytes(range(256)))
    for _ in range(300):
        ids = [rng.choice(raw) if rng.random() < 0.5 else rng.randrange(4096) for _ in range(rng.randrange(40))]
        for skip in (True, False):
            assert "".join(pieces(byte_level, ids, skip)) == byte_level.decode(ids, skip_special_tokens=skip)


def test_special_tokens(byte_level):
    ids = [0, *byte_ids(byte_level, b"ab"), 1]
    assert pieces(byte_level, ids) == ["", "a", "b", "", ""]
    assert pieces(byte_level, ids, skip=False)[0] == "<｜begin▁of▁sentence｜>"


def test_the_decoder_decides_the_kind(byte_level, sentencepiece):
    assert isinstance(make_detokenizer(byte_level, skip_special_tokens=True), ByteDetokenizer)
    assert isinstance(make_detokenizer(sentencepiece[0], skip_special_tokens=True), WindowDetokenizer)


def test_sentencepiece(sentencepiece):
    tokenizer, vocab = sentencepiece
    fire = [vocab[f"<0x{b:02X}>"] for b in "🔥".encode()]
    ids = [vocab["▁he"], vocab["llo"], vocab["▁world"], *fire, vocab["<end>"], vocab["!"]]
    assert pieces(tokenizer, ids) == ["he", "llo", " world", "", "", "", "🔥", "", "!", ""]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "hello world🔥!"
    assert "".join(pieces(tokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)
    cut = [vocab["a"], *fire[:2]]
    assert pieces(tokenizer, cut)[:3] == ["a", "", ""]
    assert "".join(pieces(tokenizer, cut)) == tokenizer.decode(cut)
