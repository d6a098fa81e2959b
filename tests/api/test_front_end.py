"""What the front end does around requests: drain, leases, tenants, keep-alive comments, CORS, HEAD and OPTIONS."""

import asyncio

import httpx
import pytest

from serve.api import caller
from serve.api.admission import Admission
from serve.api.auth import ApiKeys
from serve.api.caller import Caller, Leases
from serve.api.errors import ApiError
from tests.api.conftest import BASE, CMPL
from tests.api.fake_engine import Script
from tests.scheduler_engine import Engine


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/health", "/version", "/metrics", "/tokenizer_info"]
)
def test_head_is_get_without_its_body(make_api, path):
    api = make_api(Script([1]))
    head, got = api.request("HEAD", path), api.request("GET", path)
    assert head.status_code == got.status_code == 200
    assert head.headers["content-type"] == got.headers["content-type"]


def test_options_tells_the_methods(make_api):
    api = make_api(Script([1]))
    for path, allowed in (("/v1/chat/completions", {"POST"}), ("/v1/models", {"GET", "HEAD"})):
        answer = api.request("OPTIONS", path)
        assert answer.status_code == 204 and answer.content == b""
        assert set(answer.headers["allow"].split(", ")) == allowed
        assert "access-control-allow-origin" not in answer.headers
    assert api.request("OPTIONS", "/nowhere").status_code == 404


PAGE = "https://chat.example.com"


def test_cors_is_off_unless_an_origin_is_named(make_api, bytes_of):
    script = Script([*bytes_of("x"), 1])
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = {"Origin": PAGE, **asks}
    closed = make_api(script)
    assert "access-control-allow-origin" not in closed.request("OPTIONS", "/v1/models", headers=preflight).headers
    for origins, sender, allowed in (([PAGE], PAGE, PAGE), ([PAGE], "https://evil.example", None), (["*"], PAGE, "*")):
        api = make_api(script, cors_allow_origins=origins, api_keys=ApiKeys(["k"]))
        answer = api.request("OPTIONS", "/v1/chat/completions", headers=preflight | {"Origin": sender})
        assert answer.headers.get("access-control-allow-origin") == allowed
        if allowed:
            assert answer.status_code == 200 and "authorization" in answer.headers["access-control-allow-headers"]
        headers = {"Origin": sender, "Authorization": "Bearer k"}
        answer = api.request("POST", "/v1/chat/completions", json=BASE, headers=headers)
        assert answer.status_code == 200
        assert answer.headers.get("access-control-allow-origin") == allowed
        refused = api.request("POST", "/v1/chat/completions", json=BASE, headers={"Origin": sender})
        assert refused.status_code == 401  # pages may read errors, too
        assert refused.headers.get("access-control-allow-origin") == allowed


def test_comments_keep_a_quiet_stream_alive(make_api, bytes_of):
    api = make_api(Script([*bytes_of("ab"), 1], pause_after=1), keep_alive_s=0.05)

    async def run():
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            call = asyncio.create_task(client.post("/v1/completions", json=CMPL | {"stream": True}))
            await asyncio.sleep(0.4)
            api.engine.resume.set()
            return (await call).content

    content = asyncio.run(run())
    comments = content.count(b": keep-alive\n\n")
    assert 3 <= comments <= 8
    assert content.startswith(b": keep-alive\n\n" * comments)  # before the first event, and none between those
    events = content.replace(b": keep-alive\n\n", b"").split(b"\n\n")
    assert [event[:6] for event in events if event] == [b"data: "] * len(events[:-1])
    assert events[-2] == b"data: [DONE]"


def test_streams_that_speak_get_no_comments(make_api, bytes_of):
    assert b"keep-alive" not in make_api(Script([*bytes_of("abc"), 1]), keep_alive_s=5).complete(stream=True).content


# ----------------------------------------------------------------------------------------------------------- drain


def test_drain_finishes_what_runs_and_refuses_what_comes(make_api, bytes_of):
    api = make_api(Script([*bytes_of("abc"), 1], pause_after=2))

    async def run():
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            running = asyncio.create_task(client.post("/v1/completions", json=CMPL | {"stream": True}))
            while not api.engine.calls:
                await asyncio.sleep(0.01)
            assert not await api.serving.runner.drain(0.05)  # one still runs
            drained = asyncio.create_task(api.serving.runner.drain(30))
            await asyncio.sleep(0.01)
            health = await client.get("/health")
            refused = [await client.post("/v1/completions", json=CMPL | {"stream": s}) for s in (False, True)]
            assert not drained.done()
            api.engine.resume.set()
            return health, refused, await running, await drained

    health, refused, finished, drained = asyncio.run(run())
    assert drained and finished.content.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"stop"' in finished.content
    for answer in (health, *refused):
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == "server_draining"
    assert len(api.engine.calls) == 1


