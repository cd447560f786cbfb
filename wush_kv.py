"""WUSH-KV: a key-value cache in 2 bits, by one closed-form linear transform per KV head (arXiv 2609.38121).

Rounding a cached key or value makes an error. What matters is not how large it is but what its consumer makes of it:
a key acts only through q·k, a value only through the output projection. From a short calibration WUSH builds for each
KV head one transform T that balances what is stored against what consumes it, so that plain per-token rounding of
T k (or T v) hurts least among all invertible T.

    calibrate   text           -> second moments M of the keys and values, H of their consumers
    derive      M, H           -> T = c 𝓗 Λ^(-1/4) Uᵀ Lᵀ, one per layer, KV head and side
    fold        T_V            -> W_V ← T_V W_V, W_O ← T_V⁻ᵀ W_O: the value side costs nothing at run time
    store       k, v           -> [sink | packed 2-bit codes of T_K k and of the folded v | recent], one window cache a layer
    attend      q              -> T_K⁻ᵀ q meets T_K k: (T⁻ᵀq)·(T k) = q·k; one softmax over the three parts

    python wush_kv.py                                        the bundled model, offline, in under a minute
    python wush_kv.py --model Qwen/Qwen3-8B --bits 2         a real model

Every dimension has one letter, in each shape comment and einsum:

    b batch              l layer                            d head dim
    t query token        g KV head                          n block of the transform
    s cached token       r query head inside its group      m channel inside a block (d = n·m)
    v vocabulary         (query head h = g·R + r)           D model width

Queries are (b, g, r, t, d), keys and values (b, g, s, d), transforms (l, g, n, m, m), which act on column vectors.

Left out: training, other architectures than Qwen3 and Llama, mixture-of-experts, sliding windows, paged memory.
"""
import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import sys
import time
from functools import cache
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm


# ----------------------------------------------------------------------------------------------------------------------
# Transforms. A rule maps the Gram M of what is stored and the Hessian H of what consumes it, both (..., g, d, d), to T.
# ----------------------------------------------------------------------------------------------------------------------

def hadamard(n: int) -> Tensor:
    """Build the normalized Sylvester-Hadamard matrix 𝓗 of order n, (n, n), float64: symmetric, 𝓗 𝓗 = I."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Hadamard matrix of order {n} is not available: the order must be a power of two")
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / math.sqrt(n)


def diagonal_blocks(S: Tensor, m: int | None) -> Tensor:
    """Cut (..., d, d) into its diagonal blocks (..., n, m, m), float64; m = None keeps it whole."""
    m = m or S.shape[-1]
    if S.shape[-1] % m:
        raise ValueError(f"blocks of {m} channels do not divide {S.shape[-1]}")
    return torch.stack([S[..., i:i + m, i:i + m] for i in range(0, S.shape[-1], m)], -3).double()


def identity(gram: Tensor, hess: Tensor, m: int | None = None) -> Tensor:
    """Leave every block as it is."""
    M = diagonal_blocks(gram, m)
    return torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)


def rotate(gram: Tensor, hess: Tensor, m: int | None = None) -> Tensor:
    """Rotate every block by 𝓗, as QuaRot does and, in practice, TurboQuant."""
    M = diagonal_blocks(gram, m)
    return hadamard(M.shape[-1]).to(M.device).expand_as(M)


def oscar(gram: Tensor, hess: Tensor, m: int | None = None) -> Tensor:
    """Rotate onto the consumer's eigenvectors, then spread: T = (U 𝓗)ᵀ, one for all heads of a layer (arXiv 2605.17757).

    U holds the eigenvectors of the heads' mean `hess`. With groups narrower than the head, T stays one block of d
    channels: bit reversal deals the eigenvectors out to the groups, strong and weak alike, and 𝓗 acts in each group.
    """
    d = hess.shape[-1]
    U = torch.linalg.eigh(hess.double().mean(-3)).eigenvectors.flip(-1)      # strongest first
    bits = d.bit_length() - 1
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(d)]
    spread = torch.block_diag(*[hadamard(m or d)] * (d // (m or d))).to(U.device)
    return (U[..., order] @ spread).mT[..., None, None, :, :].expand(*hess.shape[:-2], 1, d, d)


def wush(gram: Tensor, hess: Tensor, m: int | None = None, damping: float = 1e-2) -> Tensor:
    """Balance what is stored against what consumes it: T = c 𝓗 Λ^(-1/4) Uᵀ Lᵀ (arXiv 2609.38121, section 3).

    L Lᵀ = H + γ tr(H)/m I and U Λ Uᵀ = Lᵀ (M + γ tr(M)/m I) L, block by block; c keeps tr(T M Tᵀ) = tr(M).
    Among invertible T this one makes tr(T M Tᵀ) tr(T⁻ᵀ H T⁻¹) smallest. Scaling M or H changes nothing. Where M or H
    is zero there is nothing to balance, and T = 𝓗. Raises ValueError for moments that are not finite.
    """
    if not (gram.isfinite().all() and hess.isfinite().all()):
        raise ValueError("the calibration moments hold NaN or infinity: no transform can be derived from them")
    M, H = diagonal_blocks(gram, m), diagonal_blocks(hess, m)
    I = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    mean_diagonal = lambda S: S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    dead = (mean_diagonal(M) == 0) | (mean_diagonal(H) == 0)
    M, H = (torch.where(dead, I, S / mean_diagonal(S)) for S in (M, H))      # from here on tr(S)/m = 1
    L = torch.linalg.cholesky(H + damping * I)
    lam, U = torch.linalg.eigh(L.mT @ (M + damping * I) @ L)
    T = hadamard(M.shape[-1]).to(M.device) @ (lam[..., None] ** -0.25 * U.mT) @ L.mT
    c = (mean_diagonal(M) / mean_diagonal(T @ M @ T.mT)).sqrt()
    return c * T


TRANSFORMS = {   # name: rule, (Gram, Hessian) of the keys, (Gram, Hessian) of the values: names of `calibrate`'s moments
    "identity": (identity, ("k", "q"), ("v", "o")),
    "hadamard": (rotate, ("k", "q"), ("v", "o")),
    "oscar": (oscar, ("k", "q"), ("v", "v_oscar")),
    "wush": (wush, ("k", "q"), ("v", "o")),
    "wush_a": (wush, ("k", "q_attn"), ("v", "o_attn")),
}


def derive(moments: dict[str, Tensor], name: str, m: int | None = None) -> dict[str, Tensor]:
    """Derive the transforms `name` from `calibrate`'s moments: {"k": T_K, "v": T_V}, each (l, g, n, m, m), float32."""
    rule, keys, values = TRANSFORMS[name]
    return {side: rule(*(moments[i] for i in which), m).float().contiguous()
            for side, which in (("k", keys), ("v", values))}


def apply(T: Tensor, x: Tensor) -> Tensor:
    """Apply T (g, n, m, m) to the last axis of x (b, g, ..., d), in T's dtype."""
    y = torch.einsum("gnij,bg...nj->bg...ni", T, x.to(T.dtype).unflatten(-1, T.shape[1:3]))
    return y.flatten(-2)


def inverse_transpose(T: Tensor) -> Tensor:
    """Return T⁻ᵀ, inverted in float64: what a query goes through when its keys went through T."""
    return torch.linalg.inv(T.double()).mT.to(T.dtype).contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# Quantizers. A rule maps groups x (..., m) to a scale and an offset each; codes are rounded against that pair.
# ----------------------------------------------------------------------------------------------------------------------

@cache
def gaussian_clip(bits: int) -> float:
    """Find α_b: of all grids of 2^b even levels on ±α, this one has the least squared error on N(0, 1) (QuEST, arXiv 2502.05003).

    The error is least where its derivative, E[(x − Q(x)) u(x)] with levels α·u, vanishes; found by bisection.
    """
    u = torch.linspace(-1, 1, 2 ** bits, dtype=torch.float64)
    edges = lambda a: torch.cat([torch.tensor([-40.0]), a * (u[1:] + u[:-1]) / 2, torch.tensor([40.0])])
    low, high = 0.1, 10.0
    for _ in range(60):
        a = (low + high) / 2
        x = edges(a)
        mean = ((-x ** 2 / 2).exp() / math.sqrt(2 * math.pi)).diff().neg()   # ∫ x φ(x) over each cell
        mass = torch.special.ndtr(x).diff()
        low, high = (a, high) if (u * mean - a * u ** 2 * mass).sum() > 0 else (low, a)
    return a


