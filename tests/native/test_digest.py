"""The arithmetic is frozen: fixed inputs give the bits that `arithmetic_digest.json` holds for this version.

A change here is a change of every stored page key and of every answer. It needs a new ST_ARITH_VERSION, the reason in
native/ARITHMETIC.md, and new digests: `python -m tests.native.test_digest > tests/native/arithmetic_digest.json`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from strata_native import ffi, lib

from tests.native.conftest import load_prompts
from tests.native.driver import ROOT

DIGESTS = Path(__file__).with_name("arithmetic_digest.json")
MODEL = ROOT / "native" / "models" / "strata-tiny-moe-Q4_0.gguf"
WIDTH = 1536  # six segments, six super-blocks, and a tail for odd sizes below it

Floats = npt.NDArray[np.float32]


def floats(name: str, n: int, scale: float = 2.0) -> Floats:
    """n floats in -scale..scale that depend on the name alone, on no library's generator."""
    raw = hashlib.shake_256(name.encode()).digest(4 * n)
    return (np.frombuffer(raw, "<i4").astype(np.float64) * (scale / 2**31)).astype(np.float32)


def address(a: npt.NDArray[Any], kind: str = "float *") -> Any:
    return ffi.cast(kind, ffi.from_buffer(a))


def elementwise(table: Any) -> Iterator[tuple[str, bytes]]:
    """Norms, activations and sums over rows whose length is no multiple of a vector."""
    x, w, g = (floats(f"elementwise {i}", 5000) for i in range(3))
    y = np.zeros(5000, np.float32)
    for n in (37, 384, 4999):
        table.rms_norm(address(x), address(w), n, 1e-6, address(y))
        yield f"rms_norm {n}", y[:n].tobytes()
        table.l2_norm(address(x), n, 0.125, address(y))
        yield f"l2_norm {n}", y[:n].tobytes()
        table.silu_mul(address(g), address(x), n, address(y))
        yield f"silu_mul {n}", y[:n].tobytes()
        table.sigmoid_mul(address(x), address(g), n, address(y))
        yield f"sigmoid_mul {n}", y[:n].tobytes()
        table.exp_sub(address(x), n, 0.25, 3.0, address(y))
        yield f"exp_sub {n}", y[:n].tobytes()
        table.norm_gate(address(x), address(w), address(g), n, 1e-6, address(y))
        yield f"norm_gate {n}", y[:n].tobytes()
    table.dots(address(w), 13, 384, address(x), address(y))
    yield "dots", y[:13].tobytes()


def recurrent(table: Any) -> Iterator[tuple[str, bytes]]:
    """Three tokens of one head."""
    state, qkv, out = floats("state", 64 * 64, 0.1), floats("qkv", 3 * 64, 0.3), np.zeros(64, np.float32)
    for _ in range(3):
        parts = [address(qkv[64 * i :]) for i in range(3)]
        table.delta_step(address(state), 64, 64, *parts, 0.875, 0.5, address(out))
    yield "delta_step", out.tobytes() + state.tobytes()


def product(table: Any, kind: int) -> bytes:
    """16 rows of one weight type times three activation rows."""
    row = lib.st_weight_type_at(kind)
    blocks = WIDTH // row.block
    raw = np.frombuffer(hashlib.shake_256(b"weights").digest(16 * blocks * row.block_bytes), np.uint8)
    weights = raw.reshape(16, blocks, row.block_bytes).copy()
    scale = np.frombuffer(np.float16(0.0125).tobytes(), np.uint8)
    for at in SCALES[ffi.string(row.name).decode()]:  # random bits would make infinite scales
        weights[:, :, at : at + 2] = scale
    packed = np.zeros(lib.st_pack_group_bytes(kind, WIDTH) + 64, np.uint8)
    packed = packed[-packed.ctypes.data % 64 :]
    lib.st_pack_group(
        table, kind, address(weights, "uint8_t *"), blocks * row.block_bytes, 16, WIDTH, address(packed, "uint8_t *")
    )
    tile, keep = ffi.new("st_tile *"), []
    wide = row.form == lib.ST_FORM_256
    out = np.zeros((3, 16), np.float32)
    tile.rows, tile.row_codes, tile.mode = 3, WIDTH, lib.ST_STORE
    for r in range(3):
        x, codes = floats(f"row {r}", WIDTH), np.zeros(WIDTH * (1 if wide else table.code_bytes), np.int8)
        d, sums = np.zeros(WIDTH // 32, np.float32), np.zeros(WIDTH // 16, np.int32)
        quantize = table.quantize256 if wide else table.quantize
        quantize(address(x), WIDTH, address(codes, "int8_t *"), address(d), address(sums, "int32_t *"))
        keep.append((codes, d, sums))
        tile.q[r], tile.d[r], tile.sum[r] = address(codes, "int8_t *"), address(d), address(sums, "int32_t *")
        tile.y[r] = address(out[r])
    table.mm[kind](address(packed, "uint8_t *"), lib.st_pack_group_bytes(kind, WIDTH), 1, WIDTH, tile)
    return out.tobytes()


# Where a block of each type holds its f16 scales.
SCALES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def logits(isa: str) -> Iterator[tuple[str, bytes]]:
    """Logits of the embedded model after the first 40 tokens of a reference prompt."""
    path, name = ffi.new("char[]", str(MODEL).encode()), ffi.new("char[]", isa.encode())
    options = ffi.new("st_eval_options *", {"path": path, "isa": name, "threads": 2})
    handle, err = ffi.new("st_eval **"), ffi.new("st_error *")
    assert lib.st_eval_open(options, handle, err) == 0, ffi.string(err.text)
    ids = np.array(load_prompts()[0].ids[:40], np.int32)
    out = np.zeros((4, lib.st_eval_vocab(handle[0])), np.float32)
    got = lib.st_eval_logits(handle[0], address(ids, "int32_t *"), len(ids), len(ids) - 4, address(out), err)
    lib.st_eval_close(handle[0])
    assert got >= 0, ffi.string(err.text)
    yield "logits", out.tobytes()


def current(isa: str) -> dict[str, str]:
    """Digests of all outputs as this build computes them with one instruction set."""
    table = lib.st_kernels_find(isa.encode(), ffi.NULL)
    outputs = [*elementwise(table), *recurrent(table), *logits(isa)]
    for kind in range(lib.ST_WEIGHT_TYPES):
        outputs.append((ffi.string(lib.st_weight_type_at(kind).name).decode(), product(table, kind)))
    return {name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in outputs}


def tables() -> list[str]:
    """The instruction sets that this processor has."""
    names = ("scalar", "avx2", "avxvnni", "avx512")
    return [name for name in names if lib.st_kernels_find(name.encode(), ffi.NULL) != ffi.NULL]


@pytest.mark.parametrize("isa", tables())
def test_outputs_are_those_of_the_frozen_version(isa: str) -> None:
    frozen = json.loads(DIGESTS.read_text())
    assert frozen["version"] == lib.st_arith_version()
    assert current(isa) == frozen["digests"]


if __name__ == "__main__":
    json.dump({"version": lib.st_arith_version(), "digests": current("scalar")}, sys.stdout, indent=2)
    print()