# ---------------------------------------------------------------------------------------------------------- leases


@pytest.mark.parametrize("pause", [1, 2])
def test_a_client_that_does_not_renew_its_lease_is_gone(make_api, bytes_of, monkeypatch, pause):
    monkeypatch.setattr(caller, "LEASE_S", 0.2)
    api = make_api(Script([*bytes_of("abc"), 1], pause_after=pause))

    async def run():
        lease = Leases().get("me")
        begin = asyncio.get_running_loop().time()
        with pytest.raises(ApiError, match="renewed its lease") as raised:
            await api.serving.completions(CMPL, Caller(lease=lease))
        assert (raised.value.status, raised.value.code) == (408, "client_gone")
        assert 0.2 <= asyncio.get_running_loop().time() - begin < 2

    asyncio.run(run())
    assert not api.engine.running and len(api.engine.aborted) == 1


def test_a_renewed_lease_holds(make_api, bytes_of, monkeypatch):
    monkeypatch.setattr(caller, "LEASE_S", 1.0)
    api = make_api(Script([*bytes_of("abc"), 1], pause_after=1))

    async def run():
        leases = Leases()
        lease = leases.get("me")
        call = asyncio.create_task(api.serving.completions(CMPL, Caller(lease=lease)))
        for _ in range(14):
            await asyncio.sleep(0.1)
            leases.renew("me")
        leases.renew("unknown")
        api.engine.resume.set()
        assert (await call)["choices"][0]["text"] == "abc"
        leases.get("other")
        await asyncio.sleep(1.1)
        leases.get("third")
        assert len(leases._leases) == 1  # those that expired are forgotten

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------- tenants


def test_a_tenant_with_less_than_its_share_gets_in_when_it_is_full():
    admission = Admission(max_sequences=8)
    flood = [admission.enter([1], "a") for _ in range(8)]
    with pytest.raises(ApiError):
        admission.enter([1], "a")
    others = [admission.enter([1], "b") for _ in range(4)]  # half of the bound
    for tenant in ("a", "b"):
        with pytest.raises(ApiError):
            admission.enter([1], tenant)
    thirds = [admission.enter([1], "c") for _ in range(2)]  # a third
    with pytest.raises(ApiError):
        admission.enter([1], "c")
    for ticket in (*flood, *others, *thirds):
        ticket.leave()
    assert admission.num_sequences == admission.num_waiting_tokens == 0
    assert not admission._held


def test_requests_carry_the_tenant_of_their_key(make_api, bytes_of):
    api = make_api(Script([*bytes_of("x"), 1]), api_keys=ApiKeys(["one", "two"]))
    for key in ("one", "two", "one"):
        headers = {"Authorization": f"Bearer {key}"}
        assert api.request("POST", "/v1/completions", json=CMPL, headers=headers).status_code == 200
    first, second, third = (call.tenant for call in api.engine.calls)
    assert first == third != second
    assert "one" not in first and len(first) == 16
    assert make_api(Script([1])).complete().status_code == 200


def ends(engine: Engine) -> list[str]:
    return [delta.request_id for delta in engine.drain()]


def test_tenants_take_turns():
    engine = Engine(max_num_seqs=1)
    for i in range(6):
        engine.add(f"a{i}", [1, 2], tenant="a", max_tokens=2)
    for i in range(3):
        engine.add(f"b{i}", [1, 2], tenant="b", max_tokens=2)
    engine.add("c0", [1, 2], tenant="c", max_tokens=2, priority=-1)
    assert ends(engine) == ["c0", "a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]
    engine.check_rest()


def test_a_tenant_whose_requests_are_longer_has_fewer_of_them():
    engine = Engine(max_num_seqs=1)
    for i in range(4):
        engine.add(f"a{i}", [1, 2], tenant="a", max_tokens=22)
        engine.add(f"b{i}", [1, 2], tenant="b", max_tokens=6)
    order = ends(engine)
    assert order.index("b3") < order.index("a2")


def test_one_that_was_idle_has_saved_up_nothing():
    engine = Engine(max_num_seqs=1)
    for i in range(50):
        engine.add(f"a{i}", [1, 2], tenant="a", max_tokens=2)
    assert len(ends(engine)) == 50
    for i in range(4):
        engine.add(f"a{i}", [1, 2], tenant="a", max_tokens=2)
        engine.add(f"b{i}", [1, 2], tenant="b", max_tokens=2)
    order = ends(engine)
    assert {order.index(f"a{i}") // 2 for i in range(4)} == {0, 1, 2, 3}  # one of each pair


def test_without_tenants_it_is_first_come_first_served():
    engine = Engine(max_num_seqs=1)
    for i in range(8):
        engine.add(f"r{i}", [1, 2], max_tokens=1 + 20 * (i % 2))
    assert ends(engine) == [f"r{i}" for i in range(8)]
