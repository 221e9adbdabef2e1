"""Windows by their rows: what the engine's lines say, and a short look at the real engine."""

from __future__ import annotations

import json

import pytest

from tests.bench import windows
from tests.bench.engine import BenchError, Engine, Timed
from tests.bench.machine import EMBEDDED
from tests.bench.subject import Subject


def lines_of(slots: int, window_s: float, count: int = 10) -> list[Timed]:
    """Slots that are admitted after 1 s, all in one window, and then write a token a window."""
    lines = [Timed(1.0, f"BADM {slot} 1") for slot in range(slots)]
    for n in range(count):
        lines += [Timed(1.0 + n * window_s, f"BT {slot} 5") for slot in range(slots)]
    return lines + [Timed(1.0 + (count - 1) * window_s, f"BDONE {slot} {count} length") for slot in range(slots)]


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_a_window_lasts_from_token_to_token(slots: int) -> None:
    assert windows.window_ms(lines_of(slots, 0.004), slots) == pytest.approx(4.0)


def test_what_a_slot_says_before_the_last_is_admitted_does_not_count() -> None:
    early = [Timed(0.1 * n, "BT 0 5") for n in range(1, 6)]
    assert windows.window_ms(early + lines_of(2, 0.004), 2) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (lines_of(1, 0.004), "1 of 2 slots began"),
        ([line for line in lines_of(2, 0.004) if line.line != "BDONE 1 10 length"], "1 ended"),
        ([line for line in lines_of(2, 0.004) if line.at == 1.0 or line.line != "BT 1 5"], r"made \[1, 10\] tokens"),
        (lines_of(2, 0.004, count=1), r"made \[1, 1\] tokens"),
    ],
)
def test_windows_that_were_others_are_told(lines: list[Timed], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        windows.window_ms(lines, 2)


def stat(at: float, windows_: int, rows: int, ms: float) -> Timed:
    told = {"phase": "decoding", "windows": windows_, "rows": rows, "window_ms": ms, "slots": []}
    return Timed(at, f"STAT {json.dumps(told)}")


def test_stats_are_read_for_their_numbers() -> None:
    assert windows.stats_of([Timed(1.0, "T 5"), stat(2.0, 3, 4, 5.5)]) == [{"windows": 3, "rows": 4, "window_ms": 5.5}]


def drafting_lines() -> list[Timed]:
    """Windows of 4 rows that bring two tokens every 2 ms; one window was shorter."""
    ends = [0.002 * n for n in range(10)] + [0.0185]
    return [stat(0.0, 7, 9, 1.5), *(Timed(at, "T 5") for at in ends for _ in range(2)), stat(0.02, 17, 48, 1.7)]


def test_windows_with_drafts_from_tokens_to_tokens() -> None:
    assert windows.drafting_sample(drafting_lines(), 3) == {"whole": pytest.approx(2.0), "pass": pytest.approx(1.6)}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (drafting_lines()[:-1], "no window"),
        ([drafting_lines()[0]] * 2, "no window"),
        ([*drafting_lines(), stat(0.03, 18, 42, 1.0)], "4 rows were to be measured, and had 3.00"),
    ],
)
def test_windows_with_other_drafts_are_told(lines: list[Timed], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        windows.drafting_sample(lines, 3)


def test_a_turn_repeats_a_short_measurement_and_takes_medians() -> None:
    calls: list[int] = []

    def measure(n: int) -> dict[str, float]:
        calls.append(n)
        return {"ms": float(n)}

    sample = windows.for_a_while(measure)
    assert calls == list(range(len(calls))) and len(calls) > 1
    assert sample == {"ms": (len(calls) - 1) / 2}


def test_the_engine_is_measured_with_slots_and_with_drafts() -> None:
    subject = Subject.load(EMBEDDED)
    common = ["--threads", "1", "--max-context", str(windows.CONTEXT), "--parallel", "2"]
    with Engine(subject.path, *common, "--spec", "0") as engine:
        assert windows.decode(engine, subject, 2, 1) > 0
    with Engine(subject.path, *common, "--spec", "2", "--spec-fixed", "--spec-min-p", "0") as engine:
        assert windows.has_drafter(engine)
        sample = windows.draft(engine, subject, 2, 1)
        assert sample["whole"] > 0 and sample["pass"] > 0
        with pytest.raises(BenchError, match="windows of 2 rows were to be measured"):
            windows.draft(engine, subject, 1, 1)
