"""Slots of a running engine: requests in flight, their lines sorted by slot, and what each one said.

Comparisons are over texts: the part of a token's line behind its tag, log-probabilities included, as the engine wrote
it. The oracle is the same request alone, in an engine with one thread, no drafts and nothing kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.native.driver import MODEL, Engine, Refused

_DONE = ["prompt_tokens", "prompt_ms", "decode_ms", "finish", "accepted", "offered", "reused"]
_BDONE = [
    "finish",
    "ms",
    "accepted",
    "offered",
    "prompt_tokens",
    "reused",
    "prompt_ms",
    "decode_ms",
    "prompt_tokens_read",
]
HIDDEN = -1  # the slot of GEN, whose lines carry no tag
ENGINE_KEYS = frozenset({"ckpt", "pin", "spec_min_p", "spec_p_cum", "spec_p_cum_deep"})  # without a say in the text


@dataclass(frozen=True)
class Request:
    """A prompt and what is asked for."""

    ids: tuple[int, ...]
    max_new: int
    keys: tuple[tuple[str, Any], ...] = ()

    def line(self, slot: int) -> str:
        """As a BGEN, or a GEN for the hidden slot."""
        head = f"GEN {self.max_new}" if slot == HIDDEN else f"BGEN {slot} {self.max_new}"
        return " ".join([head, *(f"{k}={v}" for k, v in self.keys), ",".join(map(str, self.ids))])

    def plain(self) -> Request:
        """Only what decides the text."""
        return Request(self.ids, self.max_new, tuple(sorted((k, v) for k, v in self.keys if k not in ENGINE_KEYS)))

    def after(self, texts: Sequence[str]) -> Request:
        """The request that goes on behind these tokens of its answer, as a daemon sends it after a crash."""
        keys = dict(self.keys)
        keys.setdefault("out_from", len(self.ids))
        more = tuple(int(text.split()[0]) for text in texts)
        return Request(self.ids + more, self.max_new - len(texts), tuple(keys.items()))


def request(ids: Sequence[int], max_new: int, **keys: Any) -> Request:
    return Request(tuple(ids), max_new, tuple(keys.items()))


@dataclass
class Stream:
    """One request in a slot, from its BGEN to the line that ends it."""

    slot: int
    request: Request
    texts: list[str] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    resumed: int | None = None
    admitted: bool = False
    yielded: int | None = None  # tokens held when it gave way
    done: dict[str, str] = field(default_factory=dict)
    error: tuple[str, str] | None = None

    @property
    def ended(self) -> bool:
        return bool(self.done) or self.error is not None

    @property
    def finish(self) -> str:
        return self.done["finish"] if self.done else f"error {self.error}"

    @property
    def tokens(self) -> list[int]:
        return [int(text.split()[0]) for text in self.texts]

    def take(self, word: str, rest: list[str]) -> None:
        """Account for one of its lines; everything must come in its place."""
        assert not self.ended, f"slot {self.slot} speaks after its end: {word} {rest}"
        if word in ("BRESUME", "RESUME"):
            assert self.resumed is None and not self.admitted
            self.resumed = int(rest[0])
            assert 0 <= self.resumed < len(self.request.ids)
        elif word in ("BPP", "PP"):
            assert self.resumed is not None and not self.admitted
            position, total = int(rest[0]), int(rest[1])
            assert total == len(self.request.ids) and 0 < position <= total
            self.progress.append(position)
        elif word in ("BADM", "REUSED"):
            assert self.progress and self.progress[-1] == len(self.request.ids) and not self.admitted
            assert word == "REUSED" or rest == ["1"]
            self.admitted = True
        elif word in ("BT", "T"):
            assert self.admitted and len(self.texts) < self.request.max_new
            self.texts.append(" ".join(rest))
        elif word == "BDONE":
            self._end(dict(zip(["generated", *_BDONE], rest, strict=True)))
        elif word == "DONE":
            self._end({**dict(zip(["generated", *_DONE], rest, strict=False)), "prompt_tokens_read": rest[13]})
        else:
            raise AssertionError(f"slot {self.slot}: {word} {rest}")

    def _end(self, done: dict[str, str]) -> None:
        self.done = done
        assert int(done["generated"]) == len(self.texts), done
        assert int(done["prompt_tokens"]) == len(self.request.ids), done
        assert 0 <= int(done["accepted"]) <= int(done["offered"]), done
        assert int(done["prompt_tokens_read"]) >= 0, done
        assert done["finish"] in ("stop", "length", "cancel"), done
        if done["finish"] != "cancel":
            assert self.texts


class Slots:
    """An engine with slots. Use as a context: it must end well."""

    def __init__(
        self,
        *args: str | Path,
        model: str | Path = MODEL,
        env: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.engine = Engine(*args, model=model, env=env, pass_fds=pass_fds)
        self.running: dict[int, Stream] = {}
        self.pushed: dict[int, Stream] = {}  # sent to slots that were busy, as far as was known
        self.idle_errors: list[str] = []  # ERR and BERR lines that end no request
        self.stats: list[dict[str, Any]] = []
        self.yields: list[tuple[int, int]] = []
        self.transfers: list[list[str]] = []  # WANT, PARKED, RESTORED and XERR lines, as words

    def __enter__(self) -> Slots:
        self.engine.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.engine.__exit__(kind, exc, tb)

    def begin(self, slot: int, req: Request) -> Stream:
        """Send a request into an idle slot."""
        assert slot not in self.running
        stream = self.running[slot] = Stream(slot, req)
        self.engine.send(req.line(slot))
        return stream

    def push(self, slot: int, req: Request) -> Stream:
        """Send a request into a slot that runs one: it is refused, unless that one has ended meanwhile."""
        assert slot in self.running and slot not in self.pushed
        stream = self.pushed[slot] = Stream(slot, req)
        self.engine.send(req.line(slot))
        return stream

    def _ended(self, slot: int) -> None:
        del self.running[slot]
        if slot in self.pushed:
            self.running[slot] = self.pushed.pop(slot)

    def take(self, timeout: float = 60) -> tuple[str, Stream | None]:
        """One line: its word and whose it is."""
        word, *rest = self.engine.line(timeout).split(" ")
        if word == "STAT":
            self.stats.append(json.loads(" ".join(rest)))
            return word, None
        if word in ("WANT", "PARKED", "RESTORED", "XERR"):
            self.transfers.append([word, *rest])
            return word, None
        if word == "YIELDED":
            slot, held = int(rest[0]), int(rest[1])
            self.yields.append((slot, held))
            stream = self.running.get(slot) or self.running[HIDDEN]
            stream.yielded = held
            return word, stream
        if word in ("BERR", "ERR"):
            return word, self._error(word, rest)
        slot = int(rest.pop(0)) if word in ("BRESUME", "BPP", "BADM", "BT", "BDONE") else HIDDEN
        stream = self.running[slot]
        stream.take(word, rest)
        if stream.ended:
            self._ended(slot)
        return word, stream

    def _error(self, word: str, rest: list[str]) -> Stream | None:
        slot = int(rest.pop(0)) if word == "BERR" else HIDDEN
        stream = self.running.get(slot)
        if rest[0] == "busy":
            stream = self.pushed.pop(slot)
            stream.error = (rest[0], " ".join(rest[1:]))
            return stream
        if stream is None or (rest[0] not in ("pool_full", "context_full", "non_finite", "no_candidates", "internal")):
            self.idle_errors.append(" ".join(rest))
            return None
        stream.error = (rest[0], " ".join(rest[1:]))
        self._ended(slot)
        return stream

    def finish(self, *streams: Stream) -> None:
        """Take lines until these streams have ended (all that run, when none is named)."""
        while self.running and not (streams and all(s.ended for s in streams)):
            self.take()

    def run(self, slot: int, req: Request) -> Stream:
        """One request to its end."""
        stream = self.begin(slot, req)
        self.finish(stream)
        return stream

    def stat(self) -> dict[str, Any]:
        """STAT and its answer."""
        self.engine.send("STAT")
        n = len(self.stats)
        while len(self.stats) == n:
            self.take()
        return self.stats[-1]


class Oracle:
    """What each request says alone: one thread, no drafts, cold. Every answer is kept."""

    def __init__(self, model: str | Path = MODEL, *args: str) -> None:
        fixed = ["--spec", "0", "--threads", "1", "--prompt-cache-mib", "0"]
        self._slots = Slots(*fixed, *args, model=model)
        self._known: dict[Request, tuple[list[str], str]] = {}
        self._slots.__enter__()

    def close(self) -> None:
        self._slots.__exit__(None, None, None)

    def __call__(self, req: Request) -> tuple[list[str], str]:
        """Texts and the reason of the end."""
        plain = req.plain()
        if plain not in self._known:
            cold = Request(plain.ids, plain.max_new, (*plain.keys, ("ckpt", 0)))
            stream = self._slots.run(HIDDEN, cold)
            if stream.error:
                raise Refused(*stream.error)
            assert stream.resumed == 0
            self._known[plain] = (stream.texts, stream.finish)
        return self._known[plain]

    def check(self, *streams: Stream) -> None:
        """Each has said what it says alone; a cancelled one a beginning of it."""
        for s in streams:
            assert s.done, f"slot {s.slot} ended with {s.error}"
            texts, finish = self(s.request)
            if s.finish == "cancel":
                texts, finish = texts[: len(s.texts)], "cancel"
            where = next((i for i, (a, b) in enumerate(zip(s.texts, texts, strict=False)) if a != b), "the end")
            assert (s.texts, s.finish) == (texts, finish), f"slot {s.slot} differs at {where}"
