"""What was measured, as data, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.spread import Series, Spread

FORMAT = 1
NONE = "-"  # a cell without a figure
PARTS = ("engine", "slots", "http", "daemon", "windows", "company", "drafts")
METHOD = (
    "Ratio = first column / second, pair by pair, measured in turns: median (least to greatest). ↓ marks figures of "
    "which less is better. Others = the largest share of the machine that other programs took during a pair."
)


@dataclass(frozen=True)
class Row:
    """One figure of both sides."""

    title: str
    unit: str
    ours: Spread | None
    peer: Spread | None = None
    ratio: Spread | None = None
    lower_is_better: bool = False
    foreign: float | None = None  # the largest share of the machine that others took during a pair, 0..1
    disturbed: bool = False  # that was more than what is measured leaves free
    detail: bool = False  # left out of the README

    @classmethod
    def of(
        cls,
        series: Series,
        metric: str,
        title: str,
        unit: str,
        *,
        lower_is_better: bool = False,
        detail: bool = False,
    ) -> Row:
        """The row of one metric of a series."""
        spreads = series.ours(metric), series.peer(metric), series.ratio(metric)
        return cls(title, unit, *spreads, lower_is_better, series.foreign, series.disturbed, detail)


@dataclass(frozen=True)
class Kernel:
    """One kernel beside what the processor can do, both measured in the same minute with one thread."""

    kind: str  # of weights
    isa: str
    length: int  # of a row of weights
    rows: int  # of activations
    gbytes: Spread  # GB/s of weights read
    gops: Spread  # 1e9 integer operations a second, a multiply-add being two
    of_bandwidth: Spread | None  # share of the bandwidth of data as large as the kernel's
    of_peak: Spread | None  # share of the integer peak

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"{self.kind} {self.isa}, k={self.length}, {self.rows} row{'s' if self.rows > 1 else ''}"


@dataclass
class ModelReport:
    """Everything about one model."""

    name: str
    size_mib: float
    engine: list[Row] = field(default_factory=list)
    slots: list[Row] = field(default_factory=list)
    http: list[Row] = field(default_factory=list)
    daemon: list[Row] = field(default_factory=list)  # stratad beside Strata's own engine, and what it costs
    windows: list[Row] = field(default_factory=list)  # this and the following: the engine beside itself
    company: list[Row] = field(default_factory=list)
    drafts: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for part in PARTS for row in getattr(self, part)]


@dataclass
class Report:
    """A whole run."""

    facts: dict[str, str]
    quick: bool = False
    models: list[ModelReport] = field(default_factory=list)
    limits: dict[str, Spread] = field(default_factory=dict)  # what probe.c measured
    kernels: list[Kernel] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what was not measured, and why

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The opposite of `to_json`. Raises ValueError for another format."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a bench report of format {FORMAT}")
        models = [
            ModelReport(m["name"], m["size_mib"], *([_row(row) for row in m.get(part, ())] for part in PARTS))
            for m in data["models"]
        ]
        limits = {name: Spread(**value) for name, value in data["limits"].items()}
        kernels = [_kernel(kernel) for kernel in data["kernels"]]
        return cls(data["facts"], data["quick"], models, limits, kernels, data["missing"])


def _spread(data: Mapping[str, Any] | None) -> Spread | None:
    return None if data is None else Spread(**data)


def _row(data: Mapping[str, Any]) -> Row:
    return Row(**{**data, **{name: _spread(data[name]) for name in ("ours", "peer", "ratio")}})


def _kernel(data: Mapping[str, Any]) -> Kernel:
    names = ("gbytes", "gops", "of_bandwidth", "of_peak")
    return Kernel(**{**data, **{name: _spread(data[name]) for name in names}})


def number(value: float) -> str:
    """About three digits, and whole numbers from 100 on; never an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def value_cell(spread: Spread | None) -> str:
    """The median, as a cell."""
    return NONE if spread is None else number(spread.median)


def ratio_cell(row: Row) -> str:
    """`median (least to greatest)`, as a cell; a disturbed one is marked and not in bold."""
    if row.ratio is None:
        return NONE
    median, span = f"{row.ratio.median:.2f}", f"({row.ratio.low:.2f} to {row.ratio.high:.2f})"
    return f"⚠ {median} {span}" if row.disturbed else f"**{median}** {span}"


def share_cell(spread: Spread | None) -> str:
    """A share in percent, as a cell."""
    return NONE if spread is None else f"{100 * spread.median:.0f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    align = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows]) + "\n"


