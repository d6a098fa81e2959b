"""The shape of streams, and that a stream says what the whole answer says."""

import asyncio
from collections import defaultdict
from contextlib import aclosing

import pytest

from serve.api.errors import ApiError
from serve.errors import EngineDeadError
from tests.api.conftest import BASE
from tests.api.fake_engine import Script

CUTS = [1, 2, 3, 7, 0]


def by_choice(chunks):
    texts, reasons = defaultdict(str), defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            texts[choice["index"]] += delta.get("content", delta.get("text", "")) or ""
            reasons[choice["index"]].append(choice["finish_reason"])
    return dict(texts), dict(reasons)


def test_first_chunk_has_the_role_and_all_share_the_head(make_api, bytes_of):
    *chunks, done = make_api(Script([*bytes_of("hello"), 1])).stream()
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "h"}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    for key in ("id", "created", "model", "object"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["model"] == "tiny"
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert set(chunks[0]["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}


def test_one_finish_chunk_and_it_is_empty(make_api, bytes_of):
    *chunks, done = make_api(Script(bytes_of("hello"))).stream(max_tokens=3)
    assert done == "[DONE]"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert by_choice(chunks)[0] == {0: "hel"}


def test_a_stream_that_says_nothing_still_has_role_and_finish(make_api):
    *chunks, done = make_api(Script([1])).stream()
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
    assert done == "[DONE]"


def test_usage_comes_last_without_choices(make_api, bytes_of):
    api = make_api(Script([*bytes_of("abc"), 1], cached=2))
    *chunks, usage, done = api.stream(stream_options={"include_usage": True})
    assert done == "[DONE]"
    prompt = len(api.engine.calls[0].token_ids)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["usage"] == api.chat().json()["usage"]


def test_usage_tells_of_drafts(make_api, bytes_of):
    """Three tokens a step of which two were drafted, and two drafts more that failed; "n" ends the answer early."""
    api = make_api(Script([*bytes_of("abcdefn"), 1], cut=3, rejected=2))
    *_, usage, _ = api.stream(stream_options={"include_usage": True})
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 6}
    assert usage["usage"]["completion_tokens_details"] == details
    assert api.chat().json()["usage"] == usage["usage"]
    cut = api.chat(stop="e").json()["usage"]  # the fifth token: its step's drafts beyond it were not used
    assert cut["completion_tokens_details"] == details | {
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 4,
    }


def test_continuous_usage(make_api, bytes_of):
    api = make_api(Script(bytes_of("abc")))
    *chunks, _usage, _done = api.stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked(make_api, bytes_of, options):
    *chunks, _done = make_api(Script(bytes_of("abc"))).stream(stream_options=options)
    assert all("usage" not in chunk for chunk in chunks)
    assert by_choice(chunks)[0] == {0: "abc"}


def test_stream_options_need_stream(make_api, bytes_of):
    api = make_api(Script(bytes_of("abc")))
    answer = api.chat(stream_options={"include_usage": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    assert api.engine.calls == []


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_characters_are_never_split(make_api, bytes_of, cut, kind):
    api = make_api(Script([*bytes_of("né🔥日"), 1], cut=cut))
    *chunks, _ = api.stream(kind)
    texts = [c["choices"][0].get("text", c["choices"][0].get("delta", {}).get("content", "")) for c in chunks]
    assert not any("\ufffd" in text for text in texts)
    whole = getattr(api, kind)().json()["choices"][0]
    assert "".join(texts) == whole.get("text", whole.get("message", {}).get("content")) == "né🔥日"


@pytest.mark.parametrize("cut", CUTS)
def test_an_unfinished_character_is_one_replacement_at_the_end(make_api, bytes_of, cut):
    api = make_api(Script(bytes_of("ab🔥".encode()[:-1]), cut=cut))
    *chunks, _ = api.stream()
    assert by_choice(chunks)[0] == {0: "ab\ufffd"}
    assert chunks[-2]["choices"][0]["delta"]["content"].endswith("\ufffd")
    assert api.chat().json()["choices"][0]["message"]["content"] == "ab\ufffd"


@pytest.mark.parametrize("cut", CUTS)
def test_stop_string(make_api, bytes_of, cut):
    api = make_api(Script(bytes_of("ABC DEFGHIJ K and more"), cut=cut))
    *chunks, usage, _ = api.stream(stop=["DEFGHIJ"], stream_options={"include_usage": True})
    texts, reasons = by_choice(chunks)
    assert texts == {0: "ABC "}
    assert reasons[0][-1] == "stop"
    assert usage["usage"]["completion_tokens"] == len("ABC DEFGHIJ")
    whole = api.chat(stop="DEFGHIJ").json()
    assert whole["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "ABC ", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert whole["usage"] == usage["usage"]
    if cut:  # the engine had more to say
        assert len(api.engine.aborted) == 2
    assert api.engine.running == set()


def test_every_choice_has_its_own_stream(make_api, bytes_of):
    words = {0: "first", 1: "second one"}
    api = make_api(lambda call: Script([*bytes_of(words[int(call.request_id[-1])]), 1]))
    *chunks, usage, _ = api.stream(n=2, temperature=1, seed=5, stream_options={"include_usage": True})
    texts, reasons = by_choice(chunks)
    assert texts == words
    for index in words:
        assert reasons[index] == [None] * (len(reasons[index]) - 1) + ["stop"]
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert not any("role" in delta for delta in deltas[1:])
    assert usage["usage"]["completion_tokens"] == len("first") + 1 + len("second one") + 1
    assert usage["usage"]["prompt_tokens"] == len(api.engine.calls[0].token_ids)
    assert sorted(call.params.seed for call in api.engine.calls) == [5, 6]
    whole = api.chat(n=2).json()
    assert [c["message"]["content"] for c in whole["choices"]] == list(words.values())
    assert [c["index"] for c in whole["choices"]] == [0, 1]


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("fail_after", [0, 3])
def test_a_failure_in_a_stream_is_told(make_api, bytes_of, kind, fail_after):
    api = make_api(Script(bytes_of("hello"), fail_after=fail_after))
    *chunks, error, done = api.stream(kind)
    assert done == "[DONE]"
    assert error == {
        "error": {
            "message": "Internal error. The server's log has the details.",
            "type": "internal_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert by_choice(chunks)[0] == ({0: "he"} if fail_after else {})


def test_a_dead_engine_in_a_stream(make_api, bytes_of):
    api = make_api(Script(bytes_of("hello"), fail_after=2, error=EngineDeadError("worker 1 was lost")))
    *_, error, done = api.stream()
    assert (error["error"]["code"], error["error"]["type"]) == ("engine_dead", "service_unavailable_error")
    assert done == "[DONE]"


def test_what_waits_leaves_in_one_chunk(make_api, bytes_of):
    """A slow consumer gets what piled up at once, and the first piece alone."""
    api = make_api(Script(bytes_of("abcdefgh")))

    async def read():
        texts = []
        async with aclosing(api.serving.chat_stream(BASE)) as chunks:
            async for chunk in chunks:
                texts.append(chunk["choices"][0]["delta"].get("content"))
                if len(texts) == 1:
                    await asyncio.sleep(0.05)
        return texts

    assert asyncio.run(read()) == ["a", "bcdefgh", None]


def test_the_first_token_leaves_before_the_second_is_there(make_api, bytes_of):
    api = make_api(Script(bytes_of("ab"), pause_after=2))

    async def read():
        async with aclosing(api.serving.chat_stream(BASE)) as chunks:
            first = await asyncio.wait_for(anext(chunks), 5)
            api.engine.resume.set()
            return first, [chunk async for chunk in chunks]

    first, rest = asyncio.run(read())
    assert first["choices"][0]["delta"]["content"] == "a"
    assert by_choice(rest)[0] == {0: "b"}


def test_closing_a_stream_aborts_every_sequence(make_api, bytes_of):
    api = make_api(Script(bytes_of("abc"), pause_after=2))

    async def read():
        chunks = api.serving.chat_stream(BASE | {"n": 3})
        await anext(chunks)
        assert len(api.engine.running) == 3
        await chunks.aclose()
        return len(api.engine.running)

    assert asyncio.run(read()) == 0
    assert len(api.engine.aborted) == 3
    assert b'finished_reason="abort",model_name="tiny"} 3.0' in api.serving.render_metrics()


def test_cancelling_a_call_aborts_it(make_api, bytes_of):
    api = make_api(Script(bytes_of("abc"), pause_after=2))

    async def call():
        task = asyncio.create_task(api.serving.chat(BASE))
        while not api.engine.running:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled(), len(api.engine.running)

    assert asyncio.run(call()) == (True, 0)


def test_serving_streams_raise_api_errors(make_api, bytes_of):
    """Over a deployment handle there is no HTTP: the exception itself travels."""
    api = make_api(Script(bytes_of("abc"), fail_after=2, error=EngineDeadError("gone")))

    async def read():
        async for _ in api.serving.chat_stream(BASE):
            pass

    with pytest.raises(ApiError) as raised:
        asyncio.run(read())
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (503, "engine_dead", 5)


@pytest.mark.parametrize("cut", CUTS)
def test_a_stop_string_that_only_begins_is_text(make_api, bytes_of, cut):
    api = make_api(Script([*bytes_of("ABC DEF"), 1], cut=cut))
    *chunks, _ = api.stream(stop=["DEFGHIJ"])
    assert by_choice(chunks)[0] == {0: "ABC DEF"}
    assert api.chat(stop=["DEFGHIJ"]).json()["choices"][0]["message"]["content"] == "ABC DEF"


def test_a_choice_that_is_done_stops_while_others_run(make_api, bytes_of):
    def script(call):
        first = call.request_id.endswith("-0")
        return Script(bytes_of("ab.cd"), pause_after=4 if first else 1)

    api = make_api(script)

    async def read():
        async with aclosing(api.serving.chat_stream(BASE | {"n": 2, "stop": "."})) as chunks:
            async for chunk in chunks:
                if chunk["choices"][0]["finish_reason"]:
                    break
            await asyncio.sleep(0.01)
            return len(api.engine.running), [name[-2:] for name in api.engine.aborted]

    assert asyncio.run(read()) == (1, ["-0"])


def test_cached_tokens_count_once_a_prompt(make_api, bytes_of):
    api = make_api(lambda call: Script(bytes_of("a"), cached=3 if call.request_id.endswith(("-0", "-2")) else 50))
    usage = api.complete(prompt=[[5, 6, 7, 8], [5, 6, 7, 8, 9]], n=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 4)


def test_what_came_before_a_failure_is_delivered(make_api, bytes_of):
    """Also when the consumer was away and finds both at once."""
    api = make_api(Script(bytes_of("abcdef"), fail_after=5))

    texts = []

    async def read():
        async for chunk in api.serving.chat_stream(BASE):
            texts.append(chunk["choices"][0]["delta"]["content"])
            if len(texts) == 1:
                await asyncio.sleep(0.05)

    with pytest.raises(ApiError, match="Internal error"):
        asyncio.run(read())
    assert texts == ["a", "bcd"]
