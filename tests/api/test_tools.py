"""Tools and reasoning over HTTP: scripts of every format, streamed and whole, in any cuts."""

import json

import pytest

from serve.parsers.detect import OutputFormat
from tests.api.conftest import BASE
from tests.api.fake_engine import Script
from tests.unit.test_parsers import WRITERS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("weather", {"city": "Zürich"}), ("now", {})]
NAMES = [name for name in WRITERS if "-" not in name]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def talk(make_api, bytes_of):
    """An Api whose model says a text, in deltas of `cut` tokens, and is of a tool format."""

    def make(text, name="glm", cut=1, eos=True, **kwargs):
        script = Script([*bytes_of(text), *([1] if eos else [])], cut=cut)
        return make_api(script, output_format=OutputFormat(name, thinker=True), max_model_len=4096, **kwargs)

    return make


def message_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"], answer.json()["choices"][0]["finish_reason"]


def gather(events):
    """The message that a stream's deltas make, and its finish reason; checks their shape on the way."""
    message, calls, reason = {"content": "", "reasoning": ""}, [], None
    for number, event in enumerate(events[:-1]):
        choice = event["choices"][0]
        delta = choice["delta"]
        assert reason is None
        assert ("role" in delta) == (number == 0)
        message["content"] += delta.get("content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        message["reasoning"] += delta.get("reasoning", "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls) and part["type"] == "function"
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
        reason = choice["finish_reason"]
        assert reason is None or delta == {}
    assert events[-1] == "[DONE]"
    return message, calls, reason


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 0])
def test_reasoning_and_calls(talk, name, cut):
    api = talk("<think>r</think>x" + WRITERS[name](CALLS), name, cut)
    message, reason = message_of(api.chat(tools=TOOLS))
    assert message["reasoning"] == message["reasoning_content"] == "r"
    assert message["content"] == "x"
    assert reason == "tool_calls"
    called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert called == CALLS
    assert all(call["type"] == "function" and call["id"] for call in message["tool_calls"])
    streamed, calls, reason = gather(api.stream(tools=TOOLS))
    assert streamed == {"content": "x", "reasoning": "r"}
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]
    ]
    assert reason == "tool_calls"


def test_content_is_null_beside_calls_alone(talk, name):
    message, _ = message_of(talk(WRITERS[name](CALLS), name).chat(tools=TOOLS))
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(talk, name, fields):
    text = "x" + WRITERS[name](CALLS)
    message, reason = message_of(talk(text, name).chat(**fields))
    assert message["content"] == text
    assert "tool_calls" not in message and reason == "stop"


def test_tools_without_a_call(talk, name):
    message, reason = message_of(talk("just text\n", name).chat(tools=TOOLS, tool_choice="auto"))
    assert (message["content"], reason) == ("just text\n", "stop")
    assert "tool_calls" not in message


def test_a_call_that_is_cut_off_ends_by_length(talk, name):
    text = WRITERS[name](CALLS[:1])
    message, reason = message_of(talk(text[:-30], name, eos=False).chat(tools=TOOLS))
    assert reason == "length"
    _, calls, reason = gather(talk(text[:-30], name, eos=False).stream(tools=TOOLS))
    assert reason == "length"
    assert [c["name"] for c in calls] == [c["function"]["name"] for c in message.get("tool_calls", [])]


