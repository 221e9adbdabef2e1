"""Text for people: short, aligned, and coloured only on a terminal that wants colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

TYPE_CHECKING = False  # spares the import of typing at run time
if TYPE_CHECKING:
    from typing import Any


def clean(text: str) -> str:
    """Text from elsewhere without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in left-aligned columns."""
    cells = [[clean(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def value(item: Any) -> str:
    """A setting's or status value in one line."""
    if item is None:
        return "unset"
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, list):
        return ", ".join(map(value, item)) if item else "(empty)"
    if isinstance(item, dict):
        return " ".join(f"{key}={value(part)}" for key, part in item.items()) if item else "(empty)"
    return str(item) if item != "" else "(empty)"


_GREEN, _YELLOW, _RED = "32", "33", "31"
_COLOURS = {"ready": _GREEN, "failed": _RED, "stopped": _RED}  # every other state is on its way: yellow


def status(snapshot: dict[str, Any]) -> str:
    """`stratactl status`. Shows what the snapshot has; a daemon of another version may lack members."""
    state = str(snapshot.get("state", "unknown"))
    text = table([(label, words) for label, words in _status_rows(snapshot) if words])
    lines = [text.replace(state, paint(state, _COLOURS.get(state, _YELLOW)), 1), *_slot_lines(snapshot)]
    if state in ("failed", "restarting"):
        lines += _last_words(_part(snapshot, "engine"))
    return "\n".join(lines)


def _status_rows(snapshot: dict[str, Any]) -> list[tuple[str, str]]:
    requests, rates = _part(snapshot, "requests"), _part(snapshot, "rates")
    state, detail = str(snapshot.get("state", "unknown")), snapshot.get("state_detail")
    return [
        ("state", f"{state}: {detail}" if detail else state),
        ("model", _model(_part(snapshot, "model"))),
        ("engine", _engine_line(_part(snapshot, "engine"))),
        ("requests", _counts(requests, ("running", "queued", "finished", "cancelled", "failed", "refused"))),
        ("rates", _rates(rates)),
        ("slots", _slots(snapshot)),
        ("serves", ", ".join(f"http://{address}" for address in snapshot.get("listeners") or [])),
        ("settings", value(snapshot["settings"]) if snapshot.get("settings") else ""),
        ("daemon", _daemon(snapshot)),
    ]


def _part(parent: dict[str, Any], key: str) -> dict[str, Any]:
    found = parent.get(key)
    return found if isinstance(found, dict) else {}


def _model(model: dict[str, Any]) -> str:
    facts = [model.get("name") or model.get("path")]
    facts.append(f"({model['arch']})" if model.get("arch") else None)
    facts.append(f"context {model['context']}" if model.get("context") else None)
    return " ".join(str(fact) for fact in facts if fact)


def _engine_line(engine: dict[str, Any]) -> str:
    info = _part(engine, "info")
    facts = [
        f"pid {engine['pid']}" if engine.get("pid") else "not running",
        info.get("isa"),
        f"{info['threads']} threads" if info.get("threads") else None,
        f"kv {info['kv']}" if info.get("kv") else None,
        f"started again {engine['restarts']} times" if engine.get("restarts") else None,
    ]
    return ", ".join(str(fact) for fact in facts if fact)


def _counts(requests: dict[str, Any], names: tuple[str, ...]) -> str:
    return ", ".join(f"{requests[name]} {name}" for name in names if requests.get(name) is not None)


def _rates(rates: dict[str, Any]) -> str:
    known = (("decode", rates.get("decode_tok_s")), ("prompt", rates.get("prompt_tok_s")))
    return ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in known if rate is not None)