def quest(x: Tensor, bits: int, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Place 2^b levels evenly in ±α_b·RMS(x), the best such grid for Gaussian data; `clip` is not used."""
    largest = x.abs().amax(-1)
    unit = x / largest.clamp(min=torch.finfo(x.dtype).tiny)[..., None]       # 1e-30 squared would be zero
    reach = gaussian_clip(bits) * largest * unit.square().mean(-1).sqrt()
    return 2 * reach / (2 ** bits - 1), -reach


def affine(x: Tensor, bits: int, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Place 2^b levels evenly from min to max of x clamped to ±τ, τ the ⌊clip·m⌋-th smallest |x| (OSCAR); 1 is min/max."""
    m = x.shape[-1]
    tau = x.abs().kthvalue(min(int(clip * m), m - 1) + 1).values[..., None]
    low, high = x.clamp(-tau, tau).aminmax(dim=-1)
    return (high - low) / (2 ** bits - 1), low


QUANTIZERS = {"quest": quest, "affine": affine}
BITS = (2, 3, 4, 8, 16)      # 16 is off


class Codec(NamedTuple):
    """How one side of the cache, keys or values, is quantized: `group` channels share a scale (None: the whole head)."""
    bits: int = 2
    rule: str = "quest"
    clip: float = 1.0
    group: int | None = None


def quantize(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x (..., d): codes (..., d) uint8 in [0, 2^b − 1], scale and offset (..., d/group) bfloat16.

    The pair is rounded to bfloat16 first and the codes are computed against the rounded pair, so that whoever reads
    them sees the same grid. A constant group gets the smallest normal scale instead of a division by zero.
    """
    groups = x.float().unflatten(-1, (-1, codec.group or x.shape[-1]))
    scale, offset = (p.bfloat16() for p in QUANTIZERS[codec.rule](groups, codec.bits, codec.clip))
    scale = scale.clamp(min=torch.finfo(torch.bfloat16).tiny)
    steps = (groups - offset.float()[..., None]) / scale.float()[..., None]
    return steps.round().clamp(0, 2 ** codec.bits - 1).to(torch.uint8).flatten(-2), scale, offset


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Read codes (..., d) back as scale·code + offset, in float32."""
    groups = codes.unflatten(-1, (scale.shape[-1], -1))
    return torch.addcmul(offset.float()[..., None], groups.float(), scale.float()[..., None]).flatten(-2)


def roundtrip(x: Tensor, T: Tensor, codec: Codec) -> Tensor:
    """Return what a reader of the cache takes x (b, g, s, d) for: T⁻¹ dequantize(quantize(T x)), in x's dtype."""
    if codec.bits == 16:
        return x
    y = dequantize(*quantize(apply(T, x), codec))
    return apply(inverse_transpose(T).mT, y).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The cache of one layer: [sink | packed | recent]. The ends stay in model dtype, the middle holds packed codes.
# ----------------------------------------------------------------------------------------------------------------------

def hot_path():
    """Import kernels.py, on first use: the mathematics above can be copied out without it."""
    import kernels
    return kernels


def grow(buffer: Tensor, capacity: int) -> Tensor:
    """Copy a buffer (b, g, s, ...) into one with room for `capacity` tokens."""
    new = buffer.new_zeros(*buffer.shape[:2], capacity, *buffer.shape[3:])
    new[:, :, :buffer.shape[2]] = buffer[:, :, :capacity]
    return new


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
    """Attend from q (b, g, r, t, d) to k, v (b, g, s, d); `mask` (b or 1, 1, t, s), True where seen, replaces causality."""
    o = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, attn_mask=mask, is_causal=causal and mask is None,
                                       enable_gqa=True)
    return o.unflatten(1, q.shape[1:3])


def padding_mask(pad: list[int], t: int, device) -> Tensor:
    """Mask (b, 1, t, t) of a left-padded batch: causal, no padding seen; padding sees itself, lest its softmax be empty."""
    column = torch.arange(t, device=device)
    seen = (column <= column[:, None]) & (column >= torch.tensor(pad, device=device)[:, None, None])
    return (seen | torch.eye(t, dtype=torch.bool, device=device))[:, None]


def alike(keys: list) -> list[slice]:
    """Group batch rows: one slice over all when their keys are the same, else one slice a row."""
    return [slice(0, len(keys))] if len(set(keys)) == 1 else [slice(i, i + 1) for i in range(len(keys))]


class PackedTensor:
    """Tokens of one layer's keys or values as packed codes of T x: what a 2-bit cache really holds.

    codes (b, g, capacity, d·bits/8) uint8, pair (b, g, capacity, groups) int32, a bfloat16 scale and offset each.
    With 16 bits nothing is rounded but to model dtype: codes are T x itself and there are no pairs.
    """

    def __init__(self, batch: int, heads: int, d: int, codec: Codec, T: Tensor | None, dtype, device):
        if codec.bits not in BITS:
            raise ValueError(f"{codec.bits} bits are not supported: choose one of {BITS}")
        self.codec, self.T, self.dtype = codec, T, dtype
        quantized = codec.bits < 16
        if quantized and (d % (codec.group or d) or d % 8):
            raise ValueError(f"head_dim {d} must be a multiple of 8 and of the group, {codec.group}")
        self.codes = torch.zeros(batch, heads, 0, d * codec.bits // 8 if quantized else d,
                                 dtype=torch.uint8 if quantized else dtype, device=device)
        self.pair = torch.zeros(batch, heads, 0, d // (codec.group or d) if quantized else 0,
                                dtype=torch.int32, device=device)

    def write(self, rows: slice, start: int, x: Tensor) -> None:
        """Transform, quantize and pack x (b, g, s, d) as tokens start, start + 1, ... of the batch rows `rows`."""
        stop, capacity = start + x.shape[2], self.codes.shape[2]
        if stop > capacity:      # the first write gets just what it needs, in 64s; later ones double
            capacity = max(2 * capacity, -(-stop // 64) * 64)
            self.codes, self.pair = grow(self.codes, capacity), grow(self.pair, capacity)
        y = x if self.T is None else apply(self.T, x)
        if self.codec.bits == 16:
            self.codes[rows, :, start:stop] = y.to(self.dtype)
        else:
            codes, scale, offset = quantize(y, self.codec)
            self.codes[rows, :, start:stop] = hot_path().pack_ref(codes, self.codec.bits)
            self.pair[rows, :, start:stop] = hot_path().join_pair(scale, offset)

    def read(self, count: int) -> Tensor:
        """Dequantize the first `count` tokens, still in the transformed basis: (b, g, count, d)."""
        if self.codec.bits == 16:
            return self.codes[:, :, :count]
        codes = hot_path().unpack_ref(self.codes[:, :, :count], self.codec.bits)
        return dequantize(codes, *hot_path().split_pair(self.pair[:, :, :count]))


class WindowCache:
    """The cache of one layer; each batch row is [its first `sink` tokens | packed | its last `keep` tokens or a few more].

    When a row's recent window reaches keep + flush tokens, its oldest `flush` are quantized together and never touched
    again (section 5 of the paper). Keys enter raw (after RoPE) and are transformed on being packed; values enter folded.
    Tokens are counted per row without padding, so a row's cache is the same alone or in a batch, and however its
    tokens were cut into calls. keep = None never flushes: an ordinary, growing cache.
    """

    def __init__(self, batch: int, heads: int, d: int, T: Tensor | None = None, k_codec: Codec = Codec(),
                 v_codec: Codec = Codec(), sink: int = 16, keep: int | None = 128, flush: int = 16,
                 dtype=torch.float32, device="cpu"):
        if sink < 0 or flush < 1 or (keep is not None and keep < 0):
            raise ValueError(f"windows must be sink >= 0, keep >= 0, flush >= 1, not {sink}, {keep}, {flush}")
        self.sink, self.keep, self.flush_size = (0 if keep is None else sink), keep, flush
        self.n, self.n_packed = [0] * batch, [0] * batch                     # per row; everything else follows
        self.k, self.v = (PackedTensor(batch, heads, d, *side, dtype, device) for side in ((k_codec, T), (v_codec, None)))
        self.T_query = None if T is None else inverse_transpose(T)
        window = lambda size: [torch.zeros(batch, heads, size, d, dtype=dtype, device=device) for _ in range(2)]
        self.sinks = window(self.sink)
        self.recent = window(self.window_size)

    @property
    def window_size(self) -> int:
        return 64 if self.keep is None else self.keep + self.flush_size

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held, spare capacity included."""
        held = *self.sinks, *self.recent, self.k.codes, self.k.pair, self.v.codes, self.v.pair
        return sum(t.untyped_storage().nbytes() for t in held)

    def n_recent(self, row: int) -> int:
        return max(0, self.n[row] - self.sink - self.n_packed[row])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pad: list[int] | None = None) -> Tensor:
        """Take in the tokens of one call and return their attention output (b, g, r, t, d).

        They see the cache as it stood when the call began and, exactly, each other; quantizing what is due comes last.
        `pad` counts the padding at the left of each row of this call.
        """
        fresh, n_before = not any(self.n), list(self.n)
        pad = pad or [0] * len(self.n)
        self.append(k, v, pad)
        if fresh:
            o = causal_attention(q, k, v, padding_mask(pad, q.shape[3], q.device) if any(pad) else None)
        else:
            first = [n - p for n, p in zip(n_before, pad)]                   # position of each row's column 0
            o = torch.cat([self.attend_parts(q[..., i:i + 256, :], [f + i for f in first])
                           for i in range(0, q.shape[3], 256)], -2)          # 256 queries at a time bound the scores
        self.flush()
        return o

    def append(self, k: Tensor, v: Tensor, pad: list[int]) -> None:
        """Write keys and values (b, g, t, d) to the sinks while these have room, then to the recent window."""
        rows_alike = alike(list(zip(self.n, self.n_packed, pad)))
        for rows in rows_alike:
            row = rows.start
            new = k.shape[2] - pad[row]
            s, r = min(max(self.sink - self.n[row], 0), new), self.n_recent(row)
            if (need := r + new - s) > self.recent[0].shape[2]:
                capacity = need if self.keep is not None else max(need, 2 * self.recent[0].shape[2])
                self.recent = [grow(w, capacity) for w in self.recent]
            for x, sinks, recent in zip((k, v), self.sinks, self.recent):
                x = x[rows, :, pad[row]:]
                sinks[rows, :, self.n[row]:self.n[row] + s] = x[:, :, :s]
                recent[rows, :, r:need] = x[:, :, s:]
        self.n = [n + k.shape[2] - p for n, p in zip(self.n, pad)]

    def flush(self) -> None:
        """Quantize the oldest recent tokens, `flush` at a time, while `keep` stay: the only place that packs."""
        if self.keep is None:
            return
        for rows in alike(list(zip(self.n, self.n_packed))):
            r, p = self.n_recent(rows.start), self.n_packed[rows.start]
            if (due := (r - self.keep) // self.flush_size * self.flush_size) <= 0:
                continue
            for packed, recent in zip((self.k, self.v), self.recent):
                packed.write(rows, p, recent[rows, :, :due])
                recent[rows, :, :r - due] = recent[rows, :, due:r].clone()
            self.n_packed[rows] = [p + due] * len(self.n_packed[rows])
        if self.recent[0].shape[2] != self.window_size:      # a long call had made the window longer
            self.recent = [grow(w, self.window_size) for w in self.recent]

    def parts(self, q: Tensor) -> Iterable[tuple]:
        """Yield (query, keys, values, first position, count) of each part; the last two per row."""
        rows = range(len(self.n))
        sizes = [min(n, self.sink) for n in self.n], self.n_packed, [self.n_recent(i) for i in rows]
        firsts = [0] * len(self.n), [self.sink] * len(self.n), [self.sink + p for p in self.n_packed]
        for part, (first, size) in enumerate(zip(firsts, sizes)):
            if not (longest := max(size)):
                continue
            if part == 1:
                query = q if self.T_query is None else apply(self.T_query, q)
                yield query, self.k.read(longest), self.v.read(longest), first, size
            else:
                k, v = (self.sinks, self.recent)[part // 2]
                yield q, k[:, :, :longest], v[:, :, :longest], first, size

    def attend_parts(self, q: Tensor, first: list[int]) -> Tensor:
        """Attend from q (b, g, r, t, d), row i at positions first[i], first[i] + 1, ..., with one softmax over the parts."""
        (b, g, r, t, d), parts = q.shape, list(self.parts(q))
        index = lambda x: torch.tensor(x, device=q.device)[:, None]
        position = index(first) + torch.arange(t, device=q.device)                              # (b, t)
        masks = []
        for _, k, _, start, size in parts:
            slot = torch.arange(k.shape[2], device=q.device)
            seen = (slot < index(size))[:, None, :] & (index(start) + slot <= position[..., None]) # (b, t, s)
            masks.append(seen[:, None, None])
        if len(parts) == 1 and parts[0][0] is q:
            return causal_attention(q, *parts[0][1:3], 
                                    masks[0].squeeze(1) if t > 1 or len(set(self.n)) > 1 else None, causal=False)
        scores = [(query.flatten(2, 3).float() @ k.float().mT).unflatten(2, (r, t)) for query, k, *_ in parts]
        scores = [(z * d ** -0.5).masked_fill(~seen, -1e30) for z, seen in zip(scores, masks)]   # (b, g, r, t, s)
        p = torch.cat(scores, -1).softmax(-1).split([z.shape[-1] for z in scores], -1)
        o = sum(w.flatten(2, 3) @ v.float() for w, (_, _, v, *_) in zip(p, parts))
        return o.unflatten(2, (r, t)).to(q.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The model, by hand: Qwen3, and Llama as the same graph without QK-norm, over a dict of weights named as in the checkpoint.
# ----------------------------------------------------------------------------------------------------------------------

class Model(NamedTuple):
    config: object               # transformers' own config object: hidden_size, num_key_value_heads, ...
    weights: dict[str, Tensor]
    inv_freq: Tensor             # (d/2,) RoPE frequencies, float32
    rope_scale: float            # factor on cos and sin (yarn)
    folded: bool = False


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last axis in float32, cast back, then weigh: the order transformers uses, so that bf16 agrees."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def linear(weights: dict, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))


def rope_tables(model: Model, positions: Tensor, dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (b, t, d), of the rotary angles at `positions` (b, t)."""
    angle = positions[..., None].float() * model.inv_freq
    angle = torch.cat([angle, angle], -1)
    return (angle.cos() * model.rope_scale).to(dtype), (angle.sin() * model.rope_scale).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i with channel i + d/2 (the checkpoint's pairing); cos and sin broadcast against x (..., t, d)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def project(model: Model, l: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project x (b, t, D) to queries (b, g, r, t, d) and keys (b, g, t, d), both after QK-norm and RoPE, and values."""
    w, c, p = model.weights, model.config, f"model.layers.{l}.self_attn."
    q, k, v = (linear(w, p + name, x).unflatten(-1, (-1, c.head_dim)) for name in ("q_proj", "k_proj", "v_proj"))
    if c.model_type == "qwen3":
        q, k = (rms_norm(y, w[p + name], c.rms_norm_eps) for y, name in ((q, "q_norm.weight"), (k, "k_norm.weight")))
    q = q.unflatten(2, (c.num_key_value_heads, -1)).permute(0, 2, 3, 1, 4)   # (b, t, h, d) -> (b, g, r, t, d)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return rope(q, cos[:, None, None], sin[:, None, None]), rope(k, cos[:, None], sin[:, None]), v


def project_out(model: Model, l: int, o: Tensor) -> Tensor:
    """Apply the output projection to o (b, g, r, t, d): (b, t, D)."""
    return linear(model.weights, f"model.layers.{l}.self_attn.o_proj", o.permute(0, 3, 1, 2, 4).flatten(2))


def swiglu(model: Model, l: int, x: Tensor) -> Tensor:
    w, p = model.weights, f"model.layers.{l}.mlp."
    return linear(w, p + "down_proj", F.silu(linear(w, p + "gate_proj", x)) * linear(w, p + "up_proj", x))


def by_tokens(f: Callable, x: Tensor, size: int = 4096) -> Tensor:
    """Map f over x (b, t, D) a few thousand tokens at a time: the wide intermediates of a long sequence never coexist."""
    return torch.cat([f(part) for part in x.split(size, 1)], 1)


@torch.no_grad()
def forward(model: Model, ids: Tensor, attend: Callable, positions: Tensor | None = None) -> Tensor:
    """Run the decoder on ids (b, t) and return the normalized hidden states (b, t, D).

    `attend(l, q, k, v) -> o` is attention, and the seam of this file: a window cache, calibration and each evaluation
    are functions put there.
    """
    w, c = model.weights, model.config
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    x = F.embedding(ids, w["model.embed_tokens.weight"])
    cos, sin = rope_tables(model, positions, x.dtype)
    for l in range(c.num_hidden_layers):
        norm = lambda y, name: rms_norm(y, w[f"model.layers.{l}.{name}.weight"], c.rms_norm_eps)
        q, k, v = project(model, l, norm(x, "input_layernorm"), cos, sin)
        x = x + project_out(model, l, attend(l, q, k, v))
        x = x + by_tokens(lambda y: swiglu(model, l, norm(y, "post_attention_layernorm")), x)
    return rms_norm(x, w["model.norm.weight"], c.rms_norm_eps)


def logits(model: Model, hidden: Tensor) -> Tensor:
    """Map hidden states (..., D) to logits (..., v)."""
    head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    return F.linear(hidden, model.weights[head])


def output_blocks(model: Model, l: int) -> Tensor:
    """View the output projection as the blocks W_O(r) that read each query head: (g, r, d, D)."""
    c, W = model.config, model.weights[f"model.layers.{l}.self_attn.o_proj.weight"]
    return W.T.unflatten(0, (c.num_key_value_heads, -1, c.head_dim))


def fold_values(model: Model, T_V: Tensor) -> Model:
    """Fold T_V (l, g, n, m, m) into a copy of the weights: W_V ← T_V W_V, bias too, and W_O(r) ← T_V⁻ᵀ W_O(r).

    The logits stay what they were while the values come out transformed. The given model is not changed. Raises
    ValueError on a model that is folded already.
    """
    if model.folded:
        raise ValueError("this model's values are folded already: fold the original one")
    weights, c = dict(model.weights), model.config
    for l, T in enumerate(T_V.double()):
        p = f"model.layers.{l}.self_attn."
        for name in ("v_proj.weight", "v_proj.bias"):
            if (W := weights.get(p + name)) is not None:
                columns = W.double().reshape(1, len(T), c.head_dim, -1).mT             # (1, g, D or 1, d)
                weights[p + name] = apply(T, columns).mT.reshape(W.shape).to(W.dtype)
        W, rows = weights[p + "o_proj.weight"], output_blocks(model, l).double().mT    # (g, r, D, d)
        folded = apply(inverse_transpose(T), rows[None])[0]
        weights[p + "o_proj.weight"] = folded.permute(2, 0, 1, 3).flatten(1).to(W.dtype)
    return model._replace(weights=weights, folded=True)


# ----------------------------------------------------------------------------------------------------------------------
# Reading checkpoints: an ordinary Hugging Face folder, or the same from the hub. What can be refused is refused early.
# ----------------------------------------------------------------------------------------------------------------------

MODEL_TYPES = ("qwen3", "llama")
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def hub(name: str, kind: str, *patterns: str) -> Path:
    """Download the files matching `patterns` of the hub's model or dataset `name`."""
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), etag_timeout=4))
    except Exception as e:       # the hub client raises a dozen unrelated types for "not there" and "no network"
        raise ValueError(f"cannot get the {kind} {name!r} from the hub ({type(e).__name__}): give a local one instead") from e


def fetch(name: str, *patterns: str) -> Path:
    """Return the local folder `name`, or download the files matching `patterns` of the hub's model `name`."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"{name!r} is neither a folder nor a hub id of the form owner/name")
    return hub(name, "model", *patterns)


def read_config(folder: Path, yarn: float | None = None):
    """Read and check config.json; return transformers' config object, its RoPE settings in `rope_parameters`.

    Raises ValueError with one sentence for each kind of model that the decode loop below would run wrongly.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    raw = json.loads((folder / "config.json").read_text())
    if (kind := raw.get("model_type")) not in MODEL_TYPES:
        raise ValueError(f"model_type {kind!r} is not supported, only {' and '.join(MODEL_TYPES)}")
    if raw.get("quantization_config"):
        raise ValueError("the checkpoint's weights are quantized: give an unquantized one")
    sliding = [t for t in raw.get("layer_types") or [] if t != "full_attention"]
    if sliding or raw.get("use_sliding_window"):
        raise ValueError(f"only full attention is supported, not {sliding[0] if sliding else 'a sliding window'}")
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json names no rope_theta, neither by itself nor in rope_parameters")
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(folder)
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only silu")
    d = config.head_dim
    if d < 8 or d & (d - 1):
        raise ValueError(f"head_dim {d} is not supported: the Hadamard matrix needs a power of two, such as 64, 128 or 256")
    rope = dict(config.rope_parameters, rope_theta=theta)
    if yarn is not None:     # Qwen3's 40960 positions are 32768 of context and 8192 for the answer: extend the former
        original = rope.get("original_max_position_embeddings") or 1 << (config.max_position_embeddings.bit_length() - 1)
        rope = dict(rope_type="yarn", factor=yarn, rope_theta=theta, original_max_position_embeddings=original)
        config.max_position_embeddings = int(original * yarn)
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"RoPE of type {rope['rope_type']!r} is not supported, only {', '.join(ROPE_TYPES)} on whole heads")
    config.rope_parameters = rope
    return config


