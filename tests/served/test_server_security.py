"""Keys, hosts, origins and request ids, against a running server."""

import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.routing import Route

from pocketllm.engine.serving.apis.text_routes import NOT_SERVED
from pocketllm.engine.serving.app import create_app
from pocketllm.engine.serving.settings import ServerSettings, is_loopback, read_api_keys
from pocketllm.engine.serving.transport.malformed import ReadableRefusals
from pocketllm.errors import OptionError
from tests.served.conftest import Served
from tests.served.scripted import ScriptedEngine

KEYS = ("first-key", "second-key")
BODY = {"prompt": "a"}


@pytest.fixture(scope="module")
def guarded() -> Served:
    server = Served(ScriptedEngine(), ServerSettings(api_keys=KEYS))
    yield server
    server.stop()


def routes() -> list[str]:
    app = create_app(ScriptedEngine(), ServerSettings())
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    return [path.replace("{name:path}", "scripted").replace("{rest:path}", "x") for path in paths]


VARIANTS = ["{}", "/{}", "{}/", "/v1/..{}", "/health/..{}", "{}%2f", "{}?x=/health", "/health//..{}", "{};/health"]


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_every_route_but_health_and_ready_asks_for_a_key(guarded: Served, method: str) -> None:
    not_served = tuple(f"/v1/{first}" for first in NOT_SERVED)
    paths = [
        *(path for path in routes() if not path.startswith(not_served)),
        "/v1/embeddings",
        "/",
        "/docs",
        "/openapi.json",
        "/invocations",
        "/v1/messages",
        "/tokenize",
        "/HEALTH",
        "/METRICS",
    ]
    for path, variant in itertools.product(paths, VARIANTS):
        target = variant.format(path)
        if target.partition("?")[0] in ("/health", "/ready"):
            continue
        for headers in ({}, {"authorization": "Bearer wrong"}):
            status = raw_status(guarded, method, target, headers)
            assert status == 401, (method, target)


def raw_status(server: Served, method: str, target: str, headers: dict[str, str]) -> int:
    """The status of a request whose path no client library has tidied."""
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", "connection: close", "content-length: 0"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with server.raw(("\r\n".join(lines) + "\r\n\r\n").encode()) as connection:
        return int(connection.recv(65536).split()[1])


def test_the_routes_that_exist_are_the_ones_the_test_above_knows() -> None:
    assert set(routes()) == {
        "/v1/models",
        "/v1/models/scripted",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/requests/scripted/cancel",
        "/",
        "/status",
        "/openapi.json",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        *(f"/v1/{first}{rest}" for first in NOT_SERVED for rest in ("", "/x")),
        "/rerank",
        "/health",
        "/ready",
        "/metrics",
        "/reset_prefix_cache",
    }


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(guarded: Served, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}

    assert guarded.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    assert guarded.client.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "first-key",
        "Basic first-key",
        "Bearer first-key2",
        "Bearer first-ke",
        "Bearer FIRST-KEY",
    ],
)
def test_anything_else_does_not_open(guarded: Served, value: str) -> None:
    response = guarded.client.post("/v1/completions", json=BODY, headers={"authorization": value})

    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_a_key_may_come_the_way_anthropics_client_sends_it(guarded: Served) -> None:
    def status(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return guarded.client.post("/v1/completions", json=BODY, headers=named).status_code

    assert status(x_api_key="first-key") == 200
    assert status(x_api_key="wrong") == 401
    assert status(x_api_key="first-key", authorization="Bearer wrong") == 401
    refused = guarded.client.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert refused.json()["error"]["type"] == "authentication_error"


def test_a_browser_is_asked_for_the_key_of_the_status_page(guarded: Served) -> None:
    refused = guarded.client.get("/")

    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert guarded.client.get("/", auth=("anyone", "first-key")).status_code == 200
    assert guarded.client.get("/status", auth=("anyone", "second-key")).json()["phase"] == "ready"
    assert guarded.client.get("/status", auth=("first-key", "wrong")).status_code == 401
    assert guarded.client.get("/status", headers={"authorization": "Basic !"}).status_code == 401


def test_two_keys_in_one_request_do_not_open(guarded: Served) -> None:
    headers = [("authorization", "Bearer wrong"), ("authorization", "Bearer first-key")]

    assert guarded.client.post("/v1/completions", json=BODY, headers=headers).status_code == 401


def test_health_and_ready_are_open(guarded: Served) -> None:
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.get("/ready").status_code == 200
    assert guarded.client.head("/health").status_code == 200
    assert guarded.client.head("/health").content == b""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "0.0.0.0", "[::2]"])
def test_a_name_rebound_to_loopback_is_refused(module_server: Served, host: str) -> None:
    for path in ("/v1/models", "/health", "/metrics"):
        response = module_server.client.get(path, headers={"host": host})

        assert response.status_code == 403
        assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9", "[::1]:80"])
