"""The ratios as a picture: one bar a row, drawn as SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from tests.bench.report import ModelReport, Report, Row
from tests.bench.spread import Spread

WIDTH = 860
LEFT = 330  # where bars begin
RIGHT = 110  # room for the numbers
BAR = 14
STEP = 24
GAP = 34
DOUBTFUL_END = 3.4  # as far as the axis goes for the sake of a ratio measured in company
BETTER, WORSE, DOUBTFUL = "#2f7d5b", "#b4562f", "#c4cbd2"  # the last for ratios measured in company
INK, FAINT, PAPER = "#24292f", "#9aa4ae", "#ffffff"
SECTIONS = (("engine", "llama-bench"), ("slots", "llama-batched-bench"), ("http", "llama-server"))


def scale_end(ratios: Sequence[float]) -> float:
    """The end of the axis: the first half above all ratios, at least 1.5."""
    return max(1.5, math.ceil(max(ratios, default=1.0) * 2 + 0.01) / 2)


def axis_need(row: Row, ratio: Spread) -> float:
    """How far the axis must reach for a row; a ratio that says little must not squeeze the others."""
    return min(ratio.median, DOUBTFUL_END) if row.disturbed else ratio.median


def drawn(rows: Iterable[Row]) -> list[tuple[Row, Spread]]:
    """The rows that tell how many times as fast we are: speeds that have a ratio."""
    return [(row, row.ratio) for row in rows if row.ratio is not None and not row.lower_is_better]


def _text(
    x: float, y: float, text: str, *, size: int = 12, color: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


class Canvas:
    """Grows downwards, row by row."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.y = 30.0
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        """Where `value` lies on the axis."""
        return LEFT + (WIDTH - LEFT - RIGHT) * min(value, self.end) / self.end

    def heading(self, text: str) -> None:
        """The name of a group of bars."""
        self.y += GAP - STEP
        self.parts.append(_text(16, self.y + BAR - 3, text, size=13, bold=True))
        self.y += STEP

    def bar(self, row: Row, ratio: Spread) -> None:
        """One ratio with its spread."""
        low, median, high = ratio.low, ratio.median, ratio.high
        middle = self.y + BAR / 2
        color = DOUBTFUL if row.disturbed else BETTER if median >= 1 else WORSE
        width = self.x(median) - LEFT
        self.parts += [
            _text(LEFT - 10, self.y + BAR - 3, row.title, anchor="end"),
            f'<rect x="{LEFT}" y="{self.y:.1f}" width="{width:.1f}" height="{BAR}" fill="{color}" rx="2"/>',
            f'<path d="M{self.x(low):.1f} {middle:.1f}H{self.x(high):.1f}M{self.x(low):.1f} {middle - 4:.1f}v8'
            f'M{self.x(high):.1f} {middle - 4:.1f}v8" stroke="{INK}" fill="none"/>',
            _text(self.x(max(high, median)) + 8, self.y + BAR - 3, f"{median:.2f}", bold=True),
        ]
        self.y += STEP

    def finish(self, note: str) -> str:
        """The whole picture."""
        bottom = self.y + 4
        axis = []
        for i in range(int(self.end * 2) + 1):
            x, main = self.x(i / 2), i == 2
            color, dash = (INK, "") if main else (FAINT, ' stroke-dasharray="2 4"')
            axis.append(f'<path d="M{x:.1f} 24V{bottom:.1f}" stroke="{color}"{dash}/>')
            axis.append(_text(x, bottom + 16, f"{i / 2:g}", size=11, anchor="middle", color=INK if main else FAINT))
        height = bottom + 52
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
                f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, sans-serif">',
                f'<rect width="{WIDTH}" height="{height:.0f}" fill="{PAPER}"/>',
                *axis,
                *self.parts,
                _text(16, bottom + 40, note, size=11, color=INK),
                "</svg>\n",
            ]
        )


def _groups(model: ModelReport) -> Iterator[tuple[str, list[tuple[Row, Spread]]]]:
    for part, peer in SECTIONS:
        rows = drawn(getattr(model, part))
        if rows:
            yield f"{model.name}, beside {peer}", rows


def svg(report: Report) -> str:
    """How many times as fast Strata is, for every speed that has a peer; 1 is the peer."""
    groups = [group for model in report.models for group in _groups(model)]
    canvas = Canvas(scale_end([axis_need(row, ratio) for _, rows in groups for row, ratio in rows]))
    for heading, rows in groups:
        canvas.heading(heading)
        for row, ratio in rows:
            canvas.bar(row, ratio)
    note = "Times as fast as llama.cpp: median, least and greatest of pairs measured in turns; grey: others ran, too"
    return canvas.finish(f"{note}; commit {report.facts.get('commit', 'unknown')}.")