def rope_frequencies(config, device="cpu") -> tuple[Tensor, float]:
    """Return the RoPE frequencies (d/2,) and the factor on cos and sin; variants come from transformers itself."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    if (kind := config.rope_parameters["rope_type"]) != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, device)
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0


def weight_shapes(config) -> dict[str, tuple]:
    """List the tensors a checkpoint of this config must hold, with their shapes."""
    c, D, d = config, config.hidden_size, config.head_dim
    Q, K, I = c.num_attention_heads * d, c.num_key_value_heads * d, c.intermediate_size
    layer = {"input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (Q, D),
             "self_attn.k_proj": (K, D), "self_attn.v_proj": (K, D), "self_attn.o_proj": (D, Q),
             "mlp.gate_proj": (I, D), "mlp.up_proj": (I, D), "mlp.down_proj": (D, I)}
    if c.model_type == "qwen3":
        layer |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    shapes = {"model.embed_tokens.weight": (c.vocab_size, D), "model.norm.weight": (D,)}
    shapes |= {} if c.tie_word_embeddings else {"lm_head.weight": (c.vocab_size, D)}
    for l in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{l}.{name}.weight": shape for name, shape in layer.items()}
        biased = ("self_attn",) * c.attention_bias + ("mlp",) * getattr(c, "mlp_bias", False)
        shapes |= {f"model.layers.{l}.{name}.bias": layer[name][:1] for name in layer
                   if name.startswith(biased) and name.endswith("_proj")} if biased else {}
    return shapes


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the safetensors file that holds it, sharded or not."""
    from safetensors import SafetensorError, safe_open
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (file := folder / "model.safetensors").is_file():
        raise ValueError(f"{folder} holds no model.safetensors")
    try:
        with safe_open(file, framework="pt") as f:
            return dict.fromkeys(f.keys(), file)
    except SafetensorError as e:
        raise ValueError(f"{file} cannot be read as safetensors: {e}") from e


