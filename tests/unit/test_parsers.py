"""Turns told apart: known ones of every format, cut at every place, and what models write that is not quite right."""

import itertools
import json
import random

import pytest

from serve.deepseek_chat import encode_chat
from serve.parsers.output import OutputParser, Said, Thinking
from serve.parsers.tool_formats import TOOL_FORMATS

WEATHER = {"city": 'Zürich "HB"\n</a>', "days": 3, "exact": True, "tags": ["a", {"b": None}], "note": "12"}
CALLS = [("weather", WEATHER), ("now", {})]
SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
REASONING, CONTENT = "I think: a < b, or </thin\nso.", "Let me see <｜x <tool."


def deepseek_v3(calls):
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    parts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def glm(calls, newline=""):
    text = ""
    for name, arguments in calls:
        text += f"\n<tool_call>{name}{newline}"
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value)
            text += f"<arg_key>{key}</arg_key>{newline}<arg_value>{shown}</arg_value>{newline}"
        text += "</tool_call>"
    return text


def kimi_k2(calls):
    parts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>"


def encoded(kind):
    """The turn as the model's own encoding writes it."""

    def write(calls):
        called = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
        turn = {"role": "assistant", "content": "", "tool_calls": called}
        text = encode_chat(kind, [{"role": "user", "content": "q"}, turn], add_generation_prompt=False)
        return text.partition("</think>")[2].removesuffix("<｜end▁of▁sentence｜>")

    return write


WRITERS = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": encoded("deepseek_v32"),
    "deepseek_v4": encoded("deepseek_v4"),
    "glm": glm,
    "glm-lines": lambda calls: glm(calls, "\n"),
    "kimi_k2": kimi_k2,
}


def make_parser(name, thinking=Thinking.CLOSED, **options):
    tool_format = TOOL_FORMATS[name.partition("-")[0]]
    return OutputParser(thinking, tool_format, SCHEMAS, exact=name in ("deepseek_v32", "deepseek_v4"), **options)


def parse(parser, pieces):
    return [said for piece in pieces for said in parser.add(piece)] + parser.finish()


def joined(parts):
    """(reasoning, content, [(name, arguments)]) of parts; a call's name comes once, before its arguments."""
    texts = {"reasoning": "", "content": ""}
    calls = []
    for said in parts:
        if said.kind == "call":
            assert said.call == len(calls) and said.id
            calls.append([said.text, ""])
        elif said.kind == "arguments":
            assert said.call == len(calls) - 1
            calls[-1][1] += said.text
        else:
            texts[said.kind] += said.text
    return texts["reasoning"], texts["content"], [tuple(call) for call in calls]


def cuts(text):
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    for size in (1, 2, 3, 7):
        yield [text[i : i + size] for i in range(0, len(text), size)]


def parse_all_cuts(make, text):
    """What every cutting gives, which must be the same."""
    whole = joined(parse(make(), [text]))
    for pieces in cuts(text):
        assert joined(parse(make(), pieces)) == whole, pieces
    return whole


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("content", ["", CONTENT])
def test_known_turns_come_back_at_every_cut(name, content):
    text = f"{REASONING}</think>{content}" + WRITERS[name](CALLS)
    reasoning, said, calls = parse_all_cuts(lambda: make_parser(name, Thinking.OPEN), text)
    assert (reasoning, said) == (REASONING, content)
    assert [(call, json.loads(arguments)) for call, arguments in calls] == CALLS


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("reasoning", ["\nr\n\n", "r", ""])
@pytest.mark.parametrize("content", ["", " a \n", "b\n\n"])
def test_encoded_turns_keep_their_white_space(kind, reasoning, content):
    calls = [{"function": {"name": "now", "arguments": "{}"}}]
    user = {"role": "user", "content": "q"}
    prompt = encode_chat(kind, [user], thinking=True)
    turn = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}
    text = encode_chat(kind, [user, turn], thinking=True, add_generation_prompt=False)
    assert text.startswith(prompt) and Thinking.of_prompt(prompt) is Thinking.OPEN
    turn_text = text.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>")
    whole = parse_all_cuts(lambda: make_parser(kind, Thinking.OPEN), turn_text)
    assert whole == (reasoning, content, [("now", "{}")])


@pytest.mark.parametrize("name", WRITERS)
def test_a_turn_that_is_cut_off_anywhere_gives_a_beginning_of_the_whole(name):
    text = f"{REASONING}</think>{CONTENT}" + WRITERS[name](CALLS)
    reasoning, content, calls = joined(parse(make_parser(name, Thinking.OPEN), [text]))
    for end in range(len(text)):
        part = parse_all_cuts(lambda: make_parser(name, Thinking.OPEN), text[:end]) if end % 29 == 0 else None
        part = part or joined(parse(make_parser(name, Thinking.OPEN), [text[:end]]))
        if "</think>" in text[:end]:
            assert part[0] == reasoning
        for (call, arguments), (whole_call, whole_arguments) in zip(part[2], calls, strict=False):
            assert call == whole_call
            assert whole_arguments.startswith(arguments)
        assert not part[2] or part[1] == content


