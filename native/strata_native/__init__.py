"""The engine's library in-process: GGUF facts, hashing, sampling arithmetic and every kernel, through cffi.

`ffi` and `lib` are cffi's usual pair over `include/strata.h`. Imports nothing else of Strata.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def _load() -> tuple[Any, Any]:
    """The compiled extension or, where it was built without Python's headers, the same declarations in ABI mode."""
    try:
        api = importlib.import_module("strata_native._api")
        return api.ffi, api.lib
    except ImportError as api_missing:
        try:
            abi = importlib.import_module("strata_native._abi")
        except ImportError:
            raise ImportError(f"strata_native is not built (run `make build`): {api_missing}") from api_missing
        return abi.ffi, abi.ffi.dlopen(str(Path(abi.__file__ or "").with_name("libstrata.so")))


ffi, lib = _load()

__all__ = ["ffi", "lib"]
