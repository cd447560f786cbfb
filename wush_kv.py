"""WUSH-KV: a key-value cache in 2 bits, by one closed-form linear transform per KV head (arXiv 2609.38121).

Rounding a cached key or value makes an error. What matters is not its size but what its consumer makes of it: a
key acts only through q·k, a value only through the output projection. From a short calibration WUSH builds for
each KV head a transform T that balances what is stored against what consumes it, so that plain per-token rounding
of T k (or T v) hurts least among all invertible T.

    calibrate   text  ->  second moments: M of the keys and values, H of their consumers
    derive      M, H  ->  T = c 𝓗 Λ^(-1/4) Uᵀ Lᵀ, per layer and KV head, T_K of the keys and T_V of the values
    fold        T_V   ->  W_V ← T_V W_V and W_O ← W_O T_V⁻¹: at run time the value transform costs nothing
    store       k, v  ->  [sink | 2-bit codes of T_K k and of the folded v | recent], one cache per layer
    attend      q     ->  T_K⁻ᵀ q meets T_K k: (T⁻ᵀq)·(T k) = q·k; one softmax over the three parts

    python wush_kv.py                                     the bundled model, offline (by wush_tools/cli.py)
    python wush_kv.py --model Qwen/Qwen3-8B --bits 2      a real model; --refine off is the paper's encoding

`quantize_kv_cache`, the last function of "Generation", is the whole method on one screen: you may read it first. One
section, "Beyond the paper", gets better codes into the same bytes, by default; the two before it are the paper alone,
with the baselines that it compares with.

Each dimension has one letter, in every shape comment and einsum:

    b batch              l layer                            d head dim
    t query token        g KV head                          n block of the transform
    s cached token       r query head of its KV head        m channel inside a block (d = n·m)
    v vocabulary         h query head (g·R + r, R of each)  D model width

Queries are (b, g, r, t, d), keys and values (b, g, s, d), transforms (l, g, n, m, m), for column vectors.

Left out: training, mixture of experts, sliding windows, paged memory. Models other than Qwen3 and Llama run
through transformers, with the WushCache of wush_tools/transformers_cache.py.
"""
import functools
import importlib.util
import math
import os
import signal
import sys
from pathlib import Path
from typing import Callable, NamedTuple

if __name__ == "__main__":
    # Torch takes seconds to load, and a Ctrl-C in its middle would be a traceback, or be lost: so it ends the process at
    # once. The last lines of this file put the usual handler back.
    usual_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

HERE = Path(__file__).resolve().parent

def load_kernels():
    """Load kernels.py from beside this file, by its path: Hugging Face publishes a package of the same name."""
    spec = importlib.util.spec_from_file_location("wush_kernels", HERE / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

kernels = sys.modules.get("wush_kernels") or load_kernels()


# ----------------------------------------------------------------------------------------------------------------
# Transforms
#
# What is stored (keys, or values) has a second moment M, the Gram matrix; what consumes it (queries, or the
# output projection) has a second moment H, the Hessian of the squared error that the consumer sees. A rule maps
# these two to a transform T: the cache stores T k, rounded, and the query becomes T⁻ᵀ q, which leaves every score
# as it was. Rounding adds noise to T k, of about the same power σ² in every channel. Read back as k, the noise has
# gone through T⁻¹, and costs the consumer σ² tr(T⁻ᵀ H T⁻¹). The step follows each token's RMS, so σ² in turn is
# proportional to the energy of T k, tr(T M Tᵀ). The damage is thus tr(T M Tᵀ) · tr(T⁻ᵀ H T⁻¹), up to a constant,
# and WUSH minimizes exactly this product. Moments are (..., g, d, d) and transforms (..., g, n, m, m): with m < d,
# each diagonal block gets its own T.

def hadamard(order):
    """Build the normalized Sylvester-Hadamard matrix 𝓗 (order, order), float64: symmetric, 𝓗 𝓗 = I.

    Raises ValueError unless the order is a power of two.
    """
    if order < 1 or order & (order - 1):
        raise ValueError(
            f"there is no Hadamard matrix of order {order} here: the order must be a power of two")
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < order:
        upper = torch.cat([H, H], 1)
        lower = torch.cat([H, -H], 1)
        H = torch.cat([upper, lower])
    return H / math.sqrt(order)

def block_width(d, m):
    """Return m, or d if m is None. Raises ValueError for blocks of m channels that do not divide d."""
    m = d if m is None else m
    if not hasattr(m, "__index__") or m < 1 or d % m:            # also numpy's whole numbers have it
        raise ValueError(f"blocks are of whole numbers of channels: {m!r} do not divide {d}")
    return m

def diagonal_blocks(S, m=None):
    """Cut moments (..., d, d) into diagonal blocks (..., n, m, m), float64; m = None keeps them whole.

    Raises ValueError for blocks that do not divide d and for moments that are not finite.
    """
    d = S.shape[-1]
    m = block_width(d, m)
    if not S.isfinite().all():
        raise ValueError(
            "the calibration moments hold NaN or infinity: no transform follows from them")
    starts = range(0, d, m)
    blocks = [S[..., i:i + m, i:i + m] for i in starts]
    return torch.stack(blocks, -3).double()

def mean_diagonal(S):
    """Return tr(S)/m of each matrix (..., m, m), as (..., 1, 1)."""
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]

def normalized(M, H):
    """Scale both moments to mean diagonal 1; where one of them is zero, both become the identity."""
    I = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    is_zero = (mean_diagonal(M) == 0) | (mean_diagonal(H) == 0)
    M = torch.where(is_zero, I, M / mean_diagonal(M))
    H = torch.where(is_zero, I, H / mean_diagonal(H))
    return M, H

def eigenvectors(S):
    """Decompose symmetric S (..., m, m) = U Λ Uᵀ, weakest first: Λ (..., m) and U, with the same signs everywhere.

    An eigenvector's sign is arbitrary, and each LAPACK library chooses its own. The loss that `wush` minimizes does not
    depend on it, but the rounding of a single token does. So each eigenvector is turned to where its components,
    weighted by √1, √2, √3, ... so that they cannot well cancel, have a positive sum.
    """
    Λ, U = torch.linalg.eigh(S)
    weights = torch.arange(1, S.shape[-1] + 1, dtype=S.dtype, device=S.device).sqrt()
    is_turned = (weights[:, None] * U).sum(-2, keepdim=True) < 0
    return Λ, torch.where(is_turned, -U, U)

def wush(gram, hess, m=None, damping=1e-2, exponent=0.25):
    """Derive T = c 𝓗 Λ^(-1/4) Uᵀ Lᵀ, block by block (arXiv 2609.38121, section 3).

        L Lᵀ   = H + γ I
        U Λ Uᵀ = Lᵀ (M + γ I) L
        c      : tr(T M Tᵀ) = tr(M)

    M and H are first scaled to mean diagonal 1: T does not depend on their scale. Among all invertible T this one,
    with the exponent 1/4, makes tr(T M Tᵀ) · tr(T⁻ᵀ H T⁻¹) of the damped moments smallest; damping keeps it well
    conditioned, whatever the calibration text. Where M or H is zero, T = 𝓗. The scalar c
    changes nothing but the numbers' range, as the step of each token follows its RMS.
    """
    M, H = normalized(diagonal_blocks(gram, m), diagonal_blocks(hess, m))
    I = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)

    # After Lᵀ the consumer feels noise alike in every direction. There, rotate onto the principal axes of what is stored.
    L = torch.linalg.cholesky(H + damping * I)
    Λ, U = eigenvectors(L.mT @ (M + damping * I) @ L)

    # Scaled by a, an axis has the energy a²λ, and noise on it costs 1/a². At a = λ^(-1/4) both are √λ, which makes the
    # product of the sums over all axes smallest (Cauchy-Schwarz). 𝓗 leaves these sums as they are and spreads every
    # axis over all channels: now each channel has the same energy and the same cost, so that one step suits them all.
    balance = Λ[..., None] ** -exponent
    T = hadamard(M.shape[-1]).to(M) @ (balance * U.mT) @ L.mT

    c = (mean_diagonal(M) / mean_diagonal(T @ M @ T.mT)).sqrt()
    return c * T

def identity(gram, hess, m=None):
    """Leave every block as it is."""
    M = diagonal_blocks(gram, m)
    return torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)

def rotate(gram, hess, m=None):
    """Rotate every block by 𝓗, as QuaRot does and, in practice, TurboQuant."""
    M = diagonal_blocks(gram, m)
    return hadamard(M.shape[-1]).to(M).expand_as(M)

