"""Each kernel beside what the processor can do at most, measured in turns within the same minute.

`probe.c` is compiled on the spot for the processor that runs it. The engine's kernel bench works with one thread on
3 MiB of weights, so its GB/s stand beside `read_cache`; `read_memory` bounds a model that is larger than the caches.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.engine import ENGINE, BenchError
from tests.bench.report import Kernel
from tests.bench.spread import QUIET, Spread, Watch

SOURCE = Path(__file__).with_name("probe.c")
COMPILER = ("gcc", "-std=gnu11", "-O2", "-march=native", "-pthread")
LIMIT = re.compile(r"^(\w+) threads=(\d+) ([\d.]+) (\S+)$", re.M)
KERNEL = re.compile(r"^(\S+)\s+(\S+)\s+k=(\d+)\s+rows=(\d+)\s+([\d.]+) GB/s\s+([\d.]+) GOP/s\s*$", re.M)
NAMES = {
    "read_memory": "Reading memory",
    "read_cache": "Reading 3 MiB in cache",
    "int8": "int8 multiply-add",
    "fma": "float multiply-add",
}


@dataclass(frozen=True)
class Limits:
    """What one run of the probe found: (name, threads) -> (value, unit)."""

    values: Mapping[tuple[str, int], tuple[float, str]]

    @classmethod
    def parse(cls, text: str) -> Limits:
        """From the probe's output. Raises BenchError where a limit is missing."""
        values = {(name, int(n)): (float(value), unit) for name, n, value, unit in LIMIT.findall(text)}
        missing = [name for name in NAMES if (name, 1) not in values]
        if missing:
            raise BenchError(f"the probe did not tell {', '.join(missing)}")
        return cls(values)

    def one(self, name: str) -> float:
        """A limit with one thread."""
        return self.values[name, 1][0]


@dataclass(frozen=True)
class Speed:
    """One line of the engine's kernel bench."""

    isa: str
    kind: str
    length: int  # of a row of weights
    rows: int  # of activations
    gbytes: float
    gops: float

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What it is the speed of."""
        return self.kind, self.isa, self.length, self.rows


def parse_kernels(text: str) -> list[Speed]:
    """The engine's kernel bench: one line a product; lines of other kinds are skipped."""
    found = KERNEL.findall(text)
    if not found:
        raise BenchError("--bench-kernels printed no products")
    return [Speed(isa, kind, int(k), int(rows), float(gb), float(gop)) for isa, kind, k, rows, gb, gop in found]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{Path(command[0]).name}: {error}") from None
    if done.returncode:
        raise BenchError(f"{Path(command[0]).name} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return done.stdout


def measure(rounds: int, quiet_wait_s: float, watch: Watch) -> tuple[list[Limits], list[list[Speed]]]:
    """Probe and kernel bench in turns, `rounds` times each."""
    limits, speeds = [], []
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        probe = str(Path(folder, "probe"))
        _run([*COMPILER, str(SOURCE), "-o", probe])
        for _ in range(rounds):
            watch.wait_for_quiet(quiet_wait_s, QUIET)
            limits.append(Limits.parse(_run([probe])))
            speeds.append(parse_kernels(_run([str(ENGINE), "--bench-kernels"])))
    return limits, speeds


def limit_spreads(limits: Sequence[Limits]) -> dict[str, Spread]:
    """The limits of all rounds, by the names of the table."""
    spreads = {}
    for (name, threads), (_, unit) in limits[0].values.items():
        spread = Spread.of(round_.values[name, threads][0] for round_ in limits)
        if spread:
            title = f"{NAMES.get(name, name)}, {threads} thread{'s' if threads > 1 else ''}, {unit}"
            spreads[title] = spread
    return spreads


def kernel_rows(limits: Sequence[Limits], speeds: Sequence[Sequence[Speed]]) -> list[Kernel]:
    """Every kernel's spread over the rounds, each round beside its own limits."""
    rows = []
    for i, first in enumerate(speeds[0]):
        seen = [round_[i] for round_ in speeds if len(round_) > i and round_[i].key == first.key]
        gbytes, gops = Spread.of(s.gbytes for s in seen), Spread.of(s.gops for s in seen)
        beside = list(zip(seen, limits, strict=False))
        bandwidth = Spread.of(s.gbytes / limit.one("read_cache") for s, limit in beside)
        peak = Spread.of(s.gops / limit.one("int8") for s, limit in beside)
        if gbytes and gops:
            rows.append(Kernel(*first.key, gbytes, gops, bandwidth, peak))
    return rows