def load_model(folder: Path, config, dtype=torch.float32, device="cpu") -> Model:
    """Load the checkpoint in `folder` straight to device and dtype. Raises ValueError if a tensor is missing or misshapen."""
    from safetensors import safe_open
    files, shapes, weights = checkpoint_files(folder), weight_shapes(config), {}
    if missing := sorted(shapes.keys() - files.keys()):
        raise ValueError(f"the checkpoint lacks {len(missing)} of its tensors, {missing[0]} among them")
    for file in sorted({files[name] for name in shapes}):
        with safe_open(file, framework="pt", device=str(device)) as f:
            for name in (n for n in shapes if files[n] == file):
                weights[name] = f.get_tensor(name).to(dtype)
                if tuple(weights[name].shape) != shapes[name]:
                    raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, config.json says {shapes[name]}")
    inv_freq, scale = rope_frequencies(config, device)
    return Model(config, weights, inv_freq, scale)


# ----------------------------------------------------------------------------------------------------------------------
# Calibration: second moments only, in one pass, never all activations and never the vocabulary logits.
# ----------------------------------------------------------------------------------------------------------------------

def second_moment(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum w x xᵀ over all but heads and channels: x (b, g, ..., t, d), weight (b, g, ..., t) -> (g, d, d), float64."""
    total = x.new_zeros(x.shape[1], x.shape[-1], x.shape[-1], dtype=torch.float64)
    for i in range(0, x.shape[-2], 4096):
        part = x[..., i:i + 4096, :].double()
        left = part if weight is None else part * weight[..., i:i + 4096, None]
        total += torch.einsum("bg...d,bg...e->gde", left, part)
    return total


def attention_sensitivity(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh each query for WUSH-A's Hessians: returns w_{r,t} (b, g, r, t) for the keys and Σ_s p² (b, g, r, t) for the values.

    First order, for one query t of head r with probabilities p_s, output o = Σ p_s v_s and output block W (d, D): an
    error δ_s of key s moves its score by q·δ_s/√d and the module's output by p_s (q·δ_s/√d) Wᵀ(v_s − o). For errors
    independent over s with covariance C the expected squared change is qᵀC q · Σ_s p_s² ‖Wᵀ(v_s − o)‖² / d. That is
    ½ tr(H C) for H = Σ w q qᵀ with w = 2 Σ_s p_s² ‖Wᵀ(v_s − o)‖² / d. An error of value s moves the output by p_s Wᵀδ_s, so
    there H = 2 Σ_r (Σ_{t,s} p²) W Wᵀ. (Appendix C of the paper was not at hand: this is our derivation of its WUSH-A.)
    """
    t, d = q.shape[-2:]
    A = (blocks.double() @ blocks.double().mT).to(q.dtype)                   # (g, r, d, d): ‖Wᵀx‖² = xᵀ A x
    squares = torch.einsum("bgsd,grde,bgse->bgrs", v, A, v)
    key_weight, p2_sum = [], []
    for i in range(0, t, 256):
        z = q[..., i:i + 256, :] @ k[:, :, None].mT * d ** -0.5
        seen = torch.arange(t, device=q.device) <= torch.arange(i, i + z.shape[-2], device=q.device)[:, None]
        p = z.float().masked_fill(~seen, -torch.inf).softmax(-1).to(q.dtype)
        o, p2 = p @ v[:, :, None], p.square()
        Ao = torch.einsum("bgrtd,grde->bgrte", o, A)
        spread = ((p2 @ squares[..., None]).squeeze(-1) - 2 * (Ao * (p2 @ v[:, :, None])).sum(-1)
                  + p2.sum(-1) * (Ao * o).sum(-1))                           # Σ_s p² (v_s − o)ᵀ A (v_s − o)
        key_weight.append(2 * spread.clamp(min=0) / d)
        p2_sum.append(p2.sum(-1))
    return torch.cat(key_weight, -1).double(), torch.cat(p2_sum, -1).double()


def calibrate(model: Model, sequences: Iterable[Tensor], attention_aware: bool = False) -> dict[str, Tensor]:
    """Accumulate the second moments of all layers over token sequences (t,), each (l, g, d, d), float64.

    k: Σ k kᵀ and q: 2 Σ_r Σ_t q qᵀ after QK-norm and RoPE; v: Σ v vᵀ; o: 2 Σ_r W_O(r) W_O(r)ᵀ (table 1 of the paper);
    v_oscar: Σ_s w_s v vᵀ, w_s = k_sᵀ C_q k_s scaled to mean 1, C_q the sequence's own query moment, so that one pass
    does; with `attention_aware` also q_attn and o_attn. One sequence at a time, so no padding ever enters.
    """
    names = ["k", "q", "v", "o", "v_oscar"] + ["q_attn", "o_attn"] * attention_aware
    c = model.config
    shape = c.num_hidden_layers, c.num_key_value_heads, c.head_dim, c.head_dim
    moments = {name: torch.zeros(shape, dtype=torch.float64, device=model.inv_freq.device) for name in names}

    def observe(l, q, k, v):
        queries = 2 * second_moment(q)
        importance = torch.einsum("bgsd,gde,bgse->bgs", k.double(), queries, k.double())
        importance = importance / importance.mean((0, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        found = {"k": second_moment(k), "q": queries, "v": second_moment(v), "v_oscar": second_moment(v, importance)}
        if attention_aware:
            blocks = output_blocks(model, l)
            weight, p2 = attention_sensitivity(q, k, v, blocks)
            found["q_attn"] = second_moment(q, weight)
            W = blocks.double()
            found["o_attn"] = 2 * torch.einsum("grdD,greD,gr->gde", W, W, p2.sum((0, 3)))
        for name, moment in found.items():
            moments[name][l] += moment
        return causal_attention(q, k, v)

    for ids in tqdm(sequences, desc="calibrate", unit="seq", disable=None):
        forward(model, ids[None].to(model.inv_freq.device), observe)
    for l in range(c.num_hidden_layers):
        W = output_blocks(model, l).double()
        moments["o"][l] = 2 * torch.einsum("grdD,greD->gde", W, W)
    return moments


def fingerprint(folder: Path) -> str:
    """Hash two of the checkpoint's weight tensors as they lie on disk: the same for every dtype and way of sharding."""
    from safetensors import safe_open
    files, digest = checkpoint_files(folder), hashlib.sha256()
    projections = sorted(name for name in files if name.endswith("self_attn.k_proj.weight"))
    for name in (projections[0], projections[-1]):
        with safe_open(files[name], framework="pt") as f:
            digest.update(f.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def save_transforms(path: str, T: dict[str, Tensor], about: dict) -> None:
    """Write {"k": T_K, "v": T_V} for serving, and beside it PATH.json, which says what they were made from."""
    torch.save({side: T[side].cpu() for side in ("k", "v")}, path)
    Path(path + ".json").write_text(json.dumps(about, indent=2) + "\n")


def load_transforms(path: str, config, about: dict) -> dict[str, Tensor]:
    """Read a transforms file and check it against the model. Raises ValueError if it is broken, misshapen or another model's."""
    try:
        T = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as e:
        raise ValueError(f"there is no transforms file {path}") from e
    except Exception as e:       # torch.load raises by where the file is cut: RuntimeError, EOFError, UnpicklingError
        raise ValueError(f"{path} cannot be read as a transforms file ({type(e).__name__})") from e
    want = (config.num_hidden_layers, config.num_key_value_heads)
    for side in ("k", "v"):
        if not (isinstance(T, dict) and isinstance(T.get(side), Tensor) and T[side].dim() == 5):
            raise ValueError(f"{path} is no transforms file: it needs 5-dimensional tensors 'k' and 'v'")
        shape = tuple(T[side].shape)
        if shape[:2] != want or shape[2] * shape[3] != config.head_dim or shape[3] != shape[4]:
            raise ValueError(f"{path} holds transforms of shape {shape}; this model has {want[0]} layers, {want[1]} KV heads "
                             f"and head_dim {config.head_dim}")
        if not (T[side].is_floating_point() and T[side].isfinite().all()):
            raise ValueError(f"{path} holds transforms that are not finite numbers")
    if Path(path + ".json").exists():
        made_for = json.loads(Path(path + ".json").read_text())
        if made_for["fingerprint"] != about["fingerprint"]:
            raise ValueError(f"{path} was made for {made_for['model']} ({made_for['fingerprint']}), not for {about['model']} "
                             f"({about['fingerprint']}): their weights differ")
    else:
        print(f"note: {path}.json is missing, so nothing says which model these transforms are for", file=sys.stderr)
    return {side: T[side].float() for side in ("k", "v")}


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation: module error, perplexity and divergence, each with its standard error over sequences.
# ----------------------------------------------------------------------------------------------------------------------

def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean over sequences and its standard error (nan for one sequence)."""
    return x.mean().item(), (x.std() / math.sqrt(len(x))).item() if len(x) > 1 else math.nan


def quantized_view(t: int, sink: int, keep: int | None, flush: int, chunk: int, device="cpu") -> Tensor:
    """Say which keys a query finds quantized, (t, t): row t fed in calls of `chunk` tokens through the windows.

    keep = None is the view without a recent window: all but the sinks is quantized, the token itself too.
    """
    column = torch.arange(t, device=device)
    if keep is None:
        return (column >= sink).expand(t, t)
    length = column // chunk * chunk                                         # of the cache when the query's call began
    end = sink + (length - sink - keep).div(flush, rounding_mode="floor").clamp(min=0) * flush
    return (column >= sink) & (column < end[:, None])


def view_attention(q: Tensor, k: Tensor, v: Tensor, k_hat: Tensor, v_hat: Tensor, view: Tensor) -> Tensor:
    """Attend causally to k_hat, v_hat where `view` (t, t) says so and to k, v elsewhere, with one softmax.

    Both versions stand side by side as 2t keys and a mask picks one: a whole sequence in one call, equal to feeding
    the cache chunk by chunk.
    """
    causal = torch.ones_like(view).tril()
    mask = torch.cat([causal & ~view, causal & view], 1)
    return causal_attention(q, torch.cat([k, k_hat], 2), torch.cat([v, v_hat], 2), mask[None, None])


def on_device(T: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    return {side: t.to(model.inv_freq.device) for side, t in T.items()}


def module_error(model: Model, sequences: list[Tensor], transforms: dict[str, dict], k_codec: Codec, v_codec: Codec,
                 sink: int = 0) -> dict[str, tuple[float, float]]:
    """Measure the relative squared error of the attention module's output (section 6): {name: (value, standard error)}.

    Each layer gets the exact activations; all keys and values but the first `sink` are quantized, and the squared
    error after the output projection is divided by the output's squared norm. Geometric mean over layers.
    """
    errors = {name: torch.zeros(len(sequences), model.config.num_hidden_layers) for name in transforms}
    transforms = {name: on_device(T, model) for name, T in transforms.items()}

    def compare(i, l, q, k, v):
        o = causal_attention(q, k, v)
        exact = project_out(model, l, o)
        for name, T in transforms.items():
            k_hat, v_hat = roundtrip(k, T["k"][l], k_codec), roundtrip(v, T["v"][l], v_codec)
            k_hat[:, :, :sink], v_hat[:, :, :sink] = k[:, :, :sink], v[:, :, :sink]
            delta = project_out(model, l, causal_attention(q, k_hat, v_hat)) - exact
            errors[name][i, l] = delta.double().square().sum() / exact.double().square().sum()
        return o

    for i, ids in enumerate(tqdm(sequences, desc="module error", unit="seq", disable=None)):
        forward(model, ids[None].to(model.inv_freq.device), lambda *args: compare(i, *args))
    return {name: mean_and_error(e.log().mean(1).exp()) for name, e in errors.items()}


def windowed(model: Model, T: dict[str, Tensor], k_codec: Codec, v_codec: Codec, view: Tensor) -> Callable:
    """Build the attention that reads keys and values quantized where `view` says so."""
    T = on_device(T, model)
    return lambda l, q, k, v: view_attention(q, k, v, roundtrip(k, T["k"][l], k_codec), roundtrip(v, T["v"][l], v_codec), view)


def divergence(model: Model, hidden: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Compare final hidden states (t, D) with hidden["none"]: means of [negative log-likelihood, KL, same top-1] over tokens."""
    sums = {name: torch.zeros(3, dtype=torch.float64, device=ids.device) for name in hidden}
    for i in range(0, len(ids) - 1, 256):                                    # 256 rows of logits at a time
        part = slice(i, min(i + 256, len(ids) - 1))
        log_p = logits(model, hidden["none"][part]).float().log_softmax(-1)
        for name, h in hidden.items():
            log_q = log_p if name == "none" else logits(model, h[part]).float().log_softmax(-1)
            nll = -log_q.gather(1, ids[part.start + 1:part.stop + 1, None])
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            same = log_p.argmax(-1) == log_q.argmax(-1)
            sums[name] += torch.stack([nll.sum(), kl.sum(), same.sum()]).double()
    return {name: total / (len(ids) - 1) for name, total in sums.items()}


def perplexity(model: Model, sequences: list[Tensor], transforms: dict[str, dict], k_codec: Codec, v_codec: Codec,
               sink: int = 16, keep: int = 128, flush: int = 16, chunk: int = 16) -> dict[str, dict]:
    """Score sequences (t,) fed in calls of `chunk` tokens through the windows; "none" is the unquantized model.

    Returns {name: {"perplexity", "kl", "same_top1": (value, standard error over sequences)}}: KL in nats from the
    unquantized model's next-token distribution, and the share of positions where both rank the same token first.
    """
    rows = []
    for ids in tqdm(sequences, desc="perplexity", unit="seq", disable=None):
        ids = ids.to(model.inv_freq.device)
        view = quantized_view(len(ids), sink, keep, flush, chunk, ids.device)
        hidden = {"none": forward(model, ids[None], lambda l, *qkv: causal_attention(*qkv))[0]}
        for name, T in transforms.items():
            hidden[name] = forward(model, ids[None], windowed(model, T, k_codec, v_codec, view))[0]
        rows.append(divergence(model, hidden, ids))
    result = {}
    for name in rows[0]:
        nll, kl, same = (mean_and_error(column) for column in torch.stack([row[name] for row in rows]).unbind(1))
        ppl = math.exp(nll[0])
        result[name] = {"perplexity": (ppl, ppl * nll[1]), "kl": kl, "same_top1": same}
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Generation through the cache.
# ----------------------------------------------------------------------------------------------------------------------

def new_cache(model: Model, batch: int = 1, T_K: Tensor | None = None, k_codec: Codec = Codec(16),
              v_codec: Codec = Codec(16), sink: int = 16, keep: int | None = None, flush: int = 16) -> list[WindowCache]:
    """Make the caches of all layers; the defaults are the ordinary 16-bit cache. T_K is (l, g, n, m, m)."""
    c, embedding = model.config, model.weights["model.embed_tokens.weight"]
    return [WindowCache(batch, c.num_key_value_heads, c.head_dim, None if T_K is None else T_K[l].to(embedding.device),
                        k_codec, v_codec, sink, keep, flush, embedding.dtype, embedding.device)
            for l in range(c.num_hidden_layers)]


def feed(model: Model, cache: list[WindowCache], ids: Tensor, pad: list[int] | None = None) -> Tensor:
    """Run ids (b, t), the next tokens of each row after `pad` columns of padding, through the cache: hidden states."""
    first = torch.tensor([n - p for n, p in zip(cache[0].n, pad or [0] * len(ids))], device=ids.device)
    positions = (first[:, None] + torch.arange(ids.shape[1], device=ids.device)).clamp(min=0)
    return forward(model, ids, lambda l, q, k, v: cache[l].attend(q, k, v, pad), positions)


def sample(scores: Tensor, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
           generator: torch.Generator | None = None) -> Tensor:
    """Pick a token of each row of logits (b, v): the largest at temperature 0, else drawn from the top-k, top-p part."""
    if temperature == 0:
        return scores.argmax(-1)
    p, order = (scores.float() / temperature).softmax(-1).sort(descending=True)
    p[:, (top_k or p.shape[-1]):] = 0
    p[p.cumsum(-1) - p >= top_p] = 0                                         # the first token always stays
    p[:, 0] = p[:, 0].clamp(min=torch.finfo(p.dtype).tiny)
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]


def decode(model: Model, cache: list[WindowCache], prompts: list[list[int]], max_new_tokens: int,
           eos: Iterable[int] = (), pick: Callable = sample, pad_id: int = 0) -> Iterable[list[int]]:
    """Yield the next token of every prompt, step by step; a row that has ended with one of `eos` yields `pad_id`.

    Prompts of different lengths are padded on the left; each row gets the tokens it would get alone.
    """
    longest, done = max(map(len, prompts)), [False] * len(prompts)
    pad, eos = [longest - len(p) for p in prompts], set(eos)
    ids = torch.tensor([[pad_id] * n + list(p) for n, p in zip(pad, prompts)], device=model.inv_freq.device)
    for step in range(max_new_tokens):
        hidden = feed(model, cache, ids, pad if step == 0 else None)
        tokens = [pad_id if end else token for end, token in zip(done, pick(logits(model, hidden[:, -1])).tolist())]
        yield tokens
        done = [end or token in eos for end, token in zip(done, tokens)]
        if all(done):
            return
        ids = torch.tensor(tokens, device=ids.device)[:, None]


def stream_text(tokenizer, tokens: Iterable[int]) -> Iterable[str]:
    """Yield text as tokens come, never cutting a character: the pieces add up to tokenizer.decode(all tokens)."""
    ids, start, shown = [], 0, 0          # text of ids[:shown] is out; ids[start:shown] give the next piece its left context
    for token in tokens:
        ids.append(token)
        before, now = tokenizer.decode(ids[start:shown]), tokenizer.decode(ids[start:])
        if not now.endswith("\ufffd"):    # an unfinished character: wait for its other bytes
            yield now[len(before):]
            start, shown = shown, len(ids)
    if shown < len(ids):
        yield tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])):]