def test_loopback_names_are_served(module_server: Served, host: str) -> None:
    assert module_server.client.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_host_that_was_allowed_is_served(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedEngine(), ServerSettings(allowed_hosts=("box.lan",)))

    assert server.client.get("/v1/models", headers={"host": "box.lan:8000"}).status_code == 200


def test_a_web_page_gets_no_cors_headers_and_no_answer(module_server: Served) -> None:
    origin = {"origin": "https://evil.example"}
    preflight = module_server.client.options(
        "/v1/completions", headers=origin | {"access-control-request-method": "POST"}
    )
    post = module_server.client.post("/v1/completions", json=BODY, headers=origin)
    get = module_server.client.get("/v1/models", headers=origin)

    assert (preflight.status_code, post.status_code) == (405, 403)
    for response in (preflight, post, get):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_page_of_this_very_host_may_post(module_server: Served) -> None:
    headers = {"origin": module_server.url}

    assert module_server.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1.2:3_x", "abc-1.2:3_x"), ("a b\tc", "abc"), ("<script>", "script"), ("x" * 500, "x" * 128)],
)
def test_a_request_id_is_echoed_without_what_could_forge_a_log_line(
    module_server: Served, given: str, echoed: str
) -> None:
    for path in ("/v1/models", "/nowhere"):
        assert module_server.client.get(path, headers={"x-request-id": given}).headers["x-request-id"] == echoed


def test_a_request_without_an_id_gets_one(module_server: Served) -> None:
    ids = {module_server.client.get("/health").headers["x-request-id"] for _ in range(3)}

    assert len(ids) == 3


def test_bytes_that_are_no_http_do_not_hurt(module_server: Served) -> None:
    for data in (
        b"\0\xff\n\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    ):
        with module_server.raw(data) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert b" 500 " not in connection.recv(1000)
    assert module_server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"what is this\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: many\r\n\r\n",
        b"GET /" + b"a" * 70_000,
    ],
    ids=["garbage", "header", "length", "long line"],
)
def test_bytes_that_are_no_http_are_refused_in_the_api_s_words(module_server: Served, sent: bytes) -> None:
    with module_server.raw(sent) as connection:
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/json" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["error"]["code"] == "malformed_request"


@pytest.mark.parametrize(("started", "complete", "answers"), [(False, False, 1), (True, False, 0), (True, True, 1)])
def test_a_refusal_never_stands_inside_an_answer(started: bool, complete: bool, answers: int) -> None:
    protocol = ReadableRefusals.__new__(ReadableRefusals)
    protocol.cycle = SimpleNamespace(response_started=started, response_complete=complete)
    protocol.transport = Mock()
    protocol.send_400_response("garbage after a request")

    assert protocol.transport.write.call_count == answers
    protocol.transport.close.assert_called_once()


def test_a_body_with_two_lengths_is_refused_and_the_connection_ends(module_server: Served) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(body)
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    sent = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + hidden
    with module_server.raw(sent) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"ambiguous_body_length" in answer


def test_a_header_without_end_is_cut_off(module_server: Served) -> None:
    connection = module_server.raw(b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000)
    with connection, contextlib.suppress(ConnectionResetError):
        assert b" 400 " in connection.recv(1000)
    assert httpx.get(module_server.url + "/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan"])
def test_a_public_address_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(OptionError, match="--allow-unauthenticated"):
        ServerSettings(host=host)
    ServerSettings(host=host, api_keys=("k",))
    ServerSettings(host=host, allow_unauthenticated=True)


def test_loopback_addresses_are_known() -> None:
    assert [host for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost") if not is_loopback(host)] == []
    assert [host for host in ("0.0.0.0", "::", "localhost.evil", "") if is_loopback(host)] == []


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n two \n")

    assert read_api_keys(path, "three,one") == ("one", "two", "three")
    assert read_api_keys(None, None) == ()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "two words\n", "schlüssel\n", "\x7f\n"])
def test_a_file_without_a_usable_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)

    with pytest.raises(OptionError) as refused:
        read_api_keys(path, None)
    assert "schl" not in str(refused.value)
    assert "words" not in str(refused.value)


def test_a_key_file_that_is_missing_or_an_empty_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_api_keys(tmp_path / "none", None)
    with pytest.raises(OptionError, match="POCKETLLM_API_KEY"):
        read_api_keys(None, " , ")


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ({"host": " "}, "--host is empty"),
        ({"max_body_bytes": 0}, "--max-body-bytes 0 must be"),
        *(({"allowed_hosts": (name,)}, f"--allowed-host '{name}' must be") for name in ("", "box:80", "http://box")),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_their_flag(said: dict[str, Any], flag: str) -> None:
    with pytest.raises(OptionError, match=f"^{flag}"):
        ServerSettings(**said)
    assert ServerSettings(allowed_hosts=("box.lan", "fe80::1")).allowed_hosts


def test_settings_do_not_show_their_keys() -> None:
    assert "first-key" not in repr(ServerSettings(api_keys=KEYS))
