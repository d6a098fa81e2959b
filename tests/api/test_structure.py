"""`response_format` and its kin over HTTP: what reaches the engine, and what is refused before it does."""

import json

import pytest
import xgrammar

from serve.chat_template import ChatTemplate
from serve.parsers.detect import OutputFormat
from tests.api.conftest import BASE, CMPL
from tests.api.fake_engine import Script
from tests.api.test_tools import TOOLS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
GLM = OutputFormat("glm", thinker=True)


@pytest.fixture
def api(make_api, bytes_of):
    return make_api(Script([*bytes_of("x"), 1]), output_format=GLM, max_model_len=4096)


@pytest.fixture(scope="module")
def matches():
    """Whether a text is what a grammar allows, as a whole."""
    vocabulary = [bytes([i]) for i in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info)

    def matches(grammar, text):
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(grammar))
        return matcher.accept_string(text) and matcher.is_completed()

    return matches


def grammar_of(api, path=CHAT, **fields):
    answer = api.post(path, (BASE if path == CHAT else CMPL) | fields)
    assert answer.status_code == 200, answer.text
    return api.engine.calls[-1].params.grammar


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '{"a":1}', "{}"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, '{"b": 1}', "1"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}}}, "aa", "b"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', '{"a": "1"}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', '{"a": "1"}'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "{}", "1"),
        ({"structured_outputs": {"regex": "[a-c]{2}"}}, "ab", "abc"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "aa"),
        ({"guided_json": {"properties": {"a": {"const": None}}, "required": ["a"]}}, '{"a":null}', "{}"),
        ({"guided_regex": "a|b"}, "a", "c"),
        ({"guided_choice": ["é", "日"]}, "日", "e"),
        ({"guided_grammar": 'root ::= "x"'}, "x", "y"),
        ({"json_schema": json.dumps(SCHEMA)}, '{"a": 1}', "{}"),
        ({"regex": "z"}, "z", "y"),
        ({"ebnf": 'root ::= "x"'}, "x", "y"),
    ],
)  # fmt: skip
def test_every_way_to_ask(api, matches, path, fields, good, bad):
    grammar = grammar_of(api, path, **fields)
    assert matches(grammar, good) and not matches(grammar, bad)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"regex": ""}]
)
def test_nothing_asked(api, path, fields):
    assert grammar_of(api, path, **fields) == ""


REGEX_A = {"structured_outputs": {"regex": "a"}}


def test_the_reasoning_stays_free(api, matches, tokenizer, make_api, bytes_of):
    maybe = grammar_of(api, **REGEX_A)
    for text in ("a", "<think>what {</think>a", "<think></think>\n\na"):
        assert matches(maybe, text)
    for text in ("what</think>a", "<think>a", "<think></think>b"):
        assert not matches(maybe, text)
    opened = ChatTemplate("{{ messages[0]['content'] }}<think>", tokenizer.special_tokens)
    inside = grammar_of(make_api(Script([1]), output_format=GLM, template=opened), **REGEX_A)
    assert matches(inside, "what</think>a") and not matches(inside, "a")
    closed = ChatTemplate("{{ messages[0]['content'] }}<think></think>", tokenizer.special_tokens)
    outside = grammar_of(make_api(Script([1]), output_format=GLM, template=closed), **REGEX_A)
    assert matches(outside, "a") and not matches(outside, "<think>b</think>a")
    # Neither a model that is not known to think nor a plain completion begins with a reasoning.
    assert not matches(grammar_of(make_api(Script([1])), **REGEX_A), "<think></think>a")
    assert not matches(grammar_of(api, TEXT, **REGEX_A), "<think></think>a")


CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
NOW = "<tool_call>now</tool_call>"