def prompt_tokens(tokenizer, prompt: str, raw: bool = False, thinking: bool = False) -> list[int]:
    """Tokenize a prompt through the model's chat template, or as it stands if `raw` or if the model has none."""
    if raw or not tokenizer.chat_template:
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                            enable_thinking=thinking, tokenize=True, return_dict=False)
    if not ids:
        raise ValueError("the prompt is empty")
    return ids


def end_tokens(folder: Path) -> list[int]:
    """Return all end-of-sequence ids: generation_config.json's, one or a list, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            eos = json.loads((folder / name).read_text()).get("eos_token_id")
            if eos is not None:
                return eos if isinstance(eos, list) else [eos]
    return []


def decode_speed(model: Model, cache: list[WindowCache], context: Tensor, steps: int = 32) -> float:
    """Return tokens/s of single-token steps after `context` (t,) has been fed; four steps of warm-up are not counted."""
    feed(model, cache, context[None])
    start = 0.0
    for step in range(-4, steps):
        if step == 0:
            start = time.perf_counter()
        token = logits(model, feed(model, cache, context[None, :1])[:, -1]).argmax(-1)
        token.item()                                                         # waits for an asynchronous device
    return steps / (time.perf_counter() - start)


def cache_bytes(config, tokens: int, dtype=torch.bfloat16, **how) -> float:
    """Measure the bytes per token that all layers' caches hold after `tokens` tokens, windows and scales included."""
    cache = WindowCache(1, config.num_key_value_heads, config.head_dim, dtype=dtype, **how)
    x = torch.zeros(1, config.num_key_value_heads, tokens, config.head_dim, dtype=dtype)
    cache.append(x, x, [0])
    cache.flush()
    return cache.nbytes * config.num_hidden_layers / tokens


