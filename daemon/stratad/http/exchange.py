"""Runs one generation for one HTTP request, streamed or not; the API's own shapes come from a `Dialect`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Send
from stratad.errors import StrataError
from stratad.http import sse
from stratad.http.answer import AnswerText, Piece
from stratad.http.drain import Drain
from stratad.http.errors import send_json
from stratad.http.feed import ClientLeft, Feed
from stratad.tokens import Tokens
from stratad.types import Done, Event, Generation, Token

KEEP_ALIVE_S = 10.0
"""Silence after which a stream gets a comment, so that nobody on the way gives up on it."""

HEADER_WAIT_S = 1.0
"""A stream's status line waits this long for the first event, so that early failures have a status of their own."""


class Dialect(Protocol):
    """How one API writes an answer down."""

    def opening(self) -> bytes:
        """Events before the first text."""
        ...

    def text(self, text: str) -> bytes:
        """The event for text without logprobs; the one that must be quick."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """The event for text with logprobs."""
        ...

    def closing(self, finish: str, usage: Mapping[str, Any], timings: Mapping[str, Any] | None) -> bytes:
        """Events after the last text, without `[DONE]`."""
        ...

    def whole(
        self, pieces: Sequence[Piece], finish: str, usage: Mapping[str, Any], timings: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The answer in one object."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to give: what runs, how its text ends, how it is written down."""

    generation: Generation
    dialect: Dialect
    tokens: Tokens
    prompt_tokens: int
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool


async def run(job: Job, receive: Receive, send: Send, drain: Drain) -> None:
    """Answer the request. Raises StrataError only as long as nothing has been sent."""
    async with Feed(job.generation, receive, drain) as feed:
        exchange = _Exchange(job, feed, send)
        try:
            await (exchange.stream() if job.stream else exchange.whole())
        except ClientLeft:
            return


class _Exchange:
    def __init__(self, job: Job, feed: Feed, send: Send) -> None:
        self._job, self._feed, self._send = job, feed, send
        self._loop = asyncio.get_running_loop()
        self._answer = AnswerText(job.tokens, job.stops, job.logprobs)
        self._done: Done | None = None
        self._written = 0.0  # loop time of the last bytes to the client

    # -- in one piece

    async def whole(self) -> None:
        pieces: list[Piece] = []
        while (events := await self._next(None)) is not None:
            pieces += [self._answer.piece(text) for text in self._texts(events)]
        pieces.append(self._answer.piece(self._answer.flush(), last=True))
        finish = self._finish()
        body = self._job.dialect.whole(pieces, finish, self._usage(), self._timings())
        await send_json(self._send, 200, body)

    # -- as a stream

    async def stream(self) -> None:
        events = await self._next(HEADER_WAIT_S)
        await self._send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        self._written = self._now()
        await self._write(self._job.dialect.opening())
        try:
            while events is not None:
                await self._write(b"".join(map(self._event, self._texts(events))) or self._sign_of_life())
                events = await self._next(max(0.0, self._next_sign() - self._now()))
            ending = self._ending()
        except StrataError as error:
            ending = sse.error_event(error)
        await self._write(ending + sse.DONE, more=False)

    def _sign_of_life(self) -> bytes:
        """A comment if the client has heard nothing for long, whatever the engine has been saying meanwhile."""
        return sse.KEEP_ALIVE if self._now() >= self._next_sign() else b""

    def _next_sign(self) -> float:
        return self._written + KEEP_ALIVE_S

    def _now(self) -> float:
        return self._loop.time()

    def _event(self, text: str) -> bytes:
        if self._job.logprobs:
            return self._job.dialect.piece(self._answer.piece(text))
        return self._job.dialect.text(text)

    def _ending(self) -> bytes:
        rest = self._answer.piece(self._answer.flush(), last=True)
        text = self._job.dialect.piece(rest) if rest.text or rest.tokens else b""
        return text + self._job.dialect.closing(self._finish(), self._usage(), self._timings())

    async def _write(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            self._written = self._now()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    # -- common

    async def _next(self, silence_s: float | None) -> list[Event] | None:
        """The next events; None when the answer is over, by itself or by a stop string."""
        if self._answer.stop is not None:
            self._note_done(await self._feed.stop())
            return None
        return await self._feed.take(silence_s)

    def _texts(self, events: Sequence[Event]) -> list[str]:
        self._note_done(events)
        texts = (self._answer.feed(event) for event in events if type(event) is Token)
        return [text for text in texts if text]

    def _note_done(self, events: Sequence[Event]) -> None:
        if events and type(events[-1]) is Done:
            self._done = events[-1]

    def _finish(self) -> str:
        """`stop` or `length`. Raises StrataError `cancelled` when somebody else ended the answer."""
        if self._answer.stop is not None:
            return "stop"
        if self._done is None:
            raise StrataError("internal", "the answer ended without a last word")
        if self._done.finish == "cancel":
            raise StrataError("cancelled", "the answer was ended by the operator")
        return self._done.finish

    def _usage(self) -> dict[str, Any]:
        prompt, answer = self._job.prompt_tokens, self._answer.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self._done.reused if self._done else 0},
        }

    def _timings(self) -> dict[str, Any] | None:
        """Engine time under llama.cpp's names; None when the engine did not say."""
        done = self._done
        if done is None:
            return None
        read = max(0, done.prompt_tokens - done.reused)
        drafts = {"draft_n": done.drafts_offered, "draft_n_accepted": done.drafts_accepted}
        return {
            "cache_n": done.reused,
            **_timing("prompt", read, done.prompt_ms),
            **_timing("predicted", done.generated, done.decode_ms),
            **(drafts if done.drafts_offered else {}),
        }


def _timing(name: str, tokens: int, milliseconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / tokens if tokens else 0.0,
        f"{name}_per_second": 1000.0 * tokens / milliseconds if milliseconds > 0 else 0.0,
    }


def now() -> int:
    """Seconds since 1970, for `created`."""
    return int(time.time())
