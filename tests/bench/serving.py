"""HTTP: stratad beside llama-server, what the daemon costs, and how much of the engine's own rate it passes on.

Every request is a chat message of some hundred tokens that no cache can know, answered greedily with a fixed number
of tokens, streamed on a connection of its own. Both servers run all the time; one rests while the other is measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.bench.client import Round, ask_together
from tests.bench.engine import Engine
from tests.bench.machine import cpu_s, descendants, peak_mib
from tests.bench.peer import Peer
from tests.bench.report import Row
from tests.bench.servers import Server, peer_server, strata_server
from tests.bench.spread import Plan, Sample, Series, Side, Spread, Watch, take_turns
from tests.bench.subject import Subject

PATH = "/v1/chat/completions"
GENERATED = 128
CONTEXT = 512
LEAST_S = 0.4  # a turn asks again until it has taken this long
IDLE_S = 1.0
SHORT = 8  # requests that tell what one costs the daemon before it streams
WORDS = (
    "garden", "river", "apple", "stone", "letter", "window", "king", "road", "bread",
    "bird", "city", "house", "horse", "table", "night", "water", "tree", "ship",
)  # fmt: skip


def message(number: int) -> list[dict[str, str]]:
    """The `number`-th conversation; no two begin alike."""
    source = random.Random(number)
    words = " ".join(source.choice(WORDS) for _ in range(80))
    return [{"role": "user", "content": f"{number}: tell me a short story with these words: {words}."}]


def body(number: int, generated: int = GENERATED) -> dict[str, Any]:
    """The `number`-th request; both servers know all of its fields."""
    return {
        "messages": message(number),
        "max_tokens": generated,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Numbers:
    """Numbers for requests, none twice."""

    def __init__(self) -> None:
        self._next = random.randrange(1 << 40)

    def take(self, count: int) -> list[int]:
        """As many new numbers."""
        self._next += count
        return list(range(self._next - count, self._next))


def figures(rounds: Sequence[Round]) -> Sample:
    """One turn: rates over all rounds, waits as medians of the rounds'."""
    return {
        "total": sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds),
        "stream": statistics.median(answer.rate for r in rounds for answer in r.answers),
        "first": 1e3 * statistics.median(r.first_median_s for r in rounds),
        "last": 1e3 * statistics.median(r.first_last_s for r in rounds),
    }


def ask_for(port: int, clients: int, numbers: Numbers) -> list[Round]:
    """Rounds of `clients` requests at once until LEAST_S have passed."""
    rounds: list[Round] = []
    while not rounds or sum(r.seconds for r in rounds) < LEAST_S:
        rounds.append(ask_together(port, PATH, [body(n) for n in numbers.take(clients)]))
    return rounds


@dataclass
class Costs:
    """Processor time of the daemon, its engine not counted."""

    pid: int
    idle: float = 0.0  # share of a processor that it takes at rest
    request_us: list[float] = field(default_factory=list)  # of a request with one token
    token_us: list[float] = field(default_factory=list)  # of every further token

    def rest(self) -> None:
        """Measure what the daemon takes while nobody asks."""
        began, used = time.monotonic(), cpu_s(self.pid)
        time.sleep(IDLE_S)
        self.idle = (cpu_s(self.pid) - used) / (time.monotonic() - began)

    def spent_us(self, work: Callable[[], Sequence[Round]]) -> tuple[float, Sequence[Round]]:
        """Do `work`; the daemon's processor time for it."""
        began, used = time.monotonic(), cpu_s(self.pid)
        rounds = work()
        return 1e6 * (cpu_s(self.pid) - used - self.idle * (time.monotonic() - began)), rounds

    def note(self, short_us: float, long_us: float, rounds: Sequence[Round]) -> None:
        """Account for SHORT requests of one token each, and for `rounds` of long ones."""
        request_us = short_us / SHORT
        answers = sum(len(r.answers) for r in rounds)
        self.request_us.append(request_us)
        self.token_us.append((long_us - answers * request_us) / (sum(r.tokens for r in rounds) - answers))


def client_rows(series: Series, clients: int) -> list[Row]:
    """The table rows of one number of clients."""
    if clients == 1:
        return [
            Row.of(series, "stream", "One stream, after its first token", "tok/s"),
            Row.of(series, "total", "One client, prompt included", "tok/s"),
            Row.of(series, "first", "First token, one client", "ms", lower_is_better=True),
        ]
    return [
        Row.of(series, "total", f"{clients} clients, all together", "tok/s"),
        Row.of(series, "first", f"First token, {clients} clients, median", "ms", lower_is_better=True),
        Row.of(series, "last", f"First token, {clients} clients, last", "ms", lower_is_better=True),
    ]


