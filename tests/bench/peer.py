"""The peer: where llama.cpp's programs lie, how they are run, and what their output says."""

from __future__ import annotations

import csv
import io
import json
import os
import select
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.engine import BenchError
from tests.bench.machine import ROOT, peak_mib

BUILT = ROOT / "build" / "peer" / "bin"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-server")
POLL_S = 0.02
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Peer:
    """A folder with the peer's programs."""

    folder: Path

    def program(self, name: str) -> Path:
        """The path of one program. Raises BenchError where it is missing."""
        path = self.folder / name
        if not os.access(path, os.X_OK):
            raise BenchError(f"{name} is missing in {self.folder}")
        return path


def find_peer(environment: Mapping[str, str], built: Path = BUILT) -> Peer | None:
    """The folder named by STRATA_BENCH_PEER, else what `make bench-peer` has built, else None.

    Raises BenchError where the named folder holds none of the programs.
    """
    named = environment.get("STRATA_BENCH_PEER", "")
    folder = Path(named).resolve() if named else built
    if any((folder / name).exists() for name in PROGRAMS):
        return Peer(folder)
    if named:
        raise BenchError(f"STRATA_BENCH_PEER: {named} holds none of {', '.join(PROGRAMS)}")
    return None


@dataclass(frozen=True)
class Output:
    """What a program printed, and the largest resident set it had."""

    text: str
    peak_mib: float


def run_watched(command: Sequence[str]) -> Output:
    """Run a program to its end and watch its memory meanwhile.

    The memory is polled: what wait4() would tell also counts the page tables of the program that forked.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout
    out, blocks, peak = process.stdout.fileno(), [], 0.0
    end = time.monotonic() + PATIENCE_S
    while True:
        if select.select([out], [], [], POLL_S)[0]:
            data = os.read(out, 1 << 16)
            if not data:
                break
            blocks.append(data)
        peak = max(peak, peak_mib(process.pid))
        if time.monotonic() > end:
            process.kill()
            break
    process.stdout.close()
    if process.wait() != 0:
        raise BenchError(f"{Path(command[0]).name} ended with status {process.returncode}")
    return Output(b"".join(blocks).decode(errors="replace"), peak)


def bench_command(program: Path, model: Path, threads: int, prompt: int, generated: int, repeats: int) -> list[str]:
    """llama-bench: read `prompt` tokens, then generate `generated` from nothing, each `repeats` times."""
    sizes = ["-p", str(prompt), "-n", str(generated), "-r", str(repeats), "-t", str(threads)]
    return [str(program), "-m", str(model), *sizes, "-o", "jsonl"]


def parse_bench(text: str) -> dict[tuple[int, int], float]:
    """llama-bench's output (jsonl, json or csv): (prompt, generated) -> tokens per second, the median of its repeats.

    Only JSON has the single repeats; from csv their mean is taken. Raises BenchError where nothing can be read.
    """
    rates: dict[tuple[int, int], float] = {}
    for row in _rows(text):
        try:
            samples = row.get("samples_ts") or [row["avg_ts"]]
            rates[int(row["n_prompt"]), int(row["n_gen"])] = statistics.median(map(float, samples))
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"llama-bench: a row without a usable {error}") from None
    if not rates:
        raise BenchError("llama-bench printed no results")
    return rates


def parse_batched(text: str) -> dict[int, dict[str, float]]:
    """llama-batched-bench's jsonl: sequences -> {"prompt", "decode", "total"} in tokens per second over all of them."""
    rates: dict[int, dict[str, float]] = {}
    for row in _rows(text):
        try:
            figures = {"prompt": row["speed_pp"], "decode": row["speed_tg"], "total": row["speed"]}
            rates[int(row["pl"])] = {name: float(value) for name, value in figures.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"llama-batched-bench: a row without a usable {error}") from None
    if not rates:
        raise BenchError("llama-batched-bench printed no results")
    return rates


def build_of(text: str) -> str:
    """The peer's own word for the build that made this llama-bench output."""
    return next((str(row["build_commit"]) for row in _rows(text) if row.get("build_commit")), "unknown")


def _rows(text: str) -> list[dict[str, Any]]:
    """Rows of csv, of a JSON list, or of one JSON object a line among lines of other kinds."""
    stripped = text.strip()
    if stripped.startswith("["):
        whole: list[dict[str, Any]] = json.loads(stripped)
        return whole
    if stripped.startswith("build_commit,"):
        return list(csv.DictReader(io.StringIO(stripped)))
    return [json.loads(line) for line in stripped.splitlines() if line.startswith("{") and line.endswith("}")]
