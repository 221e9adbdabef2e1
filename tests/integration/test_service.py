"""The whole service as its clients see it: stratad as a process, the real engine, several HTTP clients at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stratad.launch import engine_path
from stratad.settings import Settings

pytestmark = pytest.mark.skipif(engine_path(Settings()) is None, reason="strata-engine is not built")

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to twenty.",
    "Tell me a story about a dog.",
    "What is two plus three?",
    "Who are you?",
    "Name some colours.",
    "What is the capital of Italy?",
    "Write a poem about the sea.",
)


class Service:
    """A running daemon and a client for it."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        self.log = (tmp_path / "log").open("wb")
        places = ("--listen", address, "--state", str(tmp_path / "state"), "--control", str(tmp_path / "c.sock"))
        program = "import sys; from stratad.cli import main; sys.exit(main())"
        self.process = subprocess.Popen([sys.executable, "-c", program, *places, *options], stderr=self.log)
        deadline = time.monotonic() + 30
        with httpx.Client(base_url=self.url, verify=False) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        return
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
            self.log.close()

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=60, verify=False, limits=limits)


@contextlib.contextmanager
def service(tmp_path: Path, *options: str) -> Iterator[Service]:
    running = Service(tmp_path, *options)
    try:
        yield running
    finally:
        running.stop()


def chat(question: str, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 120,
        "ignore_eos": True,
    }
    return {**body, **fields}


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The text of a streamed answer, which must end as it should."""
    text, finish, last = "", None, ""
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                data = json.loads(line[6:])
                assert "error" not in data, data
                text += data["choices"][0]["delta"].get("content") or ""
                finish = data["choices"][0]["finish_reason"] or finish
            last = line or last
    assert last == "data: [DONE]" and finish == "length"
    return text


async def figures(client: httpx.AsyncClient) -> dict[str, Any]:
    metrics: dict[str, Any] = (await client.get("/metrics", headers={"Accept": "application/json"})).json()
    return metrics


async def until_idle(client: httpx.AsyncClient, seconds: float) -> None:
    """Nothing runs and nothing waits, within so many seconds."""
    async with asyncio.timeout(seconds):
        while (live := (await figures(client))["live"])["running"] or live["queued"]:
            await asyncio.sleep(0.02)


async def test_eight_clients_at_once_and_the_engine_killed_under_them(tmp_path: Path) -> None:
    with service(tmp_path, "--parallel", "4") as running:
        async with running.client() as client:
            bodies = [chat(question, temperature=n % 2, seed=n) for n, question in enumerate(QUESTIONS)]
            alone = [await streamed(client, body) for body in bodies]
            answers = [asyncio.create_task(streamed(client, body)) for body in bodies]
            for _ in range(2):
                await asyncio.sleep(0.4)
                pid = (await client.get("/v1/status")).json()["engine"]["pid"]
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*answers) == alone
            status = (await client.get("/v1/status")).json()
            assert status["concurrency"] == {"serving": 4, "requested": 4} and status["requests"]["failed"] == 0
            totals = (await figures(client))["totals"]
            assert totals["finished"] == totals["submitted"] == 2 * len(QUESTIONS)


async def hang_up(client: httpx.AsyncClient, body: dict[str, Any], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await client.post("/v1/chat/completions", json=body)
            raise AssertionError("it was answered before its client could leave")


async def test_clients_that_hang_up_free_their_places(tmp_path: Path) -> None:
    with service(tmp_path, "--parallel", "1", "--engine-args=--chunk 64") as running:
        async with running.client() as client:
            long = chat("Go on for ever.", max_tokens=3900)
            reading = {**chat("word " * 3500), "max_tokens": 1}
            for body in (long, {**long, "stream": True}, {**reading, "stream": True}):
                await hang_up(client, body, 0.3)
                await until_idle(client, 2)
            answer = asyncio.create_task(streamed(client, chat(QUESTIONS[0], max_tokens=400)))
            while (await figures(client))["live"]["running"] == 0:
                await asyncio.sleep(0.01)
            started = (await figures(client))["totals"]["started"]
            await hang_up(client, chat(QUESTIONS[1]), 0.1)
            text = await answer
            await until_idle(client, 2)
            totals = (await figures(client))["totals"]
            assert totals["started"] == started and totals["cancelled"] == 4 and totals["failed"] == 0
            assert await streamed(client, chat(QUESTIONS[0], max_tokens=400)) == text


async def test_a_herd_meets_the_bound_of_the_queue(tmp_path: Path) -> None:
    with service(tmp_path, "--parallel", "2", "--queue-limit", "8") as running:
        async with running.client() as client:
            body = chat(QUESTIONS[0], max_tokens=300)

            async def ask() -> tuple[int, str | None]:
                response = await client.post("/v1/chat/completions", json=body)
                return response.status_code, response.headers.get("retry-after")

            answers = Counter(await asyncio.gather(*(ask() for _ in range(200))))
            refused = sum(count for (status, retry), count in answers.items() if status == 429 and retry)
            assert answers[200, None] + refused == 200 and answers[200, None] >= 10
            totals = (await figures(client))["totals"]
            assert totals["refused"] == refused and totals["finished"] == answers[200, None]
            assert totals["submitted"] == totals["started"] == totals["finished"]