@dataclass
class Service:
    """The servers under measurement, and how to measure them."""

    subject: Subject
    threads: int
    plan: Plan
    watch: Watch
    ours: Server
    theirs: Server | None
    costs: Costs
    numbers: Numbers = field(default_factory=Numbers)

    def warm_up(self) -> None:
        """One answer of each server, then silence."""
        for server in filter(None, (self.ours, self.theirs)):
            ask_together(server.port, PATH, [body(n) for n in self.numbers.take(1)])
        self.costs.rest()

    def clients(self, count: int) -> list[Row]:
        """Both servers with `count` clients at once."""
        peer: Side | None = None
        if self.theirs is not None:
            port = self.theirs.port
            peer = lambda _turn: figures(ask_for(port, count, self.numbers))  # noqa: E731
        series = take_turns(
            lambda _turn: figures(ask_for(self.ours.port, count, self.numbers)),
            peer,
            self.plan,
            self.watch,
            ("total",),
        )
        return client_rows(series, count)

    def beside_engine(self) -> list[Row]:
        """The same requests over HTTP and to an engine without a daemon: the same tokens, so the same work."""
        first = self.numbers.take(100 * self.plan.most)[0]
        with Engine(self.subject.path, "--threads", str(self.threads), "--max-context", str(CONTEXT)) as engine:
            series = take_turns(
                lambda turn: self._streams(first + 100 * turn),
                lambda turn: engine_streams(engine, self.subject, first + 100 * turn),
                self.plan,
                self.watch,
                ("stream",),
            )
        costs = self.costs
        return [
            Row.of(series, "stream", "One stream, after its first token", "tok/s"),
            _cost_row("Processor time per streamed token", costs.token_us, series),
            _cost_row("Processor time per request", costs.request_us, series),
            Row("Peak memory, engine not counted", "MiB", Spread.of([peak_mib(costs.pid)]), lower_is_better=True),
        ]

    def _streams(self, first: int) -> Sample:
        short_us, _ = self.costs.spent_us(
            lambda: [ask_together(self.ours.port, PATH, [body(n, 1)]) for n in self.numbers.take(SHORT)]
        )
        long_us, rounds = self.costs.spent_us(
            lambda: [ask_together(self.ours.port, PATH, [body(n)]) for n in some(first)]
        )
        self.costs.note(short_us, long_us, rounds)
        return figures(rounds)

    def memory(self) -> Row:
        """What each server has taken at most, over all its processes."""
        ours = sum(map(peak_mib, descendants(self.ours.pid)))
        theirs = Spread.of([sum(map(peak_mib, descendants(self.theirs.pid)))]) if self.theirs else None
        ratio = Spread.of([ours / theirs.median]) if theirs and theirs.median else None
        return Row("Peak memory", "MiB", Spread.of([ours]), theirs, ratio, lower_is_better=True)


def _cost_row(title: str, values: Sequence[float], series: Series) -> Row:
    spread = Spread.of(values)
    return Row(title, "µs", spread, lower_is_better=True, foreign=series.foreign, disturbed=series.disturbed)


def some(first: int) -> Iterator[int]:
    """Numbers of requests from `first` on, at least one, until LEAST_S have passed."""
    end = time.monotonic() + LEAST_S
    yield first
    number = first + 1
    while time.monotonic() < end:
        yield number
        number += 1


def engine_streams(engine: Engine, subject: Subject, first: int) -> Sample:
    """The engine by itself, asked what the daemon was asked."""
    rates = []
    for number in some(first):
        ids = subject.chat_ids(message(number))
        done, _, _ = engine.generate(ids, GENERATED, f"temperature=0 {subject.endless}")
        rates.append(done.decode_rate)
    return {"stream": statistics.median(rates)}


def compare(
    subject: Subject, peer: Peer | None, threads: int, clients: Sequence[int], plan: Plan, watch: Watch
) -> tuple[list[Row], list[Row]]:
    """All HTTP figures of one model: beside llama-server, and beside the engine alone."""
    with ExitStack() as stack:
        ours = stack.enter_context(strata_server(subject.path, threads, max(clients), CONTEXT))
        theirs = None
        if peer is not None:
            theirs = stack.enter_context(peer_server(peer, subject.path, threads, max(clients), CONTEXT))
        service = Service(subject, threads, plan, watch, ours, theirs, Costs(ours.pid))
        service.warm_up()
        rows = [row for count in clients for row in service.clients(count)]
        rows.append(service.memory())
        return rows, service.beside_engine()
