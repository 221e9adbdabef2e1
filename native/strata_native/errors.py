"""The library's failures as one exception."""

from __future__ import annotations

from typing import Any


class StrataNativeError(Exception):
    """A failure inside the native library.

    `name` is from the library's fixed set (model_open, model_format, model_unsupported, no_memory, ...), `text` is one
    printable line that says what is wrong and where.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text

    def __reduce__(self) -> tuple[type[StrataNativeError], tuple[str, str]]:
        """Survive pickling (process pools), which would call the class with the joined text otherwise."""
        return type(self), (self.name, self.text)


def from_struct(ffi: Any, err: Any) -> StrataNativeError:
    """The exception for a filled-in `st_error *`."""
    return StrataNativeError(
        ffi.string(err.name).decode("ascii", "replace"), ffi.string(err.text).decode("utf-8", "replace")
    )
