"""Tables, picture, JSON and the README's section."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench import __main__ as command
from tests.bench.chart import BETTER, DOUBTFUL, DOUBTFUL_END, WORSE, axis_need, drawn, scale_end, svg
from tests.bench.engine import BenchError
from tests.bench.readme import BEGIN, END, replace_section
from tests.bench.report import (
    Kernel,
    ModelReport,
    Report,
    Row,
    main_kernels,
    markdown,
    number,
    ratio_cell,
    readme_section,
    table,
)
from tests.bench.spread import Spread


def flat(value: float) -> Spread:
    return Spread(value, value, value, 5)


def row(ratio: float, *, lower_is_better: bool = False, disturbed: bool = False, title: str = "Decode") -> Row:
    spread = Spread(ratio * 0.9, ratio, ratio * 1.1, 5)
    return Row(title, "tok/s", flat(1500), flat(1000), spread, lower_is_better, 0.25 if disturbed else 0.04, disturbed)


def kernel(kind: str, length: int, rows: int) -> Kernel:
    return Kernel(kind, "avx2", length, rows, flat(20), flat(100), flat(0.5), None)


@pytest.fixture
def report() -> Report:
    model = ModelReport("tiny", 34.2, engine=[row(1.5), row(0.8, lower_is_better=True, title="Memory")])
    model.http = [row(0.9, title="Clients <8>"), row(3.0, disturbed=True)]
    model.daemon = [Row("Processor time per streamed token", "µs", flat(70), lower_is_better=True)]
    kernels = [kernel("q4_0", 64, 1), kernel("q4_0", 2048, 1), kernel("q4_0", 2048, 4), kernel("q4_0", 2048, 8)]
    limits = {"int8 multiply-add, 1 thread, GOP/s": flat(200)}
    return Report({"commit": "abc1234", "load before": "0.1"}, True, [model], limits, kernels, ["slots: none yet"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.123, "0.12"), (9.994, "9.99"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_a_table_has_as_many_cells_in_every_line() -> None:
    lines = table(["a", "b"], [["1", "2"], ["3", "4"]]).splitlines()
    assert lines == ["| a | b |", "| --- | ---: |", "| 1 | 2 |", "| 3 | 4 |"]


def test_a_ratio_shows_its_spread_and_company_is_marked() -> None:
    assert ratio_cell(row(2.0)) == "**2.00** (1.80 to 2.20)"
    assert ratio_cell(row(2.0, disturbed=True)) == "⚠ 2.00 (1.80 to 2.20)"
    assert ratio_cell(Row("x", "ms", flat(1))) == "-"


def test_the_report_has_all_sections(report: Report) -> None:
    text = markdown(report)
    assert "| Decode | 1,500 | 1,000 | tok/s | **1.50** (1.35 to 1.65) | 5 | 4 % |" in text
    assert "| Memory ↓ |" in text
    assert "| Processor time per streamed token ↓ | 70.0 | - | µs | - | 5 | - |" in text
    assert "beside llama-bench" in text and "beside llama-server" in text
    assert "llama-batched-bench" not in text  # nothing was measured beside it
    assert "- slots: none yet" in text and "quick mode" in text and "commit: abc1234" in text
    assert "⚠ =" in text


def test_what_the_engine_is_beside_itself_has_headings_of_its_own(report: Report) -> None:
    model = report.models[0]
    model.windows = [row(1.2, lower_is_better=True, title="Window of 2 rows")]
    model.company = [row(0.6, title="Reading")]
    model.drafts = [
        row(1.3, title="Prose, beside none"),
        dataclasses.replace(row(1, title="Prose, tokens"), detail=True),
    ]
    text = markdown(report)
    assert "|  | these rows | 1 row |" in text and "| Window of 2 rows ↓ |" in text
    assert "|  | together | alone, or target |" in text
    assert "|  | as chosen | beside |" in text and "| Prose, tokens |" in text
    assert "Prose, beside none" in readme_section(report) and "Prose, tokens" not in readme_section(report)
    assert Report.from_json(report.to_json()) == report


def test_results_from_before_a_section_was_there_can_be_read(report: Report) -> None:
    data = json.loads(report.to_json())
    for name in ("windows", "company", "drafts"):
        del data["models"][0][name]
    for rows in (data["models"][0][name] for name in ("engine", "http", "daemon")):
        for old in rows:
            del old["detail"]
    assert Report.from_json(json.dumps(data)) == report


def test_only_marked_ratios_need_the_explanation(report: Report) -> None:
    report.models[0].http.pop()
    assert "⚠" not in markdown(report)


def test_the_table_shows_the_longest_rows_of_each_kind(report: Report) -> None:
    assert [(k.length, k.rows) for k in main_kernels(report.kernels)] == [(2048, 1), (2048, 8)]
    assert main_kernels([kernel("a", 64, 1), kernel("b", 64, 1)]) == [kernel("a", 64, 1), kernel("b", 64, 1)]


def test_json_brings_everything_back(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="format"):
        Report.from_json('{"format": 0}')


def test_the_picture_shows_speeds_that_have_a_peer() -> None:
    fast = row(2.0)
    assert drawn([fast, row(0.5, lower_is_better=True), Row("x", "tok/s", flat(1))]) == [(fast, fast.ratio)]
    assert [scale_end([]), scale_end([1.2]), scale_end([1.5]), scale_end([2.3])] == [1.5, 1.5, 2.0, 2.5]


def test_the_picture_is_well_formed_and_has_a_bar_a_ratio(report: Report) -> None:
    root = ElementTree.fromstring(svg(report))
    bars = [e.get("fill") for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("rx")]
    assert bars == [BETTER, WORSE, DOUBTFUL]
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Clients <8>" in texts and "1.50" in texts and any("abc1234" in (t or "") for t in texts)


def test_a_ratio_measured_in_company_does_not_squeeze_the_others() -> None:
    doubtful, sure = row(16.0, disturbed=True), row(16.0)
    assert doubtful.ratio and axis_need(doubtful, doubtful.ratio) == DOUBTFUL_END
    assert sure.ratio and axis_need(sure, sure.ratio) == 16.0


def test_bars_stay_inside_the_picture(report: Report) -> None:
    width = float(re.findall(r'<svg [^>]*width="(\d+)"', svg(report))[0])
    ends = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"', svg(report))]
    assert ends and max(ends) <= width


def test_an_empty_report_still_makes_a_page_and_a_picture() -> None:
    empty = Report({}, missing=["llama.cpp: no peer"])
    assert "llama.cpp: no peer" in markdown(empty)
    ElementTree.fromstring(svg(empty))


def test_the_readme_section_is_replaced_and_nothing_else(report: Report) -> None:
    readme = f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once = replace_section(readme, readme_section(report))
    assert once.startswith(f"# Title\n\n{BEGIN}\n\n![") and once.endswith(f"\n\n{END}\n\nafter\n")
    assert "old" not in once
    assert replace_section(once, readme_section(report)) == once


@pytest.mark.parametrize("text", ["", BEGIN, END, END + BEGIN, BEGIN + END + END])
def test_a_readme_without_marks_is_left_alone(text: str) -> None:
    with pytest.raises(BenchError, match=r"README\.md"):
        replace_section(text, "new")


def test_update_readme_measures_nothing(tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "measure", lambda _args: pytest.fail("measured"))
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    command.write(report, tmp_path / "results")
    assert command.main(["--update-readme", "--out", str(tmp_path / "results")]) == 0
    assert "**1.50**" in (tmp_path / "README.md").read_text()
    assert command.main(["--update-readme", "--out", str(tmp_path / "none")]) == 1


def test_what_cannot_be_measured_is_told_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_BENCH_PEER", "")
    monkeypatch.setattr(command, "find_peer", lambda _environment: None)
    model = tmp_path / "no.gguf"
    assert command.main(["--quick", "--only", "engine", "--model", str(model), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "latest.md").read_text()
    assert "no peer" in text and "no.gguf" in text
