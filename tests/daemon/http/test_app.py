"""Everything around the answers: health, status, models, unknown paths, the front as the daemon has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from stratad.config import ConfigError
from stratad.http.app import open_http
from stratad.model_file import Model
from stratad.tokens import Tokens

from tests.daemon.conftest import GGUF_FILE
from tests.daemon.http.conftest import Server, until, within
from tests.daemon.scripted import ScriptedService


async def test_health_is_ok_when_a_request_would_be_served(server: Server) -> None:
    response = await server.client.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "service": "strata", "model": "strata-tiny-moe-Q4_0"}


@pytest.mark.parametrize("state", ["starting", "loading", "restarting", "failed", "draining", "stopping"])
async def test_health_says_why_not(server: Server, state: str) -> None:
    server.service.state = {"state": state, "state_detail": "43 % or so", "engine": {"load_percent": 43}}
    response = await server.client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": state, "service": "strata", "reason": "43 % or so", "load_percent": 43}
    assert "retry-after" in response.headers


async def test_while_the_model_file_is_read_requests_are_turned_away(server: Server) -> None:
    server.context.model = None
    assert (await server.client.get("/health")).json()["status"] == "loading"
    response = await server.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_loading")
    assert (await server.client.get("/v1/models")).json()["data"] == []


async def test_before_the_engine_is_there_the_scheduler_decides(server: Server) -> None:
    server.service.facts = None
    body = (await server.chat()).json()
    assert body["system_fingerprint"] is None
    assert server.service.last.max_new == 4096 - len(server.service.last.prompt_ids)


async def test_models(server: Server, model: Model) -> None:
    listed = (await server.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    entry = listed["data"][0]
    assert (entry["id"], entry["object"], entry["created"]) == (model.name, "model", model.created)
    assert entry["meta"] == {"n_ctx": 4096, "n_ctx_train": 4096, "n_vocab": 8192}
    assert (await server.client.get(f"/v1/models/{model.name}")).json() == entry
    missing = await server.client.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_status_is_the_snapshot(server: Server) -> None:
    assert (await server.client.get("/v1/status")).json() == server.service.state


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/%00%ff", 404, "not_found"),
    ],
)
async def test_other_paths_and_methods(server: Server, method: str, path: str, status: int, code: str) -> None:
    response = await server.client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


async def test_head_of_health(server: Server) -> None:
    response = await server.client.head("/health")
    assert (response.status_code, response.text) == (200, "")


async def test_http2_that_breaks_off_leaves_the_others_alone(server: Server) -> None:
    reader, writer = await server.connect()
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64)
    writer.write_eof()
    await within(3, reader.read())
    writer.close()
    assert (await server.client.get("/health")).status_code == 200


async def test_a_request_that_is_no_http(server: Server) -> None:
    reader, writer = await server.connect()
    writer.write(b"\x16\x03\x01\x02\x00 not HTTP at all\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


def front_service(tokens: Tokens, **values: Any) -> ScriptedService:
    service = ScriptedService(tokens)
    for name, value in {"listen": ("127.0.0.1:0",), "model": str(GGUF_FILE), **values}.items():
        service.settings.set_runtime(name, value)
        service.settings.adopt("daemon-restart")
        service.settings.adopt("engine-restart")
    return service


async def test_the_front_binds_reads_the_model_answers_and_ends(tokens: Tokens) -> None:
    service = front_service(tokens, model_name="tiny")
    front = await open_http(service)
    assert len(front.addresses) == 1
    url = f"http://{front.addresses[0]}"
    await front.start()
    async with httpx.AsyncClient(base_url=url) as client:
        body = (await client.post("/v1/completions", json={"prompt": "hi"})).json()
        assert (body["model"], body["choices"][0]["text"]) == ("tiny", "Hello there.")
        await front.stop_accepting()
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(f"{url}/health")
        await until(lambda: front.addresses == [])
    await front.close(1)


async def test_a_model_file_that_cannot_be_read_is_a_configuration_error(tokens: Tokens, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but not really")
    front = await open_http(front_service(tokens, model=str(bad)))
    with pytest.raises(ConfigError, match=r"bad\.gguf"):
        await front.start()
    await front.close(0)


@pytest.mark.parametrize(
    ("accept", "json"),
    [
        (None, False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("text/plain;q=0.5, application/json;q=0.9", True),
        ("text/plain, application/json;q=0.9", False),
        ("application/json;q=0", False),
    ],
)
async def test_metrics_in_the_form_that_is_accepted(server: Server, accept: str | None, json: bool) -> None:
    response = await server.client.get("/metrics", headers={} if accept is None else {"Accept": accept})
    assert response.status_code == 200
    if json:
        assert response.headers["content-type"] == "application/json" and response.json() == {"live": {"slots": []}}
    else:
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert response.text.endswith("strata_x 1\n")