def test_where_a_turn_begins():
    assert Thinking.of_prompt("a<think>") is Thinking.OPEN
    assert Thinking.of_prompt("a<think>\n") is Thinking.OPEN
    assert Thinking.of_prompt("a<think></think>\n") is Thinking.CLOSED
    assert Thinking.of_prompt("a<｜Assistant｜>") is Thinking.MAYBE


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (Thinking.MAYBE, "<think>\nr\n</think>\n\nx", "r", "x"),
        (Thinking.MAYBE, "\n<think>r</think>x", "r", "x"),
        (Thinking.MAYBE, "  <thin", "", "  <thin"),
        (Thinking.MAYBE, " x <think>r</think>", "", " x <think>r</think>"),
        (Thinking.MAYBE, "", "", ""),
        (Thinking.OPEN, "r</think>x</think>", "r", "x</think>"),
        (Thinking.OPEN, "r", "r", ""),
        (Thinking.CLOSED, "<think>r</think>x", "", "<think>r</think>x"),
        (Thinking.IGNORED, "<think>r</think>x\n", "", "<think>r</think>x\n"),
    ],
)
def test_reasoning(thinking, text, reasoning, content):
    for tool_format in (None, TOOL_FORMATS["glm"]):
        assert parse_all_cuts(lambda t=tool_format: OutputParser(thinking, t), text) == (reasoning, content, [])


@pytest.mark.parametrize("name", WRITERS)
def test_a_turn_that_only_calls(name):
    whole = parse_all_cuts(lambda: make_parser(name, Thinking.MAYBE), WRITERS[name](CALLS[1:]))
    assert whole == ("", "", [("now", "{}")])


def test_reasoning_is_told_while_it_lasts():
    parser = OutputParser(Thinking.MAYBE)
    states = []
    for piece in ("<thi", "nk>", "r", "</think", ">", "x"):
        parser.add(piece)
        states.append(parser.thinks)
    assert states == [False, True, True, True, False, False]


def test_tools_off():
    text = "x" + deepseek_v31(CALLS)
    assert joined(parse(OutputParser(Thinking.CLOSED), [text])) == ("", text, [])


@pytest.mark.parametrize("name", WRITERS)
def test_one_call_at_a_time(name):
    make = lambda: make_parser(name, parallel_calls=False)  # noqa: E731
    calls = parse_all_cuts(make, WRITERS[name](CALLS))[2]
    assert [(call, json.loads(arguments)) for call, arguments in calls] == CALLS[:1]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # text behind the calls, and a second block
        ("glm", "a\n\n<tool_call>now</tool_call>\nb", "a\nb", [("now", "{}")]),
        ("glm", "<tool_call>now</tool_call> \n ", "", [("now", "{}")]),
        ("deepseek_v31", deepseek_v31(CALLS[1:]) + "\n" + deepseek_v31(CALLS[1:]), "", [("now", "{}")] * 2),
        # no arguments at all, none where JSON should be, a value that is no JSON, a constant JSON lacks
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜>", "", [("now", "{}")]),
        ("deepseek_v31", deepseek_v31(CALLS[1:]).replace("{}", " \n"), "", [("now", "{}")]),
        ("deepseek_v3", deepseek_v3(CALLS[1:]).replace("\n```<", "```<"), "", [("now", "{}")]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>oui</arg_value></tool_call>", "", [("f", '{"a": "oui"}')]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>", "", [("f", '{"a": "NaN"}')]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>", "", [("f", '{"a": [1]}')]),
        ("kimi_k2", kimi_k2([("a.b:c", {})]), "", [("a.b:c", "{}")]),
        # a block that only begins is no call
        ("glm", "x\n<tool_call>no", "x", []),
        ("deepseek_v32", "x\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke na", "x", []),
        ("deepseek_v32", "x\n\n<｜DSML｜function_ca", "x\n\n<｜DSML｜function_ca", []),
    ],
)  # fmt: skip
def test_odd_turns(name, text, content, calls):
    assert parse_all_cuts(lambda: make_parser(name), text) == ("", content, calls)


def test_kimi_keeps_its_ids():
    parts = parse(make_parser("kimi_k2"), [kimi_k2(CALLS)])
    assert [said.id for said in parts if said.kind == "call"] == ["functions.weather:0", "functions.now:1"]


def test_ids_differ():
    ids = [said.id for said in parse(make_parser("glm"), [glm(CALLS)]) if said.kind == "call"]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)


def test_adjacent_parts_are_joined():
    parser = make_parser("glm", Thinking.OPEN)
    parts = parser.add("r</think>x<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")
    expected = [Said("reasoning", "r"), Said("content", "x"), Said("call", "now"), Said("arguments", '{"a": 1}')]
    assert [said._replace(id="") for said in parts] == expected


def test_random_mixtures_of_tags_never_depend_on_cuts():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for name, tool_format in TOOL_FORMATS.items():
        marks = [tool_format.begin, *tool_format.marks, "<think>", "</think>", "\n", " ", "x", '"', '">', "<", "｜"]
        marks += ['<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="p" string="true">', "</｜DSML｜invoke>", "{}"]
        for _, thinking in itertools.product(range(40), (Thinking.OPEN, Thinking.MAYBE)):
            text = "".join(rng.choices(marks, k=rng.randrange(1, 14)))
            parse_all_cuts(lambda n=name, t=thinking: make_parser(n, t), text)
