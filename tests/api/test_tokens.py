"""/tokenize, /detokenize and /tokenizer_info against the shipped tokenizer."""

from typing import Any

import pytest

from serve.tokenizer import Tokenizer
from tests.api.conftest import Api
from tests.api.fake_engine import Script


@pytest.fixture
def api(make_api: Any) -> Api:
    return make_api(Script([1]))


def test_a_prompt(api: Api, tokenizer: Tokenizer) -> None:
    want = tokenizer.encode("In the beginning", add_special_tokens=True)
    answer = api.post("/tokenize", {"model": "tiny", "prompt": "In the beginning", "return_token_strs": True}).json()
    assert answer["tokens"] == want and answer["count"] == len(want)
    assert answer["max_model_len"] == api.engine.max_model_len
    assert answer["token_strs"] == ["I", "n", " the", " beginning"]
    bare = api.post("/tokenize", {"prompt": "In the beginning", "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer.encode("In the beginning", add_special_tokens=False) and "token_strs" not in bare
    assert api.post("/tokenize", {"prompt": "", "add_special_tokens": False}).json()["tokens"] == []


def test_a_prompt_longer_than_the_context(api: Api) -> None:
    assert api.post("/tokenize", {"prompt": "word " * 20_000}).json()["count"] > 10 * api.engine.max_model_len


def test_messages_are_what_the_model_is_given(api: Api) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = api.post("/tokenize", {"messages": messages}).json()
    api.chat(messages=messages)
    assert answer["tokens"] == api.engine.calls[-1].token_ids
    open_end = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert open_end["count"] < answer["count"]


def test_there_and_back(api: Api) -> None:
    ids = api.post("/tokenize", {"prompt": "né🔥日 ok"}).json()["tokens"]
    assert api.post("/detokenize", {"model": "tiny", "tokens": ids}).json() == {"prompt": "né🔥日 ok"}
    assert api.post("/detokenize", {"tokens": [0, *ids]}).json() == {"prompt": "<｜begin▁of▁sentence｜>né🔥日 ok"}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_info(api: Api, tokenizer: Tokenizer) -> None:
    info = api.request("GET", "/tokenizer_info").json()
    assert info["vocab_size"] == tokenizer.vocab_size and info["eos_token"] == "<｜end▁of▁sentence｜>"
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [4096]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", [1], 400, None),
    ],
)
def test_bad_requests(api: Api, path: str, body: Any, status: int, param: str | None) -> None:
    answer = api.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"] and error["type"] == "invalid_request_error"
