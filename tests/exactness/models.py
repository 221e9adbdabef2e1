"""Small models for the tests of exactness: the embedded one, and random ones that are fast and have a drafter.

A random model writes what its last token suggests, a little changed by everything before; its drafter sees only the
former. So some of its drafts are right and some are wrong, at every depth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.native import tiny_model, tiny_models
from tests.native.tiny_model import Shape, Tensor

VOCAB = 64
TURN, END, TEXT_END = 61, 62, 63
BODY = 0.2  # how much layers add to the embedding


def moe(path: Path, *, seed: int = 0, context: int = 8192, layers: int = 3, interval: int = 2) -> Path:
    """A qwen35moe model with an MTP block and the marks of turns."""
    shape = Shape(vocab=VOCAB, context=context, layers=layers, interval=interval)
    out = tiny_model.model(shape, seed)
    block = tiny_model.model(Shape(vocab=VOCAB, layers=1, interval=1), seed + 1)
    marks = {TURN: "<|im_start|>", END: "<|im_end|>", TEXT_END: "<|endoftext|>"}
    out.meta |= {
        "block_count": layers + 1,
        "nextn_predict_layers": 1,
        "tokenizer.ggml.tokens": [marks.get(i, f"t{i}") for i in range(VOCAB)],
    }
    for name, tensor in block.tensors.items():
        if name.startswith("blk.0."):
            out.tensors[f"blk.{layers}." + name.removeprefix("blk.0.")] = tensor
    width = shape.embd
    joined = np.concatenate([np.eye(width), 0.1 * np.eye(width)], axis=1).astype(np.float32)
    out.tensors[f"blk.{layers}.nextn.eh_proj.weight"] = Tensor(joined, Type.Q8_0)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        out.tensors[f"blk.{layers}.nextn.{name}.weight"] = Tensor(np.ones(width, np.float32))
    for name, tensor in out.tensors.items():
        if any(k in name for k in ("attn_output", "ssm_out", "ffn_down")):
            tensor.values = tensor.values * np.float32(BODY)
        elif name == "output.weight":
            tensor.values = tensor.values * np.float32(2.5)
        elif name == "token_embd.weight":
            tensor.values = tensor.values * np.float32(np.sqrt(width))
    return out.write(path)


def llama(path: Path, *, context: int = 8192) -> Path:
    """A dense llama model: no recurrent layers, so that sessions are cut anywhere."""
    tiny_models.write(replace(tiny_models.BY_NAME["llama-32"], context=context), path, "Q8_0")
    return path
