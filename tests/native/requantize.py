"""A model file with its matrices in another type: the same values as far as the type can hold them."""

from __future__ import annotations

from os import PathLike
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize

from tests.native.quantizers import quantize
from tests.native.tiny_models import is_matrix


def _copy_key(field: Any, writer: Any) -> None:
    value = field.contents()
    if field.types[0] == GGUFValueType.ARRAY:
        writer.add_array(field.name, value)
    else:
        writer.add_key_value(field.name, value, field.types[0])


def requantize(source: str | PathLike[str], target: str | PathLike[str], kind: str) -> None:
    """Write `source` to `target` with every matrix as `kind` (the rows must be multiples of its blocks).

    The tokenizer stays behind: it is of no use to logits.
    """
    reader, raw = GGUFReader(source), GGMLQuantizationType[kind]
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith(f"{arch}."):
            _copy_key(field, writer)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if raw == GGMLQuantizationType.F32 or not is_matrix(tensor.name, values):
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
