"""/v1/responses over HTTP: scripts of every kind, whole and streamed, read by OpenAI's own types and accumulator."""

import asyncio
import json

import httpx
import pytest
from openai import AsyncOpenAI, omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from serve.api.responses.input import chat_messages
from serve.parsers.detect import OutputFormat
from tests.api.fake_engine import Script
from tests.unit.test_parsers import WRITERS

ASK = {"model": "tiny", "input": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA},
    {"type": "function", "name": "now", "parameters": {}},
]
CHAT_TOOLS = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
CALLS = [("weather", {"city": "Zürich"}), ("now", {})]
SAYS = "<think>r</think>x" + WRITERS["glm"](CALLS)
LOGPROBS = "message.output_text.logprobs"
EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def talk(make_api, bytes_of):
    """An Api whose model says a text, in deltas of `cut` tokens, and calls tools as GLM does."""

    def make(text, cut=1, eos=True, **script):
        ids = [*bytes_of(text), *([1] if eos else [])]
        formats = OutputFormat("glm", thinker=True)
        return make_api(Script(ids, cut=cut, **script), output_format=formats, max_model_len=4096)

    return make


def respond(api, **fields):
    answer = api.post("/v1/responses", ASK | fields)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


def refuse(api, **fields):
    answer = api.post("/v1/responses", ASK | fields)
    assert not api.engine.calls
    return answer.status_code, answer.json()["error"]