# ----------------------------------------------------------------------------------------------------------------------
# The command line. A default stands once, in Options; the flags are made from it.
# ----------------------------------------------------------------------------------------------------------------------

BUNDLED = Path(__file__).parent / "tiny-qwen3"


def option(default, help: str, kind: type = str, choices: Iterable | None = None, low=-math.inf, high=math.inf):
    return dataclasses.field(default=default, metadata=dict(help=help, kind=kind, choices=choices, low=low, high=high))


@dataclasses.dataclass(frozen=True)
class Options:
    model: str = option(str(BUNDLED), "folder or hub id of a Qwen3 or Llama checkpoint")
    task: str = option("report", "what to do", choices=("report", "calibrate", "generate", "error", "ppl"))
    bits: int | None = option(None, "bits of keys and values (2 unless said here or by --k-bits, --v-bits); 16 is off", int, BITS)
    k_bits: int | None = option(None, "bits of the keys; 2 if only --v-bits is given", int, BITS)
    v_bits: int | None = option(None, "bits of the values; 2 if only --k-bits is given", int, BITS)
    group: int | None = option(None, "channels that share a scale and a transform block (default: the whole head)", int, low=1)
    transform: str = option("wush", "transform used to generate and to save", choices=TRANSFORMS)
    quantizer: str = option("quest", "rule that places the levels", choices=QUANTIZERS)
    clip_k: float = option(0.96, "affine: share of a key group's channels left unclipped", float, low=0.0, high=1.0)
    clip_v: float = option(0.92, "affine: share of a value group's channels left unclipped", float, low=0.0, high=1.0)
    sink: int = option(16, "first tokens kept in model dtype", int, low=0)
    keep: int = option(128, "last tokens kept in model dtype, at least", int, low=0)
    flush: int = option(16, "tokens quantized together", int, low=1)
    calib: str | None = option(None, "calibration text file (default: calib.txt in the model's folder, else FineWeb-Edu, streamed)")
    calib_seqs: int = option(16, "calibration sequences (the paper: 128)", int, low=1)
    calib_len: int = option(1024, "tokens of a calibration sequence (the paper: 32768)", int, low=2)
    eval: str | None = option(None, "evaluation text file (default: eval.txt in the model's folder, else WikiText-2's test split)")
    eval_seqs: int = option(4, "evaluation sequences", int, low=1)
    eval_len: int = option(2048, "tokens of an evaluation sequence", int, low=2)
    eval_skip: int = option(0, "tokens of the evaluation text to skip first", int, low=0)
    transforms: str | None = option(None, "read the transforms from this file instead of calibrating")
    save: str | None = option(None, "write the transforms to this file, for --transforms and for serving")
    prompt: str = option("Tell me where is fancy bred,", "prompt to continue")
    raw: bool = option(False, "give the prompt as it stands, without the model's chat template", bool)
    thinking: bool = option(False, "let a chat template with a thinking mode use it", bool)
    max_new_tokens: int = option(64, "tokens to generate at most", int, low=1)
    temperature: float = option(0.0, "sampling temperature; 0 takes the likeliest token", float, low=0.0)
    top_p: float = option(1.0, "sample from the fewest likeliest tokens that hold this probability", float, low=0.0, high=1.0)
    top_k: int = option(0, "sample from this many likeliest tokens; 0 is all", int, low=0)
    seed: int = option(0, "seed of the sampling", int)
    yarn: float | None = option(None, "extend the context by this factor with YaRN", float, low=1.0)
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    dtype: str = option("auto", "dtype of weights and windows; auto is float32 on a CPU, else bfloat16",
                        choices=("auto", "float32", "bfloat16", "float16"))
    json: str | None = option(None, "write the figures to this file too")


