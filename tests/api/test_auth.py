"""API keys: who is let in, what the others are told, and where keys come from."""

from pathlib import Path
from typing import Any

import pytest

from configs.base import ConfigError
from configs.engine import ServeConfig
from serve.api.auth import ApiKeys, load_api_keys
from tests import REPOSITORY
from tests.api.conftest import BASE, Api
from tests.api.fake_engine import Script


@pytest.fixture
def api(make_api: Any, bytes_of: Any) -> Api:
    return make_api(Script([*bytes_of("ok"), 1]), api_keys=ApiKeys(["first key", "zweiter Schlüssel"]))


def ask(api: Api, path: str, authorization: str | None, method: str = "POST") -> Any:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    return api.request(method, path, json=BASE if method == "POST" else None, headers=headers)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer first", "Bearer first key2", "Basic first key"]
)
def test_others_get_an_error_object(api: Api, given: str | None) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/nothing"):
        answer = ask(api, path, given)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
        assert "first" not in error["message"]
    assert ask(api, "/v1/models", given, "GET").status_code == 401
    assert api.engine.calls == []


@pytest.mark.parametrize("given", ["Bearer first key", "bearer first key", "Bearer  zweiter Schlüssel "])
def test_keys_that_are_known(api: Api, given: str) -> None:
    answer = ask(api, "/v1/chat/completions", given)
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
    assert ask(api, "/v1/models", given, "GET").status_code == 200


def test_probes_need_none(api: Api) -> None:
    for path in ("/health", "/version", "/metrics"):
        assert ask(api, path, None, "GET").status_code == 200


def test_without_keys_everybody_is_let_in(make_api: Any, bytes_of: Any) -> None:
    api = make_api(Script([*bytes_of("ok"), 1]))
    for given in (None, "Bearer ", "Bearer anything"):
        assert ask(api, "/v1/chat/completions", given).status_code == 200


def test_where_keys_come_from(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the web team\nabc\n\n  def  \n")
    keys = load_api_keys(file, "ghi, jkl,")
    for key in ("abc", "def", "ghi", "jkl"):
        keys.check(f"Bearer {key}")
    load_api_keys(None, " ,").check(None)
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match=r"keys holds no key: write one a line"):
        load_api_keys(file, "ghi")
    with pytest.raises(ConfigError, match=r"api_key_file .*absent cannot be read"):
        load_api_keys(tmp_path / "absent", "")


def test_the_setting(tmp_path: Path) -> None:
    args = {"engine": {"model": str(REPOSITORY / "examples" / "tiny-model")}, "api_key_file": str(tmp_path / "keys")}
    assert ServeConfig.from_args(args).api_key_file == tmp_path / "keys"
    assert ServeConfig.from_args({"engine": args["engine"]}).api_key_file is None