def stream(api, **fields):
    """The events of a stream, each of OpenAI's type and under its name, numbered in order."""
    answer = api.post("/v1/responses", ASK | {"stream": True} | fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        events.append(event)
    return events


def settled(response):
    """Without what differs from call to call."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    drop = ("id", "created_at", "completed_at", "output")
    return {key: value for key, value in response.items() if key not in drop} | {"items": items}


@pytest.mark.parametrize("cut", [1, 2, 5, 0])
def test_reasoning_message_and_calls(talk, cut):
    api = talk(SAYS, cut)
    answer = respond(api, tools=TOOLS)
    thought, message, *calls = answer["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "r"}]
    assert message["type"] == "message" and message["role"] == "assistant"
    assert message["content"] == [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert all(call["type"] == "function_call" and call["call_id"] for call in calls)
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert len({item["id"] for item in answer["output"]}) == 4
    assert (answer["status"], answer["store"]) == ("completed", False)
    chat = api.chat(tools=CHAT_TOOLS).json()["usage"]
    assert answer["usage"]["input_tokens"] == chat["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["completion_tokens"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("cut", [1, 2, 5, 0])
@pytest.mark.parametrize("text", [SAYS, "plain", "", "<think>only", WRITERS["glm"](CALLS)])
def test_a_stream_tells_the_whole_answer(talk, text, cut):
    api = talk(text, cut)
    fields = {"tools": TOOLS, "include": [LOGPROBS], "top_logprobs": 2, "metadata": {"a": "b"}}
    whole = respond(api, **fields)
    events = stream(api, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert settled(events[-1]["response"]) == settled(whole)

    state = ResponseStreamState(input_tools=[], text_format=omit)
    items, texts, scores = {}, {}, []
    for event in events:
        for told in state.handle_event(EVENTS.validate_python(event)):
            snapshot = getattr(told, "snapshot", None)
        index = event.get("output_index")
        if event["type"] == "response.output_item.done":
            items[index] = event["item"]
        elif event["type"].endswith(".delta"):
            texts[index] = texts.get(index, "") + event["delta"]
            scores += event.get("logprobs", [])
            if event["type"] != "response.reasoning_text.delta":
                assert snapshot == texts[index]
    assert list(items.values()) == events[-1]["response"]["output"]
    for index, item in items.items():
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert said == texts.get(index, "")
    messages = [item for item in items.values() if item["type"] == "message"]
    held = [score for item in messages for score in item["content"][0]["logprobs"]]
    assert scores == held[: len(scores)]


def test_logprobs_are_the_messages_own(talk):
    answer = respond(talk("<think>r</think>xyz"), include=[LOGPROBS], top_logprobs=1)
    _, message = answer["output"]
    scores = message["content"][0]["logprobs"]
    # The opening tag is nobody's until it is whole (a model says it in one token).
    assert "".join(score["token"] for score in scores).removeprefix("<think") == "xyz<｜end▁of▁sentence｜>"
    assert all(len(score["top_logprobs"]) == 1 for score in scores)


def test_an_answer_cut_short_is_incomplete(talk):
    api = talk("abcdef")
    answer = respond(api, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (message,) = answer["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "abc")
    assert answer["completed_at"] is None and answer["max_output_tokens"] == 3
    assert stream(api, max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_an_error_within_a_stream_is_told_and_ends_it(talk):
    *_, error, last = stream(talk("abc", fail_after=2))
    assert error["type"] == "error" and error["message"] and "secret" not in error["message"]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed" and last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_conversation_comes_back_as_chat_messages():
    answer = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "now", "arguments": "{}"},
    ]
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "night"}]},
    ]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *answer, *results, answer[1]]
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert chat_messages(given, "be kind") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "r",
            "content": "x",
            "tool_calls": [{"id": "c1", **call}, {"id": "c2", **call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "night"},
        {"role": "assistant", "content": "x"},
    ]


def test_prompt_and_parameters_are_those_of_chat(talk):
    api = talk(SAYS)
    respond(api, instructions="be kind", tools=TOOLS, temperature=0.5, top_p=0.9, seed=3, max_output_tokens=9, stop="q")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    api.chat(messages=messages, tools=CHAT_TOOLS, temperature=0.5, top_p=0.9, seed=3, max_completion_tokens=9, stop="q")
    one, other = api.engine.calls
    assert (one.token_ids, one.params) == (other.token_ids, other.params)
    assert one.request_id.startswith("resp_")


def test_format_and_tool_choice_demand_a_grammar(talk):
    api = talk("{}")
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    answer = respond(api, text={"format": form})
    assert answer["text"]["format"]["name"] == "place"
    respond(api, tools=TOOLS, tool_choice={"type": "function", "name": "now"})
    assert all(call.params.grammar for call in api.engine.calls)
    respond(api, tools=TOOLS, tool_choice="none")
    assert not api.engine.calls[-1].params.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name_here(talk, fields, param):
    status, error = refuse(talk("x"), **fields)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    for chats_word in {"messages", "max_tokens", "max_completion_tokens", "response_format"} - set(fields):
        assert chats_word not in error["message"]


def test_a_missing_input_and_an_unknown_model(talk):
    answer = talk("x").post("/v1/responses", {"model": "tiny"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    status, error = refuse(talk("x"), model="messages")
    assert (status, error["code"]) == (404, "model_not_found") and "'messages'" in error["message"]


def test_absent_and_null_are_the_same(talk):
    api = talk("x")
    null = dict.fromkeys(["instructions", "tools", "text", "reasoning", "include", "previous_response_id", "metadata"])
    assert settled(respond(api, **null)) == settled(respond(api))


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_nothing_is_stored(talk, method):
    path = "/v1/responses/resp_1" + ("/cancel" if method == "POST" else "")
    answer = talk("x").request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_stored")


class Place(BaseModel):
    city: str


def test_openais_client(talk):
    api = talk('<think>r</think>{"city": "Rome"}', cut=2)

    async def use() -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app))
        async with AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0) as client:
            whole = await client.responses.create(model="tiny", input="hi")
            assert whole.output_text == '{"city": "Rome"}'
            parsed = await client.responses.parse(model="tiny", input="hi", text_format=Place)
            assert parsed.output_parsed == Place(city="Rome")
            async with client.responses.stream(model="tiny", input="hi", text_format=Place) as events:
                kinds = {event.type async for event in events}
                assert (await events.get_final_response()).output_parsed == Place(city="Rome")
            assert "response.output_text.delta" in kinds and "response.reasoning_text.delta" in kinds

    asyncio.run(use())
