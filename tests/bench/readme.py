"""The README's part about speed, between two marks."""

from __future__ import annotations

from tests.bench.engine import BenchError

BEGIN = "<!-- bench: begin -->"
END = "<!-- bench: end -->"


def replace_section(readme: str, section: str) -> str:
    """`readme` with what lies between the marks replaced. Raises BenchError where marks are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise BenchError(f"README.md: needs one line {BEGIN} and after it one line {END}")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{section.strip()}\n\n{END}{after}"
