"""The tokenizer agrees with transformers on the shipped model, and finds special ids in every spelling."""

import json
import shutil

import pytest

from configs.base import ConfigError
from serve.tokenizer import Tokenizer, TokenizerError, read_optional_json

TEXTS = [
    "",
    "hello world",
    "né🔥日 12345",
    "  two  spaces\n\nand\tlines ",
    "<｜User｜>hi<｜Assistant｜>",
    "\u2028\ufffd",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model)


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy without weights, to be edited."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copyfile(tiny_model / name, tmp_path / name)
    return tmp_path


def edit(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("text", TEXTS)
def test_same_as_transformers(tiny_model, tokenizer, text):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tiny_model)
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_ids(tokenizer):
    assert tokenizer.bos_token_id == 0
    assert tokenizer.special_tokens["eos_token"] == "<｜end▁of▁sentence｜>"
    assert tokenizer.vocab_size == 4096
    assert tokenizer.is_special(0) and not tokenizer.is_special(84)


def test_token_bytes(tokenizer):
    ids = tokenizer.encode("né🔥日 hello", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids][:3] == [b"n", b"\xc3", b"\xa9"]
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == "né🔥日 hello"
    assert tokenizer.token_bytes(3) == "<｜User｜>".encode()
    assert tokenizer.token_bytes(99999) == b""
    covered = b"".join(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    assert set(covered) == set(range(256))


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode("a\ud800b", add_special_tokens=True)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_bos_by_flag(folder, name):
    edit(folder / "tokenizer_config.json", tokenizer_class=name, add_bos_token=True)
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("hi", add_special_tokens=True) == [0, *tokenizer.encode("hi", add_special_tokens=False)]
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert Tokenizer(folder).encode("hi", add_special_tokens=True)[0] != 0


def test_bos_by_post_processor_comes_once(folder):
    bos = "<｜begin▁of▁sentence｜>"
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    edit(folder / "tokenizer.json", post_processor=template)
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        edit(folder / "tokenizer_config.json", tokenizer_class=name, add_bos_token=True)
        tokenizer = Tokenizer(folder)
        assert tokenizer.encode("hi", add_special_tokens=True) == [0, *tokenizer.encode("hi", add_special_tokens=False)]
        theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode("hi", add_special_tokens=True) == theirs.encode("hi")


def test_a_tokenizer_without_bos(folder):
    edit(folder / "tokenizer_config.json", bos_token=None)
    assert Tokenizer(folder).bos_token_id is None


def test_stored_truncation_and_padding_are_off(folder):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit(folder / "tokenizer.json", truncation=truncation)
    assert len(Tokenizer(folder).encode("one two three four", add_special_tokens=True)) > 2


def test_unusable_folders(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not readable JSON"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer(folder)
    (folder / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_optional_json(folder / "list.json")
