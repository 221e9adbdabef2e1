"""Tiny models with random weights, one of each architecture and head width, as GGUF files: deterministic by their seed.

The shapes are chosen to catch what square ones hide: three value heads for each key head, more query than key heads,
rope over a part of a head, experts of another width than the shared one, a vocabulary that is no power of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from tests.native.quantizers import quantize

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tiny:
    """The shape of a tiny model."""

    name: str
    arch: str
    head_dim: int
    n_rot: int
    heads: int = 4
    kv_heads: int = 2
    layers: int = 4
    width: int = 64
    vocab: int = 528
    eps: float = 1e-5
    rope_base: float = 10000.0
    context: int = 2048
    tied: bool = True
    dense: int = 96
    interval: int = 4  # every interval-th layer is full attention
    hk: int = 2
    hv: int = 6
    state: int = 16
    experts: int = 8
    used: int = 3
    ff: int = 32
    shared_ff: int = 64
    seed: int = 1

    def __str__(self) -> str:
        return self.name


MODELS = (
    Tiny("llama-32", "llama", head_dim=32, n_rot=32),
    Tiny("llama-64", "llama", head_dim=64, n_rot=48, heads=3, kv_heads=1, rope_base=1e5, tied=False, seed=2),
    Tiny("qwen35moe-32", "qwen35moe", head_dim=32, n_rot=8, eps=1e-6, rope_base=1e6, tied=False, seed=3),
    Tiny("qwen35moe-64", "qwen35moe", head_dim=64, n_rot=32, eps=1e-6, rope_base=1e7, interval=2, state=32, seed=4),
)
# Every row of a matrix a multiple of 256 values, for weight types of super-blocks.
WIDE_MODELS = (
    Tiny("llama-wide", "llama", head_dim=64, n_rot=64, layers=2, width=256, dense=512, seed=5),
    Tiny(
        "qwen35moe-wide",
        "qwen35moe",
        head_dim=64,
        n_rot=32,
        eps=1e-6,
        layers=2,
        width=256,
        interval=2,
        hv=8,
        state=32,
        experts=4,
        used=2,
        ff=256,
        shared_ff=256,
        seed=6,
    ),
)
BY_NAME = {m.name: m for m in (*MODELS, *WIDE_MODELS)}


class _Weights:
    """Random tensors in the order they are asked for."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> Floats:
        """[..., outputs, inputs], sized so that unit inputs give outputs of about `gain`."""
        return np.asarray(self._rng.standard_normal(shape) * gain / np.sqrt(shape[-1]), np.float32)

    def vector(self, n: int, middle: float, spread: float) -> Floats:
        return np.asarray(middle + spread * self._rng.standard_normal(n), np.float32)


def _attention(m: Tiny, w: _Weights) -> Iterator[tuple[str, Floats]]:
    gated = m.arch == "qwen35moe"
    yield "attn_q.weight", w.matrix(m.heads * m.head_dim * (2 if gated else 1), m.width, gain=1.5)
    yield "attn_k.weight", w.matrix(m.kv_heads * m.head_dim, m.width, gain=1.5)
    yield "attn_v.weight", w.matrix(m.kv_heads * m.head_dim, m.width)
    yield "attn_output.weight", w.matrix(m.width, m.heads * m.head_dim)
    if gated:
        yield "attn_q_norm.weight", w.vector(m.head_dim, 1.2, 0.2)
        yield "attn_k_norm.weight", w.vector(m.head_dim, 1.2, 0.2)


def _delta_net(m: Tiny, w: _Weights) -> Iterator[tuple[str, Floats]]:
    values = m.hv * m.state
    channels = 2 * m.hk * m.state + values
    yield "attn_qkv.weight", w.matrix(channels, m.width)
    yield "attn_gate.weight", w.matrix(values, m.width)
    yield "ssm_conv1d.weight", w.matrix(channels, 4, gain=1.5)
    yield "ssm_beta.weight", w.matrix(m.hv, m.width)
    yield "ssm_alpha.weight", w.matrix(m.hv, m.width)
    yield "ssm_a", -np.exp(w.vector(m.hv, -1.0, 0.7))
    yield "ssm_dt.bias", w.vector(m.hv, -1.0, 0.5)
    yield "ssm_norm.weight", w.vector(m.state, 1.0, 0.2)
    yield "ssm_out.weight", w.matrix(m.width, values)


