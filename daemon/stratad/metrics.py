"""`GET /metrics`: one table of every metric, from which the text for Prometheus and the manual's list are made.

A metric that is not known now has no sample; counters belong to the daemon's life and survive the engine's. The JSON
form holds the same figures, the slots one by one, and the requests that ended last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stratad.launch import model_name
from stratad.scheduler import Scheduler
from stratad.settings import Settings
from stratad.storage import Storage
from stratad.supervisor import EngineState, Supervisor
from stratad.tally import Histogram
from stratad.version import daemon_version

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class View:
    """Where figures come from."""

    settings: Settings
    supervisor: Supervisor
    scheduler: Scheduler
    storage: Storage
    uptime_s: float

    def stat(self, *keys: str) -> float | None:
        """A number of the engine's last STAT answer, None when there is none."""
        value: Any = self.supervisor.engine_stat
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def slots_in(self, state: str) -> int:
        """How many slots are idle, reading or decoding."""
        return sum(row["state"] == state for row in self.scheduler.slots())

    def rate(self, state: str) -> float:
        """Tokens per second over the slots that read, or decode."""
        rates = (row.get("tok_s") for row in self.scheduler.slots() if row["state"] == state)
        return float(sum(rate for rate in rates if isinstance(rate, int | float)))

    def stored(self, key: str) -> float | None:
        """A number of the store's section of the status, None where it is not known."""
        value = self.storage.describe().get(key)
        return float(value) if isinstance(value, int | float) else None

    def info(self) -> dict[str, str]:
        """What does not change while the daemon and the engine run."""
        facts = self.supervisor.facts.info if self.supervisor.facts is not None else {}
        return {
            "version": daemon_version(),
            "engine": facts.get("engine", ""),
            "model": model_name(self.settings),
            "identity": facts.get("identity", ""),
        }


