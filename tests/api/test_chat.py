"""What chat messages become."""

import pytest

from serve.chat_template import ChatTemplate
from tests.api.conftest import FOLDER
from tests.api.fake_engine import Script

BOS, USER, ASSISTANT, EOS = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"


@pytest.fixture
def prompt_of(make_api, bytes_of, tokenizer):
    """The prompt that the engine gets for some messages, as text with its special tokens."""

    def prompt(messages, **fields):
        api = make_api(Script([*bytes_of("ok"), 1]))
        answer = api.chat(messages=messages, **fields)
        assert answer.status_code == 200, answer.text
        return tokenizer.decode(api.engine.calls[0].token_ids, skip_special_tokens=False)

    return prompt


def call(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_bos_comes_once(prompt_of):
    assert prompt_of([{"role": "user", "content": "hi"}]) == f"{BOS}{USER}hi{ASSISTANT}"


def test_text_parts_are_joined(prompt_of):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of([{"role": "user", "content": parts}]) == f"{BOS}{USER}ab{ASSISTANT}"


def test_developer_is_system_where_the_template_lacks_it(prompt_of):
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert prompt_of(messages) == f"{BOS}be brief{USER}hi{ASSISTANT}"


@pytest.mark.parametrize("content", [None, [], "missing"])
@pytest.mark.parametrize("arguments", ['{"a":1}', "", "null"])
def test_past_tool_calls(prompt_of, content, arguments):
    past = {"role": "assistant", "content": content, "tool_calls": [call(arguments)]}
    if content == "missing":
        del past["content"]
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]}
    text = prompt_of([{"role": "user", "content": "hi"}, past, result])
    written = "<arg_key>a</arg_key><arg_value>1</arg_value>" if "a" in arguments else ""
    assert text == f"{BOS}{USER}hi{ASSISTANT}\n<tool_call>f{written}</tool_call>{EOS}42{ASSISTANT}"


def test_no_tool_calls_is_no_tool_call(prompt_of):
    past = {"role": "assistant", "content": "yes", "tool_calls": []}
    messages = [{"role": "user", "content": "hi"}, past, {"role": "user", "content": "go on"}]
    assert prompt_of(messages) == f"{BOS}{USER}hi{ASSISTANT}yes{EOS}{USER}go on{ASSISTANT}"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_other_parts_are_named(make_api, bytes_of, part):
    api = make_api(Script(bytes_of("ok")))
    error = api.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]).json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert part["type"] in error["message"]
    assert api.engine.calls == []


def test_continuing_the_final_message(prompt_of):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    assert prompt_of(messages, continue_final_message=True) == f"{BOS}{USER}hi{ASSISTANT}Well, "
    assert prompt_of(messages, add_generation_prompt=False) == f"{BOS}{USER}hi{ASSISTANT}Well, {EOS}"


def test_both_at_once_is_refused(make_api, bytes_of):
    api = make_api(Script(bytes_of("ok")))
    answer = api.chat(continue_final_message=True, add_generation_prompt=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "chat_template_error")


def test_no_template_refuses_chat_only(make_api, bytes_of):
    api = make_api(Script(bytes_of("ok")), template=None)
    answer = api.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
    assert "/v1/completions" in answer.json()["error"]["message"]
    assert api.complete().json()["choices"][0]["text"] == "ok"


def test_a_template_may_refuse(make_api, bytes_of, tokenizer):
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", tokenizer.special_tokens)
    answer = make_api(Script(bytes_of("ok")), template=template).chat()
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_template_arguments(make_api, bytes_of, tokenizer):
    template = ChatTemplate("{{ bos_token }}{{ mood | default('calm') }}", tokenizer.special_tokens)
    api = make_api(Script(bytes_of("ok")), template=template)
    api.chat()
    api.chat(chat_template_kwargs={"mood": "merry"})
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=False) for c in api.engine.calls]
    assert texts == [f"{BOS}calm", f"{BOS}merry"]


def test_a_prompt_of_nothing_is_refused(make_api, bytes_of, tokenizer):
    answer = make_api(Script(bytes_of("ok")), template=ChatTemplate("", {})).chat()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_the_prompt_is_what_transformers_gives(prompt_of):
    transformers = pytest.importorskip("transformers")
    messages = [
        {"role": "system", "content": "  sys\n"},
        {"role": "user", "content": "héllo 🔥"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "again"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt_of(messages) == text