def test_parallel_calls_can_be_refused(talk, name):
    message, _ = message_of(talk(WRITERS[name](CALLS), name).chat(tools=TOOLS, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_stop_strings_cut_the_answer_alone(talk, name):
    text = "<think>a STOP b</think>x" + WRITERS[name]([("weather", {"city": "STOP"})])
    message, reason = message_of(talk(text, name).chat(tools=TOOLS, stop=["STOP"]))
    assert message["reasoning"] == "a STOP b"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "STOP"}
    assert reason == "tool_calls"
    api = talk("<think>a STOP b</think>x STO STOP y", name)
    message, reason = message_of(api.chat(stop="STOP"))
    assert (message["content"], message["reasoning"], reason) == ("x STO ", "a STOP b", "stop")
    assert gather(api.stream(stop="STOP"))[0] == {"content": "x STO ", "reasoning": "a STOP b"}


def test_what_might_begin_a_stop_string_comes_before_the_calls(talk):
    events = talk("x ST<tool_call>now</tool_call>").stream(tools=TOOLS, stop=["STOP"])
    kinds = [next(iter(set(e["choices"][0]["delta"]) - {"role"}), None) for e in events[:-1]]
    assert kinds[-3:] == ["tool_calls", "tool_calls", None] and set(kinds[:-3]) == {"content"}
    assert gather(events)[0]["content"] == "x ST"


def test_reasoning_can_be_left_out(talk):
    api = talk("<think>r</think>x")
    message, _ = message_of(api.chat(include_reasoning=False))
    assert message == {"role": "assistant", "content": "x", "refusal": None}
    assert gather(api.stream(include_reasoning=False))[0]["reasoning"] == ""


def test_reasoning_tokens_are_counted(talk):
    usage = talk("<think>rr</think>x").chat().json()["usage"]
    assert usage["completion_tokens"] == len("<think>rr</think>x") + 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(">rr</think>")
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    events = talk("x").stream(stream_options={"include_usage": True})
    assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_prompt_that_opens_the_reasoning(talk, tokenizer):
    from serve.chat_template import ChatTemplate

    template = ChatTemplate("{{ messages[0]['content'] }}<think>\n", tokenizer.special_tokens)
    message, _ = message_of(talk("r</think>\n\nx", template=template).chat())
    assert (message["reasoning"], message["content"]) == ("r", "x")


def test_tags_that_are_special_tokens_are_seen(make_api, tokenizer, bytes_of):
    think, end = tokenizer.encode("<think></think>", add_special_tokens=False)
    assert tokenizer.is_special(think) and tokenizer.is_special(end)
    api = make_api(Script([think, *bytes_of("r"), end, *bytes_of("x"), 1]))
    message, _ = message_of(api.chat())
    assert (message["reasoning"], message["content"]) == ("r", "x")
    assert api.chat().json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_both_names_of_reasoning_are_taken_back(talk, tokenizer):
    from serve.chat_template import ChatTemplate

    source = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    api = talk("x", template=ChatTemplate(source, tokenizer.special_tokens))
    for key in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "a", key: "why"}
        assert message_of(api.chat(messages=[*BASE["messages"], turn, *BASE["messages"]]))[0]["content"] == "x"
        assert "[assistant:why:a]" in tokenizer.decode(api.engine.calls[-1].token_ids)


def test_tools_are_shown_to_the_model(talk, tokenizer):
    from serve.chat_template import ChatTemplate

    source = "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}"
    api = talk("x", template=ChatTemplate(source, tokenizer.special_tokens))
    api.chat(tools=TOOLS[1:], max_tokens=1)
    shown = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    expected = "hi" + json.dumps([{"type": "function", "function": shown}])
    assert tokenizer.decode(api.engine.calls[-1].token_ids) == expected
    api.chat(tools=TOOLS[1:], tool_choice="none", max_tokens=1)
    assert tokenizer.decode(api.engine.calls[-1].token_ids) == "hi"


NOW = TOOLS[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a">'}}]}, "tools[0].function.name"),
        ({"tools": [NOW, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": "now"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [NOW], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ],
)
def test_bad_tools_are_refused(talk, fields, param):
    api = talk("x")
    answer = api.chat(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not api.engine.calls


def test_a_model_without_a_format_for_calls_refuses_tools(make_api, bytes_of):
    answer = make_api(Script([*bytes_of("x"), 1])).chat(tools=TOOLS)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert make_api(Script([*bytes_of("x"), 1])).chat(tools=TOOLS, tool_choice="none").status_code == 200
