"""The engine beside llama-bench: decode, prompt and memory, on the same file with as many threads.

What llama-bench does is done here too: a prompt of random tokens is read into an empty context, and, apart from that,
tokens are generated from nothing. It feeds itself random tokens and samples nothing; the engine has to choose, so it
is told to choose evenly among the 64 likeliest. (At temperature 0 it would soon repeat itself, and the same experts
would be asked again and again, which flatters any cache.) Choosing and printing are in the engine's time.
"""

from __future__ import annotations

import os
import statistics

from tests.bench.engine import BenchError, Done, Engine
from tests.bench.peer import Output, Peer, bench_command, parse_bench, run_watched
from tests.bench.report import Row
from tests.bench.spread import Plan, Sample, Series, Side, Watch, take_turns
from tests.bench.subject import Subject

PROMPT = 512
GENERATED = 128
CONTEXT = PROMPT + GENERATED
CLOCK_SLACK_S = 0.05
TITLES = {"decode": ("Decode", "tok/s"), "prompt": ("Prompt", "tok/s"), "memory": ("Peak memory", "MiB")}


def check(done: Done, wanted: int, wall_s: float) -> None:
    """Raise BenchError unless a request did its whole work in the time it tells."""
    if done.generated != wanted or done.reused:
        raise BenchError(f"the engine made {done.generated} of {wanted} tokens and reused {done.reused} of its prompt")
    told_s = (done.prompt_ms + done.decode_ms) / 1e3
    if told_s < 0.8 * wall_s - CLOCK_SLACK_S:
        raise BenchError(f"the engine tells {told_s:.3f} s for what took {wall_s:.3f} s")


def measure_engine(subject: Subject, threads: int, repeats: int, turn: int) -> Sample:
    """One turn of ours: a fresh process, warmed up, then each figure as the median of `repeats`."""
    decode, prompt = [], []
    with Engine(subject.path, "--threads", str(threads), "--max-context", str(CONTEXT)) as engine:
        for n in range(repeats + 1):
            seed = 1000 * turn + n
            read, _, wall_s = engine.generate(subject.random_ids(PROMPT, seed), 1, subject.endless)
            check(read, 1, wall_s)
            made, _, wall_s = engine.generate(subject.random_ids(1, seed), GENERATED + 1, subject.any_text(seed))
            check(made, GENERATED + 1, wall_s)
            if n > 0:  # the first warms up, as llama-bench does
                prompt.append(read.prompt_rate)
                decode.append(made.decode_rate)
        memory = engine.peak_mib
    return {"decode": statistics.median(decode), "prompt": statistics.median(prompt), "memory": memory}


def sample_of(output: Output) -> Sample:
    """One turn of llama-bench."""
    rates = parse_bench(output.text)
    try:
        return {"decode": rates[0, GENERATED], "prompt": rates[PROMPT, 0], "memory": output.peak_mib}
    except KeyError as error:
        raise BenchError(f"llama-bench printed no row for {error}") from None


def peer_side(peer: Peer, subject: Subject, threads: int, repeats: int) -> Side:
    """llama-bench as a side that takes turns."""
    command = bench_command(peer.program("llama-bench"), subject.path, threads, PROMPT, GENERATED, repeats)
    return lambda _turn: sample_of(run_watched(command))


def rows_of(series: Series, threads: int) -> list[Row]:
    """The table rows of one number of threads."""
    times = "1 thread" if threads == 1 else f"{threads} threads"
    return [
        Row.of(series, metric, f"{title}, {times}", unit, lower_is_better=metric == "memory")
        for metric, (title, unit) in TITLES.items()
    ]


def compare(subject: Subject, peer: Peer | None, threads: int, repeats: int, plan: Plan, watch: Watch) -> list[Row]:
    """Measure both sides in turns with `threads` threads."""
    other = peer_side(peer, subject, threads, repeats) if peer else None
    free = 1 - threads / (os.cpu_count() or threads)
    series = take_turns(
        lambda turn: measure_engine(subject, threads, repeats, turn),
        other,
        plan.leaving(free),
        watch,
        ("decode", "prompt"),
    )
    return rows_of(series, threads)
