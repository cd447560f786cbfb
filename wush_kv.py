"""WUSH-KV: a key-value cache in 2 bits, by one closed-form linear transform per KV head (arXiv 2609.38121).

Rounding a cached key or value makes an error. How large it is does not matter, but what its consumer makes of
it: a key acts only through q·k, a value only through the output projection. From a short calibration WUSH
builds for each KV head a transform T that balances what is stored against what consumes it, so that plain
per-token rounding of T k (or T v) hurts least among all invertible T.

    calibrate   text  ->  second moments: M of the keys and values, H of their consumers
    derive      M, H  ->  T = c 𝓗 Λ^(-1/4) Uᵀ Lᵀ, one per layer, KV head and side
    fold        T_V   ->  W_V ← T_V W_V and W_O ← T_V⁻ᵀ W_O: at run time the value side costs nothing
    store       k, v  ->  [sink | 2-bit codes of T_K k and of the folded v | recent], one window cache a layer
                          (beyond the paper, each channel's rounding error is fed back into later channels)
    attend      q     ->  T_K⁻ᵀ q meets T_K k: (T⁻ᵀq)·(T k) = q·k; one softmax over the three parts

    python wush_kv.py                                     the bundled model, offline, in under a minute
    python wush_kv.py --model Qwen/Qwen3-8B --bits 2      a real model; --refine off is the paper exactly

Each dimension has one letter, in every shape comment and einsum:

    b batch              l layer                            d head dim
    t query token        g KV head                          n block of the transform
    s cached token       r query head of its KV head        m channel inside a block (d = n·m)
    v vocabulary         (query head h = g·R + r)           D model width

Queries are (b, g, r, t, d), keys and values (b, g, s, d), transforms (l, g, n, m, m), for column vectors.

Left out: training, mixture of experts, sliding windows, paged memory. Models other than Qwen3 and Llama run
through transformers, with WushCache.
"""
import argparse
import copy
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
import warnings
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Callable, Iterable, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm


# ------------------------------------------------------------------------------------------------------------
# Transforms. A rule maps the Gram M of what is stored and its consumer's Hessian H, (..., g, d, d), to T.

