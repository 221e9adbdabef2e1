"""Write the tables of settings and metrics into the manual pages: `python -m stratad.tools.mansettings man/*.[58]`.

A page says where and how with a pair of comments, and everything between them is replaced:

    .\\" BEGIN settings as keys        (or: settings as options, metrics as list)
    .\\" END settings

With `--check` nothing is written, and the exit code is 1 when a page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from stratad.metrics import METRICS
from stratad.settings import SETTINGS, Setting, plain

_BLOCK = re.compile(r'^(\.\\" BEGIN (\w+ as \w+)\n).*?^(\.\\" END \w+\n)', re.MULTILINE | re.DOTALL)
_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "text": "string",
    "path": "string, a path",
    "choice": "string",
    "list": "array of strings",
    "table": "table",
}
_APPLIES = {
    "now": "A change applies at once.",
    "next-request": "A change applies to the next request.",
    "engine-restart": "A change applies when the engine is started again.",
    "daemon-restart": "A change applies when the daemon is started again.",
}


def updated(page: str) -> str:
    """The page with every block made anew. Raises ValueError for a block of an unknown kind."""

    def block(match: re.Match[str]) -> str:
        if match[2] not in _STYLES:
            raise ValueError(f"{match[2]!r}: must be one of {', '.join(_STYLES)}")
        return match[1] + "".join(f"{line}\n" for line in _STYLES[match[2]]()) + match[3]

    return _BLOCK.sub(block, page)


def _grouped(item: Callable[[Setting], Iterator[str]]) -> Iterator[str]:
    """Every setting, by group, in the order of the table."""
    for group, rows in groupby(SETTINGS, key=lambda row: row.group):
        yield f".Ss {_macro_words(group)}"
        yield ".Bl -tag -width Ds"
        for row in rows:
            yield from item(row)
        yield ".El"


def _key(row: Setting) -> Iterator[str]:
    yield f".It Ic {row.name}"
    yield from _sentences(row.help)
    yield f"Type: {_TYPES[row.kind]}{_unit(row)}."
    if row.kind in ("int", "float", "choice") and row.range != "any":
        yield f"Allowed: {_text(row.range)}."
    yield f"Default: {_default(row)}."
    yield _APPLIES[row.applies]


def _option(row: Setting) -> Iterator[str]:
    flag = row.flag.removeprefix("-")
    if row.kind == "bool":
        yield f".It Fl {_dashes(flag)} , Fl -no-{_dashes(flag[1:])}"
    else:
        yield f".It Fl {_dashes(flag)} Ar {row.metavar or row.kind.upper() if not row.choices else row.range}"
    yield from _sentences(row.help)


def _metrics() -> Iterator[str]:
    """Every metric, in the order in which they are served."""
    yield ".Bl -tag -width Ds"
    for row in METRICS:
        labels = "{" + ", ".join(row.labels) + "}" if row.labels else ""
        yield f".It Li {row.full_name}{labels and ' ' + _macro_words(labels)}"
        yield f"A {row.kind}."
        yield from _sentences(row.help)
    yield ".El"


_STYLES: dict[str, Callable[[], Iterator[str]]] = {
    "settings as keys": lambda: _grouped(_key),
    "settings as options": lambda: _grouped(_option),
    "metrics as list": lambda: _metrics(),
}


def _unit(row: Setting) -> str:
    return f", in {row.unit}" if row.unit else ""


def _default(row: Setting) -> str:
    value = plain(row.default)
    if value is None:
        return "unset"
    if value in ("", [], {}):
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return _text(", ".join(map(str, value)))
    return _text(f"{value:g}" if isinstance(value, float) else str(value))


def _sentences(text: str) -> Iterator[str]:
    """Each sentence on lines of its own, as mdoc wants it."""
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z])", text.replace("\n", " ")):
        yield from map(_text, textwrap.wrap(sentence, 78, break_on_hyphens=False))


def _text(words: str) -> str:
    """Words as a text line: nothing in them is taken for a request or an escape."""
    escaped = words.replace("\\", "\\e").replace("~", "\\(ti")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def _macro_words(words: str) -> str:
    """Words as the argument of a macro: none of them is taken for a macro of its own."""
    return '"' + words.replace("\\", "\\e").replace('"', '""') + '"'


def _dashes(flag: str) -> str:
    return flag.replace("-", "\\-")


def main(argv: Sequence[str] | None = None) -> int:
    """Update or check the pages named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m stratad.tools.mansettings", description=__doc__.split(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    arguments = parser.parse_args(argv)
    stale = False
    for path in arguments.pages:
        before = path.read_text(encoding="utf-8")
        after = updated(before)
        if before == after:
            continue
        stale = True
        if arguments.check:
            print(f"{path} is out of date: run python -m stratad.tools.mansettings {path}", file=sys.stderr)
        else:
            path.write_text(after, encoding="utf-8")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
