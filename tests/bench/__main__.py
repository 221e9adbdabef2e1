"""The command line of the bench; the package's own description tells what it does and how."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tests.bench
from tests.bench import company, drafts, kernels, serving, slots, speed, windows
from tests.bench.chart import svg
from tests.bench.engine import BenchError
from tests.bench.machine import EMBEDDED, ROOT, Company, facts, load, priority
from tests.bench.peer import Peer, find_peer
from tests.bench.readme import replace_section
from tests.bench.report import ModelReport, Report, Row, markdown, readme_section
from tests.bench.spread import Plan, Watch
from tests.bench.subject import Subject

RESULTS = Path(__file__).parent / "results"
SECTIONS = ("engine", "slots", "http", "windows", "company", "drafts", "kernels")
COUNTS = (1, 2, 4, 8)
Compare = Callable[[Subject, int, Plan, Watch], list[Row]]
NO_PEER = "llama.cpp: no peer (run `make bench-peer`, or set STRATA_BENCH_PEER to a folder with its programs)"


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    plan: Plan
    own: Plan  # of a section that measures the engine beside itself; its time is for the whole section
    repeats: int  # within one turn of the engine or llama-bench
    kernel_rounds: int


FULL = Effort(
    Plan(pairs=5, most=12, quiet_wait_s=20),
    Plan(pairs=5, most=12, quiet_wait_s=4, limit_s=170),
    repeats=3,
    kernel_rounds=5,
)
QUICK = Effort(
    Plan(pairs=3, most=5, quiet_wait_s=6), Plan(pairs=3, most=5, quiet_wait_s=1, limit_s=55), repeats=2, kernel_rounds=2
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=tests.bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", type=Path, action="append", metavar="FILE", help="GGUF file; may be repeated")
    made.add_argument(
        "--threads", type=int, action="append", metavar="N", help="threads of the engine section [1 and 2]"
    )
    made.add_argument("--only", choices=SECTIONS, action="append", help="measure this section only; may be repeated")
    made.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    made.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="NICE",
        help="nice value of both sides; one below 0 keeps others away, and needs the right to set it",
    )
    made.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where results go [tests/bench/results]")
    made.add_argument(
        "--update-readme", action="store_true", help="measure nothing; put the latest results into README.md"
    )
    return made


def say(text: str) -> None:
    """A line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Run:
    """One run of the bench."""

    report: Report
    peer: Peer | None
    effort: Effort
    sections: Sequence[str]
    threads: Sequence[int]
    watch: Watch

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do one part; what cannot be measured is written down and the rest goes on."""
        say(f"{name} ...")
        try:
            work()
        except BenchError as error:
            self.report.missing.append(f"{name}: {error}")
            say(f"{name}: not measured: {error}")

    def kernels(self) -> None:
        """Kernels and the processor's limits."""
        limits, speeds = kernels.measure(self.effort.kernel_rounds, self.effort.plan.quiet_wait_s, self.watch)
        self.report.limits = kernels.limit_spreads(limits)
        self.report.kernels = kernels.kernel_rows(limits, speeds)

    def model(self, path: Path) -> None:
        """All sections of one model."""
        subject = Subject.load(path)
        part = ModelReport(subject.name, subject.size_mib)
        self.report.models.append(part)
        plan, most = self.effort.plan, max(self.threads)
        if "engine" in self.sections:
            for threads in self.threads:

                def engine(threads: int = threads) -> None:
                    part.engine += speed.compare(subject, self.peer, threads, self.effort.repeats, plan, self.watch)

                self.attempt(f"{subject.name}: engine, {threads} threads", engine)
        if "slots" in self.sections:

            def several() -> None:
                part.slots += slots.compare(subject, self.peer, most, COUNTS, plan, self.watch)

            self.attempt(f"{subject.name}: several sequences", several)
        if "http" in self.sections:

            def http() -> None:
                part.http, part.daemon = serving.compare(subject, self.peer, most, COUNTS, plan, self.watch)

            self.attempt(f"{subject.name}: HTTP", http)
        self.beside_itself(subject, part, most)

    def beside_itself(self, subject: Subject, part: ModelReport, threads: int) -> None:
        """The sections that need no peer: the engine in one state beside itself in another."""
        sections = {"windows": windows.compare, "company": company.compare, "drafts": drafts.compare}
        for name, compare in sections.items():
            if name in self.sections:
                rows: list[Row] = getattr(part, name)

                def section(compare: Compare = compare, rows: list[Row] = rows) -> None:
                    rows += compare(subject, threads, self.effort.own, self.watch)

                self.attempt(f"{subject.name}: {name}", section)


def measure(args: argparse.Namespace) -> Report:
    """Everything that was asked for."""
    peer = find_peer(os.environ)
    report = Report(facts(), args.quick)
    if peer is None:
        report.missing.append(NO_PEER)
        say(NO_PEER)
    threads = sorted({min(n, os.cpu_count() or 1) for n in args.threads or (1, 2)})
    run = Run(report, peer, QUICK if args.quick else FULL, args.only or SECTIONS, threads, Company())
    for path in args.model or [EMBEDDED]:
        run.attempt(str(path), lambda path=path: run.model(path))  # type: ignore[misc]
    if "kernels" in run.sections:
        run.attempt("kernels", run.kernels)
    report.facts["load after"] = load()
    return report


def write(report: Report, folder: Path) -> None:
    """latest.json, latest.md and latest.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("json", report.to_json()), ("md", markdown(report)), ("svg", svg(report))):
        (folder / f"latest.{name}").write_text(text)


def update_readme(results: Path) -> None:
    """Put the latest results into README.md."""
    path = ROOT / "README.md"
    try:
        report = Report.from_json((results / "latest.json").read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{results / 'latest.json'}: {error}") from None
    path.write_text(replace_section(path.read_text(), readme_section(report)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status."""
    args = parser().parse_args(arguments)
    try:
        if args.update_readme:
            update_readme(args.out)
            return 0
        with priority(args.priority):
            report = measure(args)
    except BenchError as error:
        say(f"bench: {error}")
        return 1
    except PermissionError as error:
        say(f"bench: --priority {args.priority}: {error.strerror}; values below 0 need the right to set them")
        return 1
    write(report, args.out)
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
