"""Templates get what transformers gives them, and past tool calls in the form they need."""

import json

import pytest

from configs.base import ConfigError
from serve.chat_template import ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "hi"}
# The heads of the two families' handling of past tool calls.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ '[' + c['function']['name'] + ':' + c['function']['arguments'] + ']' }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
DICT_ARGUMENTS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
    "{% set args = c.function.arguments %}{% for k, v in args.items() %}{{ k }}={{ v | tojson }};{% endfor %}"
    "{% endfor %}{% endfor %}"
)
JSON_ARGUMENTS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def called(arguments, content=None):
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [(TEXT_ARGUMENTS, 'hi[f:{"é": "<1>"}]'), (DICT_ARGUMENTS, 'hi<f>é="<1>";'), (JSON_ARGUMENTS, 'hif{"é": "<1>"}')],
)
def test_arguments_in_the_form_the_template_needs(source, expected):
    template = ChatTemplate(source, {})
    assert template.render(called('{"é": "<1>"}')) == expected
    assert template.render(called({"é": "<1>"})) == expected
    assert template.render(called('{"é": "<1>"}', content="")) == expected


@pytest.mark.parametrize("arguments", ["", "null", None, "{}"])
def test_no_arguments(arguments):
    assert ChatTemplate(TEXT_ARGUMENTS, {}).render(called(arguments)) == "hi[f:{}]"
    assert ChatTemplate(DICT_ARGUMENTS, {}).render(called(arguments)) == "hi<f>"


def test_broken_arguments():
    assert ChatTemplate(TEXT_ARGUMENTS, {}).render(called('{"a":')) == 'hi[f:{"a":]'
    with pytest.raises(ChatTemplateError, match="'f' are not valid JSON"):
        ChatTemplate(DICT_ARGUMENTS, {}).render(called('{"a":'))


def test_what_templates_may_use():
    source = (
        "{% generation %}\n  {% for i in range(9) %}\n{% if i == 2 %}{% break %}{% endif %}{{ i }}\n  {% endfor %}\n"
        "{% endgeneration %}{{ {'a': '<é>'} | tojson }} {{ strftime_now('%Y') | length }} {{ bos_token }}"
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([USER])
    assert text == '0\n1\n{"a": "<é>"} 4 <s>TrueTrueTrue'


def test_same_as_transformers(tiny_model):
    transformers = pytest.importorskip("transformers")
    source = (
        "{{- bos_token }}\n  {% for m in messages -%}\n {% if loop.first %}first{% endif %}\n[{{ m.role }}] "
        "{{ m.content | trim }}\n  {% endfor %}\n{% if add_generation_prompt %}\n>>{% endif %}\n"
        "{{ messages | tojson(indent=2) }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"
    )
    messages = [{"role": "system", "content": " a & b <c> "}, USER]
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_model)
    expected = theirs.apply_chat_template(messages, chat_template=source, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(source, {"bos_token": theirs.bos_token}).render(messages) == expected


def test_developer_role():
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    message = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(source, {}).render(message) == "system"
    assert ChatTemplate(source + "{# developer #}", {}).render(message) == "developer"


def test_continuing():
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "so"}]
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(source, {}).render(messages, **arguments) == "[hi][so"
    with pytest.raises(ChatTemplateError, match="does not show"):
        ChatTemplate("{{ messages[0].content }}", {}).render(messages, **arguments)
    with pytest.raises(ChatTemplateError, match="needs a last message with content"):
        ChatTemplate(source, {}).render([{"role": "assistant", "content": ""}], **arguments)


def test_messages_are_not_changed():
    messages = [{"role": "developer", "content": "x"}, *called("{}")]
    before = json.dumps(messages)
    ChatTemplate(DICT_ARGUMENTS, {}).render(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[5].content }}",
        "{{ 'a' + none }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_failures_are_one_kind_of_error(source):
    with pytest.raises(ChatTemplateError, match="refused the messages"):
        ChatTemplate(source, {}).render([USER])


def test_reserved_arguments():
    with pytest.raises(ChatTemplateError, match="messages is set by the request itself"):
        ChatTemplate("x", {}).render([USER], kwargs={"messages": []})


def test_broken_template():
    with pytest.raises(ConfigError, match="chat template is not valid"):
        ChatTemplate("{% if %}", {})


def test_where_templates_are_found(tmp_path):
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert ChatTemplate.from_folder(tmp_path, {}).render([USER]) == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_folder(tmp_path, {}).render([USER]) == "named"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_folder(tmp_path, {}).render([USER]) == "file"
