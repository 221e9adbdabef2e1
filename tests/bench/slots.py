"""The engine with several sequences beside llama-batched-bench: all start together, each reads and writes as much.

The peer reads all prompts first and decodes then; the engine mixes both in its windows. So what is compared is the
whole (tokens read and written by the time until all are done), and decoding by itself: what was written between the
last prompt's end and the first sequence's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.engine import BenchError, Engine, Timed, knows
from tests.bench.peer import Peer, parse_batched, run_watched
from tests.bench.report import Row
from tests.bench.spread import Plan, Sample, Side, Watch, take_turns
from tests.bench.subject import Subject

PROMPT = 128
GENERATED = 128
WRITTEN = GENERATED + 1  # the peer's tokens are decoding steps; ours begin with the one that reading brings


@dataclass(frozen=True)
class Together:
    """Rates over all sequences, in tokens per second."""

    decode: float
    total: float

    def sample(self, sequences: int) -> Sample:
        """Its metrics, by the number of sequences."""
        return {f"decode{sequences}": self.decode, f"total{sequences}": self.total}


def rates(lines: Sequence[Timed], sequences: int, began: float) -> Together:
    """What the slots' lines say: BT a token, BADM 1 the end of a slot's reading, BDONE its end.

    Raises BenchError for BERR and for a slot that did not write all it should.
    """
    read_s, end_s, tokens = began, [], []
    for timed in lines:
        word, *rest = timed.line.split()
        if word == "BERR":
            raise BenchError(f"the engine refused slot {' '.join(rest)}")
        if word == "BADM":
            if rest[1:2] != ["1"]:
                raise BenchError(f"slot {rest[0]} was not admitted")
            read_s = timed.at
        elif word == "BT":
            tokens.append(timed.at)
        elif word == "BDONE":
            if int(rest[1]) != WRITTEN:
                raise BenchError(f"slot {rest[0]} made {rest[1]} of {WRITTEN} tokens")
            end_s.append(timed.at)
    if len(end_s) != sequences:
        raise BenchError(f"{len(end_s)} of {sequences} slots ended")
    decode_s = min(end_s) - read_s
    written = sum(read_s < at <= min(end_s) for at in tokens)
    if decode_s <= 0 or not written:
        raise BenchError("a sequence had ended before the last prompt was read: they did not run together")
    return Together(written / decode_s, sequences * (PROMPT + GENERATED) / (max(end_s) - began))


def bgen_lines(subject: Subject, sequences: int, seed: int) -> list[str]:
    """A BGEN for every slot, each with a prompt of its own."""
    lines = []
    for slot in range(sequences):
        ids = ",".join(map(str, subject.random_ids(PROMPT, seed + slot)))
        lines.append(f"BGEN {slot} {WRITTEN} {subject.any_text(seed + slot)} {ids}")
    return lines


def run_together(engine: Engine, subject: Subject, sequences: int) -> Together:
    """All slots at once, from BGEN to the last BDONE."""
    lines = bgen_lines(subject, sequences, random.randrange(1 << 40))
    began = engine.send(*lines)
    return rates(engine.read_until(b"BDONE", sequences), sequences, began)


def slots_of(engine: Engine) -> int:
    """How many slots the engine runs, as its INFO says; 0 for an engine without."""
    return int(engine.info.get("batch_slots", "0"))


def ours(subject: Subject, threads: int, counts: Sequence[int]) -> Side:
    """The engine's slots as a side that takes turns. Raises BenchError, when called, where there are too few slots."""

    def turn(_turn: int) -> Sample:
        most = max(counts)
        context = str(PROMPT + GENERATED + 16)
        args = ["--threads", str(threads), "--max-context", context, "--parallel", str(most)]
        with Engine(subject.path, *args) as engine:
            if slots_of(engine) < most:
                raise BenchError(f"the engine runs {slots_of(engine)} slots, not {most}")
            run_together(engine, subject, most)  # warms up
            sample: dict[str, float] = {}
            for count in counts:
                sample |= run_together(engine, subject, count).sample(count)
        return sample

    return turn


def batched_command(program: Path, model: Path, threads: int, counts: Sequence[int]) -> list[str]:
    """llama-batched-bench with `counts` sequences, one after the other."""
    size = max(counts) * (PROMPT + GENERATED)
    command = [str(program), "-m", str(model), "-t", str(threads), "-c", str(size), "-npp", str(PROMPT)]
    command += ["-ntg", str(GENERATED), "-npl", ",".join(map(str, counts)), "--output-format", "jsonl"]
    return command


def peer_side(peer: Peer, subject: Subject, threads: int, counts: Sequence[int]) -> Side:
    """llama-batched-bench as a side that takes turns."""
    command = batched_command(peer.program("llama-batched-bench"), subject.path, threads, counts)

    def turn(_turn: int) -> Sample:
        sample: dict[str, float] = {}
        for count, figures in parse_batched(run_watched(command).text).items():
            sample |= Together(figures["decode"], figures["total"]).sample(count)
        return sample

    return turn


def compare(
    subject: Subject, peer: Peer | None, threads: int, counts: Sequence[int], plan: Plan, watch: Watch
) -> list[Row]:
    """Measure both sides in turns. Raises BenchError where the engine has no slots."""
    if not knows("--parallel"):
        raise BenchError("the engine has no slots yet (its help names no --parallel)")
    other = peer_side(peer, subject, threads, counts) if peer else None
    series = take_turns(ours(subject, threads, counts), other, plan, watch, [f"decode{count}" for count in counts])
    rows = []
    for count in counts:
        title = f"{count} sequence{'s' if count > 1 else ''}, {threads} threads"
        rows.append(Row.of(series, f"decode{count}", f"Decode, {title}", "tok/s"))
        rows.append(Row.of(series, f"total{count}", f"Read and write, {title}", "tok/s"))
    return rows
