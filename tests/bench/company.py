"""A long prompt read beside two decoding streams: what it costs the reader, and what it costs the streams.

Each setting of `--stall-target-ms` and `--decode-share` has an engine of its own. The same engine reads a prompt of the
same length by itself, and decodes the same streams by themselves, in turns with both together. Drafts are off: what
these bring and cost depends on the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.engine import BenchError, Engine, Timed
from tests.bench.report import Row
from tests.bench.slots import slots_of
from tests.bench.spread import Plan, Sample, Series, Watch, take_turns
from tests.bench.subject import Subject

LONG = 7000
STREAMS = (0, 1)
READER = 2
BEGIN = 32  # prompt tokens of a stream
LEAD = 16  # tokens of both streams together that nobody counts
ALONE_S = 0.6  # how long streams are measured by themselves, and run before the reader comes
STEP = 16  # tokens between two looks at the clock


@dataclass(frozen=True)
class Setting:
    """The engine's two settings for the case."""

    stall_ms: int
    share: float

    @property
    def title(self) -> str:
        """As the table calls it."""
        return f"target {self.stall_ms} ms, decode share {self.share:g}"

    @property
    def args(self) -> list[str]:
        """As the engine's command line has it."""
        return ["--stall-target-ms", str(self.stall_ms), "--decode-share", f"{self.share:g}"]


DEFAULT = Setting(250, 0.5)
SETTINGS = (DEFAULT, Setting(100, 0.5), Setting(500, 0.5), Setting(250, 0.25), Setting(250, 1.0))


def prompt_length(trained: int) -> int:
    """Tokens of the long prompt: LONG, or seven eighths of a context too short for that."""
    return min(LONG, trained * 7 // 8)


def context_for(length: int) -> int:
    """The context in which a prompt of `length` fills seven eighths."""
    return -(-length * 8 // 7)


def times_of(lines: Sequence[Timed], word: str, slot: int) -> list[float]:
    """When the lines `word slot ...` arrived."""
    head = f"{word} {slot} "
    return [timed.at for timed in lines if timed.line.startswith(head)]


def stream_rate(lines: Sequence[Timed], begin: float, end: float) -> float:
    """Tokens per second of all streams together between two times."""
    return sum(begin < at <= end for slot in STREAMS for at in times_of(lines, "BT", slot)) / (end - begin)


def longest_gap_ms(lines: Sequence[Timed], begin: float, end: float) -> float:
    """The longest time between two tokens of one stream, of all times that lie between `begin` and `end` in part."""
    gaps = [0.0]
    for slot in STREAMS:
        times = times_of(lines, "BT", slot)
        gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times) if b > begin and a < end]
    return max(gaps)


def together_sample(lines: Sequence[Timed], asked: float, length: int) -> Sample:
    """What the lines of a read beside streams say, asked for at the time given.

    Raises BenchError where a stream ended before the read did, or said nothing meanwhile.
    """
    read = times_of(lines, "BADM", READER)
    if not read:
        raise BenchError("the long prompt was not read to its end")
    for slot in STREAMS:
        if times_of(lines, "BDONE", slot):
            raise BenchError(f"stream {slot} ended before the long prompt was read: its context is too short")
        if not any(asked < at <= read[0] for at in times_of(lines, "BT", slot)):
            raise BenchError(f"stream {slot} made no token while the long prompt was read")
    return {
        "read": length / (read[0] - asked),
        "streams": stream_rate(lines, asked, read[0]),
        "gap": longest_gap_ms(lines, asked, read[0]),
    }


@dataclass(frozen=True)
class Case:
    """One engine with one setting, and how to measure it."""

    engine: Engine
    subject: Subject
    setting: Setting
    length: int

    def read(self, length: int, seed: int) -> tuple[float, list[Timed]]:
        """Ask for a read and wait for its end: when it was asked for, and all lines meanwhile."""
        ids = ",".join(map(str, self.subject.random_ids(length, seed)))
        asked = self.engine.send(f"BGEN {READER} 1 {self.subject.endless} {ids}")
        return asked, self.engine.read_until(b"BDONE")

    def start(self, seed: int) -> list[Timed]:
        """Start both streams and let them run for a while; the lines since the first uncounted tokens."""
        most = context_for(self.length) - BEGIN - 1
        lines = []
        for slot in STREAMS:
            ids = ",".join(map(str, self.subject.random_ids(BEGIN, seed + slot)))
            lines.append(f"BGEN {slot} {most} {self.subject.any_text(seed + slot)} {ids}")
        self.engine.send(*lines)
        self.engine.read_until(b"BADM", len(STREAMS))
        self.engine.read_until(b"BT", LEAD)
        run: list[Timed] = []
        while not run or run[-1].at - run[0].at < ALONE_S:
            run += self.engine.read_until(b"BT", STEP)
        return run

    def stop(self) -> None:
        """End both streams."""
        self.engine.send(*(f"BSTOP {slot}" for slot in STREAMS))
        self.engine.read_until(b"BDONE", len(STREAMS))

    def alone(self, turn: int, length: int = 0) -> Sample:
        """One turn of reading and decoding, each by itself."""
        asked, lines = self.read(length or self.length, 1000 * turn)
        read = times_of(lines, "BADM", READER)
        if not read:
            raise BenchError("the long prompt was not read to its end")
        run = self.start(1000 * turn + 10)
        self.stop()
        rate = stream_rate(run, run[0].at, run[-1].at)
        return {"read": (length or self.length) / (read[0] - asked), "streams": rate, "gap": self.setting.stall_ms}

    def together(self, turn: int) -> Sample:
        """One turn of both together."""
        before = self.start(1000 * turn + 20)
        asked, lines = self.read(self.length, 1000 * turn + 30)
        self.stop()
        return together_sample([*before, *lines], asked, self.length)


def rows_of(series: Series, setting: Setting) -> list[Row]:
    """The table rows of one setting."""
    detail = setting != DEFAULT
    return [
        Row.of(series, "read", f"Reading, {setting.title}", "tok/s", detail=detail),
        Row.of(series, "streams", f"Both streams, {setting.title}", "tok/s", detail=detail),
        Row.of(series, "gap", f"Longest gap, {setting.title}", "ms", lower_is_better=True, detail=detail),
    ]


def measure(subject: Subject, threads: int, setting: Setting, length: int, plan: Plan, watch: Watch) -> list[Row]:
    """One setting."""
    args = ["--threads", str(threads), "--spec", "0", "--max-context", str(context_for(length))]
    with Engine(subject.path, *args, "--parallel", str(1 + len(STREAMS)), *setting.args) as engine:
        if slots_of(engine) <= READER:
            raise BenchError(f"the engine runs {slots_of(engine)} slots, not {1 + len(STREAMS)}")
        case = Case(engine, subject, setting, length)
        case.alone(-1, min(length, 512))  # warms up
        return rows_of(take_turns(case.together, case.alone, plan, watch, ("read", "streams")), setting)


def compare(subject: Subject, threads: int, plan: Plan, watch: Watch) -> list[Row]:
    """All settings of one model, which share the plan's time."""
    length = prompt_length(subject.model.trained_context)
    part = plan.among(len(SETTINGS))
    return [row for setting in SETTINGS for row in measure(subject, threads, setting, length, part, watch)]
