"""Log-probabilities and echo."""

import pytest

from tests.api.fake_engine import Script, fake_logprobs

CUTS = [1, 2, 3, 7, 0]


@pytest.mark.parametrize("prompt", ["hi there", [84, 134, 109, 300], [[84, 134, 109, 300], [84, 134, 109, 300]]])
def test_echo_scores_the_prompt(make_api, bytes_of, prompt):
    api = make_api(Script(bytes_of("ok")))
    answer = api.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    for choice, call in zip(answer["choices"], api.engine.calls, strict=True):
        assert call.params.prompt_logprobs == 1
        scores = choice["logprobs"]
        length = len(call.token_ids) + 1
        assert {key: len(value) for key, value in scores.items()} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), length
        )
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        expected = [fake_logprobs(t, 1).logprob for t in [*call.token_ids[1:], *bytes_of("o")]]
        assert scores["token_logprobs"][1:] == expected
        for token, value, top in list(
            zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == value == max(top.values())
        assert scores["text_offset"] == sorted(scores["text_offset"])
    if isinstance(prompt, str):
        assert answer["choices"][0]["text"] == "hi thereo"
    else:
        assert answer["choices"][0]["text"].endswith("o")
    assert answer["usage"]["completion_tokens"] == len(answer["choices"])


@pytest.mark.parametrize("cut", CUTS)
def test_echo_and_logprobs_are_the_same_in_a_stream(make_api, bytes_of, cut):
    api = make_api(Script([*bytes_of("né🔥日.x"), 1], cut=cut))
    fields = {"prompt": "日 says", "echo": True, "logprobs": 2, "stop": ["."]}
    whole = api.complete(**fields).json()["choices"][0]
    *chunks, _ = api.stream("complete", **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"] == "日 saysné🔥日"
    for key, values in whole["logprobs"].items():
        streamed = [v for c in chunks if c["choices"][0]["logprobs"] for v in c["choices"][0]["logprobs"][key]]
        assert streamed == values
    assert chunks[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


def test_offsets_point_at_the_tokens_text(make_api, bytes_of):
    api = make_api(Script(bytes_of("né日x")))
    choice = api.complete(logprobs=0, echo=True).json()["choices"][0]
    text, scores = choice["text"], choice["logprobs"]
    assert text == "hiné日x"
    pairs = zip(scores["tokens"], scores["text_offset"], strict=True)
    for token, offset in pairs:
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert scores["text_offset"][-7:] == [2, 3, 3, 4, 4, 4, 5]
    assert scores["tokens"][-6:-4] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_echo_without_logprobs(make_api, bytes_of):
    api = make_api(Script(bytes_of("ok")))
    choice = api.complete(prompt="hi", echo=True).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("hiok", None)
    assert api.engine.calls[0].params.prompt_logprobs is None


def test_scoring_alone(make_api, bytes_of):
    """max_tokens 0 is allowed with echo: the prompt and its scores, no answer."""
    api = make_api(Script(bytes_of("ok")))
    answer = api.complete(prompt="hi there", echo=True, logprobs=1, max_tokens=0).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi there", "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_tokens_of_the_same_text_do_not_overwrite_each_other(make_api, bytes_of, tokenizer, monkeypatch):
    api = make_api(Script(bytes_of("a")))
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: b"same")
    top = api.complete(logprobs=3).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    chosen = bytes_of("a")[0]
    assert list(top) == ["same", f"token_id:{chosen + 1}", f"token_id:{chosen + 2}"]
    assert list(top.values()) == fake_logprobs(chosen, 3).top_logprobs


def test_the_chosen_token_is_always_among_the_top(make_api, bytes_of):
    api = make_api(Script(bytes_of("a")))
    top = api.complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top == {"a": fake_logprobs(bytes_of("a")[0], 0).logprob}


@pytest.mark.parametrize("cut", CUTS)
def test_chat_logprobs(make_api, bytes_of, cut):
    api = make_api(Script([*bytes_of("aé"), 1], cut=cut))
    content = api.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<｜end▁of▁sentence｜>"]
    assert [entry["bytes"] for entry in content[:3]] == [[97], [0xC3], [0xA9]]
    ids = [*bytes_of("aé"), 1]
    for entry, token_id in zip(content, ids, strict=True):
        expected = fake_logprobs(token_id, 2)
        assert entry["logprob"] == expected.logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == expected.top_logprobs
        assert set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    *chunks, _ = api.stream(logprobs=True, top_logprobs=2)
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    plain = api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], [], [], []]
