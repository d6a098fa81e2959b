"""Clients that people use, as they are, against the shipped model behind Ray Serve with drafts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from pydantic import BaseModel, Field

from tests.serving.conftest import MODEL, Server

GREEDY = {"temperature": 0, "max_tokens": 24}
ASK = [{"role": "user", "content": "Tell me about Moses"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "verse",
        "description": "Reads a verse",
        "parameters": {
            "type": "object",
            "properties": {"chapter": {"type": "integer", "minimum": 1, "maximum": 50}},
            "required": ["chapter"],
            "additionalProperties": False,
        },
    },
}
LONG = "and " * 1200  # more tokens than the model's context


class Verse(BaseModel):
    chapter: int = Field(ge=1, le=50)
    holy: bool


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    """The chat's answer, which all clients must read."""
    return str(_openai(server).chat.completions.create(model=MODEL, messages=ASK, **GREEDY).choices[0].message.content)


def _openai(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class TestOpenAI:
    @pytest.fixture
    def client(self, server: Server) -> openai.OpenAI:
        return _openai(server)

    def test_stream_helper(self, client: openai.OpenAI) -> None:
        asked = {"model": MODEL, "messages": ASK, "temperature": 0, "stop": [",", "."]}  # it takes no answer cut short
        with client.chat.completions.stream(**asked) as events:
            deltas = [event.delta for event in events if event.type == "content.delta"]
            final = events.get_final_completion()
        whole = client.chat.completions.create(**asked)
        assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content

    def test_parse(self, client: openai.OpenAI) -> None:
        done = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Verse, max_tokens=300)
        verse = done.choices[0].message.parsed
        assert isinstance(verse, Verse)
        assert json.loads(done.choices[0].message.content or "") == verse.model_dump()

    def test_tools_streamed(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [TOOL], "max_tokens": 300}
        # One call: the small model would go on with more until its limit.
        asked |= {"tool_choice": "required", "parallel_tool_calls": False}
        with client.chat.completions.stream(**asked) as events:
            kinds = {event.type for event in events}
            (choice,) = events.get_final_completion().choices
        assert "tool_calls.function.arguments.delta" in kinds
        assert choice.finish_reason == "tool_calls"
        (call, *_) = choice.message.tool_calls or []
        assert call.function.name == "verse"
        assert 1 <= json.loads(call.function.arguments)["chapter"] <= 50

    def test_a_tools_result_goes_back(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "max_tokens": 300}
        forced = {"type": "function", "function": {"name": "verse"}}
        message = client.chat.completions.create(messages=ASK, tool_choice=forced, **asked).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "And God said"}
        after = client.chat.completions.create(messages=[*ASK, message, result], tool_choice="none", **asked)
        assert after.choices[0].message.content and not after.choices[0].message.tool_calls

    def test_responses(self, client: openai.OpenAI, expected: str) -> None:
        asked = {"model": MODEL, "input": "Tell me about Moses", "temperature": 0, "max_output_tokens": 24}
        assert client.responses.create(**asked).output_text == expected
        with client.responses.stream(**asked) as events:
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == expected
        parsed = client.responses.parse(model=MODEL, input="x", text_format=Verse, max_output_tokens=300)
        assert isinstance(parsed.output_parsed, Verse)

    def test_errors(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=LONG)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nope", messages=ASK)
        assert missing.value.code == "model_not_found"

    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


