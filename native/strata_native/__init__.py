"""The engine's library in-process: GGUF facts, hashing, sampling arithmetic and every kernel, through cffi.

`ffi` and `lib` are cffi's usual pair over `include/strata.h`. Imports nothing else of Strata.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ffi: Any
lib: Any

try:
    from strata_native._api import ffi, lib
except ImportError as api_missing:  # built without Python's headers: the same declarations in ABI mode
    try:
        from strata_native._abi import ffi
    except ImportError:
        raise ImportError(f"strata_native is not built (run `make build`): {api_missing}") from api_missing
    lib = ffi.dlopen(str(Path(ffi.__file__ if hasattr(ffi, "__file__") else __file__).parent / "libstrata.so"))

__all__ = ["ffi", "lib"]
