"""A client that streams several answers at once and takes little processor time from the servers it measures.

While answers stream, what arrives is only kept with its time; it is taken apart afterwards.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.engine import BenchError

PATIENCE_S = 300.0


@dataclass
class Exchange:
    """One request on a connection of its own, and what came back, block by block."""

    connection: socket.socket
    began: float
    blocks: list[tuple[float, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Streamed:
    """One streamed answer. Times in seconds since its request was sent."""

    tokens: int
    first_s: float  # first text
    last_s: float  # last text
    end_s: float  # end of the answer

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / (self.last_s - self.first_s) if self.last_s > self.first_s else 0.0


@dataclass(frozen=True)
class Round:
    """Several answers asked for at the same time."""

    answers: Sequence[Streamed]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max(answer.end_s for answer in self.answers)

    @property
    def first_median_s(self) -> float:
        """Wait for the first text, the median over the clients."""
        return statistics.median(answer.first_s for answer in self.answers)

    @property
    def first_last_s(self) -> float:
        """Wait for the first text of the client that waited longest."""
        return max(answer.first_s for answer in self.answers)


def request_bytes(host: str, port: int, path: str, body: dict[str, Any]) -> bytes:
    """A POST on a connection that ends with its answer."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def ask_together(port: int, path: str, bodies: Sequence[dict[str, Any]], host: str = "127.0.0.1") -> Round:
    """Send all requests at once and read all answers to their ends. Raises BenchError unless all are whole."""
    requests = [request_bytes(host, port, path, body) for body in bodies]
    with selectors.DefaultSelector() as selector:
        exchanges = []
        began = time.monotonic()
        for request in requests:
            connection = socket.create_connection((host, port), timeout=PATIENCE_S)
            connection.sendall(request)
            exchanges.append(Exchange(connection, began))
            selector.register(connection, selectors.EVENT_READ, exchanges[-1])
        try:
            _read_all(selector, len(exchanges))
        finally:
            for exchange in exchanges:
                exchange.connection.close()
    return Round([streamed(exchange.blocks, exchange.began) for exchange in exchanges])


def _read_all(selector: selectors.BaseSelector, left: int) -> None:
    while left:
        ready = selector.select(PATIENCE_S)
        if not ready:
            raise BenchError(f"a server said nothing for {PATIENCE_S:.0f} s")
        for key, _ in ready:
            exchange: Exchange = key.data
            data = exchange.connection.recv(1 << 16)
            exchange.blocks.append((time.monotonic(), data))
            if not data:
                selector.unregister(key.fileobj)
                left -= 1


def dechunk(blocks: Sequence[tuple[float, bytes]]) -> tuple[int, list[tuple[float, bytes]]]:
    """The status of an HTTP/1.1 answer and its body, without chunk sizes, each piece with the time of its block."""
    head, body, rest, left = b"", [], b"", 0
    chunked = True
    for at, data in blocks:
        if not head:
            rest += data
            if b"\r\n\r\n" not in rest:
                continue
            head, _, data = rest.partition(b"\r\n\r\n")
            chunked, rest = b"chunked" in head.lower(), b""
        if not chunked:
            body.append((at, data))
            continue
        data, rest = rest + data, b""
        while data:
            if left:
                body.append((at, data[:left]))
                data, left = data[left:], max(0, left - len(data))
                continue
            line, end, following = data.lstrip(b"\r\n").partition(b"\r\n")
            if not end:
                rest = data
                break
            left, data = int(line.split(b";")[0], 16), following
    words = head.split(b" ", 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body


def events_of(body: Sequence[tuple[float, bytes]]) -> list[tuple[float, Any]]:
    """The JSON of every server-sent event, with the time when it was whole."""
    events: list[tuple[float, Any]] = []
    rest = b""
    for at, data in body:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in whole:
            if block.startswith(b"data: ") and block != b"data: [DONE]":
                events.append((at, json.loads(block[6:])))
    return events


def _text_of(event: Any) -> str:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        return str(delta.get("content") or delta.get("reasoning_content") or choice.get("text") or "")
    return ""


def streamed(blocks: Sequence[tuple[float, bytes]], began: float) -> Streamed:
    """What one answer was. Raises BenchError unless it was whole and said how many tokens it had."""
    status, body = dechunk(blocks)
    if status != 200:
        text = b"".join(data for _, data in body)[:200].decode(errors="replace")
        raise BenchError(f"a server answered with status {status or 'none'}: {text}")
    events = events_of(body)
    texts = [at for at, event in events if _text_of(event)]
    counts = [event["usage"]["completion_tokens"] for _, event in events if event.get("usage")]
    if not texts or not counts:
        errors = [str(event["error"]) for _, event in events if event.get("error")]
        raise BenchError(f"a server's stream was not whole: {errors or f'{len(events)} events'}")
    return Streamed(int(counts[-1]), texts[0] - began, texts[-1] - began, blocks[-1][0] - began)