class TestLangChain:
    @pytest.fixture
    def chat(self, server: Server) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, max_retries=0, **GREEDY)

    def test_invoke_and_stream(self, chat: Any, expected: str) -> None:
        answer = chat.invoke("Tell me about Moses")
        assert answer.content == expected
        assert answer.usage_metadata["output_tokens"] <= 24
        chunks = list(chat.stream("Tell me about Moses", stream_usage=True))
        assert "".join(chunk.content for chunk in chunks) == expected
        assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0

    def test_async_batch(self, chat: Any, expected: str) -> None:
        answers = asyncio.run(chat.abatch(["Tell me about Moses"] * 4))
        assert [answer.content for answer in answers] == [expected] * 4

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, chat: Any, method: str) -> None:
        model = chat.model_copy(update={"max_tokens": 300}).with_structured_output(Verse, method=method)
        assert isinstance(model.invoke("Tell me about Moses"), Verse)

    def test_tools(self, chat: Any) -> None:
        model = chat.model_copy(update={"max_tokens": 300}).bind_tools([TOOL], tool_choice="verse")
        (call, *_) = model.invoke("Tell me about Moses").tool_calls
        assert call["name"] == "verse" and 1 <= call["args"]["chapter"] <= 50

    def test_responses_api(self, server: Server, expected: str) -> None:
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, use_responses_api=True, **GREEDY)
        assert chat.invoke("Tell me about Moses").text == expected
        assert "".join(chunk.text for chunk in chat.stream("Tell me about Moses")) == expected

    def test_overflow_is_recognised(self, chat: Any) -> None:
        from langchain_core.exceptions import ContextOverflowError

        with pytest.raises(ContextOverflowError):
            chat.invoke(LONG)


class TestLiteLLM:
    @pytest.fixture
    def asked(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices when it is imported
        return {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "messages": ASK}

    def test_completion_and_stream(self, asked: dict[str, Any], expected: str) -> None:
        import litellm

        assert litellm.completion(**asked, **GREEDY).choices[0].message.content == expected
        chunks = litellm.completion(**asked, **GREEDY, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

    def test_tools(self, asked: dict[str, Any]) -> None:
        import litellm

        answer = litellm.completion(
            **asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=300
        )
        (call, *_) = answer.choices[0].message.tool_calls
        assert call.function.name == "verse" and 1 <= json.loads(call.function.arguments)["chapter"] <= 50

    def test_text_completion(self, asked: dict[str, Any], server: Server) -> None:
        import litellm

        asked = {key: value for key, value in asked.items() if key != "messages"}
        asked["model"] = f"text-completion-openai/{MODEL}"
        answer = litellm.text_completion(**asked, prompt="And the LORD", **GREEDY)
        other = _openai(server).completions.create(model=MODEL, prompt="And the LORD", **GREEDY)
        assert answer.choices[0].text == other.choices[0].text

    def test_overflow_is_recognised(self, asked: dict[str, Any]) -> None:
        import litellm

        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            litellm.completion(**asked | {"messages": [{"role": "user", "content": LONG}]})


ITEMS = [(f"{start} {name}", f" {verb} {end}") for start, verb, end in (
    ("And the LORD said unto", "saying,", "Speak unto the children of Israel"),
    ("In the days of", "the king", "there was a famine in the land"),
    ("Now when", "had ended", "his sayings in the audience of the people"),
    ("Blessed be", "and let", "him dwell in the tents of Shem"),
) for name in ("Moses", "David", "Solomon", "Abraham", "Jacob")]  # fmt: skip


class TestLmEval:
    def test_loglikelihood_is_that_of_transformers(self, server: Server, tiny_model: Path) -> None:
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI
        from transformers import AutoModelForCausalLM, AutoTokenizer

        api = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model=MODEL,
            tokenizer_backend="huggingface",
            tokenizer=str(tiny_model),
            num_concurrent=4,
            max_length=512,
        )
        asked = [Instance("loglikelihood", {}, item, index) for index, item in enumerate(ITEMS)]
        answers = api.loglikelihood(asked, disable_tqdm=True)

        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        for (context, continuation), (told, greedy) in zip(ITEMS, answers, strict=True):
            whole = tokenizer(context + continuation)["input_ids"]
            begin = len(tokenizer(context)["input_ids"])
            with torch.no_grad():
                scores = model(torch.tensor([whole])).logits[0, begin - 1 : -1].double().log_softmax(-1)
            rest = torch.tensor(whole[begin:])
            own = scores.gather(1, rest[:, None]).sum().item()
            assert told == pytest.approx(own, abs=1e-4)
            assert greedy == bool((scores.argmax(-1) == rest).all())