def oscar(gram, hess, m=None):
    """Rotate onto the eigenvectors U of `hess`, then spread: T = (U P 𝓗)ᵀ, orthogonal (arXiv 2605.17757).

    Other rules cut T into blocks of m channels. OSCAR's T is one block of all d channels, and m only says how many of
    them will share a scale (a group): P deals the eigenvectors out to these groups, and 𝓗 mixes the channels of each.
    `hess` is averaged over the heads, so all heads of a layer share this T: (..., g, 1, d, d). For the values, OSCAR's
    `hess` is a moment of the values themselves, weighted by how much attention may turn to them (`oscar_weight`).
    """
    d = hess.shape[-1]
    m = block_width(d, m)
    if d & (d - 1):
        raise ValueError(f"OSCAR deals out a power of two of eigenvectors, not {d}")
    mean_hess = diagonal_blocks(hess).squeeze(-3).mean(-3)
    U = eigenvectors(mean_hess)[1].flip(-1)                      # strongest first

    # P is the bit-reversed order: strong and weak eigenvectors spread evenly over the groups.
    digits = d.bit_length() - 1
    binary = [f"{i:0{digits}b}" for i in range(d)]
    bit_reversed = [int(number[::-1], 2) for number in binary]
    rotation = torch.block_diag(*[hadamard(m)] * (d // m)).to(U)
    T = (U[..., bit_reversed] @ rotation).mT

    return T[..., None, None, :, :].expand(*hess.shape[:-2], 1, d, d)

class TransformRow(NamedTuple):
    """A row of TRANSFORMS: a rule, and what else its name stands for. A new transform is its rule and one row."""
    rule: Callable                                           # (gram, hess, m) -> T
    key_moments: tuple[str, str] = ("keys", "queries")       # `collect_moments`' names of the keys' M and H,
    value_moments: tuple[str, str] = ("values", "outputs")   # and of the values'
    needs_calibration: bool = True        # whether T depends on the moments at all
    is_attention_aware: bool = False      # whether its moments include those of `attention_sensitivity`
    is_compared: bool = False             # whether the report and the perplexity table show it
    can_be_refined: bool = False          # whether "Beyond the paper" applies to it

TRANSFORMS = {
    "identity": TransformRow(identity, needs_calibration=False),
    "hadamard": TransformRow(rotate, needs_calibration=False, is_compared=True),
    "oscar": TransformRow(oscar, value_moments=("values", "values_oscar"), is_compared=True),
    "wush": TransformRow(wush, is_compared=True, can_be_refined=True),
    "wush_a": TransformRow(
        wush,
        key_moments=("keys", "queries_attention"),
        value_moments=("values", "outputs_attention"),
        is_attention_aware=True,
        can_be_refined=True),
}

def apply(T, x):
    """Apply T (g, n, m, m) to the last axis of x (b, g, ..., d), in T's dtype; None leaves x as it is."""
    if T is None:
        return x
    blocks = x.to(T.dtype).unflatten(-1, T.shape[1:3])                       # (b, g, ..., n, m)
    return torch.einsum("gnij,bg...nj->bg...ni", T, blocks).flatten(-2)

def inverse_transpose(T):
    """Return T⁻ᵀ, inverted in float64: what a query goes through when its keys go through T."""
    return torch.linalg.inv(T.double()).mT.to(T.dtype).contiguous()


# ----------------------------------------------------------------------------------------------------------------
# Quantizers
#
# A group is the channels of one token and one KV head that share a scale and an offset: m of them, by default the
# whole head. A rule places 2^b evenly spaced levels for each group, as two numbers: code c stands for
# scale · c + offset. Both are rounded to bfloat16 first, and the codes are then rounded against this stored pair, so
# that the reader of the cache has the very same levels. QuEST's rule is the theory's (levels for Gaussian data), the
# percentile-clipped affine rule is what OSCAR serves with.

@functools.cache
def gaussian_clip(bits):
    """Find QuEST's α_b: 2^b even levels on ±α_b have the least squared error on N(0, 1) (arXiv 2502.05003).

    With levels α u, the derivative of that error is −2 E[(x − Q(x)) u]. The loop sums E[(x − Q(x)) u] cell by cell: it is
    positive below α_b and negative above.
    """
    u = torch.linspace(-1, 1, 2 ** bits, dtype=torch.float64)
    far = torch.tensor([40.0], dtype=torch.float64)
    low = 0.1
    high = 10.0
    for _ in range(60):
        alpha = (low + high) / 2

        # The cell of a level is what rounds to it: its probability, and the integral of x over it.
        midpoints = alpha * (u[1:] + u[:-1]) / 2
        edges = torch.cat([-far, midpoints, far])
        density = (-edges ** 2 / 2).exp() / math.sqrt(2 * math.pi)
        integral = -density.diff()                           # as ∫ x φ(x) dx = −φ(x)
        mass = torch.special.ndtr(edges).diff()

        missed = integral - alpha * u * mass                 # E[x − Q(x)] in each cell
        if (u * missed).sum() > 0:
            low = alpha
        else:
            high = alpha
    return alpha

# Where `quantize` is compiled, this is a number of the graph: torch.compiler.assume_constant_result marks it like this, but
# imports the compiler first, which takes seconds and fails without a cache folder.
gaussian_clip.__wrapped__._dynamo_marked_constant = True

def mean_over_channels(x):
    """Return the mean of the last axis, summed in float64: it rounds alike in any order, so also in the kernel."""
    return x.mean(-1, dtype=torch.float64).to(x.dtype)

def quest(x, bits, clip=1.0):
    """Place 2^b even levels on ±clip·α_b·RMS(x): with clip = 1 the best such grid for Gaussian data."""
    # Dividing by the largest value keeps the squares from under- or overflowing.
    largest = x.abs().amax(-1)
    unit = x / largest.clamp(min=torch.finfo(x.dtype).tiny)[..., None]
    rms = largest * mean_over_channels(unit.square()).sqrt()

    alpha = clip * gaussian_clip(bits)
    return rms * (2 * alpha / (2 ** bits - 1)), rms * -alpha

def clip_rank(clip, m):
    """Return ⌊clip·m⌋, at most m − 1: which of a group's m sorted |x|, counted from 0, is the affine rule's τ."""
    return min(int(clip * m), m - 1)

def affine(x, bits, clip=1.0):
    """Place 2^b even levels from min to max of x clamped to ±τ, τ of `clip_rank` (arXiv 2605.17757)."""
    rank = clip_rank(clip, x.shape[-1])
    tau = x.abs().kthvalue(rank + 1).values[..., None]
    low, high = x.clamp(-tau, tau).aminmax(dim=-1)
    return (high - low) / (2 ** bits - 1), low

def quest_kernel_numbers(bits, clip, m):
    """Return what kernels.encode needs to know to place `quest`'s levels; below the same for `affine`."""
    alpha = clip * gaussian_clip(bits)
    return {"alpha": alpha}

def affine_kernel_numbers(bits, clip, m):
    return {"rank": clip_rank(clip, m)}

class QuantizerRow(NamedTuple):
    """A row of QUANTIZERS: a rule, and what else its name stands for. A new quantizer is its rule and one row."""
    rule: Callable                            # (x (..., m), bits, clip) -> scale, offset (...)
    kernel_numbers: Callable | None = None    # (bits, clip, m) -> for kernels.encode; None: only torch
    key_clip: float = 1.0                     # the rule's `clip` for keys
    value_clip: float = 1.0                   # and for values
    can_widen: bool = False                   # whether levels may lie further apart than the rule says

QUANTIZERS = {
    "quest": QuantizerRow(quest, quest_kernel_numbers, can_widen=True),
    "affine": QuantizerRow(affine, affine_kernel_numbers, key_clip=0.96, value_clip=0.92),
}
BITS = (2, 3, 4, 8, 16)      # 16 is off: nothing is rounded

class Codec(NamedTuple):
    """How the keys, or the values, are quantized."""
    bits: int = 2
    quantizer: str = "quest"      # a name of QUANTIZERS
    clip: float = 1.0             # quest: times α_b; affine: the share κ of channels left unclipped
    group: int | None = None      # channels that share a scale and an offset; None: all of a head

def stored_pair(scale, offset):
    """Round a scale and an offset to bfloat16. A scale of zero becomes the smallest normal number instead."""
    return scale.bfloat16().clamp(min=torch.finfo(torch.bfloat16).tiny), offset.bfloat16()

FAR = 2.0 ** 36      # far from every level; products and sums of squares of such numbers do not overflow

def in_steps(groups, scale, offset):
    """Measure groups (..., m) in steps from the lowest level: whole numbers are the levels themselves."""
    steps = (groups - offset.float()[..., None]) / scale.float()[..., None]
    return steps.clamp(-FAR, FAR)        # of a large constant, rounding moves the offset by any number of tiny steps

def nearest_code(steps, bits):
    """Round to the nearest of the levels 0 .. 2^b − 1, still in floating point."""
    return steps.round().clamp(0, 2 ** bits - 1)

def quantize(x, codec):
    """Quantize x (..., d): codes (..., d) uint8 in [0, 2^b − 1], scale and offset (..., d/group) bfloat16."""
    rule = QUANTIZERS[codec.quantizer].rule
    groups = x.float().unflatten(-1, (-1, codec.group or x.shape[-1]))
    scale, offset = stored_pair(*rule(groups, codec.bits, codec.clip))
    codes = nearest_code(in_steps(groups, scale, offset), codec.bits)
    return codes.byte().flatten(-2), scale, offset

def dequantize(codes, scale, offset):
    """Read codes (..., d) back as scale·code + offset, in float32, the product rounded before the sum."""
    groups = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    products = scale.float()[..., None] * groups
    return products.add_(offset.float()[..., None]).flatten(-2)


# ----------------------------------------------------------------------------------------------------------------
# Beyond the paper
#
# The bytes and their reader stay as they are, but the codes are chosen better. An error δ of T x costs δᵀ H' δ
# with H' = T⁻ᵀ H T⁻¹, so errors of different channels can cancel. Four changes work together; PAPER switches them
# all off.
#
#     feedback   Each channel's rounding error is pushed onto the channels that are not yet rounded, as GPTQ does for
#                weights. Then each code moves again, to where it costs least beside all others: coordinate descent.
#                There, an error that shrinks or stretches a key along its own direction costs more (`own_direction`).
#     exponent   Which transform is best depends on what rounding costs. An axis of T, scaled by a, has the energy a²λ,
#                and noise on it costs 1/a². Plain rounding pays (Σ a²λ) · (Σ 1/a²), smallest at a = λ^(-1/4). With
#                feedback, channel i costs 1/C_ii² (`feedback_matrix`), and the product of all these is det H' = Π 1/a².
#                At best they are equal, each the geometric mean of all 1/a², which takes the place of Σ 1/a². It depends
#                only on the product of all a, and for a given product Σ a²λ is smallest where all a²λ are equal:
#                a = λ^(-1/2). In between, 0.4 was measured to be best at 2 to 4 bits.
#     offset     The levels of a token are placed about the mean of T x over its channels, and when the codes are known,
#                they move by the mean error. They are *centred*: T x keeps its mean almost exactly, for free. So this
#                mean should be the strongest part of x. T = 𝓗 A spreads the axes, the rows of A, over the m channels;
#                𝓗's columns sum to zero but for the first, whose entries are all 1/√m. Hence the mean of T x is the
#                first entry of A x, over √m: the strongest axis is put first.
#     widen      Levels lie further apart, so that less is clipped. Clipping shrinks a key's scores, and that hurts
#                more than noise does.

class Refine(NamedTuple):
    """Which refinements are on; an ablation is a `_replace`."""
    feedback: bool = True
    exponent: float = 0.4      # of 1/Λ
    offset: bool = True        # whether levels are centred, and T's axes reversed to suit (`strongest_first`)
    widen: bool = True

REFINED = Refine()
PAPER = Refine(feedback=False, exponent=0.25, offset=False, widen=False)
WIDENED = {2: 1.3, 3: 1.15, 4: 1.1}      # α_b times this, by bits; found on SmolLM2-135M
SWEEPS = 1                               # a second one gains 1 to 4 % of KL
OWN_DIRECTION = 0.5                      # of keys, see `own_direction`; found on SmolLM2-135M

def strongest_first(T):
    """Reverse the order of the axes, the rows of A in T = 𝓗 A (..., m, m): of `wush`'s, the strongest is the last."""
    rotation = hadamard(T.shape[-1]).to(T)
    axes = rotation @ T                                      # 𝓗 𝓗 = I leaves A
    return rotation @ axes.flip(-2)

def error_hessian(T, hess, centred=False, damping=1e-2):
    """Return H' = T⁻ᵀ H T⁻¹ (..., n, m, m), float64: an error δ of T x costs δᵀ H' δ.

    If the levels are `centred`, the offset takes up the mean of δ over the channels, so H' is first projected off this
    direction. Damping comes last, and keeps H' invertible. A zero H' becomes I.
    """
    m = T.shape[-1]
    I = torch.eye(m, dtype=torch.float64, device=T.device)
    T_inverse = torch.linalg.inv(T.double())
    H = T_inverse.mT @ diagonal_blocks(hess, m) @ T_inverse
    if centred:
        without_mean = I - 1 / m                             # I − 1 1ᵀ/m
        H = without_mean @ H @ without_mean
    size = mean_diagonal(H)
    return torch.where(size == 0, I, H + damping * size * I)

def in_score_units(hess, moments):
    """Scale a Hessian of keys (l, g, d, d) so that δᵀ H δ is, on average over directions of δ, (q·δ)²/d: in scores squared.

    T does not depend on its scale, but `own_direction` does. Only the scale is changed, as `hess` may be shrunk, or WUSH-A's.
    """
    d = hess.shape[-1]
    score_moment = moments["queries"] / (2 * max(moments["n_queries"], 1) * d)       # "queries" is 2 Σ q qᵀ
    smallest = torch.finfo(hess.dtype).tiny
    return hess / mean_diagonal(hess).clamp(min=smallest) * mean_diagonal(score_moment)

def feedback_matrix(H):
    """Derive F (..., m, m), strictly upper, from H' (..., m, m): once channel i is rounded, y_j −= e_i F_ij for all j > i.

    Here e_i is what rounding channel i misses by, after all pushes onto it. The reader finds channel j wrong by δ_j: by
    e_j, and by what was pushed onto it. So δ_j = e_j + Σ_{i<j} e_i F_ij, or δ = (I + F)ᵀ e, and the reader pays

        δᵀ H' δ = eᵀ (I + F) H' (I + F)ᵀ e

    Factor H'⁻¹ = CᵀC with C upper (Cholesky); then C H' Cᵀ = I. Divide each row of C by its C_ii, and call that I + F: now
    (I + F) H' (I + F)ᵀ is diagonal, and the reader pays Σ e_i² / C_ii², each error for itself. This F moves the channels
    to come to where the cost is least (GPTQ, arXiv 2210.17323; Babai's nearest plane, arXiv 2507.18553). Without
    feedback the reader pays Σ e_i² H'_ii on average, and 1/C_ii² ≤ H'_ii.
    """
    C = torch.linalg.cholesky(torch.linalg.inv(H.double()), upper=True)
    return (C / C.diagonal(dim1=-2, dim2=-1)[..., None]).triu(1)

def feed_back(steps, bits, F):
    """Round steps (..., m, s) channel by channel, pushing errors on by F (..., m, m): codes, in floating point."""
    y = steps.clone()
    codes = []
    for i, channel in enumerate(y.unbind(-2)):
        code = nearest_code(channel, bits)
        error = channel - code
        later = y[..., i + 1:, :]
        push = F[..., i, i + 1:, None]
        later.addcmul_(push, error[..., None, :], value=-1)
        codes.append(code)
    return torch.stack(codes, -2)

def own_direction(y, H, weight):
    """Return u (b, g, s, n, m) for transformed keys y = T k: an error δ of y costs (uᵀ δ)² beside δᵀ H' δ.

    H = E[q qᵀ]/d, in score units, counts all queries alike. But those that look for k are those near it. Let q/√d be
    normal with the covariance H, and weigh each query by the probability ∝ exp(q·k/√d) that it gives to k: as
    exp(−½ xᵀH⁻¹x + xᵀk) is a normal density around H k, the mean of q/√d is now H k, and the covariance is still H. To
    these queries an error ε of k costs εᵀ H ε + (kᵀ H ε)²: noise costs what it did, but what shrinks the key costs them
    all score. With ε = T⁻¹ δ the second term is (yᵀ H' δ)², so u = H' y, with weight 1 by this argument. Queries are not
    quite normal: a `weight` of ½ was measured to be better.
    """
    u = torch.einsum("gnij,bgsnj->bgsni", H, y) * math.sqrt(weight)
    return u.clamp(-FAR, FAR)

def sweep(codes, steps, bits, H, u=None):
    """Move each code in turn to where it costs least beside all others. All are (..., m, s), H' is (..., m, m).

    With e = codes − steps and g = H' e, the cost eᵀ H' e is a parabola in code i alone, lowest at code_i − g_i / H'_ii. The
    level nearest to there is the best one, so no move raises the cost. With u the cost is eᵀ H' e + (uᵀ e)².
    """
    gradient = H @ (codes - steps)
    curvatures = H.diagonal(dim1=-2, dim2=-1)[..., None].expand_as(codes)
    if u is not None:
        shrinkage = (u * (codes - steps)).sum(-2)            # uᵀ e
        curvatures = curvatures + u.square()
        directions = u.unbind(-2)

    moved = []
    channels = zip(codes.unbind(-2), gradient.unbind(-2), curvatures.unbind(-2), H.unbind(-1))
    for i, (code, slope, curvature, H_column) in enumerate(channels):
        if u is not None:
            slope = slope + directions[i] * shrinkage
        moved.append(nearest_code(code - slope / curvature, bits))
        move = moved[i] - code
        gradient.addcmul_(H_column[..., None], move[..., None, :])
        if u is not None:
            shrinkage.addcmul_(directions[i], move)
    return torch.stack(moved, -2)

def search(steps, bits, H, F, u=None):
    """Choose the codes of steps (b, g, s, n, m): rounded with feedback F, then swept over with H', (g, n, m, m) each."""
    # (b, g, n, m, s): the tokens of one channel lie side by side.
    steps = steps.movedim(2, -1).contiguous()
    if u is not None:
        u = u.movedim(2, -1).contiguous()
    codes = feed_back(steps, bits, F)
    for _ in range(SWEEPS):
        codes = sweep(codes, steps, bits, H, u)
    return codes.movedim(-1, 2)

def quantize_refined(x, codec, H=None, F=None, centred=False, own=0.0):
    """As `quantize`, of x (b, g, s, d); with H' and F (g, n, m, m) the codes are searched, not just rounded.

    `own` is the weight of `own_direction`, for keys. If `centred`, the levels are placed about each group's mean, and at
    last the offset takes up the mean error.
    """
    rule = QUANTIZERS[codec.quantizer].rule
    groups = x.float().unflatten(-1, (-1, codec.group or x.shape[-1]))
    if centred:
        mean = mean_over_channels(groups)
        scale, offset = rule(groups - mean[..., None], codec.bits, codec.clip)
        offset = offset + mean
    else:
        scale, offset = rule(groups, codec.bits, codec.clip)
    scale, offset = stored_pair(scale, offset)

    steps = in_steps(groups, scale, offset)
    u = own_direction(groups, H, own) if own else None
    if H is None:
        codes = nearest_code(steps, codec.bits)
    else:
        codes = search(steps, codec.bits, H, F, u)
    codes = codes.byte().flatten(-2)

    # The codes stay. Moving all levels of a group by its mean error takes that error away.
    if centred:
        read = dequantize(codes, scale, offset)
        missed = groups - read.unflatten(-1, groups.shape[-2:])
        offset = (offset.float() + mean_over_channels(missed)).bfloat16()
    return codes, scale, offset


# ----------------------------------------------------------------------------------------------------------------
# Schemes
#
# What is decided, in which order, and what holds it; each noun has one object for the keys and one for the
# values:
#
#     moments, a rule, Refine, group   ->  Transforms: two of Basis, which is T, and H' if codes are searched with it
#     Transforms, bits, a quantizer    ->  Scheme: two of Encoding, which is T, H', F, a Codec, and whether it is centred
#
# Transforms serve every number of bits, and a file holds them. A scheme says all about what a cache stores.

class Basis(NamedTuple):
    """What the keys, or the values, are transformed by, in float32."""
    transform: Tensor                  # T (l, g, n, m, m)
    hessian: Tensor | None = None      # H', alike, if codes are searched
    harm: Tensor | None = None         # (l,), what 2 bits do to the model's output in each layer alone, if measured

class Transforms(NamedTuple):
    """What a calibration is for, and what a transforms file holds."""
    keys: Basis
    values: Basis
    refine: Refine = PAPER
    group: int | None = None           # channels that share a scale; None: all of a head

class Encoding(NamedTuple):
    """How the keys, or the values, are stored: of all layers, or of one."""
    codec: Codec | list[Codec] = Codec(bits=16)      # a list has one for each layer
    transform: Tensor | None = None    # T (l, g, n, m, m), or of a layer (g, n, m, m)
    hessian: Tensor | None = None      # H', alike
    feedback: Tensor | None = None     # F, alike
    centred: bool = False              # see `quantize_refined`
    own: float = 0.0                   # the weight of `own_direction`, for keys

    def layer(self, l, device=None):
        """Return layer l's encoding, its tensors on `device`."""
        of_layer = {}
        if isinstance(self.codec, list):
            of_layer["codec"] = self.codec[l]
        for name in ("transform", "hessian", "feedback"):
            tensor = getattr(self, name)
            if tensor is not None:
                of_layer[name] = tensor[l].to(device)
        return self._replace(**of_layer)

class Scheme(NamedTuple):
    """How a model's cache is stored: the encodings of its keys and of its values."""
    keys: Encoding = Encoding()
    values: Encoding = Encoding()

    def layer(self, l, device=None):
        return Scheme(self.keys.layer(l, device), self.values.layer(l, device))

    def folded(self):
        """Return the scheme for a model whose values come out transformed already."""
        return self._replace(values=self.values._replace(transform=None))

def check_name(name, table):
    """Refuse a name that is not in TRANSFORMS or QUANTIZERS."""
    if name not in list(table):
        raise ValueError(f"{name!r} is not one of {', '.join(table)}")

def check_refine(refine):
    if not isinstance(refine, Refine):
        raise ValueError(f"refine is a Refine, such as REFINED or PAPER, not {refine!r}")

def shrunk(S, tokens, damping=1e-2):
    """Raise the damping of a moment (..., d, d) of few tokens to d/tokens of its mean diagonal.

    `wush` itself damps by 1/100, so from 100·d tokens on this adds nothing. The fewer the tokens, the more T gets like
    the transform of moments of which nothing is known.
    """
    # Differs from the paper: it calibrates on 4 million tokens, where this is nothing.
    d = S.shape[-1]
    few = max(0.0, d / max(tokens, 1) - damping)
    return S + few * mean_diagonal(S) * torch.eye(d, dtype=S.dtype, device=S.device)

def derive_basis(row, gram, hess, refine, group):
    """Derive T by a row of TRANSFORMS, and what `refine` adds to it."""
    if not row.can_be_refined:
        return Basis(row.rule(gram, hess, group).float().contiguous())
    T = row.rule(gram, hess, group, exponent=refine.exponent)
    if refine.offset:
        T = strongest_first(T)
    H = None
    if refine.feedback:
        H = error_hessian(T, hess, centred=refine.offset).float().contiguous()
    return Basis(T.float().contiguous(), H)

def derive(moments, transform="wush", refine=REFINED, group=None):
    """Derive a model's transforms from `collect_moments`' moments. `refine` is for those that can be refined."""
    check_name(transform, TRANSFORMS)
    check_refine(refine)
    row = TRANSFORMS[transform]
    if not row.can_be_refined:
        refine = PAPER

    # Moments of few tokens are shrunk; "outputs" is one of weights, and is known exactly.
    believed = {}
    for name in row.key_moments + row.value_moments:
        believed[name] = moments[name]
        if name != "outputs":
            believed[name] = shrunk(moments[name], moments["tokens"])

    keys_gram, keys_hess = [believed[name] for name in row.key_moments]
    values_gram, values_hess = [believed[name] for name in row.value_moments]
    keys = derive_basis(row, keys_gram, in_score_units(keys_hess, moments), refine, group)
    values = derive_basis(row, values_gram, values_hess, refine, group)
    return Transforms(keys, values, refine, group)

def is_average(bits):
    """Say whether bits are a fraction between 2 and 4, which layers can only have on average."""
    return isinstance(bits, float) and 2 < bits < 4 and bits != 3

def bits_of_sides(bits):
    """Return (key bits, value bits), also of numpy's or torch's. Raises ValueError for widths that there are not."""
    sides = tuple(bits) if isinstance(bits, (tuple, list)) else (bits, bits)
    numbers = [x.tolist() if hasattr(x, "tolist") else x for x in sides]
    if len(numbers) != 2 or any(type(x) is not int or x not in BITS for x in numbers):
        widths = ", ".join(map(str, BITS))
        raise ValueError(f"bits are one of {widths}, or two, of keys and of values, not {bits!r}")
    return tuple(numbers)

def allot_bits(key_harm, value_harm, bits):
    """Give the keys and the values of each layer 2, 3 or 4 bits, `bits` on average: (of the layers' keys, of the values).

    The next bit always goes to where it takes most harm (l,) away: a bit more quarters the power of the noise, and what
    the noise does to the output is taken to follow it.
    """
    harm = torch.stack([key_harm, value_harm]).double()
    widths = torch.full_like(harm, 2)
    for _ in range(math.floor((bits - 2) * harm.numel())):
        gain = harm / 4 ** (widths - 2) + torch.finfo(harm.dtype).tiny       # a layer without harm comes last
        gain[widths == 4] = 0
        widths.view(-1)[gain.argmax()] += 1
    key_bits, value_bits = widths.int().tolist()
    return key_bits, value_bits

def make_codec(bits, quantizer, clip, refine, group):
    """Combine a number of bits, or a list of the layers', with a quantizer."""
    if isinstance(bits, list):
        return [make_codec(width, quantizer, clip, refine, group) for width in bits]
    if refine.widen and QUANTIZERS[quantizer].can_widen:
        clip *= WIDENED.get(bits, 1.0)
    return Codec(bits, quantizer, clip, group)

def make_encoding(basis, bits, quantizer, clip, refine, group, own=0.0):
    """Combine a basis with a number of bits and a quantizer. What is not rounded, at 16 bits, needs no transform."""
    if bits == 16:
        return Encoding(Codec(16))
    codec = make_codec(bits, quantizer, clip, refine, group)
    if basis.hessian is None:
        return Encoding(codec, basis.transform, centred=refine.offset)
    F = feedback_matrix(basis.hessian).float().contiguous()
    return Encoding(codec, basis.transform, basis.hessian, F, refine.offset, own)

def scheme_of(transforms, bits=2, quantizer="quest"):
    """Choose bits and a quantizer for a model's transforms.

    `bits` are a number of BITS, or (of keys, of values); or a fraction between 2 and 4, an average for `allot_bits`.
    """
    check_name(quantizer, QUANTIZERS)
    if is_average(bits):
        harms = [basis.harm for basis in (transforms.keys, transforms.values)]
        if None in harms:
            raise ValueError(
                f"{bits} bits are an average over layers, and nothing says which layers need more: "
                "measure_harm, of wush_tools/evaluate.py, measures it")
        key_bits, value_bits = allot_bits(*harms, bits)
    else:
        key_bits, value_bits = bits_of_sides(bits)
    row = QUANTIZERS[quantizer]
    refine, group = transforms.refine, transforms.group
    keys = make_encoding(
        transforms.keys, key_bits, quantizer, row.key_clip, refine, group, OWN_DIRECTION)
    values = make_encoding(transforms.values, value_bits, quantizer, row.value_clip, refine, group)
    return Scheme(keys, values)

def make_scheme(
        moments,
        transform="wush",
        bits=2,
        refine=REFINED,
        group=None,
        quantizer="quest"):
    """Go from a model's moments to the scheme of its cache."""
    return scheme_of(derive(moments, transform, refine, group), bits, quantizer)

def transform_and_quantize(x, encoding):
    """Transform and quantize x (b, g, s, d): codes, scale and offset, as `quantize` returns them."""
    y = apply(encoding.transform, x)
    codec, _, H, F, centred, own = encoding
    if H is None and not centred:
        return quantize(y, codec)
    return quantize_refined(y, codec, H, F, centred, own)

def roundtrip(x, encoding):
    """Return what the cache's reader sees of x (b, g, s, d): T⁻¹ dequantize(quantize(T x)), in x's dtype."""
    if encoding.codec.bits == 16:
        return x
    y = dequantize(*transform_and_quantize(x, encoding))
    T = encoding.transform
    T_inverse = None if T is None else inverse_transpose(T).mT
    return apply(T_inverse, y).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------
# Window cache
#
# The cache of one layer is [sink | packed | recent]: the first tokens and the most recent ones stay in model
# dtype, those between are packed codes. New tokens enter the recent window; when it reaches keep + flush tokens,
# its oldest `flush` tokens are encoded together, once, and never touched again. Keys enter after RoPE and are
# transformed when they are encoded; values enter transformed already, by the folded weights. The rows of a batch
# may hold different numbers of tokens: they are counted per row, without padding, so that a row's cache is the
# same alone or in a batch, and the same however the keys and values of a layer are cut into calls.

class Windows(NamedTuple):
    sink: int = 16       # first tokens, kept in model dtype
    keep: int = 128      # last tokens, kept in model dtype, at least
    flush: int = 16      # tokens that are encoded together

def as_windows(windows):
    """Return a tuple of three as Windows. Raises ValueError for other things, and for sizes that cannot be."""
    sizes = windows if isinstance(windows, (tuple, list)) else ()
    is_whole = all(type(x) is int and 0 <= x <= 2 ** 20 for x in sizes)
    if len(sizes) != 3 or not is_whole or sizes[2] < 1:
        raise ValueError(
            "windows need three whole numbers up to 2^20, sink >= 0, keep >= 0 and flush >= 1, "
            f"not {windows!r}")
    return Windows(*windows)

class Counts(NamedTuple):
    """How many tokens of a batch row lie in each part of its cache."""
    sink: int
    packed: int
    recent: int

def attention(q, k, v, mask=None, is_causal=False):
    """Attend from q (b, g, r, t, d) to k, v (b, g, s, d); a `mask` (b, 1, t, s) is True where a query may look."""
    o = functional.scaled_dot_product_attention(
        q.flatten(1, 2), k, v, mask, is_causal=is_causal, enable_gqa=True)
    return o.unflatten(1, q.shape[1:3])

def causal_attention(q, k, v, valid=None):
    """Attend causally from q (b, g, r, t, d), the last t tokens, to k and v (b, g, s, d).

    `valid` (b, s) is False for columns of padding; None means that there are none. Every query sees its own column:
    a query that is padding would see none otherwise, and become NaN.
    """
    t, s = q.shape[3], k.shape[2]
    if valid is None and t in (1, s):
        return attention(q, k, v, is_causal=t > 1)

    # A number of queries at a time, which bounds the size of masks and scores; no queries are one empty piece.
    outputs = []
    columns = torch.arange(s, device=q.device)
    size = max(1, 2 ** 22 // s)
    for start in range(0, max(t, 1), size):
        piece = q[..., start:start + size, :]
        first = s - t + start
        own_column = columns[first:first + piece.shape[3]][:, None]
        mask = (columns <= own_column)[None]                             # (1, t, s)
        if valid is not None:
            mask = (mask & valid[:, None]) | (columns == own_column)     # (b, t, s)
        outputs.append(attention(piece, k, v, mask[:, None]))
    return torch.cat(outputs, 3)

def left_padding(pad, columns, device):
    """Return which of the columns are valid, (b, columns), if row i begins with pad[i] columns of padding."""
    if not any(pad):
        return None
    return torch.arange(columns, device=device) >= torch.tensor(pad, device=device)[:, None]

def with_room(buffer, tokens, most=None):
    """Return the buffer (b, g, capacity, ...), or a larger copy of it, with room for `tokens` tokens.

    The capacity grows by a sixteenth, but not beyond `most`, and always to `tokens`: copies are seldom, and spare room,
    which is memory held for nothing, is small.
    """
    capacity = buffer.shape[2]
    if tokens <= capacity:
        return buffer
    spacious = capacity + capacity // 16
    if most is not None:
        spacious = min(spacious, most)
    return resized(buffer, max(tokens, spacious))

def resized(buffer, capacity):
    """Copy a buffer (b, g, s, ...) into one with room for `capacity` tokens, more or fewer."""
    new = buffer.new_zeros(*buffer.shape[:2], capacity, *buffer.shape[3:])
    kept = min(capacity, buffer.shape[2])
    new[:, :, :kept] = buffer[:, :, :kept]
    return new

def check_shape(x, buffer):
    """Refuse x (b, g, t, d) that a write into the buffer (b, g, s, d) would broadcast or cut short."""
    batch, heads, _, d = buffer.shape
    if x.dim() != 4 or x.shape != (batch, heads, x.shape[2], d):
        raise ValueError(
            f"keys or values of shape {tuple(x.shape)} do not fit a cache of {batch} rows, "
            f"{heads} KV heads and head dim {d}")

def encode_reference(x, encoding):
    """Transform, quantize and pack x (b, g, s, d), with bits < 16: this specifies the encode kernel, bit for bit.

    Returns codes (b, g, s, d·bits/8), uint8, and pairs (b, g, s, groups), int32: bfloat16 scale and offset.
    """
    codes, scale, offset = transform_and_quantize(x, encoding)
    return kernels.pack(codes, encoding.codec.bits), kernels.join_pair(scale, offset)

class Store:
    """The keys, or the values, of one layer: [sink | packed | recent].

    codes are (b, g, capacity, d·bits/8), uint8, and pairs (b, g, capacity, groups), int32: a bfloat16 scale and
    offset each. With 16 bits the codes are x in model dtype, unrounded; should the encoding have a T, they are T x.
    The window cache, which owns two stores, knows how many tokens lie in each part. In the methods below, `rows` is
    always a slice of batch rows that all have the same `counts`.
    """

    def __init__(self, batch, heads, d, encoding, windows, dtype, device):
        bits, quantizer, _, group = encoding.codec
        group = d if group is None else group
        if bits not in BITS or quantizer not in QUANTIZERS:
            raise ValueError(f"there is no quantizer {quantizer!r} of {bits} bits")
        if bits < 16 and (group < 1 or d % group or d % 8):
            raise ValueError(
                f"{d} channels do not pack with {bits} bits in groups of {group}: they must be a "
                "multiple of 8 and of the group")
        H = encoding.hessian
        if H is not None and H.shape[-1] != group:
            raise ValueError(
                f"feedback in blocks of {H.shape[-1]} channels does not fit groups of {group}")
        self.encoding = encoding
        self.bits = bits
        self.windows = windows
        T = encoding.transform
        self.consumer_transform = None if T is None else inverse_transpose(T)            # T⁻ᵀ

        # What the kernels of both encoding and decoding serve: one pair per token, transforms of whole heads.
        one_block = T is None or T.shape[1] == 1
        self.has_one_pair = bits < 16 and group == d
        self.has_kernel = self.has_one_pair and one_block and d in (64, 128, 256)
        self.kernel_numbers = QUANTIZERS[quantizer].kernel_numbers

        # All buffers begin empty and grow with the tokens.
        empty = functools.partial(torch.zeros, device=device)
        self.sink = empty(batch, heads, 0, d, dtype=dtype)
        self.recent = empty(batch, heads, 0, d, dtype=dtype)
        if bits < 16:
            self.codes = empty(batch, heads, 0, d * bits // 8, dtype=torch.uint8)
            self.pairs = empty(batch, heads, 0, d // group, dtype=torch.int32)
        else:
            self.codes = empty(batch, heads, 0, d, dtype=dtype)
            self.pairs = empty(batch, heads, 0, 0, dtype=torch.int32)

    def buffers(self):
        return [self.sink, self.codes, self.pairs, self.recent]

    def append(self, rows, counts, x):
        """Write new tokens x (b, g, t, d) to the sink while it has room, the others to the recent window."""
        t = x.shape[2]
        sinks = min(self.windows.sink - counts.sink, t)
        end = counts.sink + sinks
        self.sink = with_room(self.sink, end, most=self.windows.sink)
        self.sink[rows, :, counts.sink:end] = x[:, :, :sinks]

        end = counts.recent + t - sinks
        self.recent = with_room(self.recent, end, most=self.windows.keep + self.windows.flush)
        self.recent[rows, :, counts.recent:end] = x[:, :, sinks:]

    def flush(self, rows, counts, due):
        """Encode the `due` oldest recent tokens and move the younger ones up."""
        codes, pairs = self.encode(self.recent[rows, :, :due])
        end = counts.packed + due
        self.codes = with_room(self.codes, end)
        self.pairs = with_room(self.pairs, end)
        self.codes[rows, :, counts.packed:end] = codes
        self.pairs[rows, :, counts.packed:end] = pairs

        left = counts.recent - due
        self.recent[rows, :, :left] = self.recent[rows, :, due:counts.recent].clone()

    def encode(self, x):
        """Encode x (b, g, s, d) by the kernel, where there is one for it, else in torch."""
        encoding = self.encoding
        if self.bits == 16:
            return apply(encoding.transform, x), x.new_zeros(*x.shape[:3], 0)

        knows_rule = self.kernel_numbers is not None
        if self.has_kernel and knows_rule and kernels.serves(x):
            numbers = self.kernel_numbers(self.bits, encoding.codec.clip, x.shape[-1])
            encoded = kernels.encode(
                x, encoding.transform, encoding.hessian, encoding.feedback, self.bits, SWEEPS,
                encoding.centred, encoding.own, **numbers)
            if encoded is not None:      # None: the kernel does not compile here, which it has said
                return encoded
        return encode_reference(x, encoding)

    def read_packed(self, rows, count):
        """Dequantize the first `count` packed tokens: (b, g, count, d), still transformed."""
        if self.bits == 16:
            return self.codes[rows, :, :count]
        codes = kernels.unpack(self.codes[rows, :, :count], self.bits)
        return dequantize(codes, *kernels.split_pair(self.pairs[rows, :, :count]))

    def read(self, rows, counts):
        """Read all tokens, with T undone where the store applied it: (b, g, all, d), in model dtype."""
        T_inverse = None if self.consumer_transform is None else self.consumer_transform.mT
        packed = apply(T_inverse, self.read_packed(rows, counts.packed))
        sink = self.sink[rows, :, :counts.sink]
        recent = self.recent[rows, :, :counts.recent]
        return torch.cat([sink, packed.to(sink.dtype), recent], 2)

    def scores(self, q, rows, count):
        """Return q · x̂ over the first `count` packed tokens: q (b, g, r, d), transformed -> (b, g, r, count).

        `kernels.packed_scores` is compiled for the CPU where that pays, and plain torch elsewhere.
        """
        if not self.has_one_pair:
            return q @ self.read_packed(rows, count).float().mT
        return kernels.packed_scores(q, self.codes[rows], self.pairs[rows], self.bits, count)

    def weighted_sum(self, p, rows, count):
        """Return Σ_s p_s x̂_s over the first `count` packed tokens: p (b, g, r, count) -> (b, g, r, d)."""
        if not self.has_one_pair:
            return p @ self.read_packed(rows, count).float()
        return kernels.packed_values(p, self.codes[rows], self.pairs[rows], self.bits, count)

@functools.lru_cache(8)
def device_lengths(lengths, device):
    """Copy the token counts of all rows to the device, for kernels: once for all layers of a step."""
    return torch.tensor(lengths, dtype=torch.int32, device=device)

class WindowCache:
    """The cache of one layer: a store of keys, a store of values, and how many tokens each batch row has.

    Give it the `folded()` scheme of one layer: values come out of the folded weights transformed already. `folded` is
    that of the model that it serves, if this is known.
    """

    def __init__(self, batch, heads, d, scheme=Scheme(), windows=Windows(),
                 dtype=torch.float32, device="cpu", folded=None):
        windows = as_windows(windows)
        if scheme.values.transform is not None:
            raise ValueError(
                "a window cache takes values that are transformed already: fold T_V into the model")
        self.windows = windows
        self.folded = folded
        self.n_tokens = [0] * batch
        self.n_packed = [0] * batch
        self.keys = Store(batch, heads, d, scheme.keys, windows, dtype, device)
        self.values = Store(batch, heads, d, scheme.values, windows, dtype, device)

    @property
    def nbytes(self):
        """Bytes of all storage held, spare room included."""
        buffers = self.keys.buffers() + self.values.buffers()
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    def counts(self, row):
        sink = min(self.n_tokens[row], self.windows.sink)
        packed = self.n_packed[row]
        return Counts(sink, packed, self.n_tokens[row] - sink - packed)

    def equal_rows(self, *others):
        """Return all batch rows as one slice if their counts and `others` are equal, or else each row as its own."""
        rows = list(zip(self.n_tokens, self.n_packed, *others))
        if len(set(rows)) == 1:
            return [slice(0, len(rows))]
        return [slice(row, row + 1) for row in range(len(rows))]

    def attend(self, q, k, v, pad=None):
        """Take in the tokens of one call, k and v (b, g, t, d), and attend from q (b, g, r, t, d): (b, g, r, t, d).

        The tokens of the call are appended, unrounded, and attended to with the rest; encoding what is due comes last.
        `pad` counts the padding at the left of each row of this call.
        """
        pad = pad or [0] * len(self.n_tokens)
        was_empty = not any(self.n_tokens)
        self.append(k, v, pad)
        if was_empty:
            o = causal_attention(q, k, v, left_padding(pad, k.shape[2], k.device))
        elif q.shape[3] != 1:
            o = self.attend_restored(q)
        elif self.keys.has_kernel and self.values.has_kernel and kernels.serves(q):
            o = self.attend_by_kernel(q)
        else:
            o = self.attend_parts(q)
        self.flush()
        return o

    def append(self, k, v, pad):
        """Write k and v (b, g, t, d), without their padding, to the end of every row."""
        check_shape(k, self.keys.recent)
        check_shape(v, self.values.recent)
        for rows in self.equal_rows(pad):
            # What the first row of the slice has, all of its rows have.
            counts = self.counts(rows.start)
            first = pad[rows.start]
            self.keys.append(rows, counts, k[rows, :, first:])
            self.values.append(rows, counts, v[rows, :, first:])
        t = k.shape[2]
        self.n_tokens = [count + t - skipped for count, skipped in zip(self.n_tokens, pad)]

    def flush(self):
        """Encode the oldest recent tokens, `flush` at a time, while `keep` stay: nothing else encodes any."""
        _, keep, size = self.windows
        for rows in self.equal_rows():
            counts = self.counts(rows.start)
            due = (counts.recent - keep) // size * size
            if due > 0:
                self.keys.flush(rows, counts, due)
                self.values.flush(rows, counts, due)
                self.n_packed[rows] = [counts.packed + due] * len(self.n_packed[rows])

        # Give back what a flush or a long call leaves empty in the recent windows, but for an eighth of what is unpacked.
        counts = [self.counts(row) for row in range(len(self.n_tokens))]
        longest = max(count.recent for count in counts)
        unpacked = max(count.sink + count.recent for count in counts)
        capacity = min(longest + unpacked // 8, keep + size)
        if capacity < self.keys.recent.shape[2]:
            self.keys.recent = resized(self.keys.recent, capacity)
            self.values.recent = resized(self.values.recent, capacity)

    def read(self, store, length):
        """Read the keys or the values of all rows, (b, g, length, d), aligned on the right; zeros before."""
        batch, heads, _, d = store.recent.shape
        restored = store.recent.new_zeros(batch, heads, length, d)
        for rows in self.equal_rows():
            counts = self.counts(rows.start)
            restored[rows, :, length - sum(counts):] = store.read(rows, counts)
        return restored

    def attend_restored(self, q):
        """Attend from the last t tokens' q (b, g, r, t, d), which share the cost of reading everything back."""
        # Rows end at the last column, where the last query's own token is. There are as many columns as the longest row has
        # tokens, or as there are queries, if these are more: a call may be mostly padding. What queries that are padding
        # get is not used.
        length = max(*self.n_tokens, q.shape[3])
        pad = [length - count for count in self.n_tokens]
        valid = left_padding(pad, length, q.device)
        k = self.read(self.keys, length)
        v = self.read(self.values, length)
        return causal_attention(q, k, v, valid)

    def attend_parts(self, q):
        """Attend from one token's q (b, g, r, 1, d) with one softmax over the three parts."""
        outputs = []
        q = q[..., 0, :].float()
        q_packed = apply(self.keys.consumer_transform, q)
        for rows in self.equal_rows():
            counts = self.counts(rows.start)

            # Scores of the three parts. The packed keys are T k, so they meet T⁻ᵀ q.
            k_sink = self.keys.sink[rows, :, :counts.sink].float()
            k_recent = self.keys.recent[rows, :, :counts.recent].float()
            scores = torch.cat([
                q[rows] @ k_sink.mT,
                self.keys.scores(q_packed[rows], rows, counts.packed),
                q[rows] @ k_recent.mT,
            ], -1)                                               # (b, g, r, s)

            # One softmax, then the weighted sum part by part.
            p = (scores * q.shape[-1] ** -0.5).softmax(-1)
            p_sink, p_packed, p_recent = p.split(counts, -1)
            v_sink = self.values.sink[rows, :, :counts.sink].float()
            v_recent = self.values.recent[rows, :, :counts.recent].float()
            o = p_sink @ v_sink + self.values.weighted_sum(p_packed, rows, counts.packed)
            outputs.append(o + p_recent @ v_recent)
        return torch.cat(outputs)[..., None, :].to(self.keys.recent.dtype)

    def attend_by_kernel(self, q):
        """As `attend_parts`, in one launch over packed bytes and windows; where that fails, its reference answers."""
        q = q[..., 0, :]
        q_packed = apply(self.keys.consumer_transform, q.float())

        # From the counts of each row to a tensor, over all rows, for each part.
        counts = [self.counts(row) for row in range(len(self.n_tokens))]
        lengths = [device_lengths(part, q.device) for part in zip(*counts)]
        n_sink, n_packed, n_recent = lengths
        keys = self.keys
        values = self.values
        o = kernels.decode_attention(
            q, q_packed,
            (keys.sink, values.sink, n_sink),
            (keys.codes, keys.pairs, values.codes, values.pairs, n_packed),
            (keys.recent, values.recent, n_recent),
            (keys.bits, values.bits))
        return o[..., None, :]

class PlainCache:
    """The unquantized cache of one layer: all keys and values in model dtype, padding included."""

    def __init__(self, batch, heads, d, dtype=torch.float32, device="cpu", folded=None):
        self.folded = folded
        self.n_tokens = [0] * batch                              # per row, without padding
        self.valid = torch.ones(batch, 0, dtype=torch.bool, device=device)
        self.k = torch.zeros(batch, heads, 0, d, dtype=dtype, device=device)
        self.v = torch.zeros(batch, heads, 0, d, dtype=dtype, device=device)

    @property
    def nbytes(self):
        return self.k.untyped_storage().nbytes() + self.v.untyped_storage().nbytes()

    def attend(self, q, k, v, pad=None):
        """Append k and v (b, g, t, d) and attend from q (b, g, r, t, d), as `WindowCache.attend` does."""
        pad = pad or [0] * len(self.n_tokens)
        check_shape(k, self.k)
        check_shape(v, self.v)
        start = self.valid.shape[1]
        end = start + k.shape[2]
        self.k = with_room(self.k, end)
        self.v = with_room(self.v, end)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        self.n_tokens = [count + k.shape[2] - skipped for count, skipped in zip(self.n_tokens, pad)]

        # Only padding needs a mask. If no row ever had any, all have as many tokens as there are columns.
        columns = torch.arange(k.shape[2], device=k.device)
        padding = torch.tensor(pad, device=k.device)
        new_valid = columns >= padding[:, None]
        self.valid = torch.cat([self.valid, new_valid], 1)
        valid = None if min(self.n_tokens) == end else self.valid
        return causal_attention(q, self.k[:, :, :end], self.v[:, :, :end], valid)


# ----------------------------------------------------------------------------------------------------------------
# The model
#
# Qwen3, written out by hand, and Llama as the same graph without QK-norm. The weights are a dictionary under the
# checkpoint's own names, the configuration is transformers' object. Attention is a function that the caller
# passes: that is where a cache, the calibration and every evaluation come in. Folding the value transforms
# changes two projections per layer and nothing else, so the folded model runs through the very same functions.
# W_O(r), (D, d), is the block of columns of the output projection that reads query head r.

class Model(NamedTuple):
    config: object               # transformers' config object: hidden_size, num_key_value_heads, ...
    weights: dict[str, Tensor]
    inv_freq: Tensor             # (d/2,) RoPE frequencies, float32
    rope_scale: float            # on cos and sin (YaRN)
    folded: bool = False

def rms_norm(x, weight, eps):
    """Normalize in float32, cast back, then multiply by the weight: transformers' order, for bf16's sake."""
    y = x.float()
    mean_square = y.square().mean(-1, keepdim=True)
    return weight * (y * torch.rsqrt(mean_square + eps)).to(x.dtype)

def linear(model, name, x):
    return functional.linear(x, model.weights[name + ".weight"], model.weights.get(name + ".bias"))

def rope_tables(model, positions, dtype):
    """Return cos and sin, (b, t, d) each, of the rotary angles at `positions` (b, t)."""
    angle = (positions[..., None].float() * model.inv_freq).repeat(1, 1, 2)
    cos = angle.cos() * model.rope_scale
    sin = angle.sin() * model.rope_scale
    return cos.to(dtype), sin.to(dtype)

def rope(x, cos, sin):
    """Rotate channel i of x (..., t, d) with channel i + d/2, the pairing of the checkpoints."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin

def project(model, l, x, cos, sin):
    """Project x (b, t, D) to q (b, g, r, t, d), k and v (b, g, t, d); q and k after QK-norm and RoPE."""
    config = model.config
    prefix = f"model.layers.{l}.self_attn."
    kv_heads = config.num_key_value_heads
    q = linear(model, prefix + "q_proj", x).unflatten(-1, (config.num_attention_heads, -1))
    k = linear(model, prefix + "k_proj", x).unflatten(-1, (kv_heads, -1))
    v = linear(model, prefix + "v_proj", x).unflatten(-1, (kv_heads, -1))
    if config.model_type == "qwen3":
        q = rms_norm(q, model.weights[prefix + "q_norm.weight"], config.rms_norm_eps)
        k = rms_norm(k, model.weights[prefix + "k_norm.weight"], config.rms_norm_eps)

    # From (b, t, heads, d) to heads first, query heads by KV head.
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)                # (b, g, r, t, d)
    k = k.transpose(1, 2)                                                    # (b, g, t, d)
    v = v.transpose(1, 2)

    # All heads turn by the same angles.
    cos = cos[:, None]
    sin = sin[:, None]
    return rope(q, cos[:, None], sin[:, None]), rope(k, cos, sin), v

def project_out(model, l, o):
    """Apply the output projection to o (b, g, r, t, d): (b, t, D)."""
    return linear(model, f"model.layers.{l}.self_attn.o_proj", o.permute(0, 3, 1, 2, 4).flatten(2))

def swiglu(model, l, x):
    prefix = f"model.layers.{l}.mlp."
    gate = functional.silu(linear(model, prefix + "gate_proj", x))
    return linear(model, prefix + "down_proj", gate * linear(model, prefix + "up_proj", x))

def in_pieces(function, *tensors):
    """Apply a function that takes each token alone to tensors (..., t, d), 4096 tokens at a time; it returns a list.

    Norms compute in float32, and the MLP is several times wider than x: a long call would need much memory for them.
    """
    if tensors[0].shape[-2] <= 4096:
        return function(*tensors)
    split = [x.split(4096, -2) for x in tensors]
    results = [function(*piece) for piece in zip(*split)]
    return [torch.cat(parts, -2) for parts in zip(*results)]

def block(model, l, x, cos, sin, attend):
    """Run layer l on x (b, t, D); `attend(l, q, k, v) -> o` is the caller's."""
    eps = model.config.rms_norm_eps
    attention_norm = model.weights[f"model.layers.{l}.input_layernorm.weight"]
    mlp_norm = model.weights[f"model.layers.{l}.post_attention_layernorm.weight"]

    def before(x, cos, sin):
        return project(model, l, rms_norm(x, attention_norm, eps), cos, sin)

    def after(x, o):
        x = x + project_out(model, l, o)
        return [x + swiglu(model, l, rms_norm(x, mlp_norm, eps))]

    # Tokens meet in the attention only.
    o = attend(l, *in_pieces(before, x, cos, sin))
    [x] = in_pieces(after, x, o)
    return x

@torch.no_grad()
def forward(model, ids, attend, positions=None):
    """Run the decoder on ids (b, t), attending by `attend(l, q, k, v) -> o`: normalized hidden states (b, t, D)."""
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    x = functional.embedding(ids, model.weights["model.embed_tokens.weight"])
    cos, sin = rope_tables(model, positions, x.dtype)
    for l in range(model.config.num_hidden_layers):
        x = block(model, l, x, cos, sin, attend)

    def last(x):
        return [rms_norm(x, model.weights["model.norm.weight"], model.config.rms_norm_eps)]

    [hidden] = in_pieces(last, x)
    return hidden

def logits(model, hidden):
    """Map hidden states (..., D) to logits (..., v)."""
    name = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    return functional.linear(hidden, model.weights[name])

def fold_in(T, W):
    """Return T W for the value projection (g·d, D) or its bias (g·d,); T is (g, n, m, m)."""
    rows = W.double().reshape(*T.shape[:3], -1)                              # (g, n, m, D or 1)
    return (T.double() @ rows).reshape(W.shape).to(W.dtype)

def fold_out(T, W):
    """Return W_O(r) T⁻¹, query head by query head, for the output projection (D, h·d)."""
    g, n, m = T.shape[:3]
    blocks = W.double().unflatten(1, (g, -1, n, m))                          # (D, g, r, n, m)
    T_inverse = torch.linalg.inv(T.double())
    return torch.einsum("Dgrni,gnij->Dgrnj", blocks, T_inverse).flatten(1).to(W.dtype)

FOLDS = {"v_proj.weight": fold_in, "v_proj.bias": fold_in, "o_proj.weight": fold_out}

def fold_values(model, T_V):
    """Fold T_V (l, g, n, m, m) into a copy of the weights: W_V ← T_V W_V, bias too; W_O(r) ← W_O(r) T_V⁻¹.

    The values come out transformed and the logits as they were. Raises ValueError for a model that is folded
    already; the model that is passed stays as it is.
    """
    if model.folded:
        raise ValueError("this model's values are folded already: fold the original one")
    weights = dict(model.weights)
    for l, T in enumerate(T_V):
        T = T.to(model.inv_freq.device)
        for name, fold in FOLDS.items():
            name = f"model.layers.{l}.self_attn.{name}"
            if name in weights:
                weights[name] = fold(T, weights[name])
    return model._replace(weights=weights, folded=True)


# ----------------------------------------------------------------------------------------------------------------
# Calibration
#
# One pass over a text sums second moments per layer and KV head: Σ k kᵀ and Σ v vᵀ of what is stored, 2 Σ q qᵀ
# and 2 Σ W_Oᵀ W_O of what consumes it. Nothing else is kept: neither activations nor vocabulary logits. Since T
# does not depend on the moments' scale, sums will do; tokens are counted to know when they are few, and queries since
# `own_direction` needs the scale. Two rows
# of TRANSFORMS need weighted sums: OSCAR's values, and WUSH-A, which weighs each query by what an error at a key
# would do to the module's output.

def second_moment(x, weight=None):
    """Sum w x xᵀ over all but heads and channels: x (b, g, ..., t, d), w (b, g, ..., t) -> (g, d, d), float64."""
    g = x.shape[1]
    d = x.shape[-1]
    total = x.new_zeros(g, d, d, dtype=torch.float64)
    for i in range(0, x.shape[-2], 4096):
        part = x[..., i:i + 4096, :].double()
        weighted = part if weight is None else part * weight[..., i:i + 4096, None]
        total += torch.einsum("bg...d,bg...e->gde", weighted, part)
    return total

def oscar_weight(q_moment, k):
    """Weigh tokens as OSCAR does for its values: w_s = k_sᵀ C_q k_s, scaled to mean 1: (b, g, s)."""
    # Differs from the paper: C_q and the mean are one sequence's own, so that one pass over the text will do.
    parts = []
    for part in k.split(4096, 2):
        part = part.double()
        parts.append((torch.einsum("bgsd,gde->bgse", part, q_moment) * part).sum(-1))
    w = torch.cat(parts, -1)
    return w / w.mean((0, 2), keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)

def attention_sensitivity(q, k, v, A):
    """Weigh queries for WUSH-A, by what an error at a key or at a value does to the module's output, to first order.

    A query has the probabilities p_s and the output o = Σ_s p_s v_s, which W = W_O(r), (D, d), reads; A = WᵀW is
    (g, r, d, d). Suppose the errors δ_s at all positions s have the same covariance C.

      * An error of key s moves the score by q·δ_s/√d, and so the output by p_s (q·δ_s/√d) W(v_s − o). The mean square of
        that is a_s · qᵀCq, with a_s = p_s² (v_s − o)ᵀA(v_s − o) / d.
      * An error of value s moves the output by p_s W δ_s, with the mean square p_s² · tr(A C).

    Errors at different positions and heads are taken as unrelated, so that mean squares add up. H is to be a Hessian, so
    the sum of all mean squares is ½ tr(H C). As qᵀCq = tr(qqᵀ C), this is so for

        key     H = Σ_r Σ_t w qqᵀ,   w = 2 Σ_s a_s
        value   H = 2 Σ_r Σ_t (Σ_s p_s²) A

    Returns w and Σ_s p_s², (b, g, r, t) each, float64.
    """
    # Differs from the paper: its appendix C was not at hand, this derivation of its WUSH-A is ours.
    t, d = q.shape[-2:]
    A = A.float()
    k = k.float()
    v = v.float()
    squares = []                                                 # v_sᵀ A v_s, (b, g, r, s) each
    for part in v.split(4096, 2):
        read = torch.einsum("bgsd,grde->bgrse", part, A)
        squares.append((read * part[:, :, None]).sum(-1))
    squares = torch.cat(squares, -1)[..., None]

    # A number of queries at a time, which bounds the size of p.
    step = max(1, 2 ** 25 // (t * q.shape[:3].numel()))
    weights = []
    sums_of_squares = []
    for i in range(0, t, step):
        queries = q[..., i:i + step, :].float()
        scores = torch.einsum("bgrtd,bgsd->bgrts", queries, k) * d ** -0.5
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        future = ones.triu(i + 1)
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        o = torch.einsum("bgrts,bgsd->bgrtd", p, v)
        p2 = p.square()

        # d · Σ_s a_s = Σ_s p_s² (v_sᵀ A v_s − 2 oᵀ A v_s + oᵀ A o)
        of_values = (p2 @ squares)[..., 0]
        mixed = 2 * (o @ A * torch.einsum("bgrts,bgsd->bgrtd", p2, v)).sum(-1)
        of_outputs = p2.sum(-1) * (o @ A * o).sum(-1)
        spread = of_values - mixed + of_outputs

        weights.append(2 * spread.clamp(min=0) / d)
        sums_of_squares.append(p2.sum(-1))
    return torch.cat(weights, -1).double(), torch.cat(sums_of_squares, -1).double()

class LayerMoments:
    """The moments of one layer, (g, d, d) each, float64; `total` maps the names that TRANSFORMS uses to them."""

    def __init__(self, W_O, attention_aware=False):
        """Begin with all W_O(r)ᵀ (g, r, d, D), of which the moment is complete at once."""
        W_O = W_O.double()
        A = W_O @ W_O.mT                                                     # WᵀW, (g, r, d, d)
        self.A = A if attention_aware else None
        names = ["keys", "queries", "values", "values_oscar"]
        if attention_aware:
            names += ["queries_attention", "outputs_attention"]
        self.total = {name: torch.zeros_like(A[:, 0]) for name in names}
        self.total["outputs"] = 2 * A.sum(1)
        self.tokens = 0
        self.n_queries = 0               # per KV head

    def add(self, q, k, v):
        """Add the tokens of one call: q (b, g, r, t, d), k and v (b, g, t, d), whole sequences."""
        self.tokens += k.shape[0] * k.shape[2]
        self.n_queries += q.shape[0] * q.shape[2] * q.shape[3]
        q_moment = 2 * second_moment(q)
        self.total["keys"] += second_moment(k)
        self.total["queries"] += q_moment
        self.total["values"] += second_moment(v)
        self.total["values_oscar"] += second_moment(v, oscar_weight(q_moment, k))
        if "queries_attention" in self.total:
            w, p_squared = attention_sensitivity(q, k, v, self.A)
            self.total["queries_attention"] += second_moment(q, w)
            per_head = p_squared.sum((0, 3))[..., None, None]                # (g, r, 1, 1)
            self.total["outputs_attention"] += 2 * (per_head * self.A).sum(1)

def check_model(model):
    if not isinstance(model, Model):
        raise ValueError(f"a {type(model).__name__} is no Model: transformers' take a WushCache")

def token_sequences(model, sequences):
    """Return token ids as a list of tensors (t,); they may be lists, or one tensor (b, t). Raises ValueError for others."""
    check_model(model)
    try:
        sequences = [torch.as_tensor(ids) for ids in sequences]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError("tokens are lists or tensors of whole numbers, not text") from None
    positions = model.config.max_position_embeddings
    vocabulary = len(model.weights["model.embed_tokens.weight"])
    for ids in sequences:
        is_row = ids.dim() == 1 and 0 < len(ids) <= positions and not ids.is_floating_point()
        if not is_row or ids.min() < 0 or ids.long().max() >= vocabulary:
            raise ValueError(
                f"each sequence is 1 to {positions} token ids (t,), from 0 to {vocabulary - 1}")
    return [ids.long() for ids in sequences]

def stack_moments(layers):
    """Stack the layers' moments, (l, g, d, d) each, and add how many "tokens" and, per KV head, "n_queries" they are of."""
    stacked = {"tokens": layers[0].tokens, "n_queries": layers[0].n_queries}
    for name in layers[0].total:
        stacked[name] = torch.stack([layer.total[name] for layer in layers])
    return stacked

def collect_moments(model, sequences, attention_aware=False):
    """Sum the second moments of every layer over token sequences (t,): by name, (l, g, d, d) each, and their numbers.

    keys: Σ k kᵀ and queries: 2 Σ_r Σ_t q qᵀ, both after QK-norm and RoPE; values: Σ v vᵀ; outputs:
    2 Σ_r W_O(r)ᵀ W_O(r); values_oscar: Σ w v vᵀ (`oscar_weight`); with `attention_aware` also queries_attention and
    outputs_attention.
    Raises ValueError for a model whose values are folded.
    """
    sequences = token_sequences(model, sequences)
    if model.folded:
        raise ValueError("calibrate the original model: this one's values are transformed already")
    config = model.config
    layers = []
    for l in range(config.num_hidden_layers):
        W_O = model.weights[f"model.layers.{l}.self_attn.o_proj.weight"].T   # (h·d, D)
        W_O = W_O.unflatten(0, (config.num_key_value_heads, -1, config.head_dim))
        layers.append(LayerMoments(W_O, attention_aware))

    def observe(l, q, k, v):
        layers[l].add(q, k, v)
        return causal_attention(q, k, v)

    for ids in tqdm(sequences, desc="calibrate", unit="seq", disable=None):
        forward(model, ids[None].to(model.inv_freq.device), observe)
    return stack_moments(layers)


# ----------------------------------------------------------------------------------------------------------------
# Generation
#
# The tokens of a call go through all layers, each layer's cache takes in their keys and values and answers with
# their attention. A prompt is one call, then every new token is one.

def new_cache(model, scheme=None, windows=Windows(), batch=1):
    """Make empty caches of all layers: unquantized ones, or those of a scheme, for the model with T_V folded in."""
    check_model(model)
    config = model.config
    like = model.weights["model.embed_tokens.weight"]
    if scheme is not None and scheme.values.transform is not None and not model.folded:
        raise ValueError("this scheme transforms values: fold its T_V into the model first")
    caches = []
    for l in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, config.head_dim)
        if scheme is None:
            caches.append(PlainCache(*shape, like.dtype, like.device, model.folded))
        else:
            layer_scheme = scheme.folded().layer(l, like.device)
            caches.append(WindowCache(
                *shape, layer_scheme, windows, like.dtype, like.device, model.folded))
    return caches

def feed(model, cache, ids, pad=None):
    """Run ids (b, t), the rows' next tokens after `pad` columns of padding, through the cache: (b, t, D)."""
    if cache[0].folded not in (None, model.folded):
        raise ValueError("this cache is another model's: T_V is folded into one of the two only")

    # A row's first new token comes after its last cached one. Padding gets smaller positions, which do not matter.
    skipped = pad or [0] * len(ids)
    first = [count - padding for count, padding in zip(cache[0].n_tokens, skipped)]
    columns = torch.arange(ids.shape[1], device=ids.device)
    positions = torch.tensor(first, device=ids.device)[:, None] + columns

    def attend(l, q, k, v):
        return cache[l].attend(q, k, v, pad)

    return forward(model, ids, attend, positions.clamp(min=0))

def sample(scores, temperature=0.0, top_p=1.0, top_k=0, generator=None):
    """Pick a token for each row of logits (b, v): the likeliest at temperature 0, else a random one."""
    if not (temperature >= 0 and 0 <= top_p <= 1 and top_k >= 0):
        raise ValueError("sampling needs temperature >= 0, 0 <= top_p <= 1 and top_k >= 0")
    if temperature == 0:
        return scores.argmax(-1)
    scores = scores.double() - scores.amax(-1, keepdim=True)     # so that no temperature overflows
    scores = scores / temperature
    scores, order = scores.sort(descending=True, stable=True)
    p = scores.softmax(-1)

    # Leave out what comes after the first top_k tokens, or after tokens of probability top_p; keep the likeliest.
    rank = torch.arange(p.shape[-1], device=p.device)
    before = p.cumsum(-1) - p
    left_out = (before >= top_p) | (rank >= (top_k or p.shape[-1]))
    left_out[:, 0] = False
    choice = torch.multinomial(p.masked_fill(left_out, 0), 1, generator=generator)
    return order.gather(-1, choice)[:, 0]

def decode(model, cache, prompts, max_new_tokens, eos=(), pick=sample, pad_id=0):
    """Yield every prompt's next token, step by step; a row that has ended with one of `eos` yields `pad_id`.

    Prompts of different lengths are padded on the left; each row gets the tokens it would get alone.
    """
    prompts = token_sequences(model, prompts)
    if not prompts or not hasattr(max_new_tokens, "__index__") or max_new_tokens < 0:
        raise ValueError("decoding needs a prompt, and a whole number of max_new_tokens >= 0")
    end_tokens = list(eos) if isinstance(eos, (set, frozenset)) else eos
    try:
        end_tokens = torch.as_tensor([] if eos is None else end_tokens).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"eos is a token id, or some of them, not {eos!r}") from None
    longest = max(len(prompt) for prompt in prompts)
    pad = [longest - len(prompt) for prompt in prompts]
    rows = [[pad_id] * padding + prompt.tolist() for padding, prompt in zip(pad, prompts)]
    ids = torch.tensor(rows, device=model.inv_freq.device)
    done = [False] * len(prompts)

    for step in range(max_new_tokens):
        hidden = feed(model, cache, ids, None if step else pad)
        picked = pick(logits(model, hidden[:, -1])).tolist()
        tokens = [pad_id if ended else token for ended, token in zip(done, picked)]
        yield tokens

        done = [ended or token in end_tokens for ended, token in zip(done, tokens)]
        if all(done):
            return
        ids = torch.tensor(tokens, device=ids.device)[:, None]

def with_scheme(model, scheme, windows=Windows()):
    """Fold the scheme's T_V into the model, and return it with a maker of its empty caches: batch -> caches."""
    if scheme.values.transform is not None:
        model = fold_values(model, scheme.values.transform)
    return model, functools.partial(new_cache, model, scheme, windows)

def quantize_kv_cache(
        model,
        sequences,
        transform="wush",
        bits=2,
        refine=REFINED,
        windows=Windows(),
        group=None,
        quantizer="quest"):
    """Quantize a model's KV cache: the whole method.

    `sequences` are calibration tokens (t,), `bits` a number or (of keys, of values); refine=PAPER is the paper.
    Returns the model, with T_V folded in, and a maker of its empty caches:

        model, empty_cache = quantize_kv_cache(model, sequences)
        for tokens in decode(model, empty_cache(batch=1), [prompt], max_new_tokens=64): ...
    """
    # Refuse what cannot be before anything slow.
    sequences = token_sequences(model, sequences)
    check_name(transform, TRANSFORMS)
    check_name(quantizer, QUANTIZERS)
    check_refine(refine)
    bits_of_sides(bits)
    windows = as_windows(windows)
    block_width(model.config.head_dim, group)
    row = TRANSFORMS[transform]
    if row.needs_calibration and not sequences:
        raise ValueError(f"the transform {transform!r} needs tokens to calibrate on")

    # Calibrate: sum the second moments of what is stored and of what consumes it, per layer and KV head.
    moments = collect_moments(
        model, sequences if row.needs_calibration else [], row.is_attention_aware)

    # Derive T_K and T_V and what errors cost; choose the bits of a code and where its levels lie.
    scheme = make_scheme(moments, transform, bits, refine, group, quantizer)

    # Fold T_V into W_V and W_O. T_K stays with the cache, which applies it to keys as it encodes them, and T_K⁻ᵀ
    # to each query.
    return with_scheme(model, scheme, windows)


# ----------------------------------------------------------------------------------------------------------------
# The drawer
#
# wush_tools/ holds what is not the method: checkpoints, evaluation, the transformers cache, the command line. It
# imports this file; only the lines below look there, when one of its names is asked for or the file is run.

DRAWER = {
    "load_transforms": "checkpoints",
    "WushCache": "transformers_cache",
    "calibrate": "transformers_cache",
    "folded_values": "transformers_cache",
    "shard_transforms": "transformers_cache",
}

def __getattr__(name):
    """Import a name of the drawer when it is first asked for: `from wush_kv import WushCache`."""
    if name not in DRAWER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"wush_tools.{DRAWER[name]}"), name)

if __name__ == "__main__":
    # This file runs as the module "__main__": without a second name the drawer would import it once more. Its folder
    # is not on the search path if Python runs with -P or -I.
    sys.modules["wush_kv"] = sys.modules[__name__]
    sys.path.insert(0, str(HERE))
    from wush_tools.cli import main
    signal.signal(signal.SIGINT, usual_handler)
    main()
