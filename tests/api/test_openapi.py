"""The OpenAPI document: true to the routes, and Schemathesis finds no request that breaks the server.

The same against a running server, with its own command: schemathesis run URL/openapi.json --max-examples 1000
"""

import json

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from serve.api.auth import ApiKeys
from serve.api.routes import create_app
from tests.api.conftest import Api
from tests.api.fake_engine import Script

EXAMPLES = 60  # of each operation and mode
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
BODIES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def schema(tokenizer):
    ids = [tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc"]
    api = Api(tokenizer, Script([*ids, 1]))
    return schemathesis.openapi.from_asgi("/openapi.json", api.app)


def test_every_route_is_told_and_every_field(make_api):
    api = make_api(Script([1]))
    told = api.request("GET", "/openapi.json").json()
    served = {route.path.replace("{name:path}", "{name}") for route in create_app(lambda: api.serving).routes}
    assert set(told["paths"]) == served - {"/openapi.json", "/v1/responses/{name}"}
    fields = told["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "null"} in fields["temperature"]["anyOf"]
    assert {"messages", "tools", "response_format", "guided_regex", "stop"} <= set(fields)
    assert "plain_messages" not in json.dumps(told)  # nothing of the code


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", BODIES)
def test_no_request_breaks_the_server(schema, path, mode):
    """Every answer has a documented status and shape, and every refusal OpenAI's envelope."""
    operation = next(iter(schema[path].values()))

    @SETTINGS
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        answer = case.call()
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
        if not answer.headers["content-type"][0].startswith("text/event-stream"):
            operation.validate_response(answer)

    send()


def test_the_document_is_open_to_all(make_api):
    api = make_api(Script([1]), api_keys=ApiKeys(["key"]))
    assert api.request("GET", "/openapi.json").status_code == 200
