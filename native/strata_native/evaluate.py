"""Logits of whole token sequences, in-process: for perplexity, teacher-forced checks and oracles."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fsencode
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_native import ffi, lib
from strata_native.errors import from_struct

KV_TYPES = {"int8": 0, "f16": 1, "f32": 2}
WEIGHTS = {"repack": 0, "mapped": 1}
DENSE = {"q8_0": 0, "as-is": 1}


class Evaluator:
    """A loaded model. `with Evaluator(path, kv="f32") as e: e.logits(ids)`. Raises StrataNativeError."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        kv: str = "int8",
        isa: str = "auto",
        threads: int = 0,
        max_rows: int = 0,
        weights: str = "repack",
        dense: str = "q8_0",
    ) -> None:
        """The options of strata-engine(8); 0 stands for its defaults."""
        self._handle: Any = None
        keep = ffi.new("char[]", fsencode(path)), ffi.new("char[]", isa.encode())
        numbers = [KV_TYPES[kv], threads, max_rows, WEIGHTS[weights], DENSE[dense]]
        options = ffi.new("st_eval_options *", [*keep, *numbers])
        out, err = ffi.new("st_eval **"), ffi.new("st_error *")
        if lib.st_eval_open(options, out, err):
            raise from_struct(ffi, err)
        self._handle = out[0]
        self.vocab = int(lib.st_eval_vocab(self._handle))
        self.context = int(lib.st_eval_context(self._handle))

    def logits(self, ids: Sequence[int], want_from: int = 0) -> NDArray[np.float32]:
        """[len(ids) - want_from, vocab]: row i: the raw logits behind token want_from + i. Raises StrataNativeError."""
        tokens = np.ascontiguousarray(ids, dtype=np.int32)
        out = np.empty((max(len(tokens) - want_from, 0), self.vocab), np.float32)
        err = ffi.new("st_error *")
        if lib.st_eval_logits(
            self._handle,
            ffi.cast("int32_t *", tokens.ctypes.data),
            len(tokens),
            want_from,
            ffi.cast("float *", out.ctypes.data),
            err,
        ):
            raise from_struct(ffi, err)
        return out

    def close(self) -> None:
        """Free the model. Calling it again does nothing."""
        if self._handle is not None:
            lib.st_eval_close(self._handle)
            self._handle = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
