"""From tokens to what a client sees of them: text up to a stop string, and logprob entries that go with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stratad.detokenizer import Detokenizer
from stratad.stops import StopMatcher
from stratad.tokens import Tokens
from stratad.types import Token

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Piece:
    """Text that may go out, with the tokens it came from (only when logprobs are wanted) and where it begins."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    start: int = 0  # characters of the answer before this text


class AnswerText:
    """One answer in the making. Tokens that end it, and control tokens, add no text and have no entry.

    With logprobs a token's entry goes out with its first character, and not at all when a stop string swallows it.
    """

    def __init__(self, tokens: Tokens, stops: Sequence[str], logprobs: bool) -> None:
        self._bytes_of = tokens.token_bytes
        self._decode = Detokenizer()
        self._matcher = StopMatcher(stops)
        self._logprobs = logprobs
        self._waiting: deque[tuple[int, Token]] = deque()  # (characters decoded before it, token)
        self._decoded = 0  # characters
        self._released = 0
        self.tokens = 0  # received, up to the one that completed a stop string

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.hit

    def feed(self, token: Token) -> str:
        """The text that may go out now that `token` has come; nothing once a stop string was found."""
        if self._matcher.hit is not None:
            return ""
        self.tokens += 1
        data = self._bytes_of(token.id)
        text = self._decode.feed(data)
        if self._logprobs:
            if data:
                self._waiting.append((self._decoded, token))
            self._decoded += len(text)
        return self._matcher.feed(text)

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self._matcher.hit is not None:
            return ""
        return self._matcher.feed(self._decode.flush()) + self._matcher.flush()

    def piece(self, text: str, last: bool = False) -> Piece:
        """`text` as `feed` or `flush` gave it, with the entries that belong to it; `last` after `flush`."""
        piece = Piece(text, start=self._released)
        self._released += len(text)
        everything = last and self._matcher.hit is None
        while self._waiting and (everything or self._waiting[0][0] < self._released):
            piece.tokens.append(self._waiting.popleft()[1])
        return piece


def chat_logprobs(pieces: Sequence[Piece], tokens: Tokens) -> list[dict[str, object]]:
    """Entries as in `choices[].logprobs.content`."""
    return [_chat_entry(token, tokens) for piece in pieces for token in piece.tokens]


def _chat_entry(token: Token, tokens: Tokens) -> dict[str, object]:
    top = [_alternative(other, logprob, tokens) for other, logprob in token.top]
    return {**_alternative(token.id, token.logprob, tokens), "top_logprobs": top}


def _alternative(token: int, logprob: float | None, tokens: Tokens) -> dict[str, object]:
    data = tokens.token_bytes(token) or tokens.text_of(token).encode()
    return {"token": tokens.text_of(token), "logprob": finite(logprob), "bytes": list(data)}


def completion_logprobs(pieces: Sequence[Piece], tokens: Tokens) -> dict[str, list[object]]:
    """Columns as in the completions form of `choices[].logprobs`; offsets are characters of the answer."""
    columns: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        offset = piece.start
        for token in piece.tokens:
            text = tokens.text_of(token.id)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(finite(token.logprob))
            columns["top_logprobs"].append({tokens.text_of(other): finite(value) for other, value in token.top})
            columns["text_offset"].append(offset)
            offset += len(text)
    return columns


def finite(logprob: float | None) -> float | None:
    """A logprob that JSON can hold."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