def hadamard(n: int) -> Tensor:
    """Build the normalized Sylvester-Hadamard matrix 𝓗 of order n, float64: symmetric, 𝓗 𝓗 = I."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"there is no Hadamard matrix of order {n} here: the order must be a power of two")
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / math.sqrt(n)

def diagonal_blocks(S: Tensor, m: int | None) -> Tensor:
    """Cut moments (..., d, d) into diagonal blocks (..., n, m, m), float64; m = None keeps them whole.

    Raises ValueError for blocks that do not divide d and for moments that are not finite.
    """
    m = S.shape[-1] if m is None else m
    if m < 1 or S.shape[-1] % m:
        raise ValueError(f"blocks of {m} channels do not divide {S.shape[-1]}")
    if not S.isfinite().all():
        raise ValueError("the calibration moments hold NaN or infinity: no transform follows from them")
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
    """Rotate onto the consumer's eigenvectors U, then spread: T = (U 𝓗)ᵀ, one a layer (arXiv 2605.17757).

    U are the eigenvectors of the mean of `hess` over the heads. T is one block of d channels even if groups
    have m < d: eigenvectors in bit-reversed order spread strong and weak over the groups, 𝓗 acts in each.
    """
    d, n, m = hess.shape[-1], *diagonal_blocks(hess, m).shape[-3:-1]
    U = torch.linalg.eigh(hess.double().mean(-3)).eigenvectors.flip(-1)      # strongest first
    order = [int(f"{i:0{d.bit_length() - 1}b}"[::-1], 2) for i in range(d)]
    spread = torch.block_diag(*[hadamard(m)] * n).to(U.device)
    return (U[..., order] @ spread).mT[..., None, None, :, :].expand(*hess.shape[:-2], 1, d, d)

def wush(gram: Tensor, hess: Tensor, m: int | None = None, damping: float = 1e-2, exponent: float = 0.25,
         strongest_first: bool = False) -> Tensor:
    """Balance what is stored against what consumes it: T = c 𝓗 Λ^(-1/4) Uᵀ Lᵀ (arXiv 2609.38121, section 3).

    L Lᵀ = H + γ tr(H)/m I and U Λ Uᵀ = Lᵀ (M + γ tr(M)/m I) L, block by block; c keeps tr(T M Tᵀ) = tr(M). No
    invertible T makes tr(T M Tᵀ) tr(T⁻ᵀ H T⁻¹) smaller. Scaling M or H changes nothing. Where either is zero
    there is nothing to balance, and T = 𝓗. Another `exponent` than 1/4 and Λ in falling order, so that the
    mean over the channels is the strongest direction, are for the refinement.
    """
    M, H = diagonal_blocks(gram, m), diagonal_blocks(hess, m)
    I = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    mean_diagonal = lambda S: S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    dead = (mean_diagonal(M) == 0) | (mean_diagonal(H) == 0)
    M, H = (torch.where(dead, I, S / mean_diagonal(S)) for S in (M, H))      # from here on tr(S)/m = 1
    L = torch.linalg.cholesky(H + damping * I)
    lam, U = torch.linalg.eigh(L.mT @ (M + damping * I) @ L)
    if strongest_first:
        lam, U = lam.flip(-1), U.flip(-1)
    T = hadamard(M.shape[-1]).to(M.device) @ (lam[..., None] ** -exponent * U.mT) @ L.mT
    c = (mean_diagonal(M) / mean_diagonal(T @ M @ T.mT)).sqrt()
    return c * T

TRANSFORMS = {   # name: rule, (Gram, Hessian) of the keys, of the values, as `collect_moments` names them
    "identity": (identity, ("k", "q"), ("v", "o")),
    "hadamard": (rotate, ("k", "q"), ("v", "o")),
    "oscar": (oscar, ("k", "q"), ("v", "v_oscar")),
    "wush": (wush, ("k", "q"), ("v", "o")),
    "wush_a": (wush, ("k", "q_attn"), ("v", "o_attn")),
}

# What --refine adds to the paper: another T and another choice of codes. Format and reader stay as they are.
REFINEMENTS = {
    "feedback": "a channel's rounding error is pushed onto those not yet rounded",
    "exponent": "Λ^(-0.4): the transform that suits rounding with feedback",
    "offset": "T makes a token's strongest direction its mean over the channels, which the offset carries",
    "step": "levels further apart, so that fewer values are clipped",
}
WIDENED = {2: 1.3, 3: 1.15, 4: 1.1}      # "step": α_b times this, by bits; found on SmolLM2-135M

def known_parts(refine: str | Iterable[str]) -> list[str]:
    """List the REFINEMENTS named: "all", "off", or some of them. Raises ValueError for other names."""
    if isinstance(refine, str):
        refine = {"all": [*REFINEMENTS], "off": []}.get(refine, refine.split(","))
    parts = [*refine]
    if not {*parts} <= {*REFINEMENTS}:
        raise ValueError(f"--refine is all, off, or some of {', '.join(REFINEMENTS)}, not {parts}")
    return parts

def feedback(T: Tensor, hess: Tensor, free_mean: bool = False, damping: float = 1e-2) -> Tensor:
    """Derive F (..., n, m, m), strictly upper, that feeds rounding errors of y = T x back: y_j −= e_i F_ij.

    Channels are rounded in order; e_i is what channel i misses by. An error e of y costs eᵀ H' e, with H' =
    T⁻ᵀ H T⁻¹. With F = diag(U)⁻¹ U − I, U upper, UᵀU = (H' + γ tr(H')/m I)⁻¹, that is Σ e_i²/U_ii²: later
    channels have done all they can (GPTQ, arXiv 2210.17323; Babai's nearest plane, arXiv 2507.18553). On a
    fine grid of step Δ it comes to Δ²/12 Σ 1/U_ii², never more than the Δ²/12 tr(H') of plain rounding, and
    as much where H' is diagonal. `free_mean`: an error's mean over the channels costs nothing, because the
    offset takes it up.
    """
    inverse, m = torch.linalg.inv(T.double()), T.shape[-1]
    I = torch.eye(m, dtype=torch.float64, device=T.device)
    H = inverse.mT @ diagonal_blocks(hess, m) @ inverse
    if free_mean:
        H = (I - 1 / m) @ H @ (I - 1 / m)
    mean = H.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    H = torch.where(mean == 0, I, H / mean)
    U = torch.linalg.cholesky(torch.linalg.inv(H + damping * I), upper=True)
    return (U / U.diagonal(dim1=-2, dim2=-1)[..., None]).triu(1)

def derive(moments: dict[str, Tensor], name: str, m: int | None = None, refine=()) -> dict[str, Tensor]:
    """Derive transforms from collected moments: {"k": T_K, "v": T_V}, each (l, g, n, m, m), float32.

    `refine` lists REFINEMENTS, "exponent" and "offset" for WUSH only; "feedback" adds "k_feedback" and
    "v_feedback". Raises ValueError for an unknown part.
    """
    refine, (rule, *sides) = known_parts(refine), TRANSFORMS[name]
    if "exponent" in refine:     # least loss with feedback on Gaussian rows, at 2, 3 and 4 bits alike
        rule = partial(rule, exponent=0.4)
    if "offset" in refine:
        rule = partial(rule, strongest_first=True)
    tensors = {}
    for side, (gram, hess) in zip("kv", sides):
        tensors[side] = T = rule(moments[gram], moments[hess], m)
        if "feedback" in refine:
            tensors[side + "_feedback"] = feedback(T, moments[hess], "offset" in refine)
    return {key: tensor.float().contiguous() for key, tensor in tensors.items()}

def apply(T: Tensor, x: Tensor) -> Tensor:
    """Apply T (g, n, m, m) to the last axis of x (b, g, ..., d), in T's dtype."""
    return torch.einsum("gnij,bg...nj->bg...ni", T, x.to(T.dtype).unflatten(-1, T.shape[1:3])).flatten(-2)

def inverse_transpose(T: Tensor) -> Tensor:
    """Return T⁻ᵀ, inverted in float64: what a query goes through when its keys go through T."""
    return torch.linalg.inv(T.double()).mT.to(T.dtype).contiguous()


# ------------------------------------------------------------------------------------------------------------
# Quantizers. A rule maps groups x (..., m) to a scale and an offset each; codes are rounded against the pair.

@cache
def gaussian_clip(bits: int) -> float:
    """Find QuEST's α_b: 2^b even levels on ±α_b have the least squared error on N(0, 1) (arXiv 2502.05003).

    The derivative of that error, −2 E[(x − Q(x)) u] where the levels are α u, vanishes there; by bisection.
    """
    u = torch.linspace(-1, 1, 2 ** bits, dtype=torch.float64)
    far = torch.tensor([40.0], dtype=torch.float64)
    low, high = 0.1, 10.0
    for _ in range(60):
        a = (low + high) / 2
        edges = torch.cat([-far, a * (u[1:] + u[:-1]) / 2, far])      # of the cells that round to a level
        mean = -((-edges ** 2 / 2).exp() / math.sqrt(2 * math.pi)).diff()    # ∫ x φ(x) dx over each cell
        mass = torch.special.ndtr(edges).diff()
        low, high = (a, high) if (u * (mean - a * u * mass)).sum() > 0 else (low, a)
    return a

def quest(x: Tensor, bits: int, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Place 2^b even levels on ±clip·α_b·RMS(x): with clip = 1 the best such grid for Gaussian data."""
    largest = x.abs().amax(-1)
    unit = x / largest.clamp(min=torch.finfo(x.dtype).tiny)[..., None]       # 1e-30 squared would be zero
    mean_square = unit.square().mean(-1, dtype=torch.float64).to(x.dtype)    # float64: any order sums alike
    rms = largest * mean_square.sqrt()
    alpha = clip * gaussian_clip(bits)
    return rms * (2 * alpha / (2 ** bits - 1)), rms * -alpha

def centred(x: Tensor, bits: int, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Place QuEST's levels about the mean of x; `quantize` lets the offset take up the mean error as well."""
    mean = x.mean(-1, dtype=torch.float64).to(x.dtype)
    scale, offset = quest(x - mean[..., None], bits, clip)
    return scale, offset + mean

def affine(x: Tensor, bits: int, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Place 2^b even levels from min to max of x clamped to ±τ, the ⌊clip·m⌋-th smallest |x| (OSCAR)."""
    m = x.shape[-1]
    tau = x.abs().kthvalue(min(int(clip * m), m - 1) + 1).values[..., None]
    low, high = x.clamp(-tau, tau).aminmax(dim=-1)
    return (high - low) / (2 ** bits - 1), low

QUANTIZERS = {"quest": quest, "affine": affine, "centred": centred}
BITS = (2, 3, 4, 8, 16)      # 16 is off

def block_size(T: dict[str, Tensor]) -> int | None:
    """Return the channels of a block of transforms, None if a block is a whole head."""
    return T["k"].shape[-1] if T["k"].shape[2] > 1 else None

class Codec(NamedTuple):
    """Bits; rule; `clip`, times α_b, or κ of "affine"; channels that share a scale (None: all of a head)."""
    bits: int = 2
    rule: str = "quest"
    clip: float = 1.0
    group: int | None = None

def refined_codec(bits: int, refine: Iterable[str], group: int | None = None, rule: str = "quest",
                  clip: float = 1.0) -> Codec:
    """Make the codec of some REFINEMENTS; without any it is the paper's, of `rule`."""
    clip *= WIDENED.get(bits, 1.0) if "step" in refine else 1.0
    return Codec(bits, "centred" if "offset" in refine else rule, clip, group)

def push_errors(steps: Tensor, bits: int, push: Tensor) -> Tensor:
    """Move steps (b, g, s, n, m), in levels from 0, so that rounding them feeds errors back by F = `push`."""
    y = steps.movedim(2, -1).clone(memory_format=torch.contiguous_format)      # (b, g, n, m, s), a copy
    for i in range(y.shape[-2] - 1):
        error = y[..., i, :] - y[..., i, :].round().clamp(0, 2 ** bits - 1)
        y[..., i + 1:, :].addcmul_(push[..., i, i + 1:, None], error[..., None, :], value=-1)
    return y.movedim(-1, 2)

def quantize(x: Tensor, codec: Codec, push: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x (..., d): codes (..., d) uint8 in [0, 2^b − 1], scale and offset (..., d/group) bfloat16.

    The pair is rounded first and the codes are computed against the rounded pair, so that the reader has the
    same grid. A constant group gets the smallest normal scale instead of a division by zero. With F, of x
    (b, g, s, d), rounding errors are fed back.
    """
    groups = x.float().unflatten(-1, (-1, codec.group or x.shape[-1]))
    scale, offset = (p.bfloat16() for p in QUANTIZERS[codec.rule](groups, codec.bits, codec.clip))
    scale = scale.clamp(min=torch.finfo(torch.bfloat16).tiny)
    steps = (groups - offset.float()[..., None]) / scale.float()[..., None]
    if push is not None:
        steps = push_errors(steps, codec.bits, push)
    codes = steps.round().clamp(0, 2 ** codec.bits - 1).byte().flatten(-2)
    if codec.rule == "centred":
        missed = groups - dequantize(codes, scale, offset).unflatten(-1, groups.shape[-2:])
        offset = (offset.float() + missed.mean(-1, dtype=torch.float64).float()).bfloat16()
    return codes, scale, offset

def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Read codes (..., d) back as scale·code + offset, in float32, each of the two operations rounded."""
    groups = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    return (scale.float()[..., None] * groups).add_(offset.float()[..., None]).flatten(-2)

def roundtrip(x: Tensor, T: Tensor, codec: Codec, push: Tensor | None = None) -> Tensor:
    """Return what the cache's reader sees of x (b, g, s, d): T⁻¹ dequantize(quantize(T x)), in x's dtype."""
    if codec.bits == 16:
        return x
    return apply(inverse_transpose(T).mT, dequantize(*quantize(apply(T, x), codec, push))).to(x.dtype)

class Side(NamedTuple):
    """How one layer's keys, or its values, are cached: T and `feedback`'s F, (g, n, m, m), None for none."""
    T: Tensor | None = None
    codec: Codec = Codec()
    push: Tensor | None = None

class Scheme(NamedTuple):
    """How a model's cache is quantized: the codec of each side, and `derive`'s tensors."""
    k_codec: Codec
    v_codec: Codec
    tensors: dict[str, Tensor]

    def of(self, side: str, l: int, device=None) -> Side:
        """Return how layer l's keys, side "k", or values, "v", are cached."""
        T, push = (self.tensors[key][l].to(device) if key in self.tensors else None
                   for key in (side, side + "_feedback"))
        return Side(T, self.k_codec if side == "k" else self.v_codec, push)


# ------------------------------------------------------------------------------------------------------------
# The cache of one layer, [sink | packed | recent]: the ends stay in model dtype, the middle is packed codes.

def hot_path():
    """Import kernels.py on first use: the mathematics above can be copied out without it."""
    import kernels
    return kernels

def on_gpu(x: Tensor) -> bool:
    """Say whether kernels serve x; tests put a yes in its place, and run them in Triton's interpreter."""
    return x.is_cuda

def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from q (b, g, r, t, d) to k, v (b, g, s, d), causally or to what a `mask` (b, 1, t, s) shows."""
    o = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, mask, is_causal=mask is None, enable_gqa=True)
    return o.unflatten(1, q.shape[1:3])

def padding_mask(pad: list[int], t: int, s: int, device) -> Tensor:
    """Mask for the last t of s columns, (b, 1, t, s): causal; the `pad` first columns see themselves only."""
    column = torch.arange(s, device=device)
    own, pad = column[s - t:, None], torch.tensor(pad, device=device)[:, None, None]
    return ((column >= pad) & (column <= own) | (column == own))[:, None]

def grow(buffer: Tensor, capacity: int) -> Tensor:
    """Copy a buffer (b, g, s, ...) into one with room for `capacity` tokens, more or fewer."""
    new = buffer.new_zeros(*buffer.shape[:2], capacity, *buffer.shape[3:])
    new[:, :, :buffer.shape[2]] = buffer[:, :, :capacity]
    return new

@lru_cache(8)
def device_lengths(lengths: tuple[int, ...], device) -> Tensor:
    """Copy lengths to the device, once for all layers of a step."""
    return torch.tensor(lengths, dtype=torch.int32, device=device)

class PackedTensor:
    """Tokens of one layer's keys or values as packed codes of T x: what a 2-bit cache really holds.

    codes (b, g, capacity, d·bits/8) uint8; pair (b, g, capacity, groups) int32, a bfloat16 scale and offset
    each. With 16 bits nothing is rounded but to model dtype: the codes are T x itself and there are no pairs.
    """

    def __init__(self, batch: int, heads: int, d: int, side: Side, dtype, device):
        self.T, self.codec, self.push = side
        bits, group, quantized = self.codec.bits, self.codec.group or d, self.codec.bits < 16
        pushed = group if self.push is None else self.push.shape[-1]
        if bits not in BITS or quantized and (d % group or d % 8 or group != pushed):
            raise ValueError(f"{d} channels do not pack with {bits} bits in groups of {group}: bits are in "
                             f"{BITS}, channels a multiple of 8 and of the group, the feedback's block")
        width, kind, groups = (d * bits // 8, torch.uint8, d // group) if quantized else (d, dtype, 0)
        self.one_pair = groups == 1          # a token and head, as the functions of kernels.py expect
        self.has_kernel = self.one_pair and d in (64, 128, 256) and (self.T is None or self.T.shape[1] == 1)
        self.codes = torch.zeros(batch, heads, 0, width, dtype=kind, device=device)
        self.pair = torch.zeros(batch, heads, 0, groups, dtype=torch.int32, device=device)

    def write(self, rows: slice, start: int, x: Tensor) -> None:
        """Transform, quantize and pack x (b, g, s, d) as tokens start, start + 1, ... of some batch rows."""
        stop, capacity = start + x.shape[2], self.codes.shape[2]
        if stop > capacity:      # the first write gets what it needs, in 64s; later ones double
            capacity = max(2 * capacity, -(-stop // 64) * 64)
            self.codes, self.pair = grow(self.codes, capacity), grow(self.pair, capacity)
        bits, rule, clip, _ = self.codec
        if self.has_kernel and on_gpu(x):
            codes, pair = hot_path().encode(x, self.T, bits, rule, clip, self.push)
        else:
            codes, pair = x if self.T is None else apply(self.T, x), 0
            if bits < 16:
                codes, *pair = quantize(codes, self.codec, self.push)
                codes, pair = hot_path().pack_ref(codes, bits), hot_path().join_pair(*pair)
        self.codes[rows, :, start:stop], self.pair[rows, :, start:stop] = codes, pair

    def read(self, count: int, rows: slice = slice(None)) -> Tensor:
        """Dequantize the first `count` tokens, (b, g, count, d), still in the transformed basis."""
        if self.codec.bits == 16:
            return self.codes[rows, :, :count]
        codes = hot_path().unpack_ref(self.codes[rows, :, :count], self.codec.bits)
        return dequantize(codes, *hot_path().split_pair(self.pair[rows, :, :count]))

    def scores(self, q: Tensor, count: int, rows: slice) -> Tensor:
        """Return q · x̂ over the first `count` tokens: q (b, g, r, d), transformed, -> (b, g, r, count)."""
        if not self.one_pair:
            return q @ self.read(count, rows).float().mT
        return hot_path().packed_scores(q, self.codes[rows], self.pair[rows], self.codec.bits, count)

    def weighted_sum(self, p: Tensor, count: int, rows: slice) -> Tensor:
        """Return Σ_s p_s x̂_s over the first `count` tokens: p (b, g, r, count) -> (b, g, r, d)."""
        if not self.one_pair:
            return p @ self.read(count, rows).float()
        return hot_path().packed_values(p, self.codes[rows], self.pair[rows], self.codec.bits, count)

class WindowCache:
    """The cache of one layer; a row is [its first `sink` tokens | packed | its last `keep` or a few more].

    When a row's recent window reaches keep + flush tokens, its oldest `flush` are quantized together and
    never touched again. Keys enter raw, after RoPE, and are transformed when they are packed; values enter
    folded. Tokens are counted per row, without padding: a row's cache is the same alone or in a batch, and
    however its tokens were cut into calls. keep = None never flushes: an ordinary, growing cache.
    """

    def __init__(self, batch: int, heads: int, d: int, k: Side = Side(), v: Side = Side(), sink: int = 16,
                 keep: int | None = 128, flush: int = 16, dtype=torch.float32, device="cpu"):
        if sink < 0 or flush < 1 or (keep or 0) < 0:
            raise ValueError(f"windows need sink >= 0, keep >= 0 and flush >= 1, not {sink}, {keep}, {flush}")
        self.sink, self.keep, self.flush_size = (0 if keep is None else sink), keep, flush
        self.n, self.n_packed = [0] * batch, [0] * batch                     # per row; all else follows
        self.k = PackedTensor(batch, heads, d, k, dtype, device)
        self.v = PackedTensor(batch, heads, d, v._replace(T=None), dtype, device)
        self.T_query = None if k.T is None else inverse_transpose(k.T)
        self.window_size = 64 if keep is None else keep + flush
        window = lambda size: [torch.zeros(batch, heads, size, d, dtype=dtype, device=device) for _ in "kv"]
        self.sinks, self.recent = window(self.sink), window(self.window_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held, spare capacity included."""
        held = *self.sinks, *self.recent, self.k.codes, self.k.pair, self.v.codes, self.v.pair
        return sum(t.untyped_storage().nbytes() for t in held)

    def sizes(self, row: int) -> tuple[int, int, int]:
        """Count a row's tokens in the sinks, packed, and in the recent window."""
        n, packed = self.n[row], self.n_packed[row]
        return min(n, self.sink), packed, max(0, n - self.sink - packed)

    def rows_alike(self, *others: list) -> list[slice]:
        """Group rows: one slice over all of them if their sizes and `others` are the same, else one each."""
        keys = [*zip(self.n, self.n_packed, *others)]
        return [slice(0, len(keys))] if len({*keys}) == 1 else [slice(i, i + 1) for i in range(len(keys))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pad: list[int] | None = None) -> Tensor:
        """Take in the tokens of one call and return their attention output (b, g, r, t, d).

        They see the cache as it stood when the call began and, exactly, each other; quantizing what is due
        comes last. `pad` counts the padding at the left of each row of this call.
        """
        t, before, pad = q.shape[3], max(self.n), pad or [0] * len(self.n)
        self.append(k, v, pad)
        if before == 0:
            o = causal_attention(q, k, v, padding_mask(pad, t, t, q.device) if any(pad) else None)
        elif t > 1:
            o = self.attend_dequantized(q)
        elif self.keep is None:
            o = self.attend_ordinary(q)
        else:
            by_kernel = on_gpu(q) and self.k.has_kernel and self.v.has_kernel
            o = self.attend_by_kernel(q) if by_kernel else self.attend_parts(q)
        self.flush()
        return o

    def append(self, k: Tensor, v: Tensor, pad: list[int]) -> None:
        """Write k and v (b, g, t, d) to the sinks while these have room, then to the recent window."""
        for rows in self.rows_alike(pad):
            (n_sink, _, n_recent), skip = self.sizes(rows.start), pad[rows.start]
            new = min(self.sink - n_sink, k.shape[2] - skip)     # these fill the sinks, the rest is recent
            end, capacity = n_recent + k.shape[2] - skip - new, self.recent[0].shape[2]
            if end > capacity:   # a long call stretches the window until the flush; an ordinary cache doubles
                capacity = max(end, 2 * capacity) if self.keep is None else end
                self.recent = [grow(w, capacity) for w in self.recent]
            for x, sinks, recent in zip((k, v), self.sinks, self.recent):
                sinks[rows, :, n_sink:n_sink + new] = x[rows, :, skip:skip + new]
                recent[rows, :, n_recent:end] = x[rows, :, skip + new:]
        self.n = [n + k.shape[2] - p for n, p in zip(self.n, pad)]

    def flush(self) -> None:
        """Quantize the oldest recent tokens, `flush` at a time, while `keep` stay: nothing else packs any."""
        if self.keep is None:
            return
        for rows in self.rows_alike():
            _, p, r = self.sizes(rows.start)
            if (due := (r - self.keep) // self.flush_size * self.flush_size) <= 0:
                continue
            for packed, recent in zip((self.k, self.v), self.recent):
                packed.write(rows, p, recent[rows, :, :due])
                recent[rows, :, :r - due] = recent[rows, :, due:r].clone()
            self.n_packed[rows] = [p + due] * len(self.n_packed[rows])
        if self.recent[0].shape[2] > self.window_size:
            self.recent = [grow(w, self.window_size) for w in self.recent]

    def read(self, side: int, length: int) -> Tensor:
        """Dequantize keys (side 0, T undone) or values (1): (b, g, length, d), rows aligned on the right."""
        packed, sinks, recent = (self.k, self.v)[side], self.sinks[side], self.recent[side]
        middle = packed.read(max(self.n_packed))
        if packed.T is not None:
            middle = apply(self.T_query.mT, middle)
        hat = recent.new_zeros(*recent.shape[:2], length, recent.shape[3])
        for rows in self.rows_alike():
            parts = zip((sinks, middle.to(hat.dtype), recent), self.sizes(rows.start))
            hat[rows, :, length - self.n[rows.start]:] = torch.cat([x[rows, :, :n] for x, n in parts], 2)
        return hat

    def attend_dequantized(self, q: Tensor) -> Tensor:
        """Attend from the last t > 1 tokens' q (b, g, r, t, d): they share the cost of dequantizing all."""
        length = max(*self.n, q.shape[3])                        # a call may be mostly padding
        mask = padding_mask([length - n for n in self.n], q.shape[3], length, q.device)
        k, v, step = self.read(0, length), self.read(1, length), max(1, 2 ** 22 // length)
        parts = zip(q.split(step, 3), mask.split(step, 2))       # some queries at a time: bounds the scores
        return torch.cat([causal_attention(some, k, v, seen) for some, seen in parts], 3)

    def attend_ordinary(self, q: Tensor) -> Tensor:
        """Attend from one token's q (b, g, r, 1, d) to a cache that is all recent window."""
        k, v = (w[:, :, :max(self.n)] for w in self.recent)
        slot, n = torch.arange(k.shape[2], device=q.device), torch.tensor(self.n, device=q.device)
        return causal_attention(q, k, v, slot < n[:, None, None, None])

    def attend_parts(self, q: Tensor) -> Tensor:
        """Attend from one token's q (b, g, r, 1, d) with one softmax over the three parts."""
        outputs, q = [], q[..., 0, :].float()
        q_packed = q if self.T_query is None else apply(self.T_query, q)
        for rows in self.rows_alike():
            n_sink, n_packed, n_recent = size = self.sizes(rows.start)
            k_sink, v_sink = (x[rows, :, :n_sink].float() for x in self.sinks)
            k_recent, v_recent = (x[rows, :, :n_recent].float() for x in self.recent)
            packed = self.k.scores(q_packed[rows], n_packed, rows)
            scores = torch.cat([q[rows] @ k_sink.mT, packed, q[rows] @ k_recent.mT], -1)
            p_sink, p, p_recent = (scores * q.shape[-1] ** -0.5).softmax(-1).split(size, -1)
            outputs.append(p_sink @ v_sink + self.v.weighted_sum(p, n_packed, rows) + p_recent @ v_recent)
        return torch.cat(outputs)[..., None, :].to(self.recent[0].dtype)

    def attend_by_kernel(self, q: Tensor) -> Tensor:
        """As `attend_parts`, in one launch over packed bytes and windows."""
        sizes = zip(*(self.sizes(row) for row in range(len(self.n))))
        n_sink, n_packed, n_recent = (device_lengths(size, q.device) for size in sizes)
        q, bits = q[..., 0, :], (self.k.codec.bits, self.v.codec.bits)
        q_packed = q.float() if self.T_query is None else apply(self.T_query, q)
        packed = self.k.codes, self.k.pair, self.v.codes, self.v.pair, n_packed
        windows = (*self.sinks, n_sink), (*self.recent, n_recent)
        return hot_path().decode_attention(q, q_packed, windows[0], packed, windows[1], bits)[..., None, :]

    def crop(self, count: int) -> None:
        """Drop the last `count` tokens of every row. What is packed stays packed, as it is."""
        self.n = [max(n - count, 0) for n in self.n]
        self.n_packed = [min(p, max(n - self.sink, 0)) for n, p in zip(self.n, self.n_packed)]

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order, some perhaps several times: of beams, of a smaller batch."""
        rows = torch.arange(len(self.n))[rows.cpu()]             # also of a mask or of negative indices
        index, rows = rows.to(self.recent[0].device), rows.tolist()
        self.sinks, self.recent = ([x[index] for x in window] for window in (self.sinks, self.recent))
        for packed in self.k, self.v:
            packed.codes, packed.pair = packed.codes[index], packed.pair[index]
        self.n, self.n_packed = [self.n[row] for row in rows], [self.n_packed[row] for row in rows]

    def state(self) -> dict:
        """Copy all that is held, packed tokens without spare room, for `restore` and torch.save."""
        count, packed = max(self.n_packed), (self.k.codes, self.k.pair, self.v.codes, self.v.pair)
        tensors = {"packed": [x[:, :, :count] for x in packed], "sinks": self.sinks, "recent": self.recent}
        copies = {name: [x.clone() for x in held] for name, held in tensors.items()}
        return {"n": [*self.n], "n_packed": [*self.n_packed]} | copies

    def restore(self, state: dict) -> None:
        here = lambda tensors: [x.to(self.recent[0].device, copy=True) for x in tensors]
        self.n, self.n_packed = [*state["n"]], [*state["n_packed"]]
        self.sinks, self.recent = here(state["sinks"]), here(state["recent"])
        self.k.codes, self.k.pair, self.v.codes, self.v.pair = here(state["packed"])


# ------------------------------------------------------------------------------------------------------------
# The model, by hand: Qwen3, and Llama as the same graph without QK-norm. Weights are a dict, named as stored.

class Model(NamedTuple):
    config: object               # transformers' config object: hidden_size, num_key_value_heads, ...
    weights: dict[str, Tensor]
    inv_freq: Tensor             # (d/2,) RoPE frequencies, float32
    rope_scale: float            # on cos and sin (YaRN)
    folded: bool = False

def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize in float32, cast back, then multiply by the weight: transformers' order, for bf16's sake."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

def linear(weights: dict, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

def rope_tables(model: Model, positions: Tensor, dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (b, t, d) each, of the rotary angles at `positions` (b, t)."""
    angle = (positions[..., None].float() * model.inv_freq).repeat(1, 1, 2)
    return (angle.cos() * model.rope_scale).to(dtype), (angle.sin() * model.rope_scale).to(dtype)

def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i of x (..., t, d) with channel i + d/2, the pairing of the checkpoints."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin

def project(model: Model, l: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project x (b, t, D) to q (b, g, r, t, d), k and v (b, g, t, d); q and k after QK-norm and RoPE."""
    w, c, p = model.weights, model.config, f"model.layers.{l}.self_attn."
    q, k, v = (linear(w, f"{p}{i}_proj", x).unflatten(-1, (-1, c.head_dim)) for i in "qkv")
    if c.model_type == "qwen3":
        q, k = (rms_norm(y, w[f"{p}{i}_norm.weight"], c.rms_norm_eps) for i, y in (("q", q), ("k", k)))
    q = q.unflatten(2, (c.num_key_value_heads, -1)).permute(0, 2, 3, 1, 4)   # (b, t, h, d) -> (b, g, r, t, d)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return rope(q, cos[:, None, None], sin[:, None, None]), rope(k, cos[:, None], sin[:, None]), v

def project_out(model: Model, l: int, o: Tensor) -> Tensor:
    """Apply the output projection to o (b, g, r, t, d): (b, t, D)."""
    return linear(model.weights, f"model.layers.{l}.self_attn.o_proj", o.permute(0, 3, 1, 2, 4).flatten(2))

def swiglu(model: Model, l: int, x: Tensor) -> Tensor:
    w, p = model.weights, f"model.layers.{l}.mlp."
    return linear(w, p + "down_proj", F.silu(linear(w, p + "gate_proj", x)) * linear(w, p + "up_proj", x))

@torch.no_grad()
def forward(model: Model, ids: Tensor, attend: Callable, positions: Tensor | None = None) -> Tensor:
    """Run the decoder on ids (b, t) and return the normalized hidden states (b, t, D).

    `attend(l, q, k, v) -> o` is where a window cache, calibration and each evaluation come in.
    """
    w, c = model.weights, model.config
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    x = F.embedding(ids, w["model.embed_tokens.weight"])
    cos, sin = rope_tables(model, positions, x.dtype)
    for l in range(c.num_hidden_layers):
        norm = lambda y, name: rms_norm(y, w[f"model.layers.{l}.{name}_layernorm.weight"], c.rms_norm_eps)
        q, k, v = project(model, l, norm(x, "input"), cos, sin)
        x = x + project_out(model, l, attend(l, q, k, v))
        parts = x.split(4096, 1)                     # some tokens at a time: the MLP is several times wider
        x = x + torch.cat([swiglu(model, l, norm(part, "post_attention")) for part in parts], 1)
    return rms_norm(x, w["model.norm.weight"], c.rms_norm_eps)

def logits(model: Model, hidden: Tensor) -> Tensor:
    """Map hidden states (..., D) to logits (..., v)."""
    tied = model.config.tie_word_embeddings
    return F.linear(hidden, model.weights["model.embed_tokens.weight" if tied else "lm_head.weight"])

def fold_in(T: Tensor, W: Tensor) -> Tensor:
    """Return T W for the value projection (g·d, D) or its bias (g·d,); T is (g, n, m, m)."""
    rows = W.double().reshape(*T.shape[:3], -1)                              # (g, n, m, D or 1)
    return (T.double() @ rows).reshape(W.shape).to(W.dtype)

def fold_out(T: Tensor, W: Tensor) -> Tensor:
    """Return W T⁻¹, query head by query head, for the output projection (D, h·d)."""
    blocks = W.double().unflatten(1, (len(T), -1, *T.shape[1:3]))            # (D, g, r, n, m)
    return torch.einsum("Dgrni,gnij->Dgrnj", blocks, torch.linalg.inv(T.double())).flatten(1).to(W.dtype)

FOLDS = {"v_proj.weight": fold_in, "v_proj.bias": fold_in, "o_proj.weight": fold_out}

def fold_values(model: Model, T_V: Tensor) -> Model:
    """Fold T_V (l, g, n, m, m) into a copy of the weights: W_V ← T_V W_V, bias too; W_O(r) ← T_V⁻ᵀ W_O(r).

    The values come out transformed and the logits as they were. The given model is not changed. Raises
    ValueError for a model that is folded already.
    """
    if model.folded:
        raise ValueError("this model's values are folded already: fold the original one")
    weights = dict(model.weights)
    for l, T in enumerate(T_V):
        names = {f"model.layers.{l}.self_attn.{name}": fold for name, fold in FOLDS.items()}
        weights |= {name: fold(T, weights[name]) for name, fold in names.items() if name in weights}
    return model._replace(weights=weights, folded=True)


# ------------------------------------------------------------------------------------------------------------
# Reading checkpoints: a Hugging Face folder, or the same from the hub. What can be refused is refused early.

MODEL_TYPES = ("qwen3", "llama")
HEAD_DIMS = (8, 16, 32, 64, 128, 256, 512)      # powers of two, for the Hadamard matrix
ROPE_TYPES = ("default", "linear", "yarn", "llama3")

def refuse_if(wrong, sentence: str) -> None:
    if wrong:
        raise ValueError(sentence)

@contextmanager
def explained(sentence: str):
    """Turn what a library raises, of whatever type, into a ValueError that a user understands."""
    try:
        yield
    except Exception as e:
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise ValueError(f"{sentence} ({reason[-1].strip()})") from e

def check_head_dim(d: int | None) -> None:
    refuse_if(d not in HEAD_DIMS, f"head_dim {d} is not supported, only {HEAD_DIMS}")

def head_dim(config) -> int:
    """Return the head dim of a config; some of transformers' leave it out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

def hub(name: str, kind: str, *patterns: str) -> Path:
    """Download the files that match `patterns` of the hub's model or dataset `name`."""
    from huggingface_hub import snapshot_download
    with explained(f"cannot get the {kind} {name!r} from the hub: give a local one instead"):
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), etag_timeout=4))

def fetch(name: str, *patterns: str) -> Path:
    """Return the local folder `name`, or the files that match `patterns` of the hub's model `name`."""
    if Path(name).is_dir():
        return Path(name)
    refuse_if(Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")),
              f"{name!r} is neither a folder nor a hub id of the form owner/name")
    return hub(name, "model", *patterns)

def read_json(path: Path) -> dict:
    """Read a JSON object. Raises ValueError for a file that is missing or something else."""
    with explained(f"{path} is missing or is not JSON"):
        content = json.loads(path.read_text())
    refuse_if(not isinstance(content, dict), f"{path} does not hold a JSON object")
    return content

def rope_frequencies(config, device="cpu") -> tuple[Tensor, float]:
    """Return the RoPE frequencies (d/2,) and the factor on cos and sin; variants are transformers' own."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    if (kind := config.rope_parameters["rope_type"]) != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, device)
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0

def read_config(folder: Path, yarn: float | None = None):
    """Read config.json as transformers' config object, with `rope_parameters` complete and `yarn` applied.

    Raises ValueError, one sentence, for every kind of model that the loop above would run wrongly.
    """
    raw = read_json(folder / "config.json")
    with explained(f"{folder / 'config.json'} cannot be used"):
        refuse_if(raw.get("model_type") not in MODEL_TYPES,
                  f"model_type {raw.get('model_type')!r} is not supported, only {' and '.join(MODEL_TYPES)}")
        refuse_if(raw.get("quantization_config"), "the checkpoint is quantized: give one of plain weights")
        odd = [kind for kind in raw.get("layer_types") or [] if kind != "full_attention"]
        odd += ["a sliding window"] * bool(raw.get("use_sliding_window"))
        refuse_if(odd, f"only full attention is supported, not {odd[:1]}")
        rope = raw.get("rope_parameters")
        theta = (rope if isinstance(rope, dict) else raw).get("rope_theta")
        refuse_if(theta is None or theta <= 0, "it has no rope_theta, alone or in rope_parameters")
        from transformers import AutoConfig
        config = AutoConfig.from_pretrained(folder)
        rope = dict(config.rope_parameters, rope_theta=theta)
        if yarn is not None:     # Qwen3's 40960 positions are a context of 32768 and room for the answer
            below = 1 << config.max_position_embeddings.bit_length() - 1
            original = rope.get("original_max_position_embeddings") or below
            config.max_position_embeddings = int(original * yarn)
            rope = {"rope_type": "yarn", "factor": yarn, "rope_theta": theta,
                    "original_max_position_embeddings": original}
        config.rope_parameters = rope
        refuse_if(rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1,
                  f"its RoPE is {rope['rope_type']!r}, supported are {', '.join(ROPE_TYPES)} on whole heads")
        rope_frequencies(config)
        check_head_dim(config.head_dim)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        refuse_if(kv_heads < 1 or heads % kv_heads,
                  f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        refuse_if(config.num_hidden_layers < 1, "the model has no layer: num_hidden_layers is 0")
        refuse_if(config.hidden_act != "silu", f"hidden_act is {config.hidden_act!r}, supported is silu")
    return config

def weight_shapes(config) -> dict[str, tuple]:
    """List the tensors that a checkpoint of this config must hold, with their shapes."""
    c, D, I, d = config, config.hidden_size, config.intermediate_size, config.head_dim
    Q, K, qwen3 = c.num_attention_heads * d, c.num_key_value_heads * d, c.model_type == "qwen3"
    layer = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    for part, biased, shapes in (
            ("self_attn", c.attention_bias, {"q": (Q, D), "k": (K, D), "v": (K, D), "o": (D, Q)}),
            ("mlp", not qwen3 and c.mlp_bias, {"gate": (I, D), "up": (I, D), "down": (D, I)})):
        layer |= {f"{part}.{x}_proj.weight": shape for x, shape in shapes.items()}
        layer |= {f"{part}.{x}_proj.bias": shape[:1] for x, shape in shapes.items() if biased}
    layer |= {f"self_attn.{x}_norm.weight": (d,) for x in "qk" if qwen3}
    shapes = {"model.embed_tokens.weight": (c.vocab_size, D), "model.norm.weight": (D,)}
    shapes |= {} if c.tie_word_embeddings else {"lm_head.weight": (c.vocab_size, D)}
    layers = range(c.num_hidden_layers)
    return shapes | {f"model.layers.{l}.{name}": shape for l in layers for name, shape in layer.items()}

def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the safetensors file that holds it, sharded or not."""
    from safetensors import safe_open
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        with explained(f"{index} holds no weight_map of file names"):
            return {name: folder / shard for name, shard in read_json(index)["weight_map"].items()}
    with explained(f"{file} is missing or is not a whole safetensors file"), safe_open(file, "pt") as f:
        return dict.fromkeys(f.keys(), file)

def read_tensors(files: dict[str, Path], names: Iterable[str], dtype=None, device="cpu") -> dict[str, Tensor]:
    """Read the named tensors straight to device and dtype. Raises ValueError for a file that is not whole."""
    from safetensors import safe_open
    tensors, names = {}, [*names]
    for file in sorted({files[name] for name in names}):
        with explained(f"cannot read {file}"), safe_open(file, framework="pt", device=str(device)) as f:
            tensors |= {name: f.get_tensor(name).to(dtype) for name in names if files[name] == file}
    return tensors

def load_model(folder: Path, config, dtype=torch.float32, device="cpu") -> Model:
    """Load the checkpoint straight to device and dtype. Raises ValueError if a tensor is missing or odd."""
    files, shapes = checkpoint_files(folder), weight_shapes(config)
    missing = sorted(shapes.keys() - files.keys())
    refuse_if(missing, f"the checkpoint lacks {len(missing)} tensors, {missing[:1]} among them")
    extra = [name for name in files.keys() - shapes.keys() if "_proj." in name or "_norm." in name]
    refuse_if(extra, f"the checkpoint holds {min(extra, default='')}, of which config.json knows nothing")
    weights = read_tensors(files, shapes, dtype, device)
    for name, shape in shapes.items():
        found = tuple(weights[name].shape)
        refuse_if(found != shape, f"{name} has shape {found} where config.json says {shape}")
    return Model(config, weights, *rope_frequencies(config, device))


# ------------------------------------------------------------------------------------------------------------
# Calibration: second moments only, in one pass; never all activations, never the vocabulary logits.

def second_moment(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum w x xᵀ over all but heads and channels: x (b, g, ..., t, d), w (b, g, ..., t) -> (g, d, d)."""
    total = x.new_zeros(x.shape[1], x.shape[-1], x.shape[-1], dtype=torch.float64)
    for i in range(0, x.shape[-2], 4096):
        part = x[..., i:i + 4096, :].double()
        left = part if weight is None else part * weight[..., i:i + 4096, None]
        total += torch.einsum("bg...d,bg...e->gde", left, part)
    return total

def oscar_weight(q_moment: Tensor, k: Tensor) -> Tensor:
    """Weigh tokens as OSCAR does for its values: w_s = k_sᵀ C_q k_s, scaled to mean 1: (b, g, s)."""
    # Differs from the paper: C_q and the mean are one sequence's own, so that one pass over the text will do.
    k = k.double()
    w = (torch.einsum("bgsd,gde->bgse", k, q_moment) * k).sum(-1)
    return w / w.mean((0, 2), keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)

def attention_sensitivity(q: Tensor, k: Tensor, v: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh queries for WUSH-A: w_{r,t} for the key Hessian, Σ_s p² for the value's, both (b, g, r, t).

    A = W Wᵀ, (g, r, d, d), of each query head's block W of the output projection: ‖Wᵀx‖² = xᵀ A x.

    To first order, for a query with probabilities p_s and output o = Σ p_s v_s: an error δ_s of key s moves
    its score by q·δ_s/√d and the head's share of the module's output by p_s (q·δ_s/√d) Wᵀ(v_s − o). If the
    δ_s are independent with covariance C, the expected squared change is qᵀC q · Σ_s p_s² ‖Wᵀ(v_s − o)‖² / d,
    which is ½ tr(H C) for H = Σ w q qᵀ, w = 2 Σ_s p_s² ‖Wᵀ(v_s − o)‖² / d. An error of value s moves the
    output by p_s Wᵀδ_s, so there H = 2 Σ_r (Σ_{t,s} p²) W Wᵀ. Heads are summed as if their changes were
    unrelated.
    """
    # Differs from the paper: its appendix C was not at hand, this derivation of its WUSH-A is ours.
    (t, d), A = q.shape[-2:], A.float()
    q, k, v = q.float(), k[:, :, None].float(), v[:, :, None].float()       # the terms of `spread` cancel
    squares = ((v @ A) * v).sum(-1, keepdim=True)                            # (b, g, r, s, 1)
    step, w, p_squared = max(16, 2 ** 21 // t), [], []
    for i in range(0, t, step):                                              # queries at a time: bounds p
        z = q[..., i:i + step, :] @ k.mT * d ** -0.5
        future = torch.ones(z.shape[-2:], dtype=torch.bool, device=q.device).triu(i + 1)
        p = z.masked_fill(future, -torch.inf).softmax(-1)
        o, p2 = p @ v, p.square()
        spread = (p2 @ squares)[..., 0] - 2 * (o @ A * (p2 @ v)).sum(-1) + p2.sum(-1) * (o @ A * o).sum(-1)
        w.append(2 * spread.clamp(min=0) / d)                    # spread = Σ_s p² (v_s − o)ᵀ A (v_s − o)
        p_squared.append(p2.sum(-1))
    return torch.cat(w, -1).double(), torch.cat(p_squared, -1).double()

def zero_moments(W_O: Tensor, attention_aware: bool = False) -> dict[str, Tensor]:
    """Make a layer's moments, of no tokens yet, and "A": W Wᵀ of each output block of W_O (g, r, d, D)."""
    names = ("k", "q", "v", "v_oscar") + ("q_attn", "o_attn") * attention_aware
    A = W_O.double() @ W_O.double().mT                                       # (g, r, d, d)
    return {"A": A, "o": 2 * A.sum(1)} | {name: torch.zeros_like(A[:, 0]) for name in names}

def add_moments(total: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Add the moments of one call: q (b, g, r, t, d), k and v (b, g, t, d), of a layer."""
    q_moment = 2 * second_moment(q)
    total["k"] += second_moment(k)
    total["q"] += q_moment
    total["v"] += second_moment(v)
    total["v_oscar"] += second_moment(v, oscar_weight(q_moment, k))
    if "q_attn" in total:
        w, p_squared = attention_sensitivity(q, k, v, total["A"])
        total["q_attn"] += second_moment(q, w)
        total["o_attn"] += 2 * (p_squared.sum((0, 3))[..., None, None] * total["A"]).sum(1)

def join_moments(totals: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the layers' moments, (l, g, d, d) each."""
    return {name: torch.stack([total[name] for total in totals]) for name in totals[0] if name != "A"}

def collect_moments(model: Model, sequences: list[Tensor], attention_aware: bool = False) -> dict:
    """Sum the second moments of every layer over token sequences (t,): by name, (l, g, d, d) each, float64.

    k: Σ k kᵀ; q: 2 Σ_r Σ_t q qᵀ, both after QK-norm and RoPE; v: Σ v vᵀ; o: 2 Σ_r W_O(r) W_O(r)ᵀ; v_oscar: Σ
    w v vᵀ (`oscar_weight`); with `attention_aware` also q_attn and o_attn (`attention_sensitivity`).
    """
    c, heads = model.config, (model.config.num_key_value_heads, -1, model.config.head_dim)
    W_O = [model.weights[f"model.layers.{l}.self_attn.o_proj.weight"] for l in range(c.num_hidden_layers)]
    totals = [zero_moments(W.T.unflatten(0, heads), attention_aware) for W in W_O]       # blocks (g, r, d, D)

    def observe(l, q, k, v):
        add_moments(totals[l], q, k, v)
        return causal_attention(q, k, v)

    for ids in tqdm(sequences, desc="calibrate", unit="seq", disable=not sequences or None):
        forward(model, ids[None].to(model.inv_freq.device), observe)
    return join_moments(totals)

def digest(*tensors: Tensor) -> str:
    """Hash tensors by their bytes."""
    data = [t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
    return hashlib.sha256(b"".join(data)).hexdigest()[:16]

def fingerprint(folder: Path) -> str:
    """Hash attention weights of two layers as they lie on disk: the same for every dtype and sharding."""
    files, some = checkpoint_files(folder), []
    for projection in "qkvo":
        names = sorted(name for name in files if name.endswith(f"self_attn.{projection}_proj.weight"))
        some += read_tensors(files, names[:1] + names[-1:]).values()
    return digest(*some)

SIDECAR = ("transform", "group", "refine")      # flags that a transforms file was made with

def save_transforms(path: str, T: dict[str, Tensor], about: dict) -> None:
    """Write `derive`'s {"k": T_K, "v": T_V, ...}, as serving reads it, and PATH.json: of what it was made."""
    torch.save({key: tensor.cpu() for key, tensor in T.items()}, path)
    Path(path + ".json").write_text(json.dumps(about, indent=2) + "\n")

def read_sidecar(path: str, T: dict[str, Tensor]) -> dict:
    """Read what a transforms file was made from; without a sidecar, what T tells, and a note on stderr."""
    if not Path(path + ".json").exists():
        print(f"note: without {path}.json nothing says which model {path} was made for", file=sys.stderr)
        return {"group": block_size(T)} | ({} if "k_feedback" in T else {"refine": "off"})
    made = {"refine": "off"} | read_json(Path(path + ".json"))
    lacks = {"model", "fingerprint", *SIDECAR} - made.keys()
    refuse_if(lacks, f"{path}.json does not say its {', '.join(sorted(lacks))}")
    fits = block_size(T) == made["group"] or block_size(T) is None and "k_feedback" not in T     # OSCAR's
    fits &= isinstance(made["group"], int | None) and isinstance(made["refine"], str)
    refuse_if(not fits, f"{path}.json says refine {made['refine']!r} and group {made['group']!r}, which does "
                        f"not fit {path}")
    return made

def load_transforms(path: str, config=None, device="cpu") -> dict[str, Tensor]:
    """Read a transforms file. Raises ValueError if it is broken or of another shape than the model's."""
    with explained(f"{path} cannot be read as a transforms file"):
        T = torch.load(path, weights_only=True, map_location=device)
        keys = "k", "v", *T.keys() & {"k_feedback", "v_feedback"}
        T = {key: T[key].to_dense() for key in keys}
    want = config and (config.num_hidden_layers, config.num_key_value_heads, head_dim(config))
    for key, t in T.items():
        l, g, n, m, columns = t.shape if t.dim() == 5 else (0,) * 5
        want = want or (l, g, n * m)                             # without a config: what the keys' T says
        refuse_if((l, g, n * m) != want or 0 in want or m != columns,
                  f"{path} holds transforms of shape {tuple(t.shape)}, not of the model's {want[0]} layers, "
                  f"{want[1]} KV heads and head_dim {want[2]}")
        refuse_if(t.shape != T[key[0]].shape, f"{path} holds a {key} of other blocks than {key[0]}")
        finite = t.is_floating_point() and t.isfinite().all()
        refuse_if(not finite, f"{path} holds numbers that are not finite or not floating point")
        T[key] = t = t.float()
        singular = key in "kv" and (torch.linalg.matrix_rank(t) < t.shape[-1]).any()
        refuse_if(singular, f"{path} holds transforms that do not invert")
    return T


# ------------------------------------------------------------------------------------------------------------
# Evaluation: module error, perplexity and divergence, each with its standard error over sequences.

def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean over sequences and its standard error (nan for a single sequence)."""
    return x.mean().item(), (x.std().item() / math.sqrt(len(x)) if len(x) > 1 else math.nan)

def quantized_view(t: int, sink: int, keep: int, flush: int, chunk: int, device="cpu") -> Tensor:
    """Say which keys a query finds quantized, (t, t), if tokens come in calls of `chunk` each."""
    column = torch.arange(t, device=device)
    length = column // chunk * chunk                             # of the cache as the query's call began
    packed = (length - sink - keep).div(flush, rounding_mode="floor").clamp(min=0) * flush
    return (column >= sink) & (column < sink + packed[:, None])

def view_attention(q: Tensor, k: Tensor, v: Tensor, k_hat: Tensor, v_hat: Tensor, view: Tensor) -> Tensor:
    """Attend causally, to k_hat and v_hat where `view` (t, t) says so, else to k and v, with one softmax.

    Equal to feeding a cache call by call. For 256 queries at a time the exact and the quantized tokens that
    any of them sees are concatenated, and a mask says which of these each query sees.
    """
    causal, o = torch.ones_like(view).tril(), []
    for rows in torch.arange(len(view), device=view.device).split(256):
        exact, hat = causal[rows] & ~view[rows], causal[rows] & view[rows]
        e, h = exact.any(0), hat.any(0)
        side_by_side = (torch.cat([x[:, :, e], x_hat[:, :, h]], 2) for x, x_hat in ((k, k_hat), (v, v_hat)))
        mask = torch.cat([exact[:, e], hat[:, h]], 1)[None, None]
        o.append(causal_attention(q[..., rows, :], *side_by_side, mask))
    return torch.cat(o, -2)

def module_error(model: Model, sequences: list[Tensor], schemes: dict[str, Scheme],
                 sink: int = 0) -> dict[str, tuple[float, float]]:
    """Measure the relative squared error of the attention modules' outputs: {name: (value, standard error)}.

    Each layer gets exact activations; all keys and values but the first `sink` are quantized. Squared error
    after the output projection over squared norm, per layer and sequence; geometric mean over layers, mean
    over sequences.
    """
    ratios = {name: torch.zeros(len(sequences), model.config.num_hidden_layers) for name in schemes}
    for i, ids in enumerate(tqdm(sequences, desc="module error", unit="seq", disable=None)):
        def compare(l, q, k, v):
            o = causal_attention(q, k, v)
            exact = project_out(model, l, o).double()
            for name, scheme in schemes.items():
                hats = [torch.cat([x[:, :, :sink], roundtrip(x, *scheme.of(side, l))[:, :, sink:]], 2)
                        for side, x in (("k", k), ("v", v))]
                error = project_out(model, l, causal_attention(q, *hats)).double() - exact
                ratios[name][i, l] = error.square().sum() / exact.square().sum()
            return o
        forward(model, ids[None].to(model.inv_freq.device), compare)
    return {name: mean_and_error(ratio.log().mean(1).exp()) for name, ratio in ratios.items()}

def divergence(model: Model, hidden: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Compare final hidden states (t, D) with hidden["none"]: means of [NLL, KL, same top-1]."""
    sums = {name: torch.zeros(3, dtype=torch.float64, device=ids.device) for name in hidden}
    for part in torch.arange(len(ids) - 1, device=ids.device).split(256):    # 256 rows of logits at a time
        log_p = logits(model, hidden["none"][part]).float().log_softmax(-1)
        for name, h in hidden.items():
            log_q = log_p if name == "none" else logits(model, h[part]).float().log_softmax(-1)
            nll = -log_q.gather(1, ids[part + 1, None])
            kl = log_p.exp() * (log_p - log_q)
            same = log_p.argmax(-1) == log_q.argmax(-1)
            sums[name] += torch.stack([nll.double().sum(), kl.double().sum(), same.double().sum()])
    return {name: total / (len(ids) - 1) for name, total in sums.items()}

def perplexity(model: Model, sequences: list[Tensor], schemes: dict[str, Scheme], sink: int = 16,
               keep: int = 128, flush: int = 16, chunk: int = 16) -> dict:
    """Score sequences (t,) as if fed in calls of `chunk` tokens through the windows; "none" is unquantized.

    Returns {name: {"perplexity", "excess", "kl", "same_top1": (value, standard error)}}: excess is what the
    log-perplexity has over the unquantized model's, with the error of that difference; kl, in nats, the mean
    divergence of the next-token distribution from that model's; same_top1 how often both put one token first.
    """
    rows = []
    for ids in tqdm(sequences, desc="perplexity", unit="seq", disable=None):
        ids = ids.to(model.inv_freq.device)
        view = quantized_view(len(ids), sink, keep, flush, chunk, ids.device)
        hidden = {"none": forward(model, ids[None], lambda l, *qkv: causal_attention(*qkv))[0]}
        for name, scheme in schemes.items():
            hidden[name] = forward(model, ids[None], lambda l, q, k, v: view_attention(
                q, k, v, roundtrip(k, *scheme.of("k", l)), roundtrip(v, *scheme.of("v", l)), view))[0]
        rows.append(divergence(model, hidden, ids))
    result, exact = {}, torch.stack([row["none"][0] for row in rows])
    for name in rows[0]:
        nll, kl, same = torch.stack([row[name] for row in rows]).unbind(1)
        mean, error = mean_and_error(nll)
        result[name] = {"perplexity": (math.exp(mean), math.exp(mean) * error),
                        "excess": mean_and_error(nll - exact), "kl": mean_and_error(kl),
                        "same_top1": mean_and_error(same)}
    return result


# ------------------------------------------------------------------------------------------------------------
# Generation through the cache.

def new_cache(model: Model, batch: int = 1, scheme: Scheme | None = None, sink: int = 16,
              keep: int | None = 128, flush: int = 16) -> list[WindowCache]:
    """Make the caches of all layers: unquantized, or of a scheme, for the model with its T_V folded."""
    c, like = model.config, model.weights["model.embed_tokens.weight"]
    if scheme is None:
        scheme, keep = Scheme(Codec(16), Codec(16), {}), None
    return [WindowCache(batch, c.num_key_value_heads, c.head_dim, scheme.of("k", l), scheme.of("v", l), sink,
                        keep, flush, like.dtype, like.device) for l in range(c.num_hidden_layers)]

def feed(model: Model, cache: list[WindowCache], ids: Tensor, pad: list[int] | None = None) -> Tensor:
    """Run ids (b, t), the rows' next tokens after `pad` columns of padding, through the cache: (b, t, D)."""
    first = torch.tensor([n - p for n, p in zip(cache[0].n, pad or [0] * len(ids))], device=ids.device)
    positions = (first[:, None] + torch.arange(ids.shape[1], device=ids.device)).clamp(min=0)
    return forward(model, ids, lambda l, q, k, v: cache[l].attend(q, k, v, pad), positions)

def sample(scores: Tensor, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
           generator: torch.Generator | None = None) -> Tensor:
    """Pick a token for each row of logits (b, v): the likeliest at temperature 0, else a random one."""
    if temperature == 0:
        return scores.argmax(-1)
    scores = scores.double() - scores.amax(-1, keepdim=True)     # so that no temperature overflows
    scores, order = (scores / temperature).sort(descending=True, stable=True)
    p = scores.softmax(-1)
    out = (p.cumsum(-1) - p >= top_p) | (torch.arange(p.shape[-1], device=p.device) >= (top_k or p.shape[-1]))
    out[:, 0] = False                                            # the likeliest token always stays
    return order.gather(-1, torch.multinomial(p.masked_fill(out, 0), 1, generator=generator))[:, 0]

def decode(model: Model, cache: list[WindowCache], prompts: list[list[int]], max_new_tokens: int,
           eos: Iterable[int] = (), pick: Callable = sample, pad_id: int = 0) -> Iterable[list[int]]:
    """Yield every prompt's next token, step by step; a row that has ended with one of `eos` yields `pad_id`.

    Prompts of different lengths are padded on the left; each row gets the tokens it would get alone.
    """
    longest, done, eos = max(map(len, prompts)), [False] * len(prompts), set(eos)
    pad = [longest - len(prompt) for prompt in prompts]
    rows = [[pad_id] * n + [*prompt] for n, prompt in zip(pad, prompts)]
    ids = torch.tensor(rows, device=model.inv_freq.device)
    for step in range(max_new_tokens):
        hidden = feed(model, cache, ids, None if step else pad)
        picked = pick(logits(model, hidden[:, -1])).tolist()
        tokens = [pad_id if end else token for end, token in zip(done, picked)]
        yield tokens
        done = [end or token in eos for end, token in zip(done, tokens)]
        if all(done):
            return
        ids = torch.tensor(tokens, device=ids.device)[:, None]

def stream_text(tokenizer, tokens: Iterable[int]) -> Iterable[str]:
    """Yield text as tokens come, never half a character: the pieces add up to tokenizer.decode(tokens)."""
    ids, start, shown = [], 0, 0          # ids[:shown] are out, ids[start:shown] the next one's left context
    for token in tokens:
        ids.append(token)
        before, now = tokenizer.decode(ids[start:shown]), tokenizer.decode(ids[start:])
        if not now.endswith("\ufffd"):    # an unfinished character: wait for its other bytes
            yield now[len(before):]
            start, shown = shown, len(ids)
    if shown < len(ids):
        yield tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])):]

def prompt_tokens(tokenizer, prompt: str, raw: bool = False, thinking: bool = False) -> list[int]:
    """Tokenize a prompt through the model's chat template, or as it stands if `raw` or if there is none."""
    message, how = {"role": "user", "content": prompt}, dict(add_generation_prompt=True, return_dict=False)
    with explained("the prompt is not UTF-8, or not one for the model's chat template"):
        ids = (tokenizer(prompt)["input_ids"] if raw or not tokenizer.chat_template else
               tokenizer.apply_chat_template([message], enable_thinking=thinking, **how))
    refuse_if(not ids, "the prompt is empty")
    return ids

def end_tokens(folder: Path) -> list[int]:
    """Return all end-of-sequence ids, one or a list: generation_config.json's, else config.json's."""
    for path in folder / "generation_config.json", folder / "config.json":
        if path.is_file() and (eos := read_json(path).get("eos_token_id")) is not None:
            eos = eos if isinstance(eos, list) else [eos]
            refuse_if(not all(isinstance(token, int) for token in eos), f"{path}: eos_token_id is {eos}")
            return eos
    return []

WARM_UP, STEPS = 20, 32      # the first pass a flush, since what is compiled may be compiled anew after one

def decode_speed(model: Model, cache: list[WindowCache], context: Tensor) -> float:
    """Return tokens/s of STEPS one-token steps after `context` (t,), warm-up and compilation left out."""
    feed(model, cache, context[None])
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            start = time.perf_counter()
        scores = logits(model, feed(model, cache, context[None, :1])[:, -1])
        scores.argmax(-1).item()                                 # waits for an asynchronous device
    return STEPS / (time.perf_counter() - start)

def cache_bytes(config, tokens: int, **how) -> float:
    """Measure the bytes per token that all bfloat16 caches hold after `tokens` tokens, windows and all."""
    cache = WindowCache(1, config.num_key_value_heads, config.head_dim, dtype=torch.bfloat16, **how)
    x = torch.zeros(1, config.num_key_value_heads, tokens, config.head_dim, dtype=torch.bfloat16)
    cache.append(x, x, [0])
    cache.flush()
    return cache.nbytes * config.num_hidden_layers / tokens


# ------------------------------------------------------------------------------------------------------------
# Transformers, imported on first use: calibration of its models, and WushCache, its Cache of these windows.
# With attention "wush", `update` only marks the new keys: the model hands them on, and `wush_attention` finds
# the cache's layer by the mark. With any other, `update` returns all keys and values, dequantized.

def decoder_config(config):
    """Return the decoder's own config. Raises ValueError for one that a window cache would serve wrongly."""
    from transformers.cache_utils import DynamicCache, DynamicLayer
    c = config.get_text_config(decoder=True)
    odd = {*(getattr(c, "layer_types", None) or [])} - {"full_attention"}
    odd = odd or {type(x).__name__ for x in DynamicCache(config=c).layers} - {DynamicLayer.__name__}
    refuse_if(odd, f"only layers of full attention are supported, not {', '.join(sorted(odd))}")
    check_head_dim(head_dim(c))
    return c

def attention_modules(model, *parts: str) -> list:
    """List a model's attention modules. Raises ValueError if they lack one of `parts` by this name."""
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and all(hasattr(m, x) for x in parts)]
    layers = decoder_config(model.config).num_hidden_layers
    refuse_if([m.layer_idx for m in modules] != [*range(layers)],
              f"{len(modules)} of the model's {layers} layers have an attention with {' and '.join(parts)}")
    return modules

def register_attention(name: str, function: Callable) -> None:
    """Let model.set_attn_implementation(name) choose `function`; its masks are those of "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)

def grouped(query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
    """Group queries (b, h, t, d) by KV head, (b, g, r, t, d), scaled so that d^(-1/2) remains to be done."""
    factor = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
    return (query if abs(factor - 1) < 1e-6 else query * factor).unflatten(1, (key.shape[1], -1))

@torch.no_grad()
def calibrate(model, tokenizer, text: str | list[str], *, length: int = 1024, sequences: int = 16,
              transform: str = "wush", refine=tuple(REFINEMENTS), group: int | None = None) -> dict:
    """Derive transforms for a transformers model from `sequences` times `length` tokens of text, or fewer.

    As `collect_moments` and `derive` do; `refine` is for wush and wush_a only. The model stays as it was.
    Raises ValueError for a model that WushCache cannot serve or whose values are folded, and without text.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    modules, texts = attention_modules(model, "o_proj"), [text] if isinstance(text, str) else text
    parts = known_parts(refine) if transform in ("wush", "wush_a") else []
    refuse_if(transform not in TRANSFORMS, f"transform {transform!r} is not in {', '.join(TRANSFORMS)}")
    refuse_if(hasattr(decoder_config(model.config), "wush_folded"), "the model's values are folded")
    ids = [i for part in texts for i in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]]
    ids, totals = ids[:sequences * length], [{} for _ in modules]
    refuse_if(not ids, "there is no text to calibrate on")

    def observe(module, query, key, value, mask, scaling=None, **how):
        q, total = grouped(query, key, scaling), totals[module.layer_idx]
        if not total:            # W_O as what o_proj does to I: with LoRA, quantized or offloaded weights too
            I = torch.eye(q.shape[1:3].numel() * q.shape[-1], dtype=q.dtype, device=q.device)
            W_O = module.o_proj(I) - module.o_proj(0 * I[:1])
            total |= zero_moments(W_O.unflatten(0, (*q.shape[1:3], -1)), transform == "wush_a")
        add_moments(total, q, key, value)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **how)

    register_attention("wush_calibrate", observe)
    register_attention("wush", wush_attention)           # may be chosen before a WushCache is made
    before, modes = model.config._attn_implementation, {m: m.training for m in model.modules()}
    try:
        model.eval().set_attn_implementation("wush_calibrate")
        for part in tqdm(torch.tensor(ids).split(length), "calibrate", disable=None):
            model.base_model(part[None].to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for m, mode in modes.items():
            m.training = mode
    refuse_if(not all(totals), "the model's attention does not use transformers' AttentionInterface")
    moments = join_moments([{name: x.cpu() for name, x in total.items()} for total in totals])
    return derive(moments, transform, group, parts)

@contextmanager
def folded_values(model, T_V: Tensor):
    """Fold T_V (l, g, n, m, m) into a model for a while; its config is marked, for WushCache to see.

    Raises ValueError for a model that is folded already, or of other heads, or without plain weights.
    """
    modules, config = attention_modules(model, "v_proj", "o_proj"), decoder_config(model.config)
    refuse_if(hasattr(config, "wush_folded"), "this model's values are folded already")
    folds = [(p, name, T) for m, T in zip(modules, T_V) for name, p in m.named_parameters()
             if name.startswith(("v_proj", "o_proj")) and name != "o_proj.bias"]
    plain = all(name in FOLDS and p.is_floating_point() and not p.is_meta for p, name, _ in folds)
    refuse_if(not plain, "values fold into plain weights, not into quantized or offloaded ones, nor LoRA's")
    refuse_if(T_V.shape[:4].numel() != sum(len(m.v_proj.weight) for m in modules), "T_V is of another shape")
    before = [p.data for p, *_ in folds]
    try:
        for p, name, T in folds:
            p.data = FOLDS[name](T.to(p.device), p.data)
        config.wush_folded = [digest(T) for T in T_V]
        yield model
    finally:
        for (p, *_), data in zip(folds, before):
            p.data = data
        vars(config).pop("wush_folded", None)

def shard_transforms(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Take the KV heads of one rank of a tensor-parallel model; where ranks exceed heads, they share them.

    Raises ValueError if neither number divides the other.
    """
    heads = tensors["k"].shape[1]
    refuse_if(not 0 <= rank < world_size, f"rank {rank} is not one of {world_size}")
    refuse_if(heads % world_size and world_size % heads, f"{heads} KV heads do not go to {world_size} ranks")
    first, count = rank * heads // world_size, max(heads // world_size, 1)
    return {key: t[:, first:first + count].contiguous() for key, t in tensors.items()}

def left_padding(mask: Tensor, batch: int, length: int) -> list[int]:
    """Read each row's left padding from the mask (b, 1, t, length) of the last t tokens.

    Raises ValueError for one that shows a query anything but all columns from the padding up to its own.
    """
    seen = mask if mask.dtype == torch.bool else mask == 0
    known = mask.dtype == torch.bool or (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    wrong = f"attention 'wush' serves causal masks with padding at the left only, of {length} columns"
    refuse_if(not known or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != length, wrong)
    seen, t = seen.expand(batch, -1, -1, -1), mask.shape[2]
    pad = (length - seen[:, 0, -1].sum(-1)).tolist()
    own = torch.arange(length - t, length, device=mask.device)[:, None]      # each query's column
    padding = own < torch.tensor(pad, device=mask.device)[:, None, None, None]
    refuse_if(not ((seen == padding_mask(pad, t, length, mask.device)) | padding).all(), wrong)
    return pad

def wush_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **how) -> tuple:
    """Attend through the window cache whose `update` these keys come from; without one, as "sdpa" does."""
    if (layer := getattr(key, "wush_layer", None)) is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **how)
    refuse_if(not layer.waiting, "attention 'wush' was given the keys of another layer")
    layer.waiting = False        # a refusal leaves the cache fit for the next call
    odd = [x for x in ("softcap", "s_aux", "sliding_window", "position_bias") if how.get(x) is not None]
    odd += ["dropout"] * (dropout > 0) + ["is_causal=False"] * (how.get("is_causal") is False)
    refuse_if(odd, f"attention 'wush' knows no {' and no '.join(odd)}")
    o = layer.attend(grouped(query, key, scaling), key, value, mask)
    return o.flatten(1, 2).transpose(1, 2).contiguous(), None

def without_gradient(x: Tensor, like: Tensor) -> Tensor:
    """Detach x; if `like` wants gradients, a backward pass through x raises instead of leaving them out."""
    x = x.detach()
    if like.requires_grad:
        x.requires_grad_().register_hook(lambda _: refuse_if(True, "WushCache passes no gradients on"))
    return x

class WushLayer:
    """A layer of WushCache: a WindowCache of k and T_V v, made where the first keys are.

    `length` counts padding, as transformers does; the windows hold none of it if "wush" attended.
    """
    is_compileable = is_sliding = False
    is_croppable = supports_early_init = True

    def __init__(self, config, l: int, scheme: Scheme, windows: tuple):
        self.config, self.l, self.scheme, self.windows = config, l, scheme, windows
        self.reset()

    @cached_property
    def T_V_digest(self) -> str:
        return digest(self.scheme.tensors["v"][self.l])

    def __deepcopy__(self, memo: dict):
        """Copy the tokens, share the rest: the transforms, and the model's config, which may yet change."""
        new = copy.copy(self)
        new.window = copy.deepcopy(self.window, memo)
        return new

    def reset(self) -> None:
        self.window, self.length, self.waiting, self.is_folded = None, 0, False, False

    @property
    def is_initialized(self) -> bool:
        return self.window is not None

    def lazy_initialization(self, k: Tensor, v: Tensor | None = None) -> None:
        """Make the window cache, or take it along to the device of k."""
        if self.window is not None and self.window.recent[0].device == k.device:
            return
        state = self.window and self.window.state()
        keys, values = (self.scheme.of(side, self.l, k.device) for side in "kv")
        refuse_if(k.shape[1::2] != (len(keys.T), keys.T.shape[1] * keys.T.shape[2]),
                  f"keys are {k.shape[1]} heads of {k.shape[3]} here, the transforms {tuple(keys.T.shape)}")
        self.T_V, self.T_V_inverse = values.T, inverse_transpose(values.T).mT
        self.window = WindowCache(len(k), k.shape[1], k.shape[3], keys, values, *self.windows, k.dtype,
                                  k.device)
        if state:
            self.window.restore(state)

    @torch.inference_mode(False)             # what is begun in inference mode may go on outside of it
    @torch.no_grad()
    def update(self, k: Tensor, v: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in a call's keys and values (b, g, t, d): hand them to "wush", or return all cached ones."""
        self.lazy_initialization(k)
        refuse_if(self.waiting, "the last call's keys never came to attention 'wush': is the cache's config "
                                "the model's?")
        refuse_if(len(k) != len(self.window.n), f"a batch of {len(k)} meets a cache of {len(self.window.n)}")
        folded = getattr(self.config, "wush_folded", None)       # by `folded_values`, layer by layer
        refuse_if(folded and folded[self.l] != self.T_V_digest, "the model has another T_V folded in")
        self.is_folded = bool(folded)
        if self.config._attn_implementation == "wush":
            marked, self.waiting = k.view_as(k), True            # the caller's own tensor stays as it is
            marked.wush_layer = self
            return marked, v
        if self.l == 0 and self.length == 0:
            warnings.warn("WushCache dequantizes all tokens at every step; to read the packed ones instead: "
                          "model.set_attn_implementation('wush')", stacklevel=4)
        self.length += k.shape[2]
        self.window.append(k, self.transformed(v, self.T_V), [0] * len(k))
        cached = self.keys, self.values
        self.window.flush()
        return tuple(without_gradient(x, k) for x in cached)

    @property
    def keys(self) -> Tensor:
        """All cached keys (b, g, s, d), dequantized; padding that was left out is zero."""
        return self.window.read(0, self.length)

    @property
    def values(self) -> Tensor:
        return self.transformed(self.window.read(1, self.length), self.T_V_inverse)

    def transformed(self, v: Tensor, T: Tensor) -> Tensor:
        return v if self.is_folded else apply(T, v).to(v.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend as WindowCache does, by the padding that the mask shows, which must not change."""
        before = self.length
        if mask is not None and (self.l == 0 or not hasattr(mask, "wush_pad")):      # once for all layers
            mask.wush_pad = left_padding(mask, len(k), before + k.shape[2])
        pad = [0] * len(k) if mask is None else mask.wush_pad
        refuse_if([min(p, before) for p in pad] != [before - n for n in self.window.n],
                  "the mask hides other columns than were padding when they were cached")
        self.length += k.shape[2]
        o = self.window.attend(q, k, self.transformed(v, self.T_V), [max(p - before, 0) for p in pad])
        return without_gradient(self.transformed(o, self.T_V_inverse), q)

    def get_seq_length(self, *args) -> int:
        return self.length

    def get_mask_sizes(self, query) -> tuple[int, int]:
        """Return (length with the new tokens, 0); transformers 5.0 gives the tokens' positions."""
        return self.length + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens: int) -> None:
        """Drop the last −tokens tokens; a positive number is the length to keep, as in transformers 5.0."""
        count = min(-tokens, self.length) if tokens <= 0 else max(self.length - tokens, 0)
        if self.window is not None:
            self.window.crop(count)
        self.length -= count

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.window is not None:
            self.window.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.window is not None:
            self.window.select(torch.arange(len(self.window.n)).repeat_interleave(repeats))

class WushMethods:      # WushCache without its base class, which is imported on first use
    """A transformers Cache in few bits: WushCache(model.config, transforms, bits=2).

    `transforms` come from `calibrate` or `load_transforms`; `refine` says which REFINEMENTS they were made
    with, by default all if they hold feedback, else none. The windows are WindowCache's, `group` is Codec's,
    16 bits is off. Raises ValueError for what it cannot serve.
    """

    def __init__(self, config, transforms: dict[str, Tensor], bits: int = 2, k_bits: int | None = None,
                 v_bits: int | None = None, sink: int = 16, keep: int = 128, flush: int = 16,
                 group: int | None = None, refine: Iterable[str] | None = None):
        c, widths = decoder_config(config), (k_bits or bits, v_bits or bits)
        refuse_if(not {"k", "v"} <= {*transforms}, "the transforms lack those of the keys or of the values")
        refuse_if(not {*widths} <= {*BITS}, f"{widths} bits: they are in {BITS}")
        refuse_if(any(len(t) != c.num_hidden_layers for t in transforms.values()),
                  f"the transforms are of {len(transforms['k'])} layers, the model has {c.num_hidden_layers}")
        if refine is None:
            refine = "all" if "k_feedback" in transforms else "off"
        refine = known_parts(refine)
        group = group or block_size(transforms)
        self.how = dict(transforms=transforms, k_bits=widths[0], v_bits=widths[1], sink=sink, keep=keep,
                        flush=flush, group=group, refine=refine)
        scheme = Scheme(*[refined_codec(b, refine, group) for b in widths], transforms)
        windows = sink, keep, flush
        super().__init__(layers=[WushLayer(c, l, scheme, windows) for l in range(c.num_hidden_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held, spare capacity included."""
        return sum(layer.window.nbytes for layer in self.layers if layer.window is not None)

    def save(self, path: str) -> None:
        """Write everything, transforms too: WushCache.load(path, config) goes on with the same tokens."""
        states = [(layer.length, layer.window and layer.window.state()) for layer in self.layers]
        torch.save({"how": self.how, "layers": states}, path)

    @classmethod
    def load(cls, path: str, config):
        saved = torch.load(path, weights_only=True, map_location="cpu")
        cache = cls(config, **saved["how"])
        for layer, (length, state) in zip(cache.layers, saved["layers"]):
            layer.length = length
            if state:
                layer.lazy_initialization(state["recent"][0])
                layer.window.restore(state)
        return cache

def __getattr__(name: str):
    """Make WushCache, and register attention "wush", when it is first asked for."""
    if name != "WushCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.cache_utils import Cache, CacheLayerMixin
    CacheLayerMixin.register(WushLayer)
    register_attention("wush", wush_attention)
    globals()[name] = type(name, (WushMethods, Cache), {"__doc__": WushMethods.__doc__})
    return globals()[name]


# ------------------------------------------------------------------------------------------------------------
# The command line. A default stands once, in Options, and the flags are made from it.

BUNDLED = Path(__file__).parent / "tiny-qwen3"
DATA_FREE = ["identity", "hadamard"]
COMPARED = dict(error=[*TRANSFORMS], ppl=["hadamard", "oscar", "wush"], report=["hadamard", "oscar", "wush"],
                ablation=[])
DATASETS = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
            "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")}

def option(default, help: str, choices=None, low=-math.inf, high=math.inf):
    return dataclasses.field(default=default, metadata={
        "help": help, "choices": choices and [*choices], "low": low, "high": high})

@dataclasses.dataclass(frozen=True)
class Options:
    model: str = option(str(BUNDLED), "folder or hub id of a Qwen3 or Llama checkpoint (the bundled one)")
    task: str = option("report", "what to do", choices=("calibrate", "generate", *COMPARED))
    bits: int | None = option(None, "bits of keys and values; 2 if no width is given, 16 is off", BITS)
    k_bits: int | None = option(None, "bits of the keys; 2 if only --v-bits is given", BITS)
    v_bits: int | None = option(None, "bits of the values; 2 if only --k-bits is given", BITS)
    group: int | None = option(None, "channels that share a scale and a transform block (a head)", low=4)
    transform: str = option("wush", "transform to generate with and to save", choices=TRANSFORMS)
    refine: str = option("all", "added to the paper's wush: all, off, or of " + ",".join(REFINEMENTS))
    quantizer: str = option("quest", "rule that places the levels", choices=QUANTIZERS)
    clip_k: float = option(0.96, "affine: share of a key group left unclipped", low=0, high=1)
    clip_v: float = option(0.92, "affine: share of a value group left unclipped", low=0, high=1)
    sink: int = option(16, "first tokens kept in model dtype", low=0, high=2 ** 20)
    keep: int = option(128, "last tokens kept in model dtype, at least", low=0, high=2 ** 20)
    flush: int = option(16, "tokens quantized together", low=1, high=2 ** 20)
    calib: str | None = option(None, "calibration text, a file or fineweb-edu (the model folder's calib.txt)")
    calib_seqs: int = option(16, "calibration sequences; the paper takes 128", low=1)
    calib_len: int = option(1024, "tokens of each; the paper takes 32768", low=2)
    eval: str | None = option(None, "evaluation text, a file or wikitext2 (the model folder's eval.txt)")
    eval_seqs: int = option(4, "evaluation sequences", low=1)
    eval_len: int = option(2048, "tokens of each", low=2)
    eval_skip: int = option(0, "tokens of the evaluation text to skip first", low=0)
    transforms: str | None = option(None, "file to read the transforms from instead of calibrating")
    save: str | None = option(None, "file to write the transforms to, for --transforms and for serving")
    prompt: str = option("Tell me where is fancy bred,", "prompt to continue")
    raw: bool = option(False, "take the prompt as it stands, without the chat template")
    thinking: bool = option(False, "let the chat template's thinking mode on")
    max_new_tokens: int = option(64, "tokens to generate at most", low=1)
    temperature: float = option(0.0, "sampling temperature; 0 takes the likeliest token", low=0)
    top_p: float = option(1.0, "sample from the likeliest tokens of this probability", low=0, high=1)
    top_k: int = option(0, "sample from this many likeliest tokens; 0 takes all", low=0, high=2 ** 31)
    seed: int = option(0, "seed of the sampling", low=0, high=2 ** 63)
    yarn: float | None = option(None, "extend the context by this factor with YaRN", low=1, high=1024)
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    dtype: str = option("auto", "of weights and windows; auto is float32 on a CPU, else bfloat16",
                        choices=("auto", "float32", "bfloat16", "float16"))
    json: str | None = option(None, "file to write the figures to as well")

def codecs(o: Options, refine: Iterable[str] = ()) -> list[Codec]:
    """Make the codecs of keys and of values."""
    clips = (o.clip_k, o.clip_v) if o.quantizer == "affine" else (1.0, 1.0)
    return [refined_codec(bits or o.bits or 2, refine, o.group, o.quantizer, clip)
            for bits, clip in zip((o.k_bits, o.v_bits), clips)]

def refinement(o: Options) -> list[str]:
    """List the parts of --refine that apply: to wush and wush_a, and to the affine rule its first two."""
    parts = [part for part in known_parts(o.refine)
             if o.quantizer != "affine" or part in ("feedback", "exponent")]
    return parts if o.transform in ("wush", "wush_a") else []

def wanted(o: Options) -> tuple[dict[str, tuple], str]:
    """Name the schemes that the task needs, with transform and refinements, and the one to generate with."""
    parts = refinement(o)
    served = "refined" if parts else o.transform
    schemes = {name: (name, []) for name in COMPARED.get(o.task, [])}
    if o.task == "ablation":
        schemes = {"paper": []} | {part: [part] for part in parts}
        schemes |= {f"no {part}": [p for p in parts if p != part] for part in parts}
        schemes = {name: (o.transform, chosen) for name, chosen in schemes.items()}
    return schemes | {served: (o.transform, parts)}, served

def check(o: Options) -> None:
    """Refuse what the flags alone show to be wrong."""
    for f in dataclasses.fields(o):
        value, low, high = getattr(o, f.name), f.metadata["low"], f.metadata["high"]
        refuse_if(isinstance(value, int | float) and not low <= value <= high,
                  f"--{f.name.replace('_', '-')} {value} is not between {low} and {high}")
    refinement(o)
    refuse_if(o.bits is not None and (o.k_bits is not None or o.v_bits is not None),
              "--bits sets both sides: give it, or --k-bits and --v-bits")
    refuse_if(o.save and all(codec.bits == 16 for codec in codecs(o)),
              "--save has nothing to write where --bits is 16")
    refuse_if(o.json and o.save and o.json in (o.save, o.save + ".json"),
              "--json and --save, which also writes a .json file, would overwrite each other")
    refuse_if(o.task == "calibrate" and (not o.save or o.transforms),
              "--task calibrate makes transforms: it needs --save FILE and takes no --transforms")
    for path in filter(None, (o.json, o.save, o.save and o.save + ".json")):    # now, not in an hour
        place = Path(path) if Path(path).exists() else Path(path).absolute().parent
        refuse_if(Path(path).is_dir() or not os.access(place, os.W_OK), f"{path} cannot be written")

def parse(argv: list[str] | None) -> Options:
    """Make the flags from Options, and parse them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for f in dataclasses.fields(Options):
        kind, choices = (get_args(f.type) or (f.type,))[0], f.metadata["choices"]       # of int | None: int
        how = {"action": "store_true"} if kind is bool else {"type": kind, "choices": choices}
        shown = "" if f.default in (None, False, str(BUNDLED)) else f" (default: {f.default})"
        name, help = "--" + f.name.replace("_", "-"), f.metadata["help"] + shown
        parser.add_argument(name, default=f.default, help=help, **how)
    return Options(**vars(parser.parse_args(argv)))

def read_text(source: str, tokens: int) -> str:
    """Read a text file, or of a dataset about as much as `tokens` tokens need, rows joined by blank lines."""
    if source not in DATASETS:
        with explained(f"{source} is missing or is not a text file"):
            return Path(source).read_text(encoding="utf-8")
    repo, name, split = DATASETS[source]
    hub(repo, "dataset", "README.md")          # without a network this fails at once, `datasets` after 25 s
    from datasets import load_dataset
    rows, length = [], 0
    for row in load_dataset(repo, name, split=split, streaming=True):
        rows.append(row["text"])
        length += len(row["text"])
        if length > 6 * tokens:                # a token of English is four or five characters
            break
    return "\n\n".join(rows)

def read_tokens(source: str, tokenizer, flag: str, count: int, length: int, skip: int = 0) -> list[Tensor]:
    """Cut `count` sequences of `length` tokens from a text, past `skip` tokens, adding no special tokens."""
    need = skip + count * length
    ids = tokenizer(read_text(source, need), add_special_tokens=False, verbose=False)["input_ids"]
    refuse_if(len(ids) < need, f"{source} has {len(ids)} tokens; {flag}-seqs {count} of {flag}-len {length}"
              + f" after {flag}-skip {skip}" * bool(skip) + f" need {need}")
    return list(torch.tensor(ids[skip:need]).split(length))

def read_tokenizer(folder: Path, config):
    """Load the tokenizer. Raises ValueError if there is none or if it is another model's."""
    files = "tokenizer.json", "tokenizer.model", "vocab.json"
    refuse_if(not any((folder / file).is_file() for file in files), f"{folder} holds no tokenizer.json")
    from transformers import AutoTokenizer
    with explained(f"{folder} holds no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    refuse_if(len(tokenizer) > config.vocab_size,
              f"{folder} has a tokenizer of {len(tokenizer)} entries and a model of {config.vocab_size}")
    return tokenizer

def pick_device(name: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Resolve --device and --dtype. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"there is no device {name!r} here"):
        torch.zeros(1, device=name).item()
    if dtype == "auto":
        dtype = "float32" if name.startswith("cpu") else "bfloat16"
    return torch.device(name), getattr(torch, dtype)

class Job(NamedTuple):
    """What a task works on, all of it checked."""
    options: Options
    model: Model
    tokenizer: object
    schemes: dict[str, Scheme]                 # by name; none at 16 bits
    served: str                                # the scheme to generate with, or "none"
    texts: list[Tensor]                        # evaluation sequences
    prompt: list[int]
    eos: list[int]

def prepare(o: Options) -> Job:
    """Check everything, the cheap before the slow, then load the model and read or derive the transforms."""
    check(o)
    device, dtype = pick_device(o.device, o.dtype)
    small_files = "*.json", "*.txt", "*.model", "*.jinja"
    folder = fetch(o.model, *small_files)
    config = read_config(folder, o.yarn)
    given = load_transforms(o.transforms, config, device) if o.transforms else {}
    made = read_sidecar(o.transforms, given) if given else {}
    o = dataclasses.replace(o, **{key: made[key] for key in made.keys() & SIDECAR})
    refuse_if(o.group and config.head_dim % o.group,
              f"--group {o.group} does not divide the head_dim {config.head_dim}")
    schemes, served = wanted(o)
    if all(codec.bits == 16 for codec in codecs(o)):
        schemes, served = {}, "none"
    elif given:                                # without a calibration only these can be compared with it
        schemes = {name: how for name, how in schemes.items() if name in (*DATA_FREE, served)}
    tokenizer, eos = read_tokenizer(folder, config), end_tokens(folder)
    calibrates = not given and any(transform not in DATA_FREE for transform, _ in schemes.values())
    prompt, texts, calib, source = read_inputs(o, folder, config, tokenizer, bool(schemes), calibrates)
    folder = fetch(o.model, *small_files, "*.safetensors")
    about = {"model": o.model, "fingerprint": fingerprint(folder), "transform": o.transform, "group": o.group,
             "refine": o.refine, "calibration_text": source, "calibration_tokens": sum(map(len, calib))}
    refuse_if(made.get("fingerprint", about["fingerprint"]) != about["fingerprint"],
              f"{o.transforms} was made for {made.get('model')}, other weights than those of {o.model}")
    model = load_model(folder, config, dtype, device)
    derived = [transform for name, (transform, _) in schemes.items() if not given or name != served]
    moments = collect_moments(model, calib, "wush_a" in derived) if derived else {}
    for name, (transform, parts) in schemes.items():
        tensors = given if given and name == served else derive(moments, transform, o.group, parts)
        if o.save and name == served:
            save_transforms(o.save, tensors, about)
        sides = dict(zip("kv", codecs(o, parts)))             # a side of 16 bits needs no transform
        tensors = {key: t for key, t in tensors.items() if sides[key[0]].bits < 16}
        schemes[name] = Scheme(*sides.values(), tensors)
    return Job(o, model, tokenizer, schemes, served, texts, prompt, eos)

def read_inputs(o: Options, folder: Path, config, tokenizer, quantizes: bool, calibrates: bool) -> tuple:
    """Tokenize what the task reads: prompt, evaluation and calibration sequences, their source last."""
    own = lambda file, dataset: str(folder / file) if (folder / file).is_file() else dataset
    most, prompt, texts, calib = config.max_position_embeddings, [], [], []
    fits = lambda what, n: refuse_if(n > most, f"{what}: {n} tokens are over the model's {most} positions")
    source = o.calib or own("calib.txt", "fineweb-edu")
    if o.task in ("report", "generate"):
        prompt = prompt_tokens(tokenizer, o.prompt, o.raw, o.thinking)
        fits("prompt and --max-new-tokens", len(prompt) + o.max_new_tokens)
    if o.task in COMPARED:
        fits("--eval-len", o.eval_len)
        refuse_if(quantizes and o.task != "error" and o.eval_len <= o.sink + o.keep + o.flush,
                  f"--eval-len {o.eval_len} fits into the windows: nothing would be quantized")
        text = o.eval or own("eval.txt", "wikitext2")
        texts = read_tokens(text, tokenizer, "--eval", o.eval_seqs, o.eval_len, o.eval_skip)
    if calibrates:
        fits("--calib-len", o.calib_len)
        calib = read_tokens(source, tokenizer, "--calib", o.calib_seqs, o.calib_len)
    return prompt, texts, calib, source

def serve(job: Job, name: str) -> tuple[Model, Callable]:
    """Return the model, values folded if the scheme quantizes them, and what makes an empty cache for it."""
    o, model, scheme = job.options, job.model, job.schemes.get(name)
    if scheme and "v" in scheme.tensors:
        model = fold_values(model, scheme.tensors["v"])
    return model, partial(new_cache, model, 1, scheme, o.sink, o.keep, o.flush)

def continuation(job: Job, model: Model, cache: list[WindowCache]) -> Iterable[str]:
    """Yield the text that continues the prompt, piece by piece."""
    o, generator = job.options, torch.Generator(model.inv_freq.device).manual_seed(job.options.seed)
    pick = lambda scores: sample(scores, o.temperature, o.top_p, o.top_k, generator)
    tokens = (row[0] for row in decode(model, cache, [job.prompt], o.max_new_tokens, job.eos, pick))
    return stream_text(job.tokenizer, (token for token in tokens if token not in job.eos))

def generate_task(job: Job) -> dict:
    """Print the continuation as it comes."""
    pieces, (model, empty_cache) = [], serve(job, job.served)
    for piece in continuation(job, model, empty_cache()):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return {"text": {job.served: "".join(pieces)}}

def by_figure(scores: dict[str, dict[str, tuple]]) -> dict:
    """Turn {name: {figure: (value, error)}} into {figure: {name: value}, "standard_error": {...}}."""
    value, error = ({figure: {name: None if math.isnan(row[figure][i]) else row[figure][i]
                              for name, row in scores.items()} for figure in scores["none"]} for i in (0, 1))
    return value | {"standard_error": error}

def shown(value: float, error: float) -> str:
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"

def error_task(job: Job, sink: int | None = None) -> dict:
    """Measure and print the module error of every transform."""
    sink = job.options.sink if sink is None else sink
    errors = module_error(job.model, job.texts, job.schemes, sink)
    print(f"module error, relative and squared, {sink} sink tokens exact, no recent window")
    for name, figure in errors.items():
        print(f"    {name:12} {shown(*figure)}")
    return by_figure({name: {"module_error": e} for name, e in ({"none": (0.0, 0.0)} | errors).items()})

def ppl_task(job: Job) -> dict:
    """Measure and print perplexity and divergence of every transform through the windows."""
    o = job.options
    scores = perplexity(job.model, job.texts, job.schemes, o.sink, o.keep, o.flush)
    print(f"through windows {o.sink}/{o.keep}/{o.flush}:")
    print(f"    {'':12} {'perplexity':19} {'excess, nats':19} {'KL, nats':19} same top-1")
    for name, row in scores.items():
        print(f"    {name:12} " + " ".join(f"{shown(*figure):19}" for figure in row.values()).rstrip())
    return by_figure(scores)

def memory_task(job: Job) -> dict:
    """Measure and print what the bfloat16 cache of one evaluation sequence holds."""
    o, c, (k_codec, v_codec) = job.options, job.model.config, codecs(job.options)
    elements = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim          # of a token
    sides = {"k": Side(codec=k_codec), "v": Side(codec=v_codec)}
    keep = o.keep if job.schemes else None
    held = cache_bytes(c, o.eval_len, sink=o.sink, keep=keep, flush=o.flush, **sides)
    short, long = (cache_bytes(c, n, sink=0, keep=0, flush=1, **sides) for n in (4096, 8192))
    packed = 2 * long - short                            # bytes of each further token: the windows drop out
    bits, packed_bits = 8 * held / elements, 8 * packed / elements
    print(f"KV cache, bytes per token: {2 * elements} in 16 bits; {packed:.0f} once packed, with scales "
          f"{packed_bits:.2f} bits an element; {held:.0f} at {o.eval_len} tokens with windows, {bits:.2f}")
    return {"kv_bytes_per_token": held, "effective_bits": bits, "kv_bytes_per_token_none": 2 * elements}

def report_task(job: Job) -> dict:
    """Print the whole story, unquantized and quantized: memory, error, perplexity, speed and text."""
    o, c, (k_codec, v_codec) = job.options, job.model.config, codecs(job.options)
    heads = f"{c.num_attention_heads} query heads, {c.num_key_value_heads} KV heads of {c.head_dim}"
    widths = f"{k_codec.bits}-bit keys, {v_codec.bits}-bit values"
    name = Path(o.model).resolve().name if Path(o.model).is_dir() else o.model
    print(f"{name}: {c.num_hidden_layers} layers, {heads}; {widths}")
    figures, error, ppl = memory_task(job), error_task(job, sink=0), ppl_task(job)      # 0: the paper's
    figures |= error | ppl | {"standard_error": error["standard_error"] | ppl["standard_error"]}
    figures |= {"tokens_per_second": {}, "text": {}}
    context = job.texts[0][:max(c.max_position_embeddings - WARM_UP - STEPS, 1)]
    context = context.to(job.model.inv_freq.device)
    for name in dict.fromkeys(("none", job.served)):
        model, empty_cache = serve(job, name)
        figures["tokens_per_second"][name] = speed = decode_speed(model, empty_cache(), context)
        figures["text"][name] = text = "".join(continuation(job, model, empty_cache()))
        print(f"{name}: {speed:.1f} tokens/s after {len(context)} tokens; the prompt goes on {text!r}")
    return figures

TASKS = {"report": report_task, "calibrate": lambda job: {}, "generate": generate_task, "error": error_task,
         "ppl": ppl_task, "ablation": ppl_task}

def main(argv: list[str] | None = None) -> None:
    start, o = time.perf_counter(), parse(argv)
    try:
        job = prepare(o)
    except (ValueError, OSError) as e:
        sys.exit(f"wush_kv: {e}")
    o = job.options
    figures = {"model": o.model, "bits": o.bits, "k_bits": codecs(o)[0].bits, "v_bits": codecs(o)[1].bits}
    figures |= TASKS[o.task](job)
    figures["seconds"] = time.perf_counter() - start
    if o.json:
        Path(o.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{figures['seconds']:.0f} seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
