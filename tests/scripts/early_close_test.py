"""A client that stops reading a streamed answer early leaves none of its tokens to the next request.

Alone, and with a second request running. The key, where the server wants one, is in STRATA_KEY. Exits with 1 when a
text differs from what the same request says undisturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import urllib.request
from http.client import HTTPResponse
from typing import Any

QUESTIONS = ("Tell me a story about a dog.", "Count from one to twenty.", "What is the capital of France?")


class Server:
    """A running server, asked with temperature 0."""

    def __init__(self, url: str, tokens: int, timeout: float) -> None:
        self.url, self.tokens, self.timeout = url.rstrip("/"), tokens, timeout
        self.failures = 0

    def open(self, question: str) -> HTTPResponse:
        """A streamed answer."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        body |= {"stream": True, "max_tokens": self.tokens}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("STRATA_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url}/v1/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout)
        return answer

    def ask(self, question: str) -> str:
        """The whole text."""
        text, ended = "", False
        with self.open(question) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])
                    if "error" in data:
                        raise ValueError(data["error"].get("message", "the stream ended in an error"))
                    text += "".join(c["delta"].get("content") or "" for c in data["choices"])
                ended |= line.startswith(b"data: [DONE]")
        if not ended:
            raise ValueError("the stream ended without [DONE]")
        return text

    def leave_early(self, question: str, lines: int) -> None:
        """Read so many lines of an answer, then hang up."""
        with self.open(question) as answer:
            for _ in range(lines):
                answer.readline()

    def say(self, what: str, got: str, want: str) -> None:
        """Report one comparison."""
        self.failures += got != want
        print(f"ok    {what}" if got == want else f"FAIL  {what}: {got[:60]!r} instead of {want[:60]!r}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080", help="of the server")
    parser.add_argument("--rounds", type=int, default=3, help="of each test")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer at most")
    parser.add_argument("--timeout", type=float, default=60, help="seconds without a byte")
    args = parser.parse_args()
    server = Server(args.url, args.tokens, args.timeout)
    want = [server.ask(q) for q in QUESTIONS]
    for n in range(args.rounds):
        server.leave_early(QUESTIONS[0], 2 + 3 * n)
        server.say("after a client that left", server.ask(QUESTIONS[1]), want[1])
        got: list[str] = []
        running = threading.Thread(target=lambda got=got: got.append(server.ask(QUESTIONS[1])))
        running.start()
        server.leave_early(QUESTIONS[0], 2 + 3 * n)
        server.say("after one that left a running second", server.ask(QUESTIONS[2]), want[2])
        running.join()
        server.say("the running second itself", "".join(got), want[1])
        server.say("the one that left, asked again", server.ask(QUESTIONS[0]), want[0])
    print("all equal" if not server.failures else f"{server.failures} differ", flush=True)
    return min(server.failures, 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        sys.exit(1)