Sample = tuple[Mapping[str, str], float | Histogram]
Source = Callable[[View], float | Histogram | list[Sample] | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. `name` stands without the prefix `strata_` and, for counters, without `_total`; `source` reads it."""

    name: str
    kind: Kind
    help: str
    source: Source
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as it is served."""
        return f"strata_{self.name}" + ("_total" if self.kind == "counter" else "")

    def samples(self, view: View) -> list[Sample]:
        """What is known now."""
        value = self.source(view)
        if value is None:
            return []
        return value if isinstance(value, list) else [({}, value)]


def _by(label: str, values: Mapping[str, float] | Sequence[float]) -> list[Sample]:
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    return [({label: str(key)}, value) for key, value in pairs]


def _engine_states(view: View) -> list[Sample]:
    return _by("state", {state.value: float(view.supervisor.state is state) for state in EngineState})


def _slot_states(view: View) -> list[Sample]:
    return _by("state", {state: view.slots_in(state) for state in ("idle", "reading", "decoding")})


def _puts(view: View) -> list[Sample]:
    puts = view.storage.describe().get("puts")
    return _by("outcome", {key: float(n) for key, n in puts.items()} if isinstance(puts, Mapping) else {})


def _store_states(view: View) -> list[Sample]:
    word = view.storage.state_text.partition(":")[0]
    return _by("state", {state: float(state == word) for state in ("ok", "off", "opening", "degraded")})


METRICS: tuple[Metric, ...] = (
    Metric("info", "gauge", "Always 1; says what runs.", lambda v: [(v.info(), 1.0)],
           ("version", "engine", "model", "identity")),
    Metric("uptime_seconds", "gauge", "Seconds since the daemon started.", lambda v: v.uptime_s),
    Metric("engine_state", "gauge", "1 for the state that the engine is in.", _engine_states, ("state",)),
    Metric("engine_restarts", "counter", "Times the engine was started again.", lambda v: float(v.supervisor.restarts)),
    Metric("slots", "gauge", "Slots of the engine by what they do.", _slot_states, ("state",)),
    Metric("slots_requested", "gauge", "Slots that the setting parallel asks for.",
           lambda v: float(v.settings.integer("parallel"))),
    Metric("requests_running", "gauge", "Requests that have begun and not ended.",
           lambda v: float(v.scheduler.running)),
    Metric("requests_waiting", "gauge", "Requests in the queue.", lambda v: float(v.scheduler.queued)),
    Metric("requests_submitted", "counter", "Requests taken into the queue.",
           lambda v: float(v.scheduler.tally.requests.submitted)),
    Metric("requests_started", "counter", "Requests that were given to the engine.",
           lambda v: float(v.scheduler.tally.requests.started)),
    Metric("requests_refused", "counter", "Requests turned away: queue full, loading, stopping.",
           lambda v: float(v.scheduler.tally.requests.refused)),
    Metric("requests", "counter", "Requests that ended, by how: stop, length, cancel, draining, error.",
           lambda v: _by("finish", {key: float(n) for key, n in v.scheduler.tally.by_finish.items()}), ("finish",)),
    Metric("requests_recovered", "counter", "Requests that went on in a new engine after the old one had died.",
           lambda v: float(v.scheduler.tally.recovered)),
    Metric("reads_yielded", "counter", "Times a long read gave way to a shorter prompt.",
           lambda v: float(v.scheduler.tally.yields)),
    Metric("prompt_tokens", "counter", "Prompt tokens of requests that began.",
           lambda v: float(v.scheduler.tally.prompt_tokens)),
    Metric("prompt_tokens_reused", "counter", "Of these, tokens that a held conversation or a checkpoint spared.",
           lambda v: float(v.scheduler.tally.reused_tokens)),
    Metric("prompt_tokens_read", "counter", "Prompt tokens that the engine read; again after its death included.",
           lambda v: float(v.scheduler.tally.read_tokens)),
    Metric("output_tokens", "counter", "Tokens produced.", lambda v: float(v.scheduler.tally.output_tokens)),
    Metric("prompt_seconds", "counter", "Engine time for reading prompts, summed over requests.",
           lambda v: v.scheduler.tally.prompt_seconds),
    Metric("decode_seconds", "counter", "Engine time for producing tokens, summed over requests.",
           lambda v: v.scheduler.tally.decode_seconds),
    Metric("draft_tokens_offered", "counter", "Tokens guessed ahead, by slot.",
           lambda v: _by("slot", [float(slot.offered) for slot in v.scheduler.tally.drafts]), ("slot",)),
    Metric("draft_tokens_accepted", "counter", "Of these, tokens that were right.",
           lambda v: _by("slot", [float(slot.accepted) for slot in v.scheduler.tally.drafts]), ("slot",)),
    Metric("decode_tokens_per_second", "gauge", "Tokens produced per second lately, over all slots.",
           lambda v: v.rate("decoding")),
    Metric("read_tokens_per_second", "gauge", "Prompt tokens read per second lately, over all slots.",
           lambda v: v.rate("reading")),
    Metric("queue_seconds", "histogram", "Time from a request's arrival to its beginning.",
           lambda v: v.scheduler.tally.queue_wait),
    Metric("first_token_seconds", "histogram", "Time from a request's arrival to its first token.",
           lambda v: v.scheduler.tally.first_token),
    Metric("token_gap_seconds", "histogram", "Time between a request's tokens; 0 for those that come together.",
           lambda v: v.scheduler.tally.token_gap),
    Metric("request_seconds", "histogram", "Time from a request's arrival to its end.",
           lambda v: v.scheduler.tally.whole),
    Metric("max_context", "gauge", "Tokens that a conversation may have.",
           lambda v: None if v.supervisor.facts is None else float(v.supervisor.facts.max_context)),
    Metric("engine_windows", "gauge", "Windows that the running engine has computed.", lambda v: v.stat("windows")),
    Metric("engine_rows", "gauge", "Rows in these windows.", lambda v: v.stat("rows")),
    Metric("engine_parked", "gauge", "Times the running engine parked a request for want of room.",
           lambda v: v.stat("pool", "parked")),
    Metric("pool_blocks", "gauge", "Blocks of the page pool in use.", lambda v: v.stat("pool", "blocks")),
    Metric("pool_blocks_limit", "gauge", "Blocks that the page pool may have.", lambda v: v.stat("pool", "limit")),
    Metric("prompt_cache_checkpoints", "gauge", "Checkpoints of prompts that are kept.",
           lambda v: v.stat("prompt_cache", "checkpoints")),
    Metric("store_state", "gauge", "1 for the state that the conversation store is in.", _store_states, ("state",)),
    Metric("store_conversations", "gauge", "Conversations in the store.", lambda v: v.stored("conversations")),
    Metric("store_stale_conversations", "gauge", "Of these, those of another numeric identity.",
           lambda v: v.stored("stale")),
    Metric("store_bytes", "gauge", "Bytes that the store's contents take.", lambda v: v.stored("bytes")),
    Metric("store_file_bytes", "gauge", "Length of the store's file.", lambda v: v.stored("file_bytes")),
    Metric("store_budget_bytes", "gauge", "Bytes that the store's contents may take.",
           lambda v: v.stored("budget_bytes")),
    Metric("store_hits", "counter", "Conversations that were looked for in the store and found.",
           lambda v: v.stored("hits")),
    Metric("store_misses", "counter", "Conversations that were looked for in the store in vain.",
           lambda v: v.stored("misses")),
    Metric("store_puts", "counter", "Conversations given to the store, by what became of them.", _puts, ("outcome",)),
    Metric("store_evictions", "counter", "Conversations that made room for others.", lambda v: v.stored("evictions")),
    Metric("store_evicted_bytes", "counter", "Bytes that became free by that.", lambda v: v.stored("evicted_bytes")),
    Metric("store_read_bytes", "counter", "Bytes of pages read from the store.", lambda v: v.stored("bytes_read")),
    Metric("store_written_bytes", "counter", "Bytes of pages written to the store.",
           lambda v: v.stored("bytes_written")),
    Metric("store_pages_shared", "counter", "Pages that a stored conversation needed and that were there already.",
           lambda v: v.stored("pages_shared")),
    Metric("store_bad_pages", "counter", "Pages that did not read as they were written, and were dropped.",
           lambda v: v.stored("bad_pages")),
)  # fmt: skip
"""Every metric: name, type, help, where it comes from, labels."""


def text(view: View) -> str:
    """The figures in Prometheus' text format 0.0.4."""
    return "".join(f"{line}\n" for metric in METRICS for line in _lines(metric, metric.samples(view)))


def _lines(metric: Metric, samples: list[Sample]) -> Iterator[str]:
    yield f"# HELP {metric.full_name} {_escape(metric.help, quotes=False)}"
    yield f"# TYPE {metric.full_name} {metric.kind}"
    for labels, value in samples:
        if isinstance(value, Histogram):
            yield from _histogram(metric.full_name, value)
        else:
            yield f"{metric.full_name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, histogram: Histogram) -> Iterator[str]:
    seen = 0
    for bound, count in zip((*map(_number, histogram.buckets), "+Inf"), histogram.counts, strict=True):
        seen += count
        yield f'{name}_bucket{{le="{bound}"}} {seen}'
    yield f"{name}_sum {_number(histogram.sum)}"
    yield f"{name}_count {seen}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _labels(labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _escape(value: str, quotes: bool = True) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n")
    escaped = escaped.replace('"', r"\"") if quotes else escaped
    return re.sub(r"[\ud800-\udfff]", "\ufffd", escaped)


