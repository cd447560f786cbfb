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
import importlib
import math
import sys
from functools import cache, lru_cache, partial
from typing import Callable, Iterable, NamedTuple

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


# ------------------------------------------------------------------------------------------------------------
# The drawer, wush_tools/, holds what is not the method. It imports this file; only what follows looks there.

DRAWER = {
    "load_model": "checkpoints", "load_transforms": "checkpoints", "read_config": "checkpoints",
    "read_tokenizer": "checkpoints", "read_tokens": "checkpoints",
    "cache_bytes": "evaluate", "module_error": "evaluate", "perplexity": "evaluate",
    "WushCache": "transformers_cache", "calibrate": "transformers_cache",
    "folded_values": "transformers_cache", "shard_transforms": "transformers_cache",
    "BUNDLED": "cli", "Options": "cli", "codecs": "cli",
}

def __getattr__(name: str):
    """Import a name of the drawer when it is first asked for, so that transformers need not be imported."""
    if name not in DRAWER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("wush_tools." + DRAWER[name]), name)


if __name__ == "__main__":
    # This file runs as the module "__main__". Without the second name the drawer would import it once more.
    sys.modules["wush_kv"] = sys.modules[__name__]
    from wush_tools.cli import main
    main()
