"""Text for people: short, aligned, and coloured only on a terminal that wants colour."""

from __future__ import annotations

TYPE_CHECKING = False  # spares the import of typing at run time
if TYPE_CHECKING:
    from typing import Any


def clean(text: str) -> str:
    """Text from elsewhere without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def table(rows: list[tuple[str, ...]], gap: str = "  ") -> str:
    """Rows of cells in left-aligned columns; the last column is as wide as it likes."""
    rows = [tuple(clean(cell).replace("\n", " ") for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (gap.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


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
    head = [(bold("NAME"), "VALUE", "SOURCE", "APPLIES")]
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
    return row["source"] + (f" ({row['origin']})" if row["origin"] not in ("", row["source"]) else "")


def _short(text: str, limit: int = 48) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"