def test_tool_choice(api, matches):
    assert grammar_of(api, tools=TOOLS) == grammar_of(api, tools=TOOLS, tool_choice="none") == ""
    required = grammar_of(api, tools=TOOLS, tool_choice="required")
    assert matches(required, CALL) and matches(required, NOW + CALL) and matches(required, "<think>h</think>" + CALL)
    assert not matches(required, "hello") and not matches(required, "<tool_call>weather</tool_call>")
    single = grammar_of(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert matches(single, CALL) and not matches(single, CALL + CALL)
    named = grammar_of(api, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert matches(named, NOW) and not matches(named, CALL) and not matches(named, NOW + NOW)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    some = grammar_of(api, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert matches(some, CALL) and not matches(some, NOW)


def test_strict_tools_hold_arguments_to_their_schema(api, matches):
    grammar = grammar_of(api, tools=STRICT)
    assert matches(grammar, "hello") and matches(grammar, "hello " + CALL)
    assert not matches(grammar, CALL.replace("city", "town"))


def test_a_structure_or_calls(api, matches):
    grammar = grammar_of(api, tools=TOOLS, response_format={"type": "json_object"})
    assert matches(grammar, "{}") and matches(grammar, CALL) and not matches(grammar, "hello")


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm", "kimi_k2"])
def test_calls_that_grammars_demand_are_calls_that_parsers_read(make_api, matches, bytes_of, name):
    from tests.unit.test_parsers import WRITERS

    calls = [("weather", {"city": "Bern"}), ("now", {})]
    text = WRITERS[name](calls)
    api = make_api(Script([*bytes_of(text), 1]), output_format=OutputFormat(name), max_model_len=4096)
    answer = api.chat(tools=TOOLS, tool_choice="required")
    grammar = api.engine.calls[-1].params.grammar
    assert matches(grammar, text.lstrip("\n") if name == "glm" else text)
    made = answer.json()["choices"][0]["message"]["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made] == calls


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": "json"}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
         "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
         "response_format", "Unsupported type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/defs/x"}}}},
         "response_format", "defs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}},
         "response_format.json_schema.schema", "'not'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format", "object"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format", "type"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "Unclosed"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "not defined"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice", "list"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown"),
        ({"guided_regex": "a", "ebnf": 'root ::= "x"'}, "ebnf", "exclude"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"regex": "a" * 300_000}, "regex", "larger"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_wrong_is_told_before_the_engine_hears_of_it(api, path, fields, param, says):
    answer = api.post(path, (BASE if path == CHAT else CMPL) | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"] and error["type"] == "invalid_request_error"
    assert "/project" not in error["message"] and ".cc" not in error["message"] and len(error["message"]) < 700
    assert not api.engine.calls


@pytest.mark.parametrize("depth", [150, 900])
def test_schemas_nested_without_end_are_refused(api, depth):
    schema = '{"type":"array","items":' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"properties": {{"a": {schema}}}}}}}}}'
    for field, value in (
        ("response_format", f'{{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}'),
        ("guided_json", schema),
        ("structured_outputs", f'{{"json": {schema}}}'),
        ("tools", f"[{tool}]"),
    ):
        answer = api.request("POST", CHAT, content=json.dumps(BASE)[:-1] + f', "{field}": {value}}}')
        assert answer.status_code == 400, field
        assert "128 levels" in answer.json()["error"]["message"]
    assert not api.engine.calls


def test_a_property_may_be_called_like_a_keyword(api, matches):
    properties = {"not": {"type": "integer"}, "if": {"enum": [{"not": 1}]}}
    grammar = grammar_of(api, guided_json={"type": "object", "properties": properties, "required": ["not"]})
    assert matches(grammar, '{"not": 1}')


def test_a_model_that_cannot_end_has_no_structured_output(make_api, bytes_of):
    from tests.api import fake_engine

    class Endless(fake_engine.FakeEngine):
        def __init__(self, *args):
            super().__init__(*args)
            self.eos_token_ids = ()

    api = make_api(Script(bytes_of("x")), engine_class=Endless)
    answer = api.chat(regex="a")
    assert answer.status_code == 400 and "end token" in answer.json()["error"]["message"]
