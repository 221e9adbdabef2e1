"""Floats to the blocks of any weight type: by the package gguf where it can, by libgguf for the others."""

from __future__ import annotations

from typing import Any

import gguf.quants
import libgguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

BY_LIBGGUF = (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL)


def quantize(values: npt.NDArray[np.float32], kind: Type) -> npt.NDArray[Any]:
    """The blocks of each row, as the file has them; F32 stays as it is."""
    if kind not in BY_LIBGGUF:
        return gguf.quants.quantize(values, kind)
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    blocks = np.asarray(libgguf.quantize_rows(rows, int(kind)))
    return blocks.reshape(*values.shape[:-1], -1)
