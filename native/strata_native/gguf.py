"""GGUF files as Python values: metadata, tensors, fingerprint.

The file is untrusted and is checked by the native reader as it is opened; nothing here parses the file itself. Take
what you need and close: a mapped file that someone shortens ends the process with SIGBUS on the next touch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from strata_native import ffi, lib
from strata_native.errors import StrataNativeError, from_struct

Value: TypeAlias = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_STRING = 8
_ARRAY = 9
# struct codes of the value types that have a fixed size, by the format's ids
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the table.

    `shape` is in the file's order (first dimension contiguous), `nbytes` the size of its data in bytes, `offset` where
    the data starts in its file (bytes), `shard` which part of a split model that is (from 0), `index` its place in the
    table.
    """

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    shard: int
    index: int


@dataclass(frozen=True)
class TensorType:
    """An element type: `block_size` values are stored in `block_bytes` bytes."""

    id: int
    name: str
    block_size: int
    block_bytes: int


def tensor_types() -> list[TensorType]:
    """Every element type the reader knows, in order of id."""
    entries = (lib.st_ggml_type_at(i) for i in range(lib.st_ggml_type_count()))
    return [TensorType(t.id, ffi.string(t.name).decode(), t.block_size, t.block_bytes) for t in entries]


class Metadata(Mapping[str, Value]):
    """The metadata of an open file, in file order; a value is decoded when it is first asked for, and kept.

    Bytes of a string that are no UTF-8 become U+FFFD (`raw_strings` has the bytes themselves). What was decoded stays
    readable after the file is closed; anything else is an error then.
    """

    def __init__(self, owner: GGUF) -> None:
        self._owner = owner
        self._index: dict[str, int] = {}
        self._decoded: dict[str, Value] = {}
        for i in range(lib.st_gguf_n_kv(owner.handle)):
            self._index[ffi.string(lib.st_gguf_kv_at(owner.handle, i).key).decode()] = i

    def __getitem__(self, key: str) -> Value:
        if key not in self._decoded:
            self._decoded[key] = _decode(self._entry(key))
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def raw_strings(self, key: str) -> list[bytes]:
        """The bytes of a string (a list of one) or of every string of an array. KeyError, or TypeError for others."""
        entry = self._entry(key)
        if entry.elem_type != _STRING:
            raise TypeError(f"{key} holds no strings")
        return _strings(entry)

    def _entry(self, key: str) -> Any:
        return lib.st_gguf_kv_at(self._owner.handle, self._index[key])


class GGUF:
    """An open GGUF file, or all parts of a split one when the first is named.

    Use it in a `with` statement or call `close()`. Raises StrataNativeError (model_open, model_format,
    model_unsupported, no_memory) when it cannot be opened. Not to be closed while another thread uses it.
    """

    _handle: Any = None
    _data: Any = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._handle = self._open(lib.st_gguf_open, os.fsencode(path))
        self._load()

    @classmethod
    def from_bytes(cls, data: bytes, label: str = "memory") -> GGUF:
        """Open a file that lies in memory; `label` stands for its path in messages."""
        self = cls.__new__(cls)
        self._data = ffi.from_buffer(data)  # kept: the reader points into it
        self._handle = self._open(lib.st_gguf_open_memory, self._data, len(data), label.encode())
        self._load()
        return self

    @staticmethod
    def _open(function: Any, *args: Any) -> Any:
        out, err = ffi.new("st_gguf **"), ffi.new("st_error *")
        if function(*args, out, err) < 0:
            raise from_struct(ffi, err)
        return out[0]

    def _load(self) -> None:
        self.version: int = lib.st_gguf_version(self._handle)
        self.size: int = lib.st_gguf_size(self._handle)
        self.n_shards: int = lib.st_gguf_n_shards(self._handle)
        self.metadata = Metadata(self)
        self.tensors: list[Tensor] = [self._tensor(i) for i in range(lib.st_gguf_n_tensors(self._handle))]

    def _tensor(self, i: int) -> Tensor:
        t = lib.st_gguf_tensor_at(self._handle, i)
        return Tensor(
            name=ffi.string(t.name).decode(),
            type_id=t.type,
            type_name=ffi.string(lib.st_ggml_type_find(t.type).name).decode(),
            shape=tuple(t.ne[d] for d in range(t.n_dims)),
            nbytes=t.nbytes,
            offset=t.offset,
            shard=t.shard,
            index=i,
        )

    @property
    def handle(self) -> Any:
        """The library's `st_gguf *`, for calls through `lib`. StrataNativeError (model_open) once closed."""
        if self._handle is None:
            raise StrataNativeError("model_open", "the GGUF file is closed")
        return self._handle

    def tensor(self, name: str) -> Tensor:
        """The tensor with this name; KeyError when there is none."""
        found = lib.st_gguf_tensor_find(self.handle, name.encode())
        if found == ffi.NULL:
            raise KeyError(name)
        index: int = found - lib.st_gguf_tensor_at(self.handle, 0)
        return self.tensors[index]

    def read(self, tensor: Tensor, start: int = 0, size: int | None = None) -> bytes:
        """A copy of `size` bytes of a tensor's data from byte `start` on (to its end when None)."""
        end = tensor.nbytes if size is None else start + size
        if not 0 <= start <= end <= tensor.nbytes:
            raise ValueError(f"bytes {start} to {end} are not inside the {tensor.nbytes} bytes of {tensor.name}")
        data = lib.st_gguf_tensor_at(self.handle, tensor.index).data
        return bytes(ffi.buffer(data + start, end - start))

    def fingerprint(self) -> str:
        """32 hex digits that name the model's content (sampled), wherever it lies and whatever it is called."""
        out = ffi.new("char[33]")
        lib.st_gguf_fingerprint(self.handle, out)
        return str(ffi.string(out).decode())

    def close(self) -> None:
        """Unmap the file. What was decoded before stays usable. Calling it again does nothing."""
        if self._handle is not None:
            lib.st_gguf_close(self._handle)
            self._handle = None

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _strings(entry: Any) -> list[bytes]:
    """Every string of an entry. Slicing one copy in Python beats a foreign call for each of 250,000 tokens."""
    data = bytes(ffi.buffer(entry.data, entry.nbytes))
    length = struct.Struct("<Q").unpack_from
    out, at = [], 0
    for _ in range(entry.count):
        start = at + 8
        at = start + length(data, at)[0]
        out.append(data[start:at])
    return out


def _decode(entry: Any) -> Value:
    """An entry as int, float, bool, str, or a list of these."""
    values: list[Any]
    if entry.elem_type == _STRING:
        values = [s.decode("utf-8", "replace") for s in _strings(entry)]
    else:
        code = _CODES[entry.elem_type]
        values = list(struct.unpack(f"<{entry.count}{code}", ffi.buffer(entry.data, entry.nbytes)))
    return values if entry.type == _ARRAY else values[0]