def _slot_rows(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    rows = snapshot.get("slots")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _slots(snapshot: dict[str, Any]) -> str:
    """How many slots do what; fewer than asked for is worth a word."""
    states = [str(row.get("state")) for row in _slot_rows(snapshot)]
    counts = [f"{states.count(state)} {state}" for state in ("decoding", "reading", "idle") if state in states]
    concurrency = _part(snapshot, "concurrency")
    serving, requested = concurrency.get("serving"), concurrency.get("requested")
    if counts and isinstance(serving, int) and isinstance(requested, int) and serving < requested:
        counts.append(f"{requested} were asked for")
    return ", ".join(counts)


def _slot_lines(snapshot: dict[str, Any]) -> list[str]:
    """One line for each slot that works."""
    busy = [row for row in _slot_rows(snapshot) if row.get("state") in ("reading", "decoding")]
    return table([_slot(row) for row in busy]).split("\n") if busy else []


def _slot(row: dict[str, Any]) -> tuple[str, ...]:
    rate, seconds = row.get("tok_s"), row.get("elapsed_s")
    prompt, read = row.get("prompt_tokens", "?"), row.get("prompt_read", "?")
    reading = row.get("state") == "reading"
    return (
        f"  slot {row.get('slot', '?')}",
        str(row["state"]),
        f"prompt {read} of {prompt}" if reading else f"prompt {prompt}, {row.get('generated', '?')} new",
        f"{rate:.0f} tokens/s" if isinstance(rate, int | float) else "",
        f"for {duration(seconds)}" if isinstance(seconds, int | float) else "",
    )


def _daemon(snapshot: dict[str, Any]) -> str:
    uptime = snapshot.get("uptime_s")
    facts = [snapshot.get("version"), f"pid {snapshot['pid']}" if "pid" in snapshot else None]
    facts.append(f"up {duration(uptime)}" if uptime is not None else None)
    return ", ".join(str(fact) for fact in facts if fact)


def _last_words(engine: dict[str, Any]) -> list[str]:
    """What the engine said last, which mostly is why it does not run."""
    lines = engine.get("stderr") or _part(engine, "last_exit").get("stderr") or []
    return ["last words of the engine:", *(f"  {clean(str(line))}" for line in lines[-5:])] if lines else []


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    whole = int(seconds)
    for size, unit, below, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {small}"
    return f"{whole} s"


def paint(text: str, colour: str) -> str:
    """Coloured text where stdout is a terminal and nobody asked for none."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{colour}m{text}\x1b[0m" if wanted else text


class Screen:
    """Shows one text after another: in place on a terminal, else one below the other."""

    def __init__(self) -> None:
        self._lines = 0

    def show(self, snapshot: dict[str, Any]) -> None:
        """Show a snapshot instead of the one before."""
        text = status(snapshot)
        if self._lines:
            print(f"\x1b[{self._lines}A\x1b[J" if sys.stdout.isatty() else "\n", end="")
        self._lines = text.count("\n") + 1
        print(text, flush=True)


def versions(own: str, socket: str, reply: dict[str, Any]) -> str:
    """`stratactl version`."""
    engine = reply.get("engine")
    return table(
        [
            ("stratactl", own),
            ("stratad", f"{reply['version']} (control protocol {reply['protocol']})"),
            ("strata-engine", _engine(reply) if engine else "not running"),
            ("socket", socket),
        ]
    )


def _engine(reply: dict[str, Any]) -> str:
    facts = (("protocol", "engine_protocol"), ("arithmetic", "arithmetic"), ("model type", "arch"))
    known = ", ".join(f"{label} {reply[key]}" for label, key in facts if reply.get(key) is not None)
    return f"{reply['engine']} ({known})" if known else str(reply["engine"])


def setting_table(settings: list[dict[str, Any]]) -> str:
    """`stratactl get`: one line per setting."""
    head = [("NAME", "VALUE", "SOURCE", "APPLIES")]
    body = [(row["name"], _short(value(row["value"])), _source(row), row["applies"]) for row in settings]
    return table(head + body)


def setting_blocks(settings: list[dict[str, Any]]) -> str:
    """`stratactl get NAME`: everything about each setting."""
    return "\n\n".join(map(_setting_block, settings))


def _setting_block(row: dict[str, Any]) -> str:
    lines = [
        (row["name"], value(row["value"]) + (f" {row['unit']}" if row["unit"] else "")),
        ("  meaning", row["help"]),
        ("  allowed", row["range"]),
        ("  default", value(row["default"])),
        ("  source", _source(row)),
        ("  applies", row["applies"]),
        ("  also as", f"{row['flag']}, {row['env']}"),
    ]
    if row["pending"] is not None:
        lines.insert(2, ("  pending", value(row["pending"])))
    return table(lines)


def _source(row: dict[str, Any]) -> str:
    source, origin = str(row["source"]), str(row["origin"])
    return f"{source} ({origin})" if origin not in ("", source) else source


def _short(text: str, limit: int = 48) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"