def _experts(m: Tiny, w: _Weights) -> Iterator[tuple[str, Floats]]:
    yield "ffn_gate_inp.weight", w.matrix(m.experts, m.width, gain=2.0)
    yield "ffn_gate_exps.weight", w.matrix(m.experts, m.ff, m.width, gain=1.5)
    yield "ffn_up_exps.weight", w.matrix(m.experts, m.ff, m.width)
    yield "ffn_down_exps.weight", w.matrix(m.experts, m.width, m.ff)
    yield "ffn_gate_inp_shexp.weight", w.matrix(1, m.width)[0]
    yield "ffn_gate_shexp.weight", w.matrix(m.shared_ff, m.width, gain=1.5)
    yield "ffn_up_shexp.weight", w.matrix(m.shared_ff, m.width)
    yield "ffn_down_shexp.weight", w.matrix(m.width, m.shared_ff)


def _dense(m: Tiny, w: _Weights) -> Iterator[tuple[str, Floats]]:
    yield "ffn_gate.weight", w.matrix(m.dense, m.width, gain=1.5)
    yield "ffn_up.weight", w.matrix(m.dense, m.width)
    yield "ffn_down.weight", w.matrix(m.width, m.dense)


def tensors(m: Tiny) -> dict[str, Floats]:
    """Every tensor of the model as float32, under its GGUF name, [..., outputs, inputs]."""
    w = _Weights(m.seed)
    out = {"token_embd.weight": w.matrix(m.vocab, m.width, gain=8.0), "output_norm.weight": w.vector(m.width, 1, 0.2)}
    if not m.tied:
        out["output.weight"] = w.matrix(m.vocab, m.width, gain=2.0)
    for i in range(m.layers):
        routed = m.arch == "qwen35moe"
        recurrent = routed and (i + 1) % m.interval != 0
        parts = {"attn_norm.weight": w.vector(m.width, 1, 0.2)}
        parts["post_attention_norm.weight" if routed else "ffn_norm.weight"] = w.vector(m.width, 1, 0.2)
        parts.update(_delta_net(m, w) if recurrent else _attention(m, w))
        parts.update(_experts(m, w) if routed else _dense(m, w))
        out.update({f"blk.{i}.{name}": value for name, value in parts.items()})
    return out


def is_matrix(name: str, value: Floats) -> bool:
    """Whether files hold this tensor quantised: what multiplies activations by whole blocks."""
    return value.ndim > 1 and not any(k in name for k in ("conv1d", "ffn_gate_inp", "ssm_alpha", "ssm_beta"))


def _keys(m: Tiny, w: Any) -> None:
    w.add_block_count(m.layers)
    w.add_context_length(m.context)
    w.add_embedding_length(m.width)
    w.add_head_count(m.heads)
    w.add_head_count_kv(m.kv_heads)
    w.add_key_length(m.head_dim)
    w.add_value_length(m.head_dim)
    w.add_rope_dimension_count(m.n_rot)
    w.add_rope_freq_base(m.rope_base)
    w.add_layer_norm_rms_eps(m.eps)
    w.add_vocab_size(m.vocab)
    if m.arch == "llama":
        w.add_feed_forward_length(m.dense)
        return
    w.add_rope_dimension_sections([m.n_rot // 2, 0, 0, 0])
    w.add_expert_count(m.experts)
    w.add_expert_used_count(m.used)
    w.add_expert_feed_forward_length(m.ff)
    w.add_expert_shared_feed_forward_length(m.shared_ff)
    w.add_ssm_conv_kernel(4)
    w.add_ssm_state_size(m.state)
    w.add_ssm_group_count(m.hk)
    w.add_ssm_time_step_rank(m.hv)
    w.add_ssm_inner_size(m.hv * m.state)
    w.add_uint32(f"{m.arch}.full_attention_interval", m.interval)


def write(m: Tiny, path: str | PathLike[str], kind: str = "F32") -> None:
    """The model as a GGUF file, its matrices of type `kind` (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1)."""
    w = gguf.GGUFWriter(path, m.arch)
    _keys(m, w)
    raw = GGMLQuantizationType[kind]
    for name, value in tensors(m).items():
        if kind == "F32" or not is_matrix(name, value):
            w.add_tensor(name, value)
        else:
            w.add_tensor(name, quantize(value, raw), raw_dtype=raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def sample_ids(m: Tiny, n: int, seed: int = 0) -> list[int]:
    """n token ids of the model's vocabulary, some of them repeated at once."""
    rng = np.random.default_rng([seed, m.seed])
    ids = rng.integers(0, m.vocab, n)
    repeat = rng.random(n) < 0.1
    ids[1:] = np.where(repeat[1:], ids[:-1], ids[1:])
    return [int(i) for i in ids]
