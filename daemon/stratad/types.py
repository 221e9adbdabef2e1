"""Values that cross the daemon's rooms: a generation request, the events it yields, the engine's facts.

Contract between the HTTP layer (which makes a `GenRequest` and reads events) and the scheduler (which owns the
engine). Nothing here knows of HTTP, of processes or of tokenizers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "cancel"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as the engine takes them (ARITHMETIC rule 9). The seed is always set by the daemon."""

    temperature: float = 1.0  # <= 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    penalty_last_n: int = 64
    seed: int = 0  # any 64-bit integer
    choice: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none wanted; 0..20: alternatives per token


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One answer to generate: prompt token ids, the largest number of new tokens, and how to sample them."""

    prompt_ids: tuple[int, ...]
    max_new: int
    sampling: Sampling
    client: str = ""  # who asks, for fairness and logs; never prompt text
    end_ids: frozenset[int] = frozenset()  # tokens that end an answer, so that it can be ended without the engine
    tune: Mapping[str, float] = field(default_factory=dict)  # `spec_*` keys for this request; they change speed only


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt reading: `position` of `total` prompt tokens are read; `reused` of them came from a held session."""

    position: int
    total: int
    reused: int


@dataclass(frozen=True, slots=True)
class Token:
    """One produced token (the end token included); logprob and alternatives from the raw logits when asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Last event of a generation. `finish` is the engine's word; milliseconds are engine time.

    The figures are about the client's request, whatever happened to it meanwhile: `reused` counts the prompt tokens
    that were held when it first began, and a prompt that was read again is counted once.
    """

    finish: FinishReason
    generated: int
    prompt_tokens: int
    reused: int
    prompt_ms: float
    decode_ms: float
    drafts_offered: int = 0
    drafts_accepted: int = 0


Event = Progress | Token | Done


class Generation(Protocol):
    """A running or queued answer. Iterate it for events; it ends after `Done` or raises `errors.StrataError`."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def cancel(self) -> None:
        """Stop within one token (decoding) or one chunk (reading), or leave the queue. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine said of itself before READY: `info` holds every INFO key, `max_context` is READY's number."""

    max_context: int
    info: Mapping[str, str]


class Service(Protocol):
    """What HTTP and control see of the daemon."""

    def submit(self, request: GenRequest) -> Generation:
        """Queue a request. Raises StrataError `queue_full`, `engine_loading` or `engine_down` at once."""
        ...

    @property
    def facts(self) -> EngineFacts | None:
        """None until the engine has said READY."""
        ...

    def status(self) -> dict[str, object]:
        """A snapshot for `stratactl status --json` and `GET /v1/status`; never waits for the engine."""
        ...

    async def restart_engine(self) -> None:
        """End the engine in an orderly way and start another, with the settings that waited for that.

        Requests that run go on in it. Returns when it is ready. Raises StrataError `engine_down` when it cannot run,
        `invalid_value`, with nothing done, when a file that it needs is missing, `draining` while the daemon stops.
        """
        ...

    def metrics(self) -> dict[str, object]:
        """Everything that `GET /metrics` shows as JSON; never waits for the engine."""
        ...

    def metrics_text(self) -> str:
        """The same figures in Prometheus' text format 0.0.4."""
        ...
