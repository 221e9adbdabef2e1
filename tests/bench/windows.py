"""What a decode window costs by its rows: several slots with a row each, or one slot with its drafts.

Each count takes turns with a window of a single row in the same engine process. Tokens are chosen at random, so that
the rows of a mixture of experts ask for different ones. Sampling and printing are in a window's time, as a client waits
for them, too.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tests.bench.engine import BenchError, Engine, Timed, gen_line
from tests.bench.report import Row
from tests.bench.slots import slots_of
from tests.bench.spread import Plan, Sample, Series, Side, Watch, take_turns
from tests.bench.subject import Subject

COUNTS = (1, 2, 4, 8, 16)
DRAFTS = (0, 1, 2, 3)
PROMPT = 16
WINDOWS = 128  # decode windows of one measurement
CONTEXT = PROMPT + WINDOWS * (1 + max(DRAFTS)) + 64
LEAST_S = 0.25  # a turn measures again until it has taken this long
STEP = 8  # tokens between two looks at how long the last forward pass took
MOST_OTHER = 0.1  # of the rows of windows with drafts, how many may be missing


def window_ms(lines: Sequence[Timed], slots: int) -> float:
    """Milliseconds of a window while all of `slots` decode, each a row in every window.

    Raises BenchError where windows carried anything else.
    """
    admitted = [timed.at for timed in lines if timed.line.startswith("BADM ")]
    ended = [timed.at for timed in lines if timed.line.startswith("BDONE ")]
    if len(admitted) != slots or len(ended) != slots:
        raise BenchError(f"{len(admitted)} of {slots} slots began and {len(ended)} ended")
    tokens: dict[str, list[float]] = {}
    for timed in lines:
        if timed.line.startswith("BT ") and max(admitted) <= timed.at <= min(ended):
            tokens.setdefault(timed.line.split()[1], []).append(timed.at)
    counts = sorted(len(times) for times in tokens.values())
    if len(counts) != slots or counts[0] < 2 or counts[-1] - counts[0] > 1:
        raise BenchError(f"{slots} slots that decode together made {counts} tokens")
    times = next(iter(tokens.values()))
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def decode(engine: Engine, subject: Subject, slots: int, seed: int) -> float:
    """One measurement: milliseconds of a window of so many rows."""
    lines = []
    for slot in range(slots):
        ids = ",".join(map(str, subject.random_ids(PROMPT, seed + slot)))
        lines.append(f"BGEN {slot} {WINDOWS} {subject.any_text(seed + slot)} {ids}")
    engine.send(*lines)
    return window_ms(engine.read_until(b"BDONE", slots), slots)


def for_a_while(measure: Callable[[int], Sample]) -> Sample:
    """The medians of what `measure`, told how often it was called before, finds until LEAST_S have passed."""
    samples: list[Sample] = []
    end = time.monotonic() + LEAST_S
    while not samples or time.monotonic() < end:
        samples.append(measure(len(samples)))
    return {metric: statistics.median(sample[metric] for sample in samples) for metric in samples[0]}


def rows_side(engine: Engine, subject: Subject, slots: int) -> Side:
    """Windows with a row of each of `slots` slots as a side that takes turns."""

    def turn(turn: int) -> Sample:
        ms = for_a_while(lambda n: {"window": decode(engine, subject, slots, 10_000 * turn + 100 * n)})["window"]
        return {"window": ms, "row": ms / slots}

    return turn


def by_slots(subject: Subject, threads: int, plan: Plan, watch: Watch) -> list[Row]:
    """Windows of several slots beside those of one."""
    args = ["--threads", str(threads), "--spec", "0", "--max-context", str(CONTEXT), "--parallel", str(max(COUNTS))]
    rows = []
    with Engine(subject.path, *args) as engine:
        counts = [count for count in COUNTS if count <= slots_of(engine)]
        decode(engine, subject, max(counts), 1)  # warms up
        for count in counts:
            single = rows_side(engine, subject, 1) if count > 1 else None
            turns = take_turns(rows_side(engine, subject, count), single, plan.among(len(counts)), watch, ("window",))
            rows += slot_rows(turns, count)
    return rows


def slot_rows(series: Series, count: int) -> list[Row]:
    """The table rows of one number of slots."""
    if count == 1:
        return [Row.of(series, "window", "Window of 1 row", "ms", lower_is_better=True)]
    return [
        Row.of(series, "window", f"Window of {count} rows, a slot each", "ms", lower_is_better=True),
        Row.of(series, "row", f"One of {count} rows", "ms", lower_is_better=True, detail=True),
    ]


# ---- one slot with drafts ----


def stats_of(lines: Sequence[Timed]) -> list[dict[str, float]]:
    """The plain numbers of every STAT among `lines`."""
    told = [json.loads(timed.line.removeprefix("STAT ")) for timed in lines if timed.line.startswith("STAT ")]
    return [{name: float(value) for name, value in stat.items() if isinstance(value, int | float)} for stat in told]


def drafting_sample(lines: Sequence[Timed], drafts: int) -> Sample:
    """The usual whole window, from one's tokens to the next one's, and the usual forward pass, as STATs tell it.

    Medians, since a few windows carry no drafts: those for which there is no room in the blocks at hand. Raises
    BenchError where these are many.
    """
    stats = stats_of(lines)
    if len(stats) < 2 or stats[-1]["windows"] <= stats[0]["windows"]:
        raise BenchError("the engine's STATs tell of no window")
    rows = (stats[-1]["rows"] - stats[0]["rows"]) / (stats[-1]["windows"] - stats[0]["windows"])
    if abs(rows - (1 + drafts)) > MOST_OTHER * (1 + drafts):
        raise BenchError(f"windows of {1 + drafts} rows were to be measured, and had {rows:.2f}")
    ends = sorted({timed.at for timed in lines if timed.line.startswith("T ")})
    whole = statistics.median(b - a for a, b in itertools.pairwise(ends))
    return {"whole": 1e3 * whole, "pass": statistics.median(stat["window_ms"] for stat in stats)}


def draft(engine: Engine, subject: Subject, drafts: int, seed: int) -> Sample:
    """One measurement of a slot whose windows carry `drafts` drafts."""
    engine.send(gen_line(subject.random_ids(PROMPT, seed), CONTEXT - PROMPT - 1, subject.any_text(seed)))
    engine.read_until(b"T", STEP)
    lines: list[Timed] = []
    for _ in range(WINDOWS // STEP):
        lines += engine.read_until(b"T", STEP)
        engine.send("STAT")
        lines += engine.read_until(b"STAT")
    engine.send("STOP")
    engine.read_until(b"DONE")
    return drafting_sample(lines, drafts)


def drafts_side(engine: Engine, subject: Subject, drafts: int) -> Side:
    """Windows of one slot with `drafts` drafts as a side that takes turns."""
    return lambda turn: for_a_while(lambda n: draft(engine, subject, drafts, 10_000 * turn + n))


def by_drafts(subject: Subject, threads: int, plan: Plan, watch: Watch) -> list[Row]:
    """Windows of one slot with drafts beside those without; nothing for a model without a drafter."""
    common = ["--threads", str(threads), "--max-context", str(CONTEXT), "--spec-fixed", "--spec-min-p", "0"]
    rows: list[Row] = []
    with ExitStack() as stack:
        engines: list[Engine] = []
        for drafts in DRAFTS:
            engine = stack.enter_context(Engine(subject.path, *common, "--spec", str(drafts)))
            if not has_drafter(engine):
                return []
            draft(engine, subject, drafts, 1)  # warms up
            engines.append(engine)
        none, part = drafts_side(engines[0], subject, 0), plan.among(len(DRAFTS) - 1)
        for drafts in DRAFTS[1:]:
            series = take_turns(drafts_side(engines[drafts], subject, drafts), none, part, watch, ("whole", "pass"))
            rows += draft_rows(series, drafts)
    return rows


def draft_rows(series: Series, drafts: int) -> list[Row]:
    """The table rows of one number of drafts."""
    title = f"1 + {drafts} rows of one slot"
    return [
        Row.of(series, "whole", f"{title}, drafts made", "ms", lower_is_better=True),
        Row.of(series, "pass", f"{title}, forward pass alone", "ms", lower_is_better=True, detail=True),
    ]


def has_drafter(engine: Engine) -> bool:
    """Whether the engine's INFO says that the model drafts."""
    return engine.info.get("mtp", "0") != "0"


def compare(subject: Subject, threads: int, plan: Plan, watch: Watch) -> list[Row]:
    """All windows of one model; both halves share the plan's time."""
    half = plan.among(2)
    return by_slots(subject, threads, half, watch) + by_drafts(subject, threads, half, watch)
