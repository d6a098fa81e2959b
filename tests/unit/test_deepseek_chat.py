"""DeepSeek-V3.2's and V4's chat encodings, character for character."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve.chat_template import ChatTemplate, ChatTemplateError, DeepSeekChat, load_chat_format
from serve.deepseek_chat import encode_chat
from tests import REPOSITORY

CASES = json.loads((REPOSITORY / "tests" / "data" / "chat" / "encodings.json").read_text())["cases"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['model']} {c['name']} {'on' if c['thinking'] else 'off'}")
def test_cases(case: dict[str, Any]) -> None:
    got = encode_chat(case["model"], case["messages"], case["tools"] or (), thinking=case["thinking"])
    assert got == case["text"]


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", ["", "null", None, "{}", {}])
def test_a_call_without_arguments(arguments: Any) -> None:
    text = encode_chat("deepseek_v32", called(arguments), add_generation_prompt=False)
    assert text.endswith(
        '</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
    )


@pytest.mark.parametrize("arguments", ["[1]", "{", "3", [1]])
def test_arguments_that_are_no_object(arguments: Any) -> None:
    with pytest.raises(ValueError, match="arguments of the tool call 'f' are not a JSON object"):
        encode_chat("deepseek_v4", called(arguments))


def test_reasoning_of_the_turn_that_goes_on_is_kept() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning": "why", "tool_calls": called("{}")[1]["tool_calls"]},
        {"role": "tool", "content": "r"},
    ]
    v32 = encode_chat("deepseek_v32", messages, [TOOL], thinking=True)
    assert "<｜Assistant｜><think>why</think>\n\n<｜DSML｜" in v32 and v32.endswith("</function_results>\n\n<think>")
    later = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert "why" not in encode_chat("deepseek_v32", later, [TOOL], thinking=True)
    assert "<think>why</think>" in encode_chat("deepseek_v4", later, [TOOL], thinking=True)
    assert "why" not in encode_chat("deepseek_v4", later, thinking=True)
    assert "why" not in encode_chat("deepseek_v4", later, [TOOL], thinking=False)


def test_tools_follow_the_first_system_message() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "system")]
    text = encode_chat("deepseek_v32", messages, [TOOL])
    assert text.startswith("<｜begin▁of▁sentence｜>system\n\n## Tools\n") and text.count("## Tools") == 1


def test_without_a_generation_prompt() -> None:
    assert encode_chat("deepseek_v32", [{"role": "user", "content": "a"}], add_generation_prompt=False) == (
        "<｜begin▁of▁sentence｜><｜User｜>a"
    )


def test_unknown_roles() -> None:
    with pytest.raises(ValueError, match=r"messages\[0\].role: 'critic' is not known"):
        encode_chat("deepseek_v32", [{"role": "critic", "content": "a"}])


USER = {"role": "user", "content": "hi"}


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    assert load_chat_format(tmp_path, {}) is None
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert load_chat_format(tmp_path, {}) is None
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    chat = load_chat_format(tmp_path, {})
    assert isinstance(chat, DeepSeekChat)
    assert chat.render([USER]) == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    for name in ("thinking", "enable_thinking"):
        assert chat.render([USER], kwargs={name: True}).endswith("<｜Assistant｜><think>")
    (tmp_path / "chat_template.jinja").write_text("own")
    assert isinstance(load_chat_format(tmp_path, {}), ChatTemplate)


def test_continuing_the_last_message() -> None:
    messages = [USER, {"role": "assistant", "content": "Well,"}]
    text = DeepSeekChat("deepseek_v32").render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>Well,"


def test_what_it_refuses() -> None:
    with pytest.raises(ChatTemplateError, match="thinking must be true or false"):
        DeepSeekChat("deepseek_v32").render([USER], kwargs={"thinking": "yes"})
    with pytest.raises(ChatTemplateError, match="arguments of the tool call 'f' are not a JSON object"):
        DeepSeekChat("deepseek_v32").render(called("{"))