def snapshot(view: View) -> dict[str, object]:
    """The figures as JSON: the engine, what happens now (`live`), what ended last, and totals."""
    scheduler, supervisor = view.scheduler, view.supervisor
    slots = scheduler.slots()
    return {
        "engine": {
            "state": supervisor.state.value,
            "model": model_name(view.settings),
            "max_context": supervisor.facts.max_context if supervisor.facts is not None else None,
            "restarts": supervisor.restarts,
            "info": dict(supervisor.facts.info) if supervisor.facts is not None else {},
            "stat": dict(supervisor.engine_stat),
        },
        "live": {
            "state": _live_state(slots),
            "queued": scheduler.queued,
            "running": scheduler.running,
            "parallel": scheduler.serving,
            "tok_s": round(view.rate("decoding"), 1),
            "read_tok_s": round(view.rate("reading"), 1),
            "slots": slots,
        },
        "drafts": [{"slot": slot, **asdict(drafts)} for slot, drafts in enumerate(scheduler.tally.drafts)],
        "rates": asdict(scheduler.tally.rates),
        "latency": {
            "queue": _quantiles(scheduler.tally.queue_wait),
            "first_token": _quantiles(scheduler.tally.first_token),
            "token_gap": _quantiles(scheduler.tally.token_gap),
            "request": _quantiles(scheduler.tally.whole),
        },
        "requests": list(scheduler.tally.records),
        "totals": scheduler.tally.totals(),
        "uptime_s": round(view.uptime_s, 1),
    }


def _live_state(slots: list[dict[str, object]]) -> str:
    states = {row["state"] for row in slots}
    return next((state for state in ("decoding", "reading", "idle") if state in states), "unloaded")


def _quantiles(histogram: Histogram) -> dict[str, float | None]:
    """Seconds; a quantile is the upper bound of its bucket."""
    count = histogram.count
    mean = round(histogram.sum / count, 6) if count else None
    named = {f"p{round(share * 100)}": histogram.quantile(share) for share in (0.5, 0.95, 0.99)}
    return {"count": count, "mean": mean, **named}