def parse(argv: list[str] | None) -> Options:
    """Make the flags from Options, parse them, and refuse what can be refused by looking at the flags alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Options):
        kind, choices, name = f.metadata["kind"], f.metadata["choices"], "--" + f.name.replace("_", "-")
        shown = "" if f.default in (None, False) else f" (default: {f.default})".replace(str(BUNDLED), "the bundled one")
        how = {"action": "store_true"} if kind is bool else {"type": kind, "choices": choices and tuple(choices)}
        parser.add_argument(name, default=f.default, help=f.metadata["help"] + shown, **how)
    o = Options(**vars(parser.parse_args(argv)))
    if o.bits is not None and (o.k_bits is not None or o.v_bits is not None):
        parser.error("--bits sets both sides: give it or --k-bits and --v-bits")
    if o.task == "calibrate" and not o.save:
        parser.error("--task calibrate needs --save FILE to write to")
    if o.transforms and o.task == "calibrate":
        parser.error("--transforms reads what --task calibrate would make: give one of them")
    for f in dataclasses.fields(Options):
        value, low, high = getattr(o, f.name), f.metadata["low"], f.metadata["high"]
        if f.metadata["kind"] in (int, float) and value is not None and not low <= value <= high:
            parser.error(f"--{f.name.replace('_', '-')} must be {low} or more" + (f", {high} at most" if high < math.inf else ""))
    return o


DATASETS = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
            "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")}


def read_text(source: str, tokens: int) -> str:
    """Read a text file, or of a named dataset, streamed, about as much as `tokens` tokens need, rows joined by blank lines."""
    if source not in DATASETS:
        try:
            return Path(source).read_text()
        except UnicodeDecodeError as e:
            raise ValueError(f"{source} is not a text file in UTF-8") from e
    repo, name, split = DATASETS[source]
    hub(repo, "dataset", "README.md")                    # without a network this fails at once, `datasets` after 25 s
    from datasets import load_dataset
    rows, length = [], 0
    for row in load_dataset(repo, name, split=split, streaming=True):
        rows.append(row["text"])
        length += len(rows[-1])
        if length > 6 * tokens:                          # characters; a token of English is four or five
            break
    return "\n\n".join(rows)


def read_tokens(source: str, tokenizer, count: int, length: int, skip: int, flags: str) -> list[Tensor]:
    """Cut `count` sequences of `length` tokens from a text, past `skip` tokens; no special tokens are added."""
    need = skip + count * length
    ids = tokenizer(read_text(source, need), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < need:
        raise ValueError(f"{source} has {len(ids)} tokens and {need} are asked for: lower {flags}")
    return list(torch.tensor(ids[skip:need]).split(length))


def own_text(folder: Path, file: str, dataset: str) -> str:
    return str(folder / file) if (folder / file).is_file() else dataset


class Job(NamedTuple):
    """What a task needs, all of it checked; `transforms` by name, {"k", "v"} each."""
    options: Options
    model: Model
    tokenizer: object
    k_codec: Codec
    v_codec: Codec
    transforms: dict[str, dict[str, Tensor]]
    eval: list[Tensor]
    prompt: list[int]
    eos: list[int]


COMPARED = {"error": tuple(TRANSFORMS), "ppl": ("hadamard", "oscar", "wush"), "report": ("hadamard", "oscar", "wush")}
DATA_FREE = ("identity", "hadamard")


def codecs(o: Options, d: int) -> tuple[Codec, Codec]:
    """Make the codecs of keys and values. Raises ValueError for a group that does not divide the head."""
    if o.group is not None and (d % o.group or o.group & (o.group - 1)):
        raise ValueError(f"--group {o.group} must be a power of two that divides the head_dim, {d}")
    default = o.bits or 2
    return tuple(Codec(bits or default, o.quantizer, clip, o.group)
                 for bits, clip in ((o.k_bits, o.clip_k), (o.v_bits, o.clip_v)))


def check_writable(path: str | None) -> None:
    """Raise OSError now, not after an hour, if a result could not be written."""
    if path and not Path(path).exists():
        Path(path).touch()
        Path(path).unlink()


def pick_device(o: Options) -> tuple[torch.device, torch.dtype]:
    """Resolve --device and --dtype. Raises ValueError for a device that is not there."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device)
        torch.empty(1, device=device)
    except Exception as e:       # an unknown name, a missing driver and a torch without CUDA raise three types
        raise ValueError(f"there is no device {o.device!r} here") from e
    return device, getattr(torch, ("float32" if device.type == "cpu" else "bfloat16") if o.dtype == "auto" else o.dtype)


