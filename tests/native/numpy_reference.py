"""The forward pass once more, in float64 numpy, from the GGUF file alone: what the engine's logits are held against.

Written from the formulae of the papers and of the models' published code, for whole sequences, and sharing nothing with
the engine but the file. Quantised tensors are dequantised by the `gguf` package. An architecture is a row of FAMILIES
plus, where it has a part of its own, a method.

`python -m tests.native.numpy_reference FILE id,id,...` prints the five most probable tokens behind the last id.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Family:
    """What distinguishes one architecture from another."""

    adjacent_rope: bool  # rope turns (2i, 2i + 1), not (i, i + n_rot / 2)
    gated: bool  # every query head is followed by its gate
    head_norms: bool  # queries and keys are normed head by head
    ffn_norm: str  # name of the norm before the feed-forward
    recurrent: bool = False  # layers but every full_attention_interval-th are gated delta nets


FAMILIES = {
    "llama": Family(adjacent_rope=True, gated=False, head_norms=False, ffn_norm="ffn_norm"),
    "qwen35moe": Family(
        adjacent_rope=False, gated=True, head_norms=True, ffn_norm="post_attention_norm", recurrent=True
    ),
}


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(0, x))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    y = x - x.max(-1, keepdims=True)
    return np.asarray(y - np.log(np.exp(y).sum(-1, keepdims=True)))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def l2_norm(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6))


class Reference:
    """One model file. `logits(ids)` is all it does. `dtype` float32 is for long texts: twice as fast, 1e-5 off."""

    def __init__(self, path: str | PathLike[str], dtype: type[np.floating[Any]] = np.float64) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {t.name: t for t in self._reader.tensors}
        self._dtype = dtype
        self.arch = str(self._reader.fields["general.architecture"].contents())
        self.family = FAMILIES[self.arch]
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))
        self.n_layers = int(self.key("block_count")) - int(self.key("nextn_predict_layers", 0))
        self.width = int(self.key("embedding_length"))
        self.heads = int(self.key("attention.head_count"))
        self.kv_heads = int(self.key("attention.head_count_kv", self.heads))
        self.head_dim = int(self.key("attention.key_length", self.width // self.heads))
        self.n_rot = int(self.key("rope.dimension_count", self.head_dim))
        self.rope_base = float(self.key("rope.freq_base", 10000.0))
        self.tensor: Callable[[str], Array] = cache(self._tensor)

    def key(self, suffix: str, default: Any = None) -> Any:
        """Metadata `ARCH.suffix`; KeyError when it is missing and has no default."""
        name = f"{self.arch}.{suffix}"
        if name not in self._reader.fields and default is not None:
            return default
        return self._reader.fields[name].contents()

    def _tensor(self, name: str) -> Array:
        """Values of a tensor, [..., outputs, inputs], kept in float32."""
        t = self._tensors[name]
        values = dequantize(t.data, t.tensor_type)
        return np.asarray(values, np.float32).reshape([int(n) for n in reversed(t.shape)])

    def weight(self, layer: int, name: str) -> Array:
        return self.tensor(f"blk.{layer}.{name}").astype(self._dtype, copy=False)

    def linear(self, x: Array, layer: int, name: str) -> Array:
        """[..., outputs] of rows x [..., inputs]."""
        y: Array = x @ self.weight(layer, f"{name}.weight").T
        return y

    # -- mixers --------------------------------------------------------------------------------------------------

    def rope(self, x: Array) -> Array:
        """x [positions, heads, head_dim], turned by position; values behind n_rot stay."""
        half = self.n_rot // 2
        angle = np.arange(len(x))[:, None] * self.rope_base ** (-2.0 * np.arange(half) / self.n_rot)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = (
            (slice(0, self.n_rot, 2), slice(1, self.n_rot, 2))
            if self.family.adjacent_rope
            else (slice(0, half), slice(half, self.n_rot))
        )
        y = x.copy()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
        return y

    def attention(self, x: Array, layer: int) -> Array:
        n, hd = len(x), self.head_dim
        q = self.linear(x, layer, "attn_q").reshape(n, self.heads, -1)
        k = self.linear(x, layer, "attn_k").reshape(n, self.kv_heads, hd)
        v = self.linear(x, layer, "attn_v").reshape(n, self.kv_heads, hd)
        q, gate = q[..., :hd], q[..., hd:]
        if self.family.head_norms:
            q = rms_norm(q, self.weight(layer, "attn_q_norm.weight"), self.eps)
            k = rms_norm(k, self.weight(layer, "attn_k_norm.weight"), self.eps)
        q, k = self.rope(q), self.rope(k)
        future = np.triu(np.full((n, n), -np.inf), 1)
        out = np.empty((n, self.heads, hd), x.dtype)
        for h in range(self.heads):
            g = h // (self.heads // self.kv_heads)
            out[:, h] = softmax(q[:, h] @ k[:, g].T / np.sqrt(hd) + future) @ v[:, g]
        if self.family.gated:
            out = out * sigmoid(gate)
        return self.linear(out.reshape(n, -1), layer, "attn_output")

    def delta_net(self, x: Array, layer: int) -> Array:
        """Gated delta net; value head h reads key head h mod hk."""
        hk, hv, d = (int(self.key(f"ssm.{k}")) for k in ("group_count", "time_step_rank", "state_size"))
        n, taps = len(x), int(self.key("ssm.conv_kernel"))
        raw = self.linear(x, layer, "attn_qkv")
        past = np.concatenate([np.zeros((taps - 1, raw.shape[1])), raw])
        kernel = self.weight(layer, "ssm_conv1d.weight")  # [channels, taps], the last tap is the current token's
        mixed = silu(np.sum([past[t : t + n] * kernel[:, t] for t in range(taps)], axis=0))
        q = l2_norm(mixed[:, : hk * d].reshape(n, hk, d)) / np.sqrt(d)
        k = l2_norm(mixed[:, hk * d : 2 * hk * d].reshape(n, hk, d))
        v = mixed[:, 2 * hk * d :].reshape(n, hv, d)
        beta = sigmoid(self.linear(x, layer, "ssm_beta"))
        step = softplus(self.linear(x, layer, "ssm_alpha") + self.weight(layer, "ssm_dt.bias"))
        decay = np.exp(self.weight(layer, "ssm_a") * step)
        out = self._recurrence(np.tile(q, (1, hv // hk, 1)), np.tile(k, (1, hv // hk, 1)), v, decay, beta)
        out = rms_norm(out, self.weight(layer, "ssm_norm.weight"), self.eps)
        z = self.linear(x, layer, "attn_gate").reshape(n, hv, d)
        return self.linear((out * silu(z)).reshape(n, -1), layer, "ssm_out")

    @staticmethod
    def _recurrence(q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
        """Every head's state S [key, value] token by token: decay, correct by the delta rule, read."""
        n, heads, d = v.shape
        state = np.zeros((heads, d, d), v.dtype)
        out = np.empty_like(v)
        for t in range(n):
            state *= decay[t][:, None, None]
            held = np.einsum("hi,hij->hj", k[t], state)
            state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - held))[:, None, :]
            out[t] = np.einsum("hi,hij->hj", q[t], state)
        return out

    # -- feed-forward --------------------------------------------------------------------------------------------

    def dense(self, x: Array, layer: int, suffix: str = "") -> Array:
        gate = self.linear(x, layer, f"ffn_gate{suffix}")
        return self.linear(silu(gate) * self.linear(x, layer, f"ffn_up{suffix}"), layer, f"ffn_down{suffix}")

    def experts(self, x: Array, layer: int) -> Array:
        used = int(self.key("expert_used_count"))
        p = softmax(self.linear(x, layer, "ffn_gate_inp"))
        chosen = np.argsort(-p, axis=-1, kind="stable")[:, :used]
        share = np.take_along_axis(p, chosen, -1)
        share = share / share.sum(-1, keepdims=True)
        gate, up, down = (self.tensor(f"blk.{layer}.ffn_{w}_exps.weight") for w in ("gate", "up", "down"))
        y = np.zeros_like(x)
        for e in np.unique(chosen):
            rows, place = np.nonzero(chosen == e)
            g, u, w = (m[e].astype(self._dtype, copy=False) for m in (gate, up, down))
            y[rows] += share[rows, place][:, None] * ((silu(x[rows] @ g.T) * (x[rows] @ u.T)) @ w.T)
        shared = sigmoid(x @ self.weight(layer, "ffn_gate_inp_shexp.weight").reshape(-1))
        return np.asarray(y + shared[:, None] * self.dense(x, layer, "_shexp"))

    # -- the whole -----------------------------------------------------------------------------------------------

    def is_recurrent(self, layer: int) -> bool:
        interval = int(self.key("full_attention_interval", 4))
        return self.family.recurrent and (layer + 1) % interval != 0

    def logits(self, ids: Sequence[int], want_from: int = 0) -> Array:
        """[len(ids) - want_from, vocab]: the logits behind every token from `want_from` on."""
        x = self.tensor("token_embd.weight")[list(ids)].astype(self._dtype, copy=False)
        routed = f"{self.arch}.expert_count" in self._reader.fields
        for i in range(self.n_layers):
            h = rms_norm(x, self.weight(i, "attn_norm.weight"), self.eps)
            x = x + (self.delta_net(h, i) if self.is_recurrent(i) else self.attention(h, i))
            h = rms_norm(x, self.weight(i, f"{self.family.ffn_norm}.weight"), self.eps)
            x = x + (self.experts(h, i) if routed else self.dense(h, i))
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        x = rms_norm(x[want_from:], self.tensor("output_norm.weight").astype(self._dtype, copy=False), self.eps)
        y: Array = x @ self.tensor(head).astype(self._dtype, copy=False).T
        return y


def main() -> None:
    """Print what the model named on the command line thinks comes next."""
    ids = [int(i) for i in sys.argv[2].split(",")]
    row = log_softmax(Reference(sys.argv[1]).logits(ids, len(ids) - 1)[0])
    for i in np.argsort(-row)[:5]:
        print(f"{i}\t{row[i]:.6f}")


if __name__ == "__main__":
    main()
