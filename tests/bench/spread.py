"""The arithmetic of the bench: spreads, ratios, and pairs measured in turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Sample = Mapping[str, float]
"""What one turn of one side brought: metric -> value."""

Side = Callable[[int], Sample]
"""Measures one turn; the argument counts the turns, so that prompts can differ from turn to turn."""

QUIET = 0.10
"""Share of the machine that others may take, besides what is left to them, while a pair counts as undisturbed."""


@dataclass(frozen=True)
class Spread:
    """The least, the median and the greatest of `count` values."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of `values`, or None where there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(ordered[0], statistics.median(ordered), ordered[-1], len(ordered))

    @property
    def width(self) -> float:
        """Greatest by least: 1 where all values are equal; infinite where the least is not above 0."""
        return self.high / self.low if self.low > 0 else float("inf")


@dataclass(frozen=True)
class Pair:
    """One turn of each side, taken one right after the other."""

    ours: Sample
    peer: Sample | None
    foreign: float  # share of the machine that other programs and the hypervisor took meanwhile, 0..1

    def ratio(self, metric: str) -> float | None:
        """Ours by the peer's; None where a side is missing or the peer's is not above 0."""
        if self.peer is None or metric not in self.ours or self.peer.get(metric, 0.0) <= 0:
            return None
        return self.ours[metric] / self.peer[metric]


@dataclass(frozen=True)
class Plan:
    """How often to measure."""

    pairs: int = 5  # undisturbed ones that are wanted
    most: int = 12  # tries, when pairs are disturbed or spread widely
    wide: float = 1.15  # greatest by least ratio beyond which more pairs are taken
    quiet_wait_s: float = 20.0  # how long to wait before a pair for others to become quiet
    allowed: float = QUIET  # share of the machine that others may take
    limit_s: float = math.inf  # no further pair begins that would not be done by then; one is measured in any case

    def among(self, comparisons: int) -> Plan:
        """This plan for one of several comparisons that share its time."""
        return dataclasses.replace(self, limit_s=self.limit_s / max(1, comparisons))

    def leaving(self, free: float) -> Plan:
        """This plan where `free`, a share of the machine, is not used by what is measured: others may have it."""
        return dataclasses.replace(self, allowed=free + QUIET)


class Watch(Protocol):
    """Sees what the rest of the machine does (`machine.Company`)."""

    def wait_for_quiet(self, limit_s: float, allowed: float) -> None:
        """Return when others take no more than `allowed` of the machine, or after `limit_s`."""

    def start(self) -> None:
        """Begin to count."""

    def foreign_share(self) -> float:
        """What others took of the machine since `start`, 0..1."""


@dataclass
class Series:
    """The pairs of one comparison."""

    wanted: int
    allowed: float = QUIET  # share of the machine that others may take
    pairs: list[Pair] = field(default_factory=list)

    @property
    def quiet(self) -> list[Pair]:
        """The undisturbed pairs."""
        return [pair for pair in self.pairs if pair.foreign <= self.allowed]

    @property
    def counted(self) -> list[Pair]:
        """The undisturbed pairs if there are as many as wanted, else as many of the least disturbed ones.

        What decides is how much others ran, never what was measured.
        """
        quiet = self.quiet
        if len(quiet) >= self.wanted:
            return quiet
        return sorted(self.pairs, key=lambda pair: pair.foreign)[: self.wanted]

    @property
    def foreign(self) -> float:
        """The largest share of the machine that others took during a counted pair."""
        return max((pair.foreign for pair in self.counted), default=0.0)

    @property
    def disturbed(self) -> bool:
        """Whether others took more than they may."""
        return self.foreign > self.allowed

    def ours(self, metric: str) -> Spread | None:
        """Our values."""
        return Spread.of(pair.ours[metric] for pair in self.counted if metric in pair.ours)

    def peer(self, metric: str) -> Spread | None:
        """The peer's values."""
        return Spread.of(pair.peer[metric] for pair in self.counted if pair.peer and metric in pair.peer)

    def ratio(self, metric: str) -> Spread | None:
        """Ours by the peer's, pair by pair: what slows both cancels."""
        return Spread.of(r for pair in self.counted if (r := pair.ratio(metric)) is not None)

    def between(self, ours: Mapping[str, str], peer: Mapping[str, str]) -> Series:
        """Two sides that every turn has measured together; for each side: metric -> its name in a turn's sample."""
        pairs = [Pair(_named(pair.ours, ours), _named(pair.ours, peer), pair.foreign) for pair in self.pairs]
        return Series(self.wanted, self.allowed, pairs)

    def wide(self, limit: float, metrics: Sequence[str]) -> bool:
        """Whether any of `metrics` spreads beyond `limit`: its ratios, or our values where there is no peer."""
        spreads = (self.ratio(metric) or self.ours(metric) for metric in metrics)
        return any(spread is not None and spread.width > limit for spread in spreads)


def _named(sample: Sample, names: Mapping[str, str]) -> Sample:
    return {metric: sample[name] for metric, name in names.items() if name in sample}


def take_turns(
    ours: Side,
    peer: Side | None,
    plan: Plan,
    watch: Watch,
    metrics: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
) -> Series:
    """Measure pairs until `plan` is fulfilled; `metrics` are those whose spread decides about more."""
    series = Series(plan.pairs, plan.allowed)
    began = clock()
    while not _enough(series, plan, metrics) and _time_left(clock() - began, len(series.pairs), plan.limit_s):
        turn = len(series.pairs)
        watch.wait_for_quiet(plan.quiet_wait_s, plan.allowed)
        watch.start()
        if peer is None:
            mine, theirs = ours(turn), None
        elif turn % 2 == 0:
            mine = ours(turn)
            theirs = peer(turn)
        else:  # the other way round, so that a steady drift favours neither
            theirs = peer(turn)
            mine = ours(turn)
        series.pairs.append(Pair(mine, theirs, watch.foreign_share()))
    return series


def _enough(series: Series, plan: Plan, metrics: Sequence[str]) -> bool:
    if len(series.pairs) >= plan.most:
        return True
    if len(series.quiet) < plan.pairs:
        return False
    return not series.wide(plan.wide, metrics)


def _time_left(elapsed_s: float, pairs: int, limit_s: float) -> bool:
    """Whether one more pair, as long as those before, is done by the limit."""
    return not pairs or elapsed_s * (pairs + 1) / pairs <= limit_s