def prepare(o: Options) -> Job:
    """Check everything, the cheap before the slow, then load the model and read or derive the transforms."""
    check_writable(o.json)
    check_writable(o.save)
    device, dtype = pick_device(o)
    small_files = "*.json", "*.txt", "*.model", "*.jinja"
    folder = fetch(o.model, *small_files)
    config = read_config(folder, o.yarn)
    k_codec, v_codec = codecs(o, config.head_dim)
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt, limit = prompt_tokens(tokenizer, o.prompt, o.raw, o.thinking), config.max_position_embeddings
    if o.task in ("report", "generate") and len(prompt) + o.max_new_tokens > limit:
        raise ValueError(f"{len(prompt)} tokens of prompt and {o.max_new_tokens} new ones are over the model's {limit} positions")
    if max(o.calib_len, o.eval_len) > limit:
        raise ValueError(f"--calib-len {o.calib_len} or --eval-len {o.eval_len} is over the model's {limit} positions")
    source = lambda file, dataset: str(folder / file) if (folder / file).is_file() else dataset
    names = [] if k_codec.bits == v_codec.bits == 16 else [*dict.fromkeys((*COMPARED.get(o.task, ()), o.transform))]
    texts = {"calib": o.calib or source("calib.txt", "fineweb-edu"), "eval": o.eval or source("eval.txt", "wikitext2")}
    calib, evaluated = [], []
    if o.task in COMPARED:
        evaluated = read_tokens(texts["eval"], tokenizer, o.eval_seqs, o.eval_len, o.eval_skip,
                                "--eval-seqs, --eval-len or --eval-skip")
    if not o.transforms and set(names) - set(DATA_FREE):
        calib = read_tokens(texts["calib"], tokenizer, o.calib_seqs, o.calib_len, 0, "--calib-seqs or --calib-len")
    folder = fetch(o.model, *small_files, "*.safetensors")
    about = {"model": o.model, "fingerprint": fingerprint(folder), "transform": o.transform, "group": o.group,
             "calibration_text": texts["calib"], "calibration_tokens": sum(map(len, calib))}
    given = load_transforms(o.transforms, config, about) if o.transforms else None
    model = load_model(folder, config, dtype, device)
    transforms = find_transforms(model, names, calib, given, o)
    if o.save:
        save_transforms(o.save, transforms[o.transform], about)
    return Job(o, model, tokenizer, k_codec, v_codec, transforms, evaluated, prompt, end_tokens(folder))


def find_transforms(model: Model, names: list[str], calib: list[Tensor], given: dict | None, o: Options) -> dict:
    """Derive the named transforms; where a file gives one, it stands for --transform and only data-free ones join it."""
    if given:
        names = [name for name in names if name in DATA_FREE and name != o.transform]
    moments = calibrate(model, calib, "wush_a" in names)
    return {name: derive(moments, name, o.group) for name in names} | ({o.transform: given} if given else {})


def make_cache(job: Job, quantized: bool) -> tuple[Model, list[WindowCache]]:
    """Return the model and empty caches of one sequence: the folded model and packed caches, or the ordinary ones."""
    o = job.options
    if not quantized or not job.transforms:
        return job.model, new_cache(job.model)
    T = on_device(job.transforms[o.transform], job.model)
    model = job.model if job.v_codec.bits == 16 else fold_values(job.model, T["v"])
    T_K = None if job.k_codec.bits == 16 else T["k"]
    return model, new_cache(model, 1, T_K, job.k_codec, job.v_codec, o.sink, o.keep, o.flush)


def continuation(job: Job, quantized: bool) -> Iterable[str]:
    """Yield the text that continues the prompt, piece by piece."""
    o, (model, cache) = job.options, make_cache(job, quantized)
    generator = torch.Generator(model.inv_freq.device).manual_seed(o.seed)
    pick = lambda scores: sample(scores, o.temperature, o.top_p, o.top_k, generator)
    tokens = (row[0] for row in decode(model, cache, [job.prompt], o.max_new_tokens, job.eos, pick))
    return stream_text(job.tokenizer, (token for token in tokens if token not in job.eos))


def generate_task(job: Job) -> dict:
    pieces = []
    for piece in continuation(job, True):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return {"text": {job.options.transform if job.transforms else "none": "".join(pieces)}}


def split_errors(figures: dict[str, tuple[float, float]]) -> tuple[dict, dict]:
    return {name: f[0] for name, f in figures.items()}, {name: f[1] for name, f in figures.items()}


def error_task(job: Job, sink: int | None = None) -> dict:
    """Measure and print the module error of every transform."""
    sink = job.options.sink if sink is None else sink
    errors = {"none": (0.0, 0.0)} | module_error(job.model, job.eval, job.transforms, job.k_codec, job.v_codec, sink)
    print(f"module error (relative, squared; {sink} sink tokens exact, no recent window)")
    for name, (value, error) in errors.items():
        print(f"    {name:10} {value:.4f} ± {error:.4f}")
    value, error = split_errors(errors)
    return {"module_error": value, "standard_error": {"module_error": error}}


def ppl_task(job: Job) -> dict:
    """Measure and print perplexity and divergence of every transform through the windows."""
    o = job.options
    scores = perplexity(job.model, job.eval, job.transforms, job.k_codec, job.v_codec, o.sink, o.keep, o.flush)
    print(f"through the windows {o.sink}/{o.keep}/{o.flush}:  perplexity        KL (nats)          same top-1")
    for name, row in scores.items():
        (ppl, ppl_se), (kl, kl_se), (same, same_se) = row.values()
        print(f"    {name:10} {ppl:26.3f} ± {ppl_se:.3f}    {kl:.4f} ± {kl_se:.4f}    {same:.4f} ± {same_se:.4f}")
    columns = {key: split_errors({name: row[key] for name, row in scores.items()}) for key in scores["none"]}
    return {key: c[0] for key, c in columns.items()} | {"standard_error": {key: c[1] for key, c in columns.items()}}


def memory_task(job: Job) -> dict:
    """Measure and print what a bfloat16 cache of one evaluation sequence holds."""
    o, c = job.options, job.model.config
    elements = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    plain = elements * 2
    held = cache_bytes(c, o.eval_len, k_codec=job.k_codec, v_codec=job.v_codec, sink=o.sink, keep=o.keep, flush=o.flush)
    packed = cache_bytes(c, 4096, k_codec=job.k_codec, v_codec=job.v_codec, sink=0, keep=0, flush=1)
    print(f"KV cache at {o.eval_len} tokens, bytes per token: {plain} in 16 bits, {held:.0f} quantized "
          f"({8 * held / elements:.2f} effective bits with scales and windows; {8 * packed / elements:.2f} without windows)")
    return {"kv_bytes_per_token": held, "effective_bits": 8 * held / elements, "kv_bytes_per_token_16bit": plain}


def report_task(job: Job) -> dict:
    """Print the whole story: memory, error, perplexity, speed and text, unquantized and quantized."""
    figures = memory_task(job)
    error, ppl = error_task(job, sink=0), ppl_task(job)
    standard_error = error.pop("standard_error") | ppl.pop("standard_error")
    figures |= error | ppl | {"standard_error": standard_error, "tokens_per_second": {}, "text": {}}
    context = job.eval[0][:-36].to(job.model.inv_freq.device)
    for name, quantized in (("none", False), (job.options.transform, True))[:1 + bool(job.transforms)]:
        figures["tokens_per_second"][name] = speed = decode_speed(*make_cache(job, quantized), context)
        figures["text"][name] = "".join(continuation(job, quantized))
        print(f"{name}: {speed:.1f} tokens/s after {len(context)} tokens; continues {job.options.prompt!r} with\n"
              f"    {figures['text'][name]!r}")
    return figures


TASKS = {"report": report_task, "calibrate": lambda job: {}, "generate": generate_task, "error": error_task, "ppl": ppl_task}


def main(argv: list[str] | None = None) -> None:
    start, o = time.perf_counter(), parse(argv)
    try:
        job = prepare(o)
    except (ValueError, OSError) as e:
        sys.exit(f"wush_kv: {e}")
    figures = {"model": o.model, "bits": o.bits, "k_bits": job.k_codec.bits, "v_bits": job.v_codec.bits} | TASKS[o.task](job)
    figures["seconds"] = time.perf_counter() - start
    if o.json:
        Path(o.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{figures['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
