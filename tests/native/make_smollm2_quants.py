"""SmolLM2 in other weight types: `python -m tests.native.make_smollm2_quants q4_k_m OUT.gguf [SOURCE.gguf]`.

No real model in K-quants is small enough to fetch, so this makes one, with libgguf, from the Q4_1 file that
`python -m stratad.tools.fetch smollm2` fetches: its values are what Q4_1 left of them, and a mix of better types keeps
those. Most rows of SmolLM2 have 576 values, which is no multiple of 256: super-blocks fit `ffn_down` (1536) alone. The
other matrices get the type of 32 values that stands in for each super-block type where rows are short: Q5_0 for Q4_K,
Q5_1 for Q5_K, Q8_0 for Q6_K. All metadata is kept, so the daemon can serve the result.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from os import PathLike
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from stratad.tools.fetch import MODELS, FetchError, cache_folder, fetch

from tests.native.quantizers import quantize

STANDS_IN = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


@dataclass(frozen=True)
class Mix:
    """Types of a file: of most matrices, of those that deserve more bits, of the embedding."""

    most: Type
    more: Type
    embedding: Type = Type.Q8_0


MIXES = {
    "q4_k_m": Mix(Type.Q4_K, Type.Q6_K),
    "q5_k_m": Mix(Type.Q5_K, Type.Q6_K),
    "q6_k": Mix(Type.Q6_K, Type.Q6_K),
    **{kind.name.lower(): Mix(kind, kind) for kind in (Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.IQ4_NL)},
    "f16": Mix(Type.F16, Type.F16, Type.F16),
    "bf16": Mix(Type.BF16, Type.BF16, Type.BF16),
    "f32": Mix(Type.F32, Type.F32, Type.F32),
}


def more_bits(name: str, layers: int) -> bool:
    """Whether a matrix is one of those that `_M` mixes hold in the better type: values and downs of the first and the
    last eighth of the layers and of every third between."""
    if not name.startswith("blk.") or not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    i, eighth = int(name.split(".")[1]), layers // 8
    return i < eighth or i >= layers - eighth or (i - eighth) % 3 == 2


def type_of(name: str, width: int, mix: Mix, layers: int) -> Type:
    """The type that a matrix with rows of `width` values gets."""
    if name == "token_embd.weight":
        return mix.embedding
    kind = mix.more if more_bits(name, layers) else mix.most
    return STANDS_IN[kind] if kind in STANDS_IN and width % 256 else kind


def make(source: str | PathLike[str], target: str | PathLike[str], mix: Mix) -> None:
    """Write `source` to `target` with its matrices in the types of the mix; vectors stay F32."""
    reader = GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    layers = int(reader.fields[f"{arch}.block_count"].contents())
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value: Any = field.contents()
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(name, value, GGUFValueType.ARRAY, sub_type=field.types[-1])
        else:
            writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        kind = type_of(tensor.name, shape[-1], mix, layers) if len(shape) > 1 else Type.F32
        raw = None if kind == Type.F32 else kind
        writer.add_tensor(tensor.name, values if raw is None else quantize(values, kind), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str] | None = None) -> int:
    """Make one file; 1 when the source cannot be fetched."""
    parser = argparse.ArgumentParser(prog="python -m tests.native.make_smollm2_quants")
    parser.add_argument("mix", choices=MIXES)
    parser.add_argument("target")
    parser.add_argument("source", nargs="?")
    args = parser.parse_args(arguments)
    try:
        make(args.source or fetch(MODELS["smollm2"], cache_folder()), args.target, MIXES[args.mix])
    except FetchError as error:
        print(f"make_smollm2_quants: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
