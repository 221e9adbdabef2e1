"""What the scheduler counts. Counters belong to the daemon's life and never go down, whatever the engine does."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from stratad.generation import ScheduledGeneration

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""Upper bounds in seconds; fine where a gap between tokens would be felt."""

RECORDS_KEPT = 100


class Histogram:
    """Observations in seconds, counted by bucket."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: Sequence[float] = LATENCY_BUCKETS) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)  # the last: above every bound
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.buckets, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket in which this share of the observations is reached; None for none at all."""
        wanted = share * self.count
        seen = 0
        for bound, count in zip(self.buckets, self.counts, strict=False):
            seen += count
            if seen >= wanted and seen:
                return bound
        return self.buckets[-1] if self.count else None


@dataclass(slots=True)
class Counters:
    """Requests since the daemon started. submitted = queued + running + finished + cancelled + failed."""

    submitted: int = 0
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0


@dataclass(slots=True)
class Drafts:
    """Drafts of the model's own drafter."""

    offered: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Rates:
    """Tokens per second of the last request that had any, in engine time."""

    decode_tok_s: float | None = None
    prompt_tok_s: float | None = None


@dataclass(slots=True)
class Tally:
    """Everything that is counted about requests."""

    requests: Counters = field(default_factory=Counters)
    by_finish: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancel", "draining", "error"), 0)
    )
    prompt_tokens: int = 0  # of requests that began
    reused_tokens: int = 0
    read_tokens: int = 0  # by the engine, again after a crash included
    output_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafts: list[Drafts] = field(default_factory=list)  # by slot
    recovered: int = 0  # requests taken on by a new engine
    yields: int = 0
    rates: Rates = field(default_factory=Rates)
    queue_wait: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    token_gap: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    records: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=RECORDS_KEPT))

    def draft(self, slot: int, offered: int, accepted: int) -> None:
        """Count the drafts of one leg."""
        while len(self.drafts) <= slot:
            self.drafts.append(Drafts())
        self.drafts[slot].offered += offered
        self.drafts[slot].accepted += accepted

    def end(self, generation: ScheduledGeneration, finish: str, now: float, wall: float) -> None:
        """A request that was submitted has ended; `finish` is one of `by_finish`."""
        if finish == "cancel":
            self.requests.cancelled += 1
        elif finish in ("stop", "length"):
            self.requests.finished += 1
        else:
            self.requests.failed += 1
        self.by_finish[finish] += 1
        figures, record = generation.figures, generation.record
        self.whole.observe(now - generation.submitted)
        began = figures.began
        self.records.appendleft(
            {
                "at": round(wall, 3),
                "finish": finish,
                "duration_s": round(now - generation.submitted, 3),
                "queued_s": round((now if began is None else began) - generation.submitted, 3),
                "first_token_s": _since(figures.first_token, generation.submitted),
                "prompt_tokens": len(record.prompt),
                "output_tokens": len(record.output),
                "reused": figures.reused or 0,
                "prompt_ms": round(figures.prompt_ms, 1),
                "decode_ms": round(figures.decode_ms, 1),
                "drafts_offered": figures.drafts_offered,
                "drafts_accepted": figures.drafts_accepted,
            }
        )

    def totals(self) -> dict[str, object]:
        """The plain counters, JSON-ready."""
        return {
            **asdict(self.requests),
            "by_finish": dict(self.by_finish),
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "prompt_tokens_read": self.read_tokens,
            "output_tokens": self.output_tokens,
            "prompt_seconds": round(self.prompt_seconds, 3),
            "decode_seconds": round(self.decode_seconds, 3),
            "drafts_offered": sum(slot.offered for slot in self.drafts),
            "drafts_accepted": sum(slot.accepted for slot in self.drafts),
            "recovered": self.recovered,
            "yields": self.yields,
        }


def _since(moment: float | None, start: float) -> float | None:
    return None if moment is None else round(moment - start, 3)
