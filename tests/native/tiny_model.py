"""Tiny qwen35moe files with random weights: of any shape, or with one thing wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from tests.native.quantizers import quantize

ARCH = "qwen35moe"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are the smallest that the engine takes."""

    embd: int = 32
    layers: int = 2
    interval: int = 2  # every so many layers attention, else a gated delta net
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    rot: int = 8
    key_heads: int = 1
    value_heads: int = 2
    state: int = 16
    experts: int = 4
    used: int = 2
    ff: int = 32
    shared_ff: int = 32
    vocab: int = 48
    context: int = 256


@dataclass
class Tensor:
    """Values in numpy's order (outputs first) and the type they are stored as; or its blocks themselves (`raw`)."""

    values: npt.NDArray[np.float32]
    type: Type = Type.F32
    raw: npt.NDArray[np.uint8] | None = None


@dataclass
class Model:
    """What goes into the file; change it, then write it."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the GGUF file; returns its path."""
        writer = gguf.GGUFWriter(path, ARCH)
        for key, value in self.meta.items():
            full = key if "." in key and key.split(".")[0] in ("general", "tokenizer") else f"{ARCH}.{key}"
            if key == "general.architecture":
                writer.kv_data[0][key].value = value
            elif isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, int):
                writer.add_int32(full, value) if value < 0 else writer.add_uint32(full, value)
            elif isinstance(value, float):
                writer.add_float32(full, value)
            elif isinstance(value, str):
                writer.add_string(full, value)
            else:
                writer.add_array(full, value)
        for name, tensor in self.tensors.items():
            data = tensor.raw if tensor.raw is not None else quantize(tensor.values, tensor.type)
            writer.add_tensor(name, data, raw_dtype=None if tensor.type == Type.F32 else tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def metadata(s: Shape) -> dict[str, Any]:
    """The keys a model of this shape has."""
    return {
        "block_count": s.layers,
        "context_length": s.context,
        "embedding_length": s.embd,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": s.rot,
        "expert_count": s.experts,
        "expert_used_count": s.used,
        "expert_feed_forward_length": s.ff,
        "expert_shared_feed_forward_length": s.shared_ff,
        "ssm.conv_kernel": 4,
        "ssm.state_size": s.state,
        "ssm.group_count": s.key_heads,
        "ssm.time_step_rank": s.value_heads,
        "ssm.inner_size": s.value_heads * s.state,
        "full_attention_interval": s.interval,
    }


def model(s: Shape = Shape(), seed: int = 0, dense: Type = Type.Q8_0, experts: Type = Type.Q4_0) -> Model:
    """A model of random weights that keep activations ordinary."""
    rng = np.random.default_rng(seed)
    out = Model(metadata(s))

    def mat(name: str, *shape: int, type: Type = Type.F32) -> None:
        values = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        out.tensors[name] = Tensor(values, type)

    def vec(name: str, n: int, low: float, high: float) -> None:
        out.tensors[name] = Tensor(rng.uniform(low, high, n).astype(np.float32))

    values, channels = s.value_heads * s.state, 2 * s.key_heads * s.state + s.value_heads * s.state
    mat("token_embd.weight", s.vocab, s.embd, type=dense)
    mat("output.weight", s.vocab, s.embd, type=dense)
    vec("output_norm.weight", s.embd, 0.5, 1.5)
    for i in range(s.layers):
        b = f"blk.{i}."
        vec(b + "attn_norm.weight", s.embd, 0.5, 1.5)
        vec(b + "post_attention_norm.weight", s.embd, 0.5, 1.5)
        if (i + 1) % s.interval:
            mat(b + "attn_qkv.weight", channels, s.embd, type=dense)
            mat(b + "attn_gate.weight", values, s.embd, type=dense)
            mat(b + "ssm_out.weight", s.embd, values, type=dense)
            mat(b + "ssm_conv1d.weight", channels, 4)
            mat(b + "ssm_alpha.weight", s.value_heads, s.embd)
            mat(b + "ssm_beta.weight", s.value_heads, s.embd)
            vec(b + "ssm_a", s.value_heads, -2.0, -0.1)
            vec(b + "ssm_dt.bias", s.value_heads, -1.0, 1.0)
            vec(b + "ssm_norm.weight", s.state, 0.5, 1.5)
        else:
            mat(b + "attn_q.weight", 2 * s.heads * s.head_dim, s.embd, type=dense)
            mat(b + "attn_k.weight", s.kv_heads * s.head_dim, s.embd, type=dense)
            mat(b + "attn_v.weight", s.kv_heads * s.head_dim, s.embd, type=dense)
            mat(b + "attn_output.weight", s.embd, s.heads * s.head_dim, type=dense)
            vec(b + "attn_q_norm.weight", s.head_dim, 0.5, 1.5)
            vec(b + "attn_k_norm.weight", s.head_dim, 0.5, 1.5)
        mat(b + "ffn_gate_inp.weight", s.experts, s.embd)
        mat(b + "ffn_gate_exps.weight", s.experts, s.ff, s.embd, type=experts)
        mat(b + "ffn_up_exps.weight", s.experts, s.ff, s.embd, type=experts)
        mat(b + "ffn_down_exps.weight", s.experts, s.embd, s.ff, type=experts)
        vec(b + "ffn_gate_inp_shexp.weight", s.embd, -0.2, 0.2)
        mat(b + "ffn_gate_shexp.weight", s.shared_ff, s.embd, type=experts)
        mat(b + "ffn_up_shexp.weight", s.shared_ff, s.embd, type=experts)
        mat(b + "ffn_down_shexp.weight", s.embd, s.shared_ff, type=experts)
    return out