def _row_cells(row: Row) -> list[str]:
    title = row.title + (" ↓" if row.lower_is_better else "")
    count = NONE if row.ours is None else str(row.ours.count)
    return [
        title,
        value_cell(row.ours),
        value_cell(row.peer),
        row.unit,
        ratio_cell(row),
        count,
        NONE if row.foreign is None else f"{100 * row.foreign:.0f} %",
    ]


def rows_table(rows: Sequence[Row], ours: str, peer: str) -> str:
    """The table of one section, with the headings of both sides."""
    return table(["", ours, peer, "unit", "ratio", "pairs", "others"], map(_row_cells, rows))


@dataclass(frozen=True)
class Section:
    """How the tables of one part of a model's report are headed."""

    part: str
    title: str
    ours: str  # the first side
    peer: str


SECTIONS = (
    Section("engine", "The engine beside llama-bench", "Strata", "llama-bench"),
    Section("slots", "Several sequences, the engine beside llama-batched-bench", "Strata", "llama-batched-bench"),
    Section("http", "HTTP, stratad beside llama-server", "Strata", "llama-server"),
    Section("daemon", "The daemon by itself, and beside Strata's engine without it", "Strata", "engine alone"),
    Section("windows", "A decode window by its rows, beside one of a single row", "these rows", "1 row"),
    Section(
        "company",
        "A long prompt read beside two streams; the longest gap between two tokens of a stream beside its target",
        "together",
        "alone, or target",
    ),
    Section(
        "drafts",
        "The engine's choice of draft depth beside none and beside the best fixed depth (sought: 0.97 of the best, "
        "1.00 of none, 1.10 of none where text is predictable)",
        "as chosen",
        "beside",
    ),
)


def model_sections(model: ModelReport, level: str, *, details: bool = True) -> list[str]:
    """The tables of one model, under headings of `level`; without `details` only their main rows."""
    parts = [f"{level} {model.name} ({model.size_mib:.0f} MiB)\n"]
    for section in SECTIONS:
        rows = [row for row in getattr(model, section.part) if details or not row.detail]
        if rows:
            parts.append(f"{section.title}:\n\n{rows_table(rows, section.ours, section.peer)}")
    return parts


def facts_line(report: Report) -> str:
    """The facts in one line."""
    return "; ".join(f"{name}: {value}" for name, value in report.facts.items()) + (
        "; quick mode" if report.quick else ""
    )


def disturbed(report: Report) -> bool:
    """Whether any row was measured in company."""
    return any(row.disturbed for model in report.models for row in model.rows)


def main_kernels(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Of each kind the longest rows of weights, with the least and the most rows of activations."""
    chosen = []
    for kind in dict.fromkeys((k.kind, k.isa) for k in kernels):
        same = [k for k in kernels if (k.kind, k.isa) == kind]
        longest = [k for k in same if k.length == max(k.length for k in same)]
        ends = {min(k.rows for k in longest), max(k.rows for k in longest)}
        chosen += [k for k in longest if k.rows in ends]
    return chosen


def kernel_part(report: Report) -> str:
    """What the processor can do, and what the kernels make of it."""
    limits = table(
        ["limit", "measured", "least to greatest"],
        ([name, number(s.median), f"{number(s.low)} to {number(s.high)}"] for name, s in report.limits.items()),
    )
    if not report.kernels:
        return limits
    rows = (
        [k.name, number(k.gbytes.median), share_cell(k.of_bandwidth), number(k.gops.median), share_cell(k.of_peak)]
        for k in main_kernels(report.kernels)
    )
    return limits + "\n" + table(["kernel, 1 thread", "GB/s", "of bandwidth", "GOP/s", "of int8 peak"], rows)


def notes(report: Report) -> list[str]:
    """What a reader must know to judge the tables."""
    parts = [METHOD + "\n", facts_line(report) + ".\n"]
    if disturbed(report):
        parts.append(
            "⚠ = other programs took more of the machine than was free; such a ratio says little, because programs "
            "suffer from company in different degrees.\n"
        )
    if report.missing:
        parts.append("Not measured:\n\n" + "".join(f"- {reason}\n" for reason in report.missing))
    return parts


def markdown(report: Report) -> str:
    """The whole report."""
    parts = ["# Strata beside llama.cpp\n", "![Ratios](latest.svg)\n"]
    for model in report.models:
        parts += model_sections(model, "##")
    if report.limits:
        parts.append("## Kernels beside what the processor can do\n\n" + kernel_part(report))
    return "\n".join(parts + notes(report))


def readme_section(report: Report) -> str:
    """The part for the README: no kernels, no details."""
    parts = ["![Strata beside llama.cpp](tests/bench/results/latest.svg)\n"]
    for model in report.models:
        parts += model_sections(model, "###", details=False)
    return "\n".join(parts + notes(report))
