"""The laws of wush_kv.py and kernels.py as property-based tests, and the equality with transformers.

A test's name is a theorem. Hypothesis draws sizes, seeds and kinds of data; each tolerance says where it comes from.
No network, no GPU: every model is made here. Norm weights are random, or a wrong norm would pass; head_dim is not
hidden/heads; every input that is to be quantized is long enough for it.
"""
import functools
import math
import os
import random
import subprocess
import sys
import textwrap
import weakref
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported: its kernels run on the CPU

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wush_kv as W
from wush_kv import Codec, kernels
from wush_tools import checkpoints
from wush_tools.testing import (
    HERE, OFF, TWO, WINDOWS, close, distance, fed, law, moment, normal, pair, powers, reference,
    saved, scheme, seeds, sizes, softmax_attention, tiny, tokens, transforms)

QUEST_ALPHA = {1: 0.79788456, 2: 1.49353462, 3: 2.05106835, 4: 2.51393058, 8: 3.88493868}

widths = sizes(2, 3, 4, 8)
quantizers = sizes(*W.QUANTIZERS)
slow = pytest.mark.skipif("SLOW" not in os.environ, reason="takes a minute: SLOW=1 pytest")
codecs = st.builds(Codec, widths, quantizers, sizes(0.92, 0.96, 1.0), sizes(None, 16))

def integers(seed, below, *shape):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))

def data(kind, seed, s, d):
    """Draw rows (s, d) of a kind."""
    x = normal(seed, s, d)
    channel = torch.arange(d)
    row = torch.arange(s)[:, None]
    kinds = {
        "normal": x,
        "outlier": torch.where(channel == 1, 1e4 * x, x),
        "dead": x * (channel != 1),
        "token": x * (row == 0),
        "constant": torch.full_like(x, -3.0),
        "zeros": 0 * x,
        "tiny": 1e-30 * x,
        "large": 1e4 * x,
    }
    return kinds[kind]

def all_kinds(seed, d):
    """Draw four rows of each kind that a quantizer must stand: (24, d) float32."""
    kinds = ["normal", "outlier", "constant", "zeros", "tiny", "large"]
    rows = [data(kind, seed + i, 4, d) for i, kind in enumerate(kinds)]
    return torch.cat(rows).float()

def trace(S):
    return S.diagonal(dim1=-2, dim2=-1).sum(-1)

def eye(d):
    return torch.eye(d, dtype=torch.float64)

def random_moments(seed, d, heads=1):
    """Draw M and H (heads, d, d), with axes of their own and strengths of 0.2 to 5: condition about 1e3."""
    x = normal(seed, 2, heads, 3 * d, d)
    U = torch.linalg.qr(normal(seed + 1, 2, heads, d, d)).Q
    strengths = torch.logspace(-0.7, 0.7, d, dtype=torch.float64)
    M, H = moment(x * strengths @ U)
    return M, H

def damped(S, damping=0.01):
    """Add to moments (..., d, d) what `wush` and `error_hessian` add."""
    d = S.shape[-1]
    return S + damping * (trace(S) / d)[..., None, None] * eye(d)

def as_collected(M, H, tokens=10 ** 6, n_queries=1):
    """Name moments (l, g, d, d) as `collect_moments` does, the same for keys and for values; H is Σ q qᵀ."""
    named = {"keys": M, "queries": 2 * H, "values": M, "outputs": 2 * H}
    return named | {"tokens": tokens, "n_queries": n_queries}

def quantized_and_read(x, codec):
    return W.dequantize(*W.quantize(x, codec))


# ---- transforms

@pytest.mark.parametrize("order", [0, 1, 2, 16, 24, 64, 80, 96, 128, 256])
def test_hadamard_is_sylvesters_orthonormal_matrix_or_refused_by_name(order):
    """Sylvester's entry (i, j) is (−1)^popcount(i & j)."""
    if order.bit_count() != 1:
        with pytest.raises(ValueError, match=str(order)):
            W.hadamard(order)
        return
    signs = np.ones((order, order))
    for i, j in np.ndindex(order, order):
        signs[i, j] = (-1.0) ** (i & j).bit_count()
    expected = torch.from_numpy(signs) / math.sqrt(order)
    assert close(W.hadamard(order), expected, 1e-15)
    assert close(moment(W.hadamard(order)), eye(order), 1e-12)

@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("name", W.TRANSFORMS)
def test_transform_rules_share_one_signature(name, m):
    """(gram, hess, m) -> (l, g, n, m, m), float64, layer by layer."""
    M, H = random_moments(1, 32, heads=2)
    M = torch.stack([M, M.flip(-1, -2)])
    H = torch.stack([H, H.flip(-1, -2)])
    rule = W.TRANSFORMS[name].rule
    T = rule(gram=M, hess=H, m=m)
    assert T.dtype == torch.float64
    one_block = m is None or name == "oscar"
    assert T.shape == ((2, 2, 1, 32, 32) if one_block else (2, 2, 4, 8, 8))
    assert close(rule(M[1], H[1], m), T[1], 1e-9)
    if name in ("identity", "hadamard", "oscar"):
        assert close(T @ T.mT, eye(T.shape[-1]).expand_as(T), 1e-12)
    if name == "identity":
        assert (T == eye(m or 32)).all()
    if name == "hadamard":
        assert (T == W.hadamard(m or 32)).all()

@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("name, key_hess, value_hess", [
    ("identity", "queries", "outputs"),
    ("hadamard", "queries", "outputs"),
    ("oscar", "queries", "values_oscar"),
    ("wush", "queries", "outputs"),
    ("wush_a", "queries_attention", "outputs_attention"),
])
def test_derived_transforms_are_their_rules_of_their_moments(name, key_hess, value_hess, m):
    names = ["keys", "queries", "values", "outputs",
             "values_oscar", "queries_attention", "outputs_attention"]
    drawn = normal(2, 7, 2, 2, 40, 32)
    calibrated = {key: moment(x) for key, x in zip(names, drawn)}
    calibrated["tokens"] = 100 * 32
    calibrated["n_queries"] = 40
    derived = W.derive(calibrated, name, W.PAPER, m)
    rule = W.TRANSFORMS[name].rule
    key_H = W.in_score_units(calibrated[key_hess], calibrated)
    sides = [
        (derived.keys, "keys", key_H), (derived.values, "values", calibrated[value_hess])]
    for basis, gram, hess in sides:
        expected = rule(calibrated[gram], hess, m)
        assert basis.transform.is_contiguous()
        assert torch.equal(basis.transform, expected.float())
        assert basis.hessian is None
    assert (derived.refine, derived.group) == (W.PAPER, m)

def turned_eigh(seed):
    """Make an eigh of another library: it decomposes the matrix with reversed axes, and turns eigenvectors at random."""
    eigh = torch.linalg.eigh

    def turned(S):
        Λ, U = eigh(S.flip(-1, -2))
        signs = normal(seed, *Λ.shape).sign()
        return Λ, U.flip(-2) * signs[..., None, :]

    return turned

@law(seeds, sizes(2, 8, 64))
def test_eigenvectors_decompose_and_their_signs_are_no_librarys(seed, d):
    S = random_moments(seed, d, heads=2)[0]
    Λ, U = W.eigenvectors(S)
    assert close(U * Λ[..., None, :] @ U.mT, S, 1e-12)
    assert close(U.mT @ U, eye(d).expand_as(U), 1e-12)
    assert (Λ.diff(dim=-1) >= 0).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", turned_eigh(seed))
        assert close(W.eigenvectors(S)[1], U, 1e-9)

@law(seeds, sizes("wush", "oscar"), sizes(8, 64), sizes(None, 4))
def test_transforms_do_not_depend_on_the_signs_of_a_librarys_eigenvectors(seed, name, d, m):
    moments = random_moments(seed, d, heads=2)
    rule = W.TRANSFORMS[name].rule
    T = rule(*moments, m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", turned_eigh(seed))
        assert close(rule(*moments, m), T, 1e-9)

@pytest.mark.parametrize("name", W.TRANSFORMS)
@pytest.mark.parametrize("m", [24, 64])
def test_transform_rules_refuse_blocks_that_do_not_divide_the_head(name, m):
    with pytest.raises(ValueError, match="do not divide"):
        W.TRANSFORMS[name].rule(*random_moments(0, 32), m)

@law(seeds, sizes(8, 16, 32), sizes(1, 2, 4))
def test_oscar_deals_the_mean_hessians_eigenvectors_evenly_to_the_groups(seed, d, groups):
    """With 𝓗 undone in each group T H̄ Tᵀ is diagonal; of each `groups` eigenvalues in a row each has one.

    T is the same for all heads. eigh's backward error is about eps·d.
    """
    M, H = random_moments(seed, d, heads=3)
    m = d // groups
    T = W.oscar(M, H, m)
    assert T.shape == (3, 1, d, d)
    assert (T == T[:1]).all()
    unspread = torch.block_diag(*[W.hadamard(m)] * groups)
    unspread_T = unspread @ T[0, 0]
    D = unspread_T @ H.mean(0) @ unspread_T.mT
    assert close(D, D.diagonal().diag(), 1e-14 * d)
    eigenvalues = torch.linalg.eigvalsh(H.mean(0))
    dealt = D.diagonal().view(groups, m).sort(-1).values.mT.sort(-1).values
    assert close(dealt, eigenvalues.view(m, groups), 1e-14 * d)

@law(seeds, sizes(2, 16, 64), powers, powers,
     sizes("normal", "outlier", "dead", "token", "tiny", "large"))
def test_wush_ignores_the_scale_of_its_moments_and_keeps_the_norm(seed, d, a, b, kind):
    """wush(aM, bH) = wush(M, H): bit for bit at powers of two, else up to signs of eigenvectors, not in TᵀT.

    TᵀT = c² · geometric mean of H and M⁻¹; its error is eps times their condition numbers, 1 + d/γ each.
    """
    M = moment(data(kind, seed, 40, d))
    H = moment(normal(seed + 1, 40, d))
    T = W.wush(M, H)
    powers_of_two = W.wush(2.0 ** round(3 * a) * M, 2.0 ** round(3 * b) * H)
    assert torch.equal(powers_of_two, T)
    scaled = W.wush(10 ** a * M, 10 ** b * H)
    condition = 1 + d / 1e-2
    assert close(moment(scaled), moment(T), 2.0 ** -52 * condition ** 2)
    norm = trace(T @ M @ T.mT) / trace(M)
    assert abs(norm - 1).max() <= 1e-12

@law(seeds, sizes(2, 16, 64), sizes(1e-2, 0.3))
def test_wush_balances_the_damped_moments_with_a_constant_diagonal(seed, d, damping):
    """T M Tᵀ/c² = c² T⁻ᵀ H T⁻¹ = 𝓗 Λ^(1/2) 𝓗ᵀ, Λ of LᵀML; so c⁴ is the ratio of the two traces."""
    M, H = random_moments(seed, d)
    T = W.wush(M, H, damping=damping)[0, 0]
    M = damped(M, damping)[0]
    H = damped(H, damping)[0]
    L = torch.linalg.cholesky(H)
    inverse = torch.linalg.inv(T)
    stored = T @ M @ T.mT
    consumed = inverse.mT @ H @ inverse
    c2 = (trace(stored) / trace(consumed)).sqrt()
    assert close(stored / c2, c2 * consumed, 1e-8)
    assert close(stored.diagonal(), stored.diagonal().mean().expand(d), 1e-8)
    spectrum = W.hadamard(d) @ stored @ W.hadamard(d) / c2
    assert close(spectrum, spectrum.diagonal().diag(), 1e-8)
    eigenvalues = torch.linalg.eigvalsh(L.mT @ M @ L)
    assert close(spectrum.diagonal().sort().values, eigenvalues.sqrt(), 1e-8)

@law(seeds, sizes(2, 8, 32))
def test_wush_is_the_best_invertible_transform(seed, d):
    """Undamped, tr(T M Tᵀ)·tr(T⁻ᵀ H T⁻¹) is (tr (LᵀML)^(1/2))², and no T, near or far, goes below."""
    M, H = random_moments(seed, d)
    M = M[0]
    H = H[0]

    def cost(T):
        inverse = torch.linalg.inv(T)
        return trace(T @ M @ T.mT) * trace(inverse.mT @ H @ inverse)

    L = torch.linalg.cholesky(H)
    T = W.wush(M, H, damping=0.0)[0]
    least = torch.linalg.eigvalsh(L.mT @ M @ L).sqrt().sum() ** 2
    assert abs(cost(T) / least - 1) <= 1e-8              # eps·cond(M)·cond(H) is about 1e-9
    near = T + T @ normal(seed + 3, 50, d, d) * 0.05
    far = normal(seed + 2, 50, d, d)
    whitening = torch.stack([L.mT, torch.linalg.cholesky(M).inverse()])
    assert (cost(torch.cat([far, near, whitening])) > least).all()

@law(seeds, sizes(16, 128), *[sizes("normal", "outlier", "dead", "token", "large")] * 2)
def test_wush_is_well_conditioned_whatever_the_moments(seed, d, stored, consumed):
    """Damped, eigenvalues lie in tr/d·[γ, d + γ]; TᵀT is a geometric mean: so cond(T) ≤ √(1 + d/γ) ≤ 114.

    So T T⁻¹ = I within about 2⁻²⁴·√d·cond(T) < 1e-3 in float32.
    """
    M = moment(data(stored, seed, 40, d))
    H = moment(data(consumed, seed + 1, 40, d))
    T = W.wush(M, H)
    assert torch.linalg.cond(T).max() <= math.sqrt(1 + d / 1e-2) * (1 + 1e-6)
    T = T.float()
    inverse = W.inverse_transpose(T[None])[0].mT
    assert close(T @ inverse, torch.eye(d)[None], 1e-3)

@law(seeds, sizes(2, 16, 64), st.booleans())
def test_wush_of_nothing_is_hadamard(seed, d, no_keys):
    """M = 0 or H = 0 of one head leaves the others alone; NaN is refused."""
    M, H = random_moments(seed, d, heads=2)
    T = W.wush(M, H)
    (M if no_keys else H)[0] = 0
    with_nothing = W.wush(M, H)
    assert close(with_nothing[0, 0], W.hadamard(d), 1e-12)
    assert torch.equal(with_nothing[1], T[1])
    with pytest.raises(ValueError, match="NaN"):
        W.wush(M / 0, H)

@law(seeds, sizes(2, 4, 16), sizes(1, 2, 4))
def test_wush_derives_each_block_from_its_own_diagonal_block(seed, m, n):
    M, H = random_moments(seed, m * n, heads=2)
    parts = [slice(i, i + m) for i in range(0, m * n, m)]
    alone = [W.wush(M[:, part, part], H[:, part, part]) for part in parts]
    assert close(W.wush(M, H, m), torch.cat(alone, 1), 1e-9)

@law(seeds, sizes(4, 16), sizes(1, 2))
def test_query_and_key_transforms_cancel_and_nothing_else_does(seed, m, n):
    """(T⁻ᵀq)·(T k) = q·k at cond(T) = 1e4, to eps·cond = 1e-12 times √d; with T q or T⁻¹q it is not."""
    U, V = torch.linalg.qr(normal(seed, 2, 2, n, m, m)).Q
    T = U * torch.logspace(0, -4, m, dtype=torch.float64) @ V
    q = normal(seed + 1, 1, 2, 3, 5, m * n)
    k = normal(seed + 2, 1, 2, 7, m * n)

    def scores(T_query):
        return torch.einsum("bgrtd,bgsd->bgrts", W.apply(T_query, q), W.apply(T, k))

    exact = torch.einsum("bgrtd,bgsd->bgrts", q, k)
    assert close(scores(W.inverse_transpose(T)), exact, 1e-9)
    for wrong in (T, torch.linalg.inv(T)):
        assert not close(scores(wrong), exact, 0.1)


# ---- why keys cannot be folded

def test_key_transform_that_commutes_with_rope_and_norm_is_signs_on_both_halves():
    """T R_p = R_p T at a few p leaves rotation-scalings of the pairs (i, i + d/2): d numbers.

    Commuting with a generic norm weight too, a scale a pair: d/2. Keeping the RMS, ‖Tx‖ = ‖x‖: their signs.
    """
    d = 8
    model = SimpleNamespace(inv_freq=10.0 ** -torch.arange(0, 4), rope_scale=1.0)
    cos, sin = W.rope_tables(model, torch.tensor([[1, 7, 77, 1003]]), torch.float64)
    zero = torch.zeros(d).double()
    turns = [W.rope(eye(d), c, s) for c, s in zip(cos[0], sin[0])]
    quarter_turn = W.rope(eye(d), zero, zero + 1)
    weight = normal(0, d).abs().diag()

    def commutator(A):
        return torch.kron(eye(d), A) - torch.kron(A.mT.contiguous(), eye(d))

    def free_numbers(*matrices):
        equations = torch.cat([commutator(A) for A in matrices])
        return (torch.linalg.svdvals(equations) < 1e-9).sum()

    assert free_numbers(*turns) == d
    assert free_numbers(*turns, weight) == d // 2

    # These have as many free numbers, so there are no others.
    a, b = (torch.cat([x, x]).diag() for x in normal(1, 2, d // 2))
    for T in (a, b @ quarter_turn):
        assert max((T @ A - A @ T).abs().max() for A in turns) < 1e-12
    assert (a @ weight == weight @ a).all()
    assert close(moment(a), a.diagonal().square().diag(), 1e-15)

@pytest.mark.parametrize("seed", range(3))
def test_key_transform_folded_into_the_projection_survives_only_as_such_signs(seed):
    """W_K ← T W_K gives keys T k after norm and RoPE for signs alike on both halves, which move nothing."""
    model = tiny_pair()[1]
    x = normal(seed, 1, 9, 64).float()
    prefix = "model.layers.0.self_attn.k_proj."
    cos, sin = W.rope_tables(model, torch.arange(3, 12)[None], x.dtype)

    def keys(changed):
        changed_model = model._replace(weights=model.weights | changed)
        _, k, _ = W.project(changed_model, 0, x, cos, sin)
        return k

    def folded(T):
        both_heads = torch.block_diag(T, T)
        names = [prefix + "weight", prefix + "bias"]
        return {name: both_heads @ model.weights[name] for name in names}

    def survives(T):
        return close(keys(folded(T)), keys({}) @ T.mT, 1e-4)

    half = normal(seed, 8).sign()
    signs = torch.cat([half, half]).diag().float()
    assert survives(signs)
    assert torch.equal(keys(folded(signs)).abs(), keys({}).abs())

    uneven = signs.clone()
    uneven[0, 0] *= -1
    scaled = signs.clone()
    scaled[[0, 8], [0, 8]] *= 2
    turned = signs.clone()
    turned[[0, 0, 8, 8], [0, 8, 0, 8]] = torch.tensor([0.6, -0.8, 0.8, 0.6])
    others = [uneven, scaled, turned, signs.roll(1, 0), W.hadamard(16).float()]
    assert not any(survives(T) for T in others)


# ---- quantizers

@pytest.mark.parametrize("bits, published", QUEST_ALPHA.items())
def test_gaussian_clip_has_the_least_error_on_a_gaussian(bits, published):
    """The midpoint rule at step 1e-4 is exact to 1e-9. QuEST's α is near the minimum: 1 % below at 8 bits."""
    x = torch.arange(-12, 12, 1e-4, dtype=torch.float64) + 5e-5
    density = (-x ** 2 / 2).exp() * 1e-4 / math.sqrt(2 * math.pi)
    top = 2 ** bits - 1

    def error(alpha):
        step = 2 * alpha / top
        nearest = ((x + alpha) / step).round().clamp(0, top) * step - alpha
        return (density * (x - nearest).square()).sum().item()

    alpha = W.gaussian_clip(bits)
    for factor in (0.6, 0.9, 0.98, 1.02, 1.1, 1.6):
        assert error(alpha) < error(alpha * factor)
    assert error(alpha) <= error(published) + 1e-9
    assert abs(alpha / published - 1) <= (1e-2 if bits == 8 else 1e-4)

def test_affine_2_bits_of_eight_numbers_worked_by_hand():
    """x = (−1, −0.6, −0.2, 0, 0.4, 0.8, 1.2, 2): min −1, range 3: step 1, offset −1, exact in bfloat16.

    (x + 1)/1 = 0, 0.4, 0.8, 1, 1.4, 1.8, 2.2, 3 rounds to 0 0 1 1 1 2 2 3, read back as −1 −1 0 0 0 1 1 2.
    Byte 0 has channels 0 2 4 6, codes 0 1 1 2: 0 + 1·4 + 1·16 + 2·64 = 148; byte 1: channels 1 3 5 7, codes 0
    1 2 3: 0 + 4 + 32 + 192 = 228. The pair: 1.0 is 0x3f80, its low half, −1.0 is 0xbf80, its high half.
    """
    x = torch.tensor([-1, -0.6, -0.2, 0, 0.4, 0.8, 1.2, 2])
    codes, scale, offset = W.quantize(x, Codec(2, "affine"))
    assert codes.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    assert (scale.item(), offset.item()) == (1, -1)
    assert W.dequantize(codes, scale, offset).tolist() == [-1, -1, 0, 0, 0, 1, 1, 2]
    assert kernels.pack(codes, 2).tolist() == [148, 228]
    assert kernels.join_pair(scale, offset).item() == 0xbf803f80 - 2 ** 32

def rounds_to(value, stored):
    """`stored` is `value` within half a step of bfloat16's 8 significant bits, and some float32 noise."""
    half_step = 2.0 ** (np.frexp(value)[1] - 9) * (value != 0)
    return (abs(stored.double().numpy() - value) <= half_step * 1.001).all()

@law(seeds, codecs, sizes(16, 64, 128))
def test_quantizer_pair_is_its_rule_rounded_to_bfloat16(seed, codec, d):
    """QuEST: ±κ α_b RMS. Affine: min and max after clamping to the ⌊κm⌋-th smallest |x|; κ = 1 is min/max."""
    x = all_kinds(seed, d)
    groups = x.double().unflatten(-1, (-1, codec.group or d)).numpy()
    m = groups.shape[-1]
    if codec.quantizer == "quest":
        rms = np.sqrt((groups ** 2).mean(-1))
        high = codec.clip * W.gaussian_clip(codec.bits) * rms
        low = -high
    else:
        rank = min(int(codec.clip * m), m - 1)
        tau = np.sort(abs(groups))[..., rank, None]
        clamped = np.clip(groups, -tau, tau)
        low = clamped.min(-1)
        high = clamped.max(-1)
    _, scale, offset = W.quantize(x, codec)
    assert scale.dtype == offset.dtype == torch.bfloat16
    assert scale.shape == offset.shape == low.shape
    assert rounds_to(low, offset)
    step = (high - low) / (2 ** codec.bits - 1)
    assert rounds_to(np.maximum(step, 2.0 ** -126), scale)

@law(seeds, codecs, sizes(16, 64, 128))
def test_quantizer_picks_the_nearest_level_of_the_stored_pair(seed, codec, d):
    """Inside the grid of the *stored* scale and offset the error is at most step/2, outside its distance.

    Plus float32 rounding of (x − offset)/scale and of the readout: 2⁻²² of the quantities there.
    """
    x = all_kinds(seed, d)
    top = 2 ** codec.bits - 1
    codes, scale, offset = W.quantize(x, codec)
    read = W.dequantize(codes, scale, offset)
    assert codes.dtype == torch.uint8
    assert codes.max() <= top
    assert read.dtype == torch.float32

    step = scale.double().repeat_interleave(codec.group or d, -1)
    lowest = offset.double().repeat_interleave(codec.group or d, -1)
    noise = 2.0 ** -22 * (x.abs() + lowest.abs() + step * top)
    assert ((read - (step * codes + lowest)).abs() <= noise).all()
    bounds = torch.stack([step / 2, lowest - x, x - lowest - step * top])
    assert ((read - x).abs() <= bounds.amax(0) + noise).all()

@law(seeds, codecs, sizes(16, 128))
def test_quantizer_of_a_group_depends_on_that_group_alone(seed, codec, d):
    """Rows of zeros read back as zeros, and their neighbours are bit for bit as if alone."""
    x = normal(seed, 4, d).float()
    x[::2] = 0
    m = codec.group or d
    codes, scale, offset = W.quantize(x, codec)
    assert (W.dequantize(codes, scale, offset)[::2].abs() <= 1e-6).all()
    for row, group in np.ndindex(4, d // m):
        channels = slice(group * m, group * m + m)
        alone = W.quantize(x[row, channels], codec._replace(group=None))
        assert torch.equal(codes[row, channels], alone[0])
        assert (scale[row, group], offset[row, group]) == (alone[1], alone[2])

@pytest.mark.parametrize("c", [0.01, -3, 1e-6])
def test_quantizer_keeps_a_constant_row(c):
    """Affine: c as bfloat16. QuEST, 2 bits: its level 0.498 c or 1.494 c, 0.502 or 0.494 away."""
    x = torch.full((64,), c)
    affine = quantized_and_read(x, Codec(2, "affine"))
    quest = quantized_and_read(x, Codec(2, "quest"))
    assert ((affine - c).abs() <= 2.0 ** -8 * abs(c)).all()
    assert (quest * c > 0).all()
    assert ((quest - c).abs() <= 0.51 * abs(c)).all()

@law(seeds, codecs, st.integers(-12, 12))
def test_quantizer_commutes_with_powers_of_two_bit_for_bit(seed, codec, power):
    """2^j leaves 1e-30/255 a normal number. The scale of a group without a range stays the smallest one."""
    x = all_kinds(seed, 64)
    factor = 2.0 ** power
    codes, scale, offset = W.quantize(x, codec)
    codes_after, scale_after, offset_after = W.quantize(factor * x, codec)
    ranged = scale.double() > 2.0 ** -126
    assert torch.equal(offset_after, factor * offset)
    assert torch.equal(scale_after[ranged], factor * scale[ranged])
    read = W.dequantize(codes, scale, offset)
    assert torch.equal(W.dequantize(codes_after, scale_after, offset_after), factor * read)

@law(seeds, sizes(2, 3, 4), sizes(16, 64, 128))
def test_affine_of_what_was_read_back_changes_nothing(seed, bits, d):
    """Min/max: up to 4 bits the pair rounds by under half a step: both end codes occur, the grid returns."""
    once = quantized_and_read(all_kinds(seed, d), Codec(bits, "affine"))
    assert torch.equal(quantized_and_read(once, Codec(bits, "affine")), once)

@law(seeds, quantizers, sizes(16, 128))
def test_quantizer_error_falls_with_bits(seed, quantizer, d):
    x = normal(seed, 16, d)
    read = [quantized_and_read(x, Codec(bits, quantizer)) for bits in (2, 3, 4, 8)]
    errors = [(y - x).square().sum() for y in read]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 30 * errors[3]

@pytest.mark.parametrize("shape, clip", [
    ((8, 64, 128), 0.96),
    ((8, 64, 128), 0.92),
    ((2 ** 24 + 8,), 0.96),
])
def test_affine_clip_is_numpys_percentile_of_any_number_of_bfloat16(shape, clip):
    """torch.quantile refuses both. The ⌊κm⌋-th smallest, from 0, is numpy's "higher" percentile here."""
    x = normal(0, *shape).bfloat16()
    numbers = x.float().numpy()
    tau = np.percentile(abs(numbers), 100 * clip, axis=-1, method="higher", keepdims=True)
    clamped = np.clip(numbers, -tau, tau)
    _, scale, offset = W.quantize(x, Codec(2, "affine", clip))
    assert rounds_to(clamped.min(-1, keepdims=True), offset)
    assert rounds_to(np.ptp(clamped, -1, keepdims=True) / 3, scale)

@law(seeds)
def test_affine_clips_an_outlier_and_spares_the_others(seed):
    """One of 128 values is 100 times too large: κ = 0.96 leaves the others 0.6 of the error or less."""
    x = normal(seed, 128)
    x[5] = 100 * x.abs().max()

    def error(clip):
        read = quantized_and_read(x, Codec(2, "affine", clip))
        return (read - x)[6:].square().sum()

    assert error(0.96) <= 0.6 * error(1.0)

@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("quantizer", W.QUANTIZERS)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_quantizing_compiles_into_one_graph_and_gives_the_same_codes(backend, quantizer):
    """Nothing is known of the clips before, as in a new process. Errors that inductor feeds back round once less."""
    x = all_kinds(0, 32)[None, None]
    codec = Codec(2, quantizer, group=8)
    H, F = random_errors(1, 4, 8) if backend == "eager" else (None, None)
    programs = {
        W.quantize: (x, codec),
        W.quantize_refined: (x, codec, H, F, True),
    }
    for function, arguments in programs.items():
        torch.compiler.reset()
        W.gaussian_clip.cache_clear()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for got, expected in zip(compiled(*arguments), function(*arguments)):
            assert torch.equal(got, expected)


# ---- packing

@law(seeds, widths, sizes(16, 64, 128), sizes((), (3,), (2, 1, 5)))
def test_packing_is_undone_and_lays_runs_of_channels_side_by_side(seed, bits, d, shape):
    """In a plane of w bits, byte i of n = d·w/8 holds channels i, i + n, i + 2n, ... from low bits up.

    3 bits are two planes: the codes' upper two bits, then their lowest.
    """
    codes = integers(seed, 2 ** bits, *shape, d).to(torch.uint8)
    packed = kernels.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape, d * bits // 8)
    assert torch.equal(kernels.unpack(packed, bits), codes)

    row = codes.view(-1, d)[-1].tolist()
    planes = [(bits, row)]
    if bits == 3:
        planes = [(2, [code // 2 for code in row]), (1, [code % 2 for code in row])]
    expected = []
    for width, plane in planes:
        n = d * width // 8
        for i in range(n):
            channels = plane[i::n]
            expected.append(sum(code << j * width for j, code in enumerate(channels)))
    assert packed.view(-1, d * bits // 8)[-1].tolist() == expected

@pytest.mark.parametrize("bits, d", [
    (3, 12),
    (3, 4),
    (2, 6),
    (4, 15),
    (5, 16),
    (1, 16),
    (0, 16),
])
def test_packing_refuses_codes_that_do_not_fill_bytes(bits, d):
    with pytest.raises(ValueError, match=rf"\b{d}\b.*\b{bits} bits"):
        kernels.pack(torch.zeros(2, d, dtype=torch.uint8), bits)
    with pytest.raises(ValueError):
        W.WindowCache(1, 2, d, W.Scheme(W.Encoding(Codec(bits)), W.Encoding()))

@law(seeds)
def test_pair_holds_the_scale_in_the_low_half_and_the_offset_in_the_high(seed):
    """A bfloat16 is the upper half of the float32 of the same value."""
    scale, offset = all_kinds(seed, 10).bfloat16().view(2, 3, 10, 4)

    def upper_half(x):
        return x.float().numpy().view(np.uint32) >> 16

    pairs = kernels.join_pair(scale, offset)
    assert pairs.dtype == torch.int32
    expected = upper_half(scale) + (upper_half(offset) << 16)
    assert (pairs.numpy().view(np.uint32) == expected).all()
    scale_back, offset_back = kernels.split_pair(pairs)
    assert torch.equal(scale_back, scale)
    assert torch.equal(offset_back, offset)

@law(seeds, widths, sizes(16, 64, 128), sizes(1, 3, 4), sizes(0, 1, 40, 1030))
def test_one_pass_over_packed_bytes_equals_dequantizing(seed, bits, d, heads, s):
    """What is given to the compiler, and the reference; sums of s or d terms in another order."""
    x = normal(seed, 2, 2, s, d).float()
    q = normal(seed + 1, 2, 2, heads, d).float()
    p = normal(seed + 2, 2, 2, heads, s).float()
    codec = Codec(bits, "affine", 0.96)
    codes, pairs = W.encode_reference(x, W.Encoding(codec))
    read = quantized_and_read(x, codec)
    for scores in (kernels.packed_scores_ref, kernels.scores_in_one_pass):
        found = scores(q, codes, pairs, bits, s)
        assert found.shape == (2, 2, heads, s)
        assert s == 0 or distance(found, q @ read.mT) <= 1e-5 * d
    for values in (kernels.packed_values_ref, kernels.values_in_one_pass):
        assert distance(values(p, codes, pairs, bits, s), p @ read) <= 1e-5 * (s + 1)


# ---- what a transform is worth

def score_error(T, q, k, quantizer):
    """Relative squared error of q·k with 2-bit keys (s, d) under T (n, m, m)."""
    encoding = W.Encoding(Codec(2, quantizer), T[None])
    read = W.roundtrip(k[None, None], encoding)[0, 0]
    error = q @ (read - k).mT
    return error.square().sum() / (q @ k.mT).square().sum()

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("quantizer", W.QUANTIZERS)
def test_wush_is_each_heads_own_and_another_heads_is_worse(quantizer, seed):
    """Two heads of different covariance: their data swapped, the transforms swap."""
    U = torch.linalg.qr(normal(seed, 2, 64, 64)).Q
    mix = U * torch.logspace(0.7, -0.7, 64, dtype=torch.float64)
    k = normal(seed + 1, 2, 512, 64) @ mix.mT
    q = normal(seed + 2, 2, 512, 64) @ mix.flip(0).mT
    T = W.wush(moment(k), 2 * moment(q))
    assert not close(T[0], T[1], 0.1)
    swapped = W.wush(moment(k.flip(0)), moment(q.flip(0)))
    assert close(swapped, T.flip(0), 1e-9)
    for g in (0, 1):
        own = score_error(T[g], q[g], k[g], quantizer)
        assert score_error(T[1 - g], q[g], k[g], quantizer) >= 1.5 * own

@pytest.mark.parametrize("shift, of_identity, of_hadamard", [(60, 0.5, 0.7), (0, 1.1, 1.1)])
@pytest.mark.parametrize("quantizer", W.QUANTIZERS)
def test_wush_halves_the_error_of_keys_with_two_huge_channels(
        quantizer, shift, of_identity, of_hadamard):
    """A shift of 60 on two of 128 channels, as Qwen2.5 has; without one nothing is lost."""
    q = normal(0, 512, 128)
    k = normal(1, 512, 128) + shift * (torch.arange(128) // 2 == 20)
    error = {}
    for name in ("identity", "hadamard", "wush"):
        rule = W.TRANSFORMS[name].rule
        T = rule(moment(k)[None], moment(q)[None])[0]
        error[name] = score_error(T, q, k, quantizer)
    assert error["wush"] <= of_identity * error["identity"]
    assert error["wush"] <= of_hadamard * error["hadamard"]


# ---- beyond the paper

def error_cost(T, hess, free_mean=False):
    """What errors in the basis of T (d, d) cost, damped as `error_hessian` damps it, written out by itself."""
    d = len(T)
    inverse = torch.linalg.solve(T.double(), eye(d))
    without_mean = eye(d) - free_mean / d
    H = without_mean @ inverse.mT @ hess @ inverse @ without_mean
    return damped(H)

@law(seeds, sizes(2, 8, 64), st.booleans())
def test_feedback_makes_each_channels_error_cost_by_itself(seed, d, free_mean):
    """(I + F) H' (I + F)ᵀ is diagonal, its trace at most that of H', H' damped: the LDL factorization."""
    M, H = random_moments(seed, d)
    T = W.wush(M, H)
    F = W.feedback_matrix(W.error_hessian(T, H, free_mean))[0, 0]
    cost = error_cost(T[0, 0], H[0], free_mean)
    pivots = (eye(d) + F) @ cost @ (eye(d) + F).mT
    assert torch.equal(F, F.triu(1))
    assert close(pivots, pivots.diagonal().diag(), 1e-9)
    assert trace(pivots) <= trace(cost) * (1 + 1e-12)

def test_feedback_of_a_diagonal_cost_or_of_none_is_nothing():
    H = torch.diag(torch.arange(1.0, 17))[None]
    for hess in (H, 0 * H):
        cost = W.error_hessian(torch.eye(16)[None, None], hess)
        assert (W.feedback_matrix(cost) == 0).all()

@law(seeds, sizes(16, 64))
def test_fine_grid_loses_a_twelfth_of_the_pivots_with_feedback_and_of_the_trace_without(seed, d):
    """Δ²/12 Σ D_ii and Δ²/12 tr(H'): no clipping at a step of 1e-3. 4000 rows: 5 standard errors are 0.03."""
    M, H = random_moments(seed, d)
    T = W.wush(M, H)
    F = W.feedback_matrix(W.error_hessian(T, H)).float()
    cost = error_cost(T[0, 0], H[0])
    unit = eye(d) + F[0, 0].double()
    x = normal(seed, 1, 1, 4000, 1, d).float()
    step = 2.0 ** -10
    pivots = unit @ cost @ unit.mT
    for matrix, expected in [(0 * F, trace(cost)), (F, trace(pivots))]:
        codes = W.feed_back((x + 16).movedim(2, -1) / step, 16, matrix).movedim(-1, 2)
        error = (codes * step - 16 - x).double()[0, 0, :, 0]
        loss = ((error @ cost) * error).sum(-1).mean()
        assert loss.item() == pytest.approx(expected.item() * step ** 2 / 12, rel=0.03)

def random_errors(seed, *shape):
    """Draw what errors cost, H' (1, *shape, m), of condition up to 1e3 and mean diagonal 1, and F of it."""
    m = shape[-1]
    M, H = random_moments(seed, m, math.prod(shape[:-1]))
    cost = W.error_hessian(torch.linalg.cholesky(M).mT[:, None], H)
    cost = cost / W.mean_diagonal(cost)
    cost = cost.reshape(1, *shape, m)
    return cost.float(), W.feedback_matrix(cost).float()

def best_of_all_levels(codes, steps, i, top, H, u):
    """Try each level for channel i of codes (s, m), in float64: the one of the least eᵀ H' e + (uᵀ e)², (s,)."""
    levels = torch.arange(top + 1)[:, None]
    errors = (codes.double() - steps.double()).repeat(top + 1, 1, 1)
    errors[..., i] = levels - steps[:, i].double()
    cost = (errors @ H.double() * errors).sum(-1)
    cost += (u * errors).sum(-1).square()
    return cost.argmin(0).float()

def quantized_channel_by_channel(x, codec, H, F, sweeps, centred, own):
    """Quantize x (s, m), one group, by H' and F (m, m), with plain loops: codes, scale and offset."""
    top = 2 ** codec.bits - 1
    middle = torch.zeros(len(x), 1)
    if centred:
        middle = x.double().mean(-1, keepdim=True).float()
    _, scale, lowest = W.quantize(x - middle, codec._replace(group=None))
    if codec.quantizer == "affine":
        exact_scale, exact_lowest = W.affine(x - middle, codec.bits, codec.clip)
    else:
        exact_scale, exact_lowest = W.quest(x - middle, codec.bits, codec.clip)
    assert torch.equal(exact_scale.bfloat16().clamp(min=2.0 ** -126), scale[:, 0])
    scale = scale.float()
    lowest = (exact_lowest[:, None] + middle).bfloat16().float()
    y = x.clone()
    codes = torch.zeros_like(x)
    for i in range(x.shape[-1]):
        channel = y[:, i:i + 1]
        code = ((channel - lowest) / scale).round().clamp(0, top)
        codes[:, i:i + 1] = code
        error = channel - (scale * code + lowest)
        y = y - error * F[i]
    for _, i in np.ndindex(sweeps, x.shape[-1]):
        u = own ** 0.5 * x.double() @ H.double()
        codes[:, i] = best_of_all_levels(codes, (x - lowest) / scale, i, top, H, u)
    if centred:
        missed = x - (scale * codes + lowest)
        lowest = lowest + missed.double().mean(-1, keepdim=True).float()
    return codes.byte(), scale.bfloat16(), lowest.bfloat16()

@law(seeds, sizes(2, 3, 4), quantizers, sizes(None, 16), sizes(0, 2), st.booleans(),
     sizes(0.0, 0.5))
def test_refined_quantizing_equals_one_channel_after_another(
        seed, bits, quantizer, group, sweeps, centred, own):
    """Errors in units of steps change float noise only: few codes. Groups are apart."""
    codec = Codec(bits, quantizer, 1.0, group)
    m = group or 64
    x = normal(seed, 1, 2, 50, 64).float()
    H, F = random_errors(seed + 1, 2, 64 // m, m)
    H = H[0]
    F = F[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(W, "SWEEPS", sweeps)
        codes, scale, offset = W.quantize_refined(x, codec, H, F, centred, own)
    wrong_rows = 0
    wrong_pairs = 0
    for g, n in np.ndindex(2, 64 // m):
        channels = slice(n * m, n * m + m)
        expected = quantized_channel_by_channel(
            x[0, g, :, channels], codec, H[g, n], F[g, n], sweeps, centred, own)
        different = codes[0, g, :, channels] != expected[0]
        wrong_rows += different.any(-1).sum().item()
        different = scale[0, g, :, n] != expected[1][:, 0]
        wrong_pairs += different.sum().item()
        different = offset[0, g, :, n] != expected[2][:, 0]
        wrong_pairs += different.sum().item()
    assert wrong_rows <= 0.01 * 100 * (64 // m)
    assert wrong_pairs <= 0.01 * 200 * (64 // m)
    assert (codes != W.quantize(x, codec)[0]).double().mean() > 0.05

@law(seeds, codecs, sizes(16, 64))
def test_refined_quantizing_without_refinements_is_the_papers(seed, codec, d):
    x = all_kinds(seed, d)[None, None]
    paper = W.quantize(x, codec)
    refined = W.quantize_refined(x, codec)
    assert all(torch.equal(a, b) for a, b in zip(paper, refined))

@law(seeds, codecs, sizes(16, 64))
def test_refined_quantizing_stands_every_kind_of_row(seed, codec, d):
    """Codes stay in range and what is read is finite, also of constant rows and zeros."""
    x = all_kinds(seed, d)[None, None]
    m = codec.group or d
    H, F = random_errors(seed + 1, d // m, m)
    codes, scale, offset = W.quantize_refined(x, codec, H, F, True, 0.5)
    assert codes.max() <= 2 ** codec.bits - 1
    read = W.dequantize(codes, scale, offset)
    assert read.isfinite().all()
    assert (read[0, 0, 12:16].abs() <= 1e-6).all()       # the rows of zeros
    constant = read[0, 0, 8:12]
    assert ((constant + 3).abs() <= 3 * 2.0 ** -8).all()

@law(seeds, sizes(2, 3, 4), quantizers, sizes(1.0, -3e3, 1e4, 1e30), sizes(0, 1e-7))
def test_search_finds_codes_of_constants_that_bfloat16_rounds(seed, bits, quantizer, c, spread):
    """The smallest step goes into such an offset's rounding error more often than float32 can count."""
    x = (c * (1 + spread * normal(seed, 1, 2, 5, 64))).float()
    H, F = random_errors(seed + 1, 2, 1, 64)
    search = W.search
    found = []

    def search_and_note(*inputs):
        found.append(search(*inputs))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(W, "search", search_and_note)
        read = W.dequantize(*W.quantize_refined(x, Codec(bits, quantizer), H[0], F[0], True, 0.5))
    assert ((found[0] >= 0) & (found[0] <= 2 ** bits - 1)).all()
    assert ((read - x).abs() <= abs(c) * 2.0 ** -8).all()

def cost_of(codes, steps, H, u=None):
    """Return eᵀ H' e + (uᵀ e)² of each column of e = codes − steps (..., m, s), in float64: (..., s)."""
    error = codes.double() - steps.double()
    cost = (error * (H.double() @ error)).sum(-2)
    if u is not None:
        cost += (u.double() * error).sum(-2).square()
    return cost

def to_be_swept(seed, bits, d, has_u, dtype=torch.float64):
    """Draw codes at random, steps (d, 24) of every kind of row, H' (d, d), and u (d, 24) or None."""
    rows = all_kinds(seed, d)
    scale, offset = W.stored_pair(*W.quest(rows, bits))
    steps = W.in_steps(rows, scale, offset).mT
    codes = integers(seed, 2 ** bits, d, 24)
    H = random_errors(seed, 1, d)[0][0, 0].to(dtype)
    u = normal(seed, d, 24).to(dtype) if has_u else None
    return codes.to(dtype), steps.to(dtype), H, u

def test_sweep_of_two_channels_worked_by_hand():
    """Costs 2e₀² + 2e₀e₁ + 2e₁², so F₀₁ = −1/2.

    Steps 0.4 and 0.4: from codes 0, 0, e = (−0.4, −0.4) and g₀ = −1.2, so code 0 moves to the level next to 0.6. Then
    g₁ = 0.6 − 0.8 and code 1 would go to 0.1: it stays. Feedback finds the mirror image, (0, 1), and a sweep leaves it.

    Steps 0.4 and 3.3: channel 1 is clipped and takes no push of channel 0, so feedback gives (0, 3) and
    e = (−0.4, −0.3). As g₀ = −1.1, code 0 goes to the level next to 0.55, and the cost falls from 0.74 to 0.54.
    """
    H = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    F = W.feedback_matrix(H).float()
    assert close(F, torch.tensor([[0, -0.5], [0, 0]]), 1e-6)
    steps = torch.tensor([[0.4], [0.4]])
    assert W.sweep(torch.zeros(2, 1), steps, 2, H).flatten().tolist() == [1, 0]
    fed_back = W.feed_back(steps, 2, F)
    assert fed_back.flatten().tolist() == [0, 1]
    assert torch.equal(W.sweep(fed_back, steps, 2, H), fed_back)

    clipped = torch.tensor([[0.4], [3.3]])
    fed_back = W.feed_back(clipped, 2, F)
    swept = W.sweep(fed_back, clipped, 2, H)
    assert fed_back.flatten().tolist() == [0, 3]
    assert swept.flatten().tolist() == [1, 3]
    assert cost_of(fed_back, clipped, H).item() == pytest.approx(0.74)
    assert cost_of(swept, clipped, H).item() == pytest.approx(0.54)

def noise_of(codes, steps, bits, H, u):
    """Bound what rounding does to the cost of d moves, each of at most `top` steps, by gradients of 2d roundings."""
    top = 2 ** bits - 1
    d = len(codes)
    size = (codes - steps).double().abs() + top
    gradient = H.double().abs() @ size
    if u is not None:
        along = u.double().abs()
        gradient += along * (along * size).sum(0)
    return 2 * d * torch.finfo(codes.dtype).eps * top * gradient.sum(0)

@law(seeds, sizes(2, 3, 4), sizes(2, 8, 64), st.booleans(), sizes(torch.float32, torch.float64))
def test_sweep_never_raises_the_cost_and_moves_among_the_levels(seed, bits, d, has_u, dtype):
    """From any codes, and for any kind of row."""
    codes, steps, H, u = to_be_swept(seed, bits, d, has_u, dtype)
    swept = W.sweep(codes, steps, bits, H, u)
    assert ((swept == swept.round()) & (0 <= swept) & (swept <= 2 ** bits - 1)).all()
    noise = noise_of(codes, steps, bits, H, u)
    assert (cost_of(swept, steps, H, u) <= cost_of(codes, steps, H, u) + noise).all()
    assert (swept != codes).any()

@law(seeds, sizes(2, 3, 4), sizes(2, 8, 24), st.booleans())
def test_fixed_point_of_sweeps_has_the_best_level_in_every_channel(seed, bits, d, has_u):
    """Each level of each channel is tried, the others left as they are."""
    codes, steps, H, u = to_be_swept(seed, bits, d, has_u)
    for _ in range(100):
        before = codes
        codes = W.sweep(before, steps, bits, H, u)
        if torch.equal(codes, before):
            break
    assert torch.equal(codes, before)
    lowest = cost_of(codes, steps, H, u) - noise_of(codes, steps, bits, H, u)
    for i, level in np.ndindex(d, 2 ** bits):
        moved = codes.clone()
        moved[i] = level
        assert (cost_of(moved, steps, H, u) >= lowest).all()

@law(seeds, codecs, sizes(16, 64), st.booleans())
def test_search_with_a_diagonal_hessian_changes_nothing_after_rounding(seed, codec, d, centred):
    """Bit for bit: products by powers of two are exact, and so is code − step where the code is the nearest."""
    x = all_kinds(seed, d)[None, None]
    m = codec.group or d
    H = torch.diag(2.0 ** (integers(seed, 9, m) - 4)).expand(1, d // m, m, m)
    F = W.feedback_matrix(H).float()
    searched = W.quantize_refined(x, codec, H, F, centred)
    rounded = W.quantize_refined(x, codec, None, None, centred)
    assert all(torch.equal(a, b) for a, b in zip(searched, rounded))

@law(seeds, sizes(2, 3, 4), sizes(16, 64))
def test_search_costs_less_than_feedback_alone_and_that_less_than_rounding(seed, bits, d):
    """Summed over 200 rows of normal data."""
    H, F = random_errors(seed, 1, d)
    x = normal(seed, 1, 1, 200, 1, d).float()
    steps = (2 ** bits - 1) / 2 * (1 + x / W.gaussian_clip(bits))
    costs = []
    for sweeps in (0, 1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(W, "SWEEPS", sweeps)
            codes = W.search(steps, bits, H[0], F[0])
        costs.append(cost_of(codes[0, 0, :, 0].mT, steps[0, 0, :, 0].mT, H[0, 0]).sum())
    rounded = W.nearest_code(steps, bits)
    of_rounding = cost_of(rounded[0, 0, :, 0].mT, steps[0, 0, :, 0].mT, H[0, 0]).sum()
    assert costs[2] <= costs[1] < costs[0] < of_rounding

@law(seeds, sizes(8, 64), sizes(0.25, 0.5, 1.0))
def test_own_direction_makes_stretching_a_key_cost_its_score_squared(seed, d, weight):
    """An error c·y adds weight · (c · yᵀH'y)² to its c² · yᵀH'y, whatever the axis of y."""
    H = random_errors(seed, 1, d)[0]
    y = normal(seed, 1, 1, 5, 1, d).float()
    u = W.own_direction(y, H, weight)
    score = (y @ H * y).sum(-1)
    assert close((u * y).sum(-1).square(), weight * score.square(), 1e-5)
    across = normal(seed + 1, 1, 1, 5, 1, d).float()
    across -= y * (across @ H * y).sum(-1, keepdim=True) / score[..., None]      # yᵀ H' across = 0
    assert (u * across).sum(-1).abs().max() <= 1e-5 * d * u.norm() * across.norm()

@law(seeds, sizes(2, 4))
def test_queries_that_look_for_a_key_pay_for_its_own_direction_with_weight_1(seed, d):
    """Normal queries, weighted by exp(q·k/√d), pay δᵀHδ + (kᵀHδ)² for an error δ. kᵀHk = 1/4, so 3 % are over five standard errors."""
    factor = normal(seed, d, d) + 2 * eye(d)
    H = moment(factor) / d                                   # E[q qᵀ]/d
    k = normal(seed + 1, d)
    k /= 2 * (k @ H @ k).sqrt()
    error = normal(seed + 2, d)
    scaled = normal(seed + 3, 200_000, d) @ factor / math.sqrt(d)               # q/√d
    weights = (scaled @ k).softmax(0)
    paid = weights @ (scaled @ error).square()
    u = W.own_direction(k.expand(1, 1, 1, 1, d), H[None, None], 1.0).flatten()
    assert paid.item() == pytest.approx((error @ H @ error + (u @ error) ** 2).item(), rel=0.03)

@law(seeds, sizes(1, 7), sizes(4, 16))
def test_hessian_in_score_units_is_the_mean_square_of_scores_moves(seed, n_queries, d):
    """Of the queries themselves; another Hessian of keys gets their size, and a zero one stays zero."""
    q = normal(seed, 1, 1, n_queries, d)
    k = normal(seed + 1, d)
    calibrated = as_collected(moment(q), moment(q), n_queries=n_queries)
    H = W.in_score_units(calibrated["queries"], calibrated)[0, 0]
    scores = q[0, 0] @ k / math.sqrt(d)
    assert (k @ H @ k).item() == pytest.approx(scores.square().mean().item(), rel=1e-9)
    other = W.in_score_units(7 * random_moments(seed, d)[1][None], calibrated)
    assert trace(other).item() == pytest.approx(trace(H).item(), rel=1e-9)
    loud = as_collected(moment(q), 1e6 * moment(q), n_queries=n_queries)
    assert (W.in_score_units(torch.zeros(1, 1, d, d).double(), loud) == 0).all()

@law(seeds, sizes(2, 16, 64))
def test_reversing_the_order_of_eigenvalues_is_a_rotation_from_the_left(seed, d):
    """The mean over channels of T x, 1ᵀT, becomes the axis of the largest λ instead of the smallest."""
    M, H = random_moments(seed, d)
    T = W.wush(M, H)[0, 0]
    reversed_T = W.strongest_first(T)
    assert close(reversed_T.mT @ reversed_T, T.mT @ T, 1e-12)
    L = torch.linalg.cholesky(damped(H)[0])
    eigenvectors = torch.linalg.eigh(L.mT @ damped(M)[0] @ L).eigenvectors
    for mean_axis, index in [(T.sum(0), 0), (reversed_T.sum(0), -1)]:
        axis = (L @ eigenvectors)[:, index]
        parallel = mean_axis.norm() * axis.norm()
        assert (mean_axis @ axis).abs() == pytest.approx(parallel.item(), rel=1e-6)

@law(seeds, sizes(2, 3, 4), st.booleans())
def test_offset_carries_the_mean_over_channels_to_half_a_step_of_bfloat16(seed, bits, feeds_back):
    M, H = random_moments(seed, 64)
    T = W.strongest_first(W.wush(M, H, exponent=0.4))
    cost = W.error_hessian(T, H, True).float() if feeds_back else None
    F = W.feedback_matrix(cost).float() if feeds_back else None
    x = W.apply(T, normal(seed, 1, 1, 64, 64)).float()
    codes, scale, offset = W.quantize_refined(x, Codec(bits, clip=1.3), cost, F, True)
    missed = (x - W.dequantize(codes, scale, offset)).mean(-1, keepdim=True)
    noise = 2.0 ** -20 * x.abs().amax(-1, keepdim=True)
    assert (missed.abs() <= offset.float().abs() * 2.0 ** -8 + noise).all()

@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("quantizer", W.QUANTIZERS)
def test_refined_beats_the_papers_setting_at_every_width(bits, quantizer):
    """Keys with the paper's transform and refined, on data of the moments' own: condition 1e3."""
    M, H = (S.float().double() / 192 for S in random_moments(3, 64, 2))
    k = normal(5, 2, 1000, 64) @ torch.linalg.cholesky(M).mT
    q = normal(6, 2, 1000, 64) @ torch.linalg.cholesky(H).mT
    calibrated = as_collected(M[None], H[None])
    loss = {}
    for refine in (W.PAPER, W.REFINED):
        keys = W.make_scheme(calibrated, "wush", bits, refine, quantizer=quantizer).keys
        error = W.roundtrip(k[None].float(), keys.layer(0))[0].double() - k
        loss[refine] = (q @ error.mT).square().sum()
    assert loss[W.REFINED] <= 0.66 * loss[W.PAPER]


@pytest.mark.parametrize("tokens", [2, 10, 40, 200, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_few_calibration_tokens_are_never_much_worse_than_none(seed, tokens):
    """Refined, from any number of tokens, loses at most 1.2 times what the Hadamard transform loses."""
    M, H = (S / 192 for S in random_moments(seed, 64, 2))    # so that scores are of a model's size
    L_M = torch.linalg.cholesky(M)
    L_H = torch.linalg.cholesky(H)

    def drawn(seed, count, L):
        return normal(seed, 2, count, 64) @ L.mT

    few = as_collected(
        moment(drawn(seed + 10, tokens, L_M))[None],
        moment(drawn(seed + 20, tokens, L_H))[None],
        tokens, tokens)
    k = drawn(seed + 30, 2000, L_M)
    q = drawn(seed + 40, 500, L_H)
    loss = {}
    for name in ("hadamard", "wush"):
        keys = W.make_scheme(few, name).keys
        error = W.roundtrip(k[None].float(), keys.layer(0))[0].double() - k
        loss[name] = (q @ error.mT).square().sum()
    assert loss["wush"] <= 1.2 * loss["hadamard"]

def test_many_calibration_tokens_are_believed_as_they_are():
    """From 100·d tokens on, T is the rule's of the moments themselves, bit for bit."""
    M, H = random_moments(0, 16, 2)
    calibrated = as_collected(M[None], H[None], 1600)
    derived = W.derive(calibrated, refine=W.PAPER)
    key_H = W.in_score_units(H[None], calibrated)
    assert torch.equal(derived.keys.transform, W.wush(M[None], key_H).float())
    fewer = W.derive(as_collected(M[None], H[None], 1599), refine=W.PAPER)
    assert not torch.equal(fewer.keys.transform, derived.keys.transform)


# ---- schemes

def test_scheme_has_the_bits_and_clips_of_each_side_and_no_transform_at_16():
    M, H = random_moments(0, 16, heads=2)
    calibrated = as_collected(M[None], H[None])
    both = W.make_scheme(calibrated, bits=(3, 2), quantizer="affine", refine=W.PAPER, group=8)
    assert both.keys.codec == Codec(3, "affine", 0.96, 8)
    assert both.values.codec == Codec(2, "affine", 0.92, 8)
    widened = W.make_scheme(calibrated, bits=(4, 16))
    assert widened.keys.codec == Codec(4, "quest", 1.1)
    assert widened.keys.centred
    assert widened.values == W.Encoding(Codec(16))
    assert widened.folded().keys == widened.keys
    assert both.folded().values.transform is None

@pytest.mark.parametrize("bits", [
    0, 1, 5, 2.0, True, "2", None, (2, 0), (2.0, 2), (16, 17), (2,), (2, 2, 2), [], {2},
    torch.tensor([3, 2]), torch.tensor(2.0), np.float64(2)])
def test_bits_that_there_are_not_are_refused(bits):
    with pytest.raises(ValueError, match="bits are one of 2, 3, 4, 8, 16, or two"):
        W.bits_of_sides(bits)

@law(seeds, st.floats(2.0, 4.0))
def test_no_allotment_of_as_many_bits_leaves_less_harm(seed, bits):
    """Of all ways to give two layers' keys and values 2, 3 or 4 bits each."""
    harm = normal(seed, 2, 2).exp() ** 3
    allotted = torch.tensor(W.allot_bits(*harm, bits))
    assert 4 * bits - 1 < allotted.sum() <= 4 * bits

    everything = torch.cartesian_prod(*[torch.arange(2, 5)] * 4).view(-1, 2, 2)
    alike = everything[everything.sum((1, 2)) == allotted.sum()]
    left = (harm * 4.0 ** -alike).sum((1, 2))
    assert (harm * 4.0 ** -allotted).sum() <= left.min() * (1 + 1e-12)

def test_layers_have_the_bits_of_an_average_and_the_clips_that_go_with_them():
    M, H = random_moments(0, 16, heads=2)
    calibrated = as_collected(torch.stack([M, M]), torch.stack([H, H]))
    derived = W.derive(calibrated)
    with pytest.raises(ValueError, match="2.5 bits are an average.*measure_harm"):
        W.scheme_of(derived, 2.5)

    # One of the keys does nearly all harm: it gets as many as there are.
    keys = derived.keys._replace(harm=torch.tensor([1e-3, 1.0]))
    values = derived.values._replace(harm=torch.tensor([1e-4, 1e-5]))
    scheme = W.scheme_of(derived._replace(keys=keys, values=values), 2.5)
    first, second = [scheme.layer(l) for l in (0, 1)]
    assert first.keys.codec == second.values.codec == Codec(2, "quest", 1.3)
    assert second.keys.codec == Codec(4, "quest", 1.1)
    assert first.values.codec.bits == 2

@pytest.mark.parametrize("bits", [
    (3, 2), [3, 2], (np.int64(3), np.uint8(2)), (torch.tensor(3), 2), np.int64(3), torch.tensor(3)])
def test_bits_may_be_numpys_or_torchs_and_two_of_them_a_list(bits):
    sides = W.bits_of_sides(bits)
    assert sides == ((3, 2) if isinstance(bits, (tuple, list)) else (3, 3))
    assert [type(width) for width in sides] == [int, int]

def test_transform_that_cannot_be_refined_is_the_papers():
    M, H = random_moments(0, 16, heads=2)
    calibrated = as_collected(M[None], H[None])
    derived = W.derive(calibrated, "hadamard", W.REFINED)
    assert derived.refine == W.PAPER
    assert derived.keys.hessian is None


# ---- calibration

@functools.cache
def tiny_pair():
    """Make a tiny Qwen3 of transformers with biases, and ours of its weights."""
    theirs = tiny(attention_bias=True, attn_implementation="eager").requires_grad_(False)
    frequencies = checkpoints.rope_frequencies(theirs.config)
    return theirs, W.Model(theirs.config, theirs.state_dict(), *frequencies)

@law(seeds, sizes(1, 3), sizes(1, 5), st.booleans())
def test_second_moment_is_the_plain_sum_of_outer_products(seed, batch, heads, weighted):
    x = normal(seed, batch, 2, heads, 4, 3).float()
    w = normal(seed + 1, batch, 2, heads, 4)
    if not weighted:
        w = torch.ones_like(w)
    expected = torch.zeros(2, 3, 3, dtype=torch.float64)
    for b, g, r, t in np.ndindex(batch, 2, heads, 4):
        token = x[b, g, r, t].double()
        expected[g] += w[b, g, r, t] * token.outer(token)
    found = W.second_moment(x, w if weighted else None)
    assert found.dtype == torch.float64
    assert close(found, expected, 1e-13)                 # 60 sums of eps each
    numbers = torch.arange(9000.0).view(1, 1, -1, 1)
    assert W.second_moment(numbers).item() == sum(i * i for i in range(9000))

def transformers_view(theirs, ids):
    """What transformers sees of a sequence: its output with cache and attention maps, and queries per layer."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
    normed = []

    def note(module, args, q):
        normed.append(q)

    layers = theirs.model.layers
    hooks = [layer.self_attn.q_norm.register_forward_hook(note) for layer in layers]
    out = theirs(ids[None], output_attentions=True, use_cache=True)
    for hook in hooks:
        hook.remove()
    cos, sin = theirs.model.rotary_emb(normed[0], torch.arange(len(ids))[None])
    queries = []
    for q in normed:
        q = q.transpose(1, 2)
        queries.append(apply_rotary_pos_emb(q, q, cos, sin)[0][0].double())      # (h, t, d)
    return out, queries

def moments_by_hand(theirs, ids):
    """One sequence's statistics from transformers' cached keys and values, attention maps and plain loops."""
    out, queries = transformers_view(theirs, ids)
    names = ["keys", "queries", "values", "outputs",
             "values_oscar", "queries_attention", "outputs_attention"]
    total = {name: torch.zeros(2, 2, 16, 16, dtype=torch.float64) for name in names}
    for l, g in np.ndindex(2, 2):
        cached = out.past_key_values.layers[l]
        k = cached.keys[0, g].double()
        v = cached.values[0, g].double()
        total["keys"][l, g] = moment(k)
        total["values"][l, g] = moment(v)
        for h in range(4 * g, 4 * g + 4):
            p = out.attentions[l][0, h].double()
            q = queries[l][h]
            o_proj = theirs.model.layers[l].self_attn.o_proj.weight
            W_O = o_proj[:, 16 * h:16 * h + 16].double().mT
            A = W_O @ W_O.mT
            total["queries"][l, g] += 2 * moment(q)
            total["outputs"][l, g] += 2 * A
            total["outputs_attention"][l, g] += 2 * p.square().sum() * A
            for t in range(len(ids)):
                squares = ((v - p[t] @ v) @ W_O).square().sum(-1)            # ‖Wᵀ(v_s − o_t)‖²
                weight = 2 * p[t].square() @ squares / 16
                total["queries_attention"][l, g] += weight * q[t].outer(q[t])
        weights = torch.stack([x @ total["queries"][l, g] @ x for x in k])
        for weight, x in zip(weights / weights.mean(), v):
            total["values_oscar"][l, g] += weight * x.outer(x)
    return total

def test_collected_moments_count_what_transformers_caches_and_attends_with():
    """Keys as in a DynamicCache, after QK-norm and RoPE. Two float32 forward passes agree to 1e-5."""
    theirs, ours = tiny_pair()
    sequences = [integers(0, 256, 23), integers(1, 256, 40)]
    found = W.collect_moments(ours, sequences, attention_aware=True)
    first, second = (moments_by_hand(theirs, ids) for ids in sequences)
    assert found.pop("tokens") == 23 + 40
    assert found.pop("n_queries") == (23 + 40) * 4             # queries of a KV head
    assert found.keys() == first.keys()
    attention = {"queries_attention", "outputs_attention"}
    assert W.collect_moments(ours, []).keys() == first.keys() - attention | {"tokens", "n_queries"}
    for name, S in found.items():
        expected = first[name] if name == "outputs" else first[name] + second[name]
        assert S.dtype == torch.float64
        assert all(close(S[i], expected[i], 1e-5) for i in np.ndindex(2, 2)), name

def test_collected_moments_add_up_over_sequences_in_any_order():
    """All but the outputs', of weights only. Values carry no position: joined, layer 0 has the same."""
    model = tiny_pair()[1]
    a = integers(2, 256, 17)
    b = integers(3, 256, 30)

    def collected(*sequences):
        moments = W.collect_moments(model, sequences, attention_aware=True)
        count = sum(len(sequence) for sequence in sequences)
        assert moments.pop("tokens") == count
        assert moments.pop("n_queries") == 4 * count         # of a KV head
        return moments

    both = collected(a, b)
    swapped = collected(b, a)
    first = collected(a)
    second = collected(b)
    for name, S in both.items():
        assert close(S, swapped[name], 1e-13)
        assert close(S, first[name] + second[name] * (name != "outputs"), 1e-13)
    joined = collected(torch.cat([a, b]))
    assert close(joined["values"][0], both["values"][0], 1e-6)
    assert not close(joined["keys"][0], both["keys"][0], 1e-3)

@pytest.mark.parametrize("name", ["wush", "wush_a"])
def test_every_query_head_counts_for_its_group_and_their_order_does_not(name):
    """Order is float32 noise in layer 1's moments, amplified by 1 + d/γ at most; TᵀT has no signs."""
    model = tiny_pair()[1]
    weights = model.weights

    def TT(changed):
        changed_model = model._replace(weights=weights | changed)
        moments = W.collect_moments(changed_model, [integers(4, 256, 60)], attention_aware=True)
        derived = W.derive(moments, name, W.PAPER)
        keys = moment(derived.keys.transform.double())
        values = moment(derived.values.transform.double())
        return torch.stack([keys, values], 1)                # (l, 2, g, n, m, m)

    T = TT({})
    order = torch.tensor([2, 0, 3, 1, 4, 7, 6, 5])
    rows = (order[:, None] * 16 + torch.arange(16)).flatten()
    reordered = {}
    for key, weight in weights.items():
        if "q_proj" in key:
            reordered[key] = weight[rows]
        if "o_proj.weight" in key:
            reordered[key] = weight[:, rows]
    assert close(TT(reordered), T, 1e-4)

    # Another head in its place, in layer 0.
    q_name = "model.layers.0.self_attn.q_proj.weight"
    o_name = "model.layers.0.self_attn.o_proj.weight"
    for head in range(8):
        place = slice(16 * head, 16 * head + 16)
        g = head // 4
        q = weights[q_name].clone()
        o = weights[o_name].clone()
        q[place] = normal(head, 16, 64)
        o[:, place] = normal(head + 9, 64, 16)
        layer = TT({q_name: q, o_name: o})[0]
        assert not close(layer[0, g], T[0, 0, g], 1e-2)
        assert not close(layer[1, g], T[0, 1, g], 1e-2)
        assert close(layer[:, 1 - g], T[0, :, 1 - g], 1e-4)

def gram(W_O):
    return W_O.double() @ W_O.double().mT

@law(seeds, sizes(1, 3))
def test_wush_a_hessians_are_the_squared_jacobians_of_the_heads_outputs(seed, heads):
    """Errors of covariance C at every position change W_O(r)ᵀo by ½ tr(H C) in mean square, summed over r.

    So ½ H = Σ J Jᵀ over outputs and positions, with J from autograd. The softmax is in float32: 1e-5.
    """
    q = normal(seed, 1, 2, heads, 6, 4)
    k, v = normal(seed + 1, 2, 1, 2, 6, 4) + 1
    blocks = normal(seed + 2, 2, heads, 4, 7)

    def outputs(k, v):
        return torch.einsum("bgrtd,grdD->bgrtD", W.causal_attention(q, k, v), blocks)

    jacobians = torch.autograd.functional.jacobian(outputs, (k, v))
    key_hess, value_hess = (2 * torch.einsum("bgrtDbgsd,bgrtDbgse->gde", J, J) for J in jacobians)
    weight, p2 = W.attention_sensitivity(q, k, v, gram(blocks))
    assert close(W.second_moment(q, weight), key_hess, 1e-5)
    found = 2 * torch.einsum("grdD,greD,gr->gde", blocks, blocks, p2.sum((0, 3)))
    assert close(found, value_hess, 1e-5)

def test_wush_a_weights_do_not_lose_precision_to_bfloat16_activations():
    """The numbers in bfloat16 tensors are exact in float64: the Hessian of both agrees to float32 noise."""
    q = 4 * normal(0, 1, 2, 2, 64, 32).bfloat16()
    kv = normal(1, 2, 1, 2, 64, 32) + 3 * normal(2, 32)
    k, v = kv.bfloat16()
    A = gram(normal(3, 2, 2, 32, 64).bfloat16())

    def hessian(dtype):
        weight, _ = W.attention_sensitivity(q.to(dtype), k.to(dtype), v.to(dtype), A)
        return W.second_moment(q, weight)

    assert close(hessian(torch.bfloat16), hessian(torch.float64), 1e-3)

def test_wush_a_weights_of_a_long_sequence_are_each_querys_own():
    """6,000 tokens are more than are done at a time; a query sees those up to its own."""
    q = normal(0, 1, 1, 1, 6000, 4)
    k, v = normal(1, 2, 1, 1, 6000, 4)
    W_O = normal(2, 1, 1, 4, 7)
    weight, p2 = W.attention_sensitivity(q, k, v, gram(W_O))
    p2 = p2[0, 0, 0]
    weight = weight[0, 0, 0]
    for t in (0, 1, 1000, 5999):
        seen = v[0, 0, :t + 1]
        scores = k[0, 0, :t + 1] @ q[0, 0, 0, t] / 2
        p = scores.softmax(0)
        squares = ((seen - p @ seen) @ W_O[0, 0]).square().sum(-1)
        assert abs(p2[t] - p.square().sum()) <= 1e-5 * p2[t]
        expected = 2 * p.square() @ squares / 4
        assert abs(weight[t] - expected) <= 1e-5 * weight.max()

def test_wush_a_key_hessian_predicts_what_small_noise_does_to_the_module():
    """Noise 1e-4·A z on the keys of 4,000 copies, a query head a group: ½ tr(H A Aᵀ) ± 5 standard errors."""
    q = normal(0, 1, 2, 1, 6, 4)
    k, v = normal(1, 2, 1, 2, 6, 4)
    blocks = normal(2, 2, 1, 4, 7)
    A = normal(3, 4, 4)
    noise = 1e-4 * normal(4, 4000, 2, 6, 4) @ A.mT
    q_copies = q.expand(4000, -1, -1, -1, -1)
    v_copies = v.expand(4000, -1, -1, -1)
    noisy = W.causal_attention(q_copies, k + noise, v_copies)
    difference = (noisy - W.causal_attention(q, k, v)) * 1e4
    change = torch.einsum("bgrtd,grdD->btD", difference, blocks).square().sum((1, 2))
    weight, _ = W.attention_sensitivity(q, k, v, gram(blocks))
    predicted = trace(W.second_moment(q, weight) @ A @ A.mT).sum() / 2
    assert abs(change.mean() - predicted) <= 5 * change.std() / math.sqrt(4000)

class PeakBytes(TorchDispatchMode):
    """Count the bytes of all storage that is made and not yet freed, and their peak; meta tensors count, too."""

    def __init__(self, outside):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in outside}
        self.live = 0
        self.peak = 0

    def free(self, storage, size):
        self.known.discard(storage)
        self.live -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if torch.is_tensor(x)]
        for storage in {x.untyped_storage() for x in tensors}:
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

def meta_model(layers, hidden, heads, mlp):
    """Make a Qwen3 with 8 KV heads of 128 in bfloat16 of which only the shapes are there."""
    config = tiny(num_hidden_layers=1).config
    for name, value in {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": mlp,
        "max_position_embeddings": 40960,
    }.items():
        setattr(config, name, value)
    shapes = checkpoints.weight_shapes(config)
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()}
    return W.Model(config, weights, torch.empty(64, device="meta"), 1.0)

@pytest.mark.parametrize("length, attention_aware", [
    (4096, False), (32768, False), (4096, True), pytest.param(32768, True, marks=slow)])
@pytest.mark.parametrize("layers, hidden, heads, mlp", [
    (36, 4096, 32, 12288),      # Qwen3-8B
    (64, 5120, 64, 25600),      # Qwen3-32B
])
def test_calibration_needs_3_gib_beside_the_weights(
        layers, hidden, heads, mlp, length, attention_aware, monkeypatch):
    """Two layers run on the device "meta"; of the others only the moments are there. Fused attention needs o alone."""
    def fused(q, k, v, mask, is_causal, enable_gqa):
        return torch.empty_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    model = meta_model(2, hidden, heads, mlp)
    ids = torch.zeros(length, dtype=torch.long)
    with PeakBytes([ids, model.inv_freq, *model.weights.values()]) as memory:
        moments = W.collect_moments(model, [ids], attention_aware)

    square_bytes = 8 * 128 * 128
    layer_bytes = square_bytes * 8 * (len(moments) - 2)
    if attention_aware:
        layer_bytes += square_bytes * heads
    squares = [S for S in moments.values() if isinstance(S, torch.Tensor)]
    assert memory.live == sum(S.nbytes for S in squares)
    assert memory.peak + (layers - 2) * layer_bytes <= 3 * 2 ** 30

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_rotations_in_pieces_are_those_of_the_whole_call(dtype):
    """Bit for bit, as they take each token alone."""
    x = normal(0, 1, 2, 5000, 16).to(dtype)
    weight = normal(1, 16).to(dtype)
    angles = normal(2, 2, 5000, 16).to(dtype)
    cos, sin = angles[:, None]

    def norm_and_turn(x, cos, sin):
        x = W.rms_norm(x, weight, 1e-6)
        return [x, W.rope(x, cos, sin)]

    for pieces, whole in zip(W.in_pieces(norm_and_turn, x, cos, sin), norm_and_turn(x, cos, sin)):
        assert torch.equal(pieces, whole)

def test_long_call_equals_the_same_call_not_in_pieces(pair, monkeypatch):
    """But for the order in which a matrix product of fewer rows may add: a few roundings of float32."""
    model = pair[1]
    ids = tokens(1, 5000)
    in_pieces = W.forward(model, ids, lambda l, q, k, v: W.causal_attention(q, k, v))
    monkeypatch.setattr(W, "in_pieces", lambda function, *tensors: function(*tensors))
    whole = W.forward(model, ids, lambda l, q, k, v: W.causal_attention(q, k, v))
    assert close(in_pieces, whole, 1e-5)


# ---- equality with transformers; 1e-4 is float32's 6e-8 · condition of T (100) · logits (5) · a few

@pytest.mark.parametrize("kind, changes", [
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"num_key_value_heads": 8, "rms_norm_eps": 0.1}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": None, "num_attention_heads": 4}),
])
def test_logits_equal_transformers_with_transform_on_and_quantization_off(
        kind, changes, tmp_path):
    """Whatever the cut into calls: single steps, ragged, all at once."""
    hf, model = saved(tmp_path, kind, **changes)
    ids = tokens(2, 160)
    expected = reference(hf, ids)
    folded = W.fold_values(model, transforms(model, seed=3))
    for cuts in ([60] + [1] * 100, [7, 53, 20, 80], [160]):
        cache = W.new_cache(folded, scheme(transforms(model), OFF, OFF), WINDOWS, batch=2)
        assert distance(fed(folded, cache, ids, cuts), expected) < 1e-4
        assert cache[0].n_tokens == [160, 160]
        assert cache[0].n_packed == [128, 128]               # (160 - 4 - 24) // 8 * 8
        plain = W.new_cache(model, batch=2)
        assert distance(fed(model, plain, ids, cuts), expected) < 1e-4

def test_logits_equal_transformers_in_bfloat16(tmp_path):
    """3e-2 of the largest logit: a few of bfloat16's steps of 2^-8."""
    hf, model = saved(tmp_path, dtype=torch.bfloat16)
    ids = tokens(2, 120)
    T = transforms(model, condition=4.0)
    expected = reference(hf.bfloat16(), ids).float()
    folded = W.fold_values(model, T)
    window_cache = W.new_cache(folded, scheme(T, OFF, OFF), WINDOWS, batch=2)
    assert all(layer.keys.recent.dtype == torch.bfloat16 for layer in window_cache)
    plain_cache = W.new_cache(model, batch=2)
    for ours, cache in [(model, plain_cache), (folded, window_cache)]:
        found = fed(ours, cache, ids, [60] + [1] * 60)
        assert distance(found, expected) < 3e-2 * expected.abs().max()

def test_decode_equals_transformers_at_every_position_across_buffer_growth(pair):
    """K of a token stays, and equals transformers' DynamicCache's to eps · condition · |k|."""
    hf, model = pair
    ids = tokens(1, 600)
    T = transforms(model, condition=4.0)
    cache = W.new_cache(model, scheme(T, OFF, OFF), W.Windows(4, 16, 4))
    plain = W.new_cache(model)
    every = slice(None)
    steps = []
    stored = {}
    for i in range(600):
        token = ids[:, i:i + 1]
        steps.append(W.logits(model, W.feed(model, cache, token)))
        W.feed(model, plain, token)
        if i in (200, 300):
            stored[i] = cache[1].keys.read_packed(every, 100).clone()
    assert distance(torch.cat(steps, 1), reference(hf, ids)) < 1e-4
    assert cache[0].n_tokens == plain[0].n_tokens == [600]
    assert torch.equal(stored[200], stored[300])

    with torch.no_grad():
        theirs = hf(ids, use_cache=True).past_key_values
    for l in range(2):
        k = W.apply(torch.linalg.inv(T[l]), cache[l].keys.read_packed(every, 580))
        assert distance(k, theirs.layers[l].keys[:, :, 4:584]) < 1e-5
        assert distance(plain[l].k[:, :, :600], theirs.layers[l].keys) < 1e-5

@pytest.mark.parametrize("bias", [False, True])
def test_fold_leaves_logits_and_original_as_they_were(bias, tmp_path):
    """The folded model caches T_V v; folding twice is refused."""
    hf, model = saved(tmp_path, attention_bias=bias)
    before = {name: weight.clone() for name, weight in model.weights.items()}
    ids = tokens(1, 60)
    T = transforms(model)
    folded = W.fold_values(model, T)
    assert distance(fed(folded, W.new_cache(folded), ids, [60]), reference(hf, ids)) < 1e-4
    assert all(torch.equal(weight, before[name]) for name, weight in model.weights.items())
    assert not model.folded

    def first_values(model):
        cache = W.new_cache(model)
        W.feed(model, cache, ids)
        return cache[0].v[:, :, :60]

    assert distance(first_values(folded), W.apply(T[0], first_values(model))) < 1e-4
    with pytest.raises(ValueError, match="folded already"):
        W.fold_values(folded, T)
    with pytest.raises(ValueError, match="original model"):
        W.collect_moments(folded, [tokens(9)])


# ---- the window cache

def integer_T(seed, d=16):
    """Draw an integer T (2, 1, d, d), determinant 1: T x of integer x is exact in any order of summation."""
    below = (normal(seed, 2, 1, d, d) / 1.65).trunc().clamp(-1, 1)           # one in ten is not 0
    return (below.tril(-1) + torch.eye(d)).float()


# H' of channels in pairs, and F that follows: a sum of two products by powers of two is the same in any order.
PAIR = torch.tensor([[1, 0.5], [0.5, 1]])
PAIRS = torch.block_diag(*[PAIR] * 8).expand(2, 1, 16, 16)
FEEDBACK_IN_PAIRS = -PAIRS.triu(1)

def stored_bytes(layers, *index):
    """The codes and the pairs of some layers' keys and values."""
    stores = [store for layer in layers for store in (layer.keys, layer.values)]
    return [x[index] for store in stores for x in (store.codes, store.pairs)]

def share_of_differing(a, b):
    """Share of entries that differ: in another order of summation one in 1000 may cross a rounding edge."""
    return max((x != y).double().mean().item() for x, y in zip(a, b))

class Row:
    """What a batch row has been fed, k and v (2, s, 16), and what a cache should read of it."""

    def __init__(self, layer_scheme, windows):
        self.scheme = layer_scheme
        self.windows = windows
        self.k = torch.zeros(2, 0, 16)
        self.v = torch.zeros(2, 0, 16)

    def packed(self, count):
        """How many of `count` tokens are packed."""
        sink, keep, flush = self.windows
        return max(0, (count - sink - keep) // flush) * flush

    def append(self, k, v):
        self.k = torch.cat([self.k, k], 1)
        self.v = torch.cat([self.v, v], 1)

    def read(self, x, encoding, packed):
        """What the reader sees of x (2, s, 16) if so many tokens after the sink are packed."""
        middle = slice(self.windows.sink, self.windows.sink + packed)
        seen = x.clone()
        seen[:, middle] = W.roundtrip(x[None, :, middle], encoding)[0]
        return seen

drawn_windows = st.builds(W.Windows, st.integers(0, 9), st.integers(0, 20), st.integers(1, 9))
drawn_calls = st.lists(st.integers(1, 40), max_size=4)
drawn_bits = st.tuples(sizes(*W.BITS), sizes(*W.BITS))

@law(seeds, drawn_windows, drawn_calls, drawn_bits, st.booleans())
def test_window_cache_equals_its_rows_alone_and_plain_attention(
        seed, windows, calls, bits, refined):
    """Padding in any call, any cut into calls: same bytes, same windows, and a plain softmax over them."""
    dice = random.Random(seed)
    sink, keep, flush = windows
    H = PAIRS if refined else None
    F = FEEDBACK_IN_PAIRS if refined else None
    layer_scheme = W.Scheme(
        W.Encoding(Codec(bits[0]), integer_T(seed), H, F, refined),
        W.Encoding(Codec(bits[1]), None, H, F, refined))
    cache = W.WindowCache(3, 2, 16, layer_scheme, windows)
    rows = [Row(layer_scheme, windows) for _ in range(3)]
    for call, t in enumerate([*calls, sink + keep + 3 * flush + 5, 1]):
        pad = [dice.randrange(min(t, 6)) for _ in rows]
        q = normal(seed + 3 * call, 3, 2, 3, t, 16).float() / 4
        k = integers(seed + 3 * call + 1, 17, 3, 2, t, 16).float() - 8
        v = integers(seed + 3 * call + 2, 17, 3, 2, t, 16).float() - 8
        o = cache.attend(q, k, v, pad)
        for i, row in enumerate(rows):
            start = row.k.shape[1]
            row.append(k[i, :, pad[i]:], v[i, :, pad[i]:])
            packed = row.packed(start)                       # as when the call began
            k_seen = row.read(row.k, layer_scheme.keys, packed)
            v_seen = row.read(row.v, layer_scheme.values, packed)
            expected = softmax_attention(q[i, :, :, pad[i]:], k_seen, v_seen, start)
            # 1e-3 is 6e-8 · values 8 · scores 30 · T⁻¹ 50.
            assert distance(o[i, :, :, pad[i]:], expected) < 1e-3
            assert cache.n_tokens[i] == row.k.shape[1]
            assert cache.n_packed[i] == row.packed(row.k.shape[1])

    for i, row in enumerate(rows):
        assert cache.n_packed[i] >= 3 * flush
        alone = W.WindowCache(1, 2, 16, layer_scheme, windows)
        q = torch.zeros(1, 2, 3, row.k.shape[1], 16)
        alone.attend(q, row.k[None], row.v[None])
        assert alone.counts(0) == cache.counts(i)
        packed = slice(0, cache.n_packed[i])
        assert share_of_differing(
            stored_bytes([cache], i, slice(None), packed),
            stored_bytes([alone], 0, slice(None), packed)) == 0
        recent = cache.counts(i).recent
        for store, x in [(cache.keys, row.k), (cache.values, row.v)]:
            assert torch.equal(store.sink[i], x[:, :sink])
            assert torch.equal(store.recent[i, :, :recent], x[:, sink + cache.n_packed[i]:])

@pytest.mark.parametrize("bits, d, expected", [
    (2, 128, 72),
    (3, 128, 104),
    (4, 128, 136),
    (2, 64, 40),
])
@pytest.mark.parametrize("call", [128, 1])
def test_cache_holds_its_bytes_per_token_and_head_and_no_more(bits, d, expected, call):
    """d·b/8 bytes of codes and 4 of scale and offset, twice: 2 · (32 + 4) = 72. Measured on storages."""
    x = normal(0, 1, 2, 128, d).bfloat16()
    side = W.Encoding(Codec(bits))
    cache = W.WindowCache(1, 2, d, W.Scheme(side, side), W.Windows(0, 0, 1), torch.bfloat16)
    for part in x.split(call, 2):
        cache.attend(part[:, :, None], part, part)
    assert cache.n_packed == [128]               # the window is empty, and its room given back
    needed = expected * 128 * 2
    spare = needed // 16 if call == 1 else 0     # what grew token by token
    assert needed <= cache.nbytes <= needed + spare

@pytest.mark.parametrize("kind", [W.WindowCache, W.PlainCache])
def test_cache_refuses_keys_or_values_that_a_write_would_broadcast(kind):
    """Two prompts in a cache of one row, one head for two, another head dim; keys or values."""
    shapes = [
        (2, 2, 3, 16),
        (1, 1, 3, 16),
        (1, 2, 3, 8),
        (1, 2, 3, 1),
        (2, 3, 16),
    ]
    for shape in shapes:
        right = torch.zeros(1, 2, 3, 16)
        wrong = torch.zeros(shape)
        for k, v in [(wrong, right), (right, wrong)]:
            with pytest.raises(ValueError, match="do not fit a cache of 1 rows"):
                kind(1, 2, 16).attend(torch.zeros(1, 2, 1, 3, 16), k, v)

@pytest.mark.parametrize("kind", [W.WindowCache, W.PlainCache])
@pytest.mark.parametrize("first", [0, 5])
def test_call_without_tokens_changes_nothing(kind, first):
    cache = kind(2, 2, 16)
    for t in (first, 0):
        x = normal(t, 2, 2, t, 16).float()
        assert cache.attend(x[:, :, None], x, x).shape == (2, 2, 1, t, 16)
    assert cache.n_tokens == [first, first]

@pytest.mark.parametrize("codec", [
    Codec(5), Codec(2, "median"), Codec(2, group=24), Codec(2, group=0)])
def test_store_refuses_what_cannot_be_packed(codec):
    with pytest.raises(ValueError):
        W.WindowCache(1, 2, 64, W.Scheme(W.Encoding(codec), W.Encoding()))

@pytest.mark.parametrize("windows", [
    W.Windows(-1), W.Windows(keep=-1), W.Windows(flush=0), W.Windows(sink=2 ** 40), (16, 128), 16])
def test_windows_that_cannot_be_are_refused(windows):
    with pytest.raises(ValueError, match="windows need"):
        W.WindowCache(1, 2, 64, windows=windows)

def test_values_are_not_transformed_by_the_cache():
    """A scheme that still carries T_V belongs to a model that is not folded."""
    T = torch.eye(16).expand(2, 1, 16, 16)
    unfolded = W.Scheme(values=W.Encoding(TWO, T))
    with pytest.raises(ValueError, match="fold T_V"):
        W.WindowCache(1, 2, 16, unfolded)
    W.WindowCache(1, 2, 16, unfolded.folded())

def test_packed_bytes_of_a_token_never_change_and_each_flush_packs_its_size(pair, monkeypatch):
    """200 tokens with windows 4/64/8 pack 128 of them; then 100 steps pack 8 at a time."""
    model = pair[1]
    flushed = []
    flush = W.Store.flush

    def flush_and_note(store, rows, counts, due):
        flushed.append(due)
        flush(store, rows, counts, due)

    monkeypatch.setattr(W.Store, "flush", flush_and_note)
    cache = W.new_cache(model, scheme(transforms(model), TWO, TWO), W.Windows(4, 64, 8))
    ids = tokens(1, 300)
    first = slice(None), slice(None), slice(128)
    W.feed(model, cache, ids[:, :200])
    assert [layer.n_packed for layer in cache] == [[128]] * 2
    before = [x.clone() for x in stored_bytes(cache, *first)]

    flushed.clear()
    for i in range(200, 300):
        W.feed(model, cache, ids[:, i:i + 1])
    assert share_of_differing(before, stored_bytes(cache, *first)) == 0
    assert set(flushed) == {8}
    assert len(flushed) <= 2 * 2 * (math.ceil(100 / 8) + 1)

@pytest.mark.parametrize("cuts", [[128, 128, 44], [299, 1], [1] * 300])
def test_packed_bytes_of_layer_0_do_not_depend_on_the_calls(cuts, pair):
    """The logits do, and may: the tokens of one call see each other exactly."""
    model = pair[1]
    ids = tokens(1, 300)
    caches = []
    for calls in ([300], cuts):
        caches.append(W.new_cache(model, scheme(transforms(model), TWO, TWO), WINDOWS))
        out = fed(model, caches[-1], ids, calls)
    assert caches[0][0].n_packed == [272]
    first = slice(None), slice(None), slice(272)
    at_once, in_calls = (stored_bytes(cache[:1], *first) for cache in caches)
    assert share_of_differing(at_once, in_calls) < 1e-3
    exact = fed(model, W.new_cache(model), ids, [300])
    assert distance(out, exact) > 1e-3 or cuts == [299, 1]

@pytest.mark.parametrize("quantizer", W.QUANTIZERS)
def test_error_falls_with_bits_and_each_side_has_its_own(quantizer, pair):
    """Distance from off falls over 2, 3, 4, 8 bits; each side counts; short input is exact."""
    model = pair[1]
    ids = tokens(2, 160)
    T = transforms(model, condition=4.0)
    folded = W.fold_values(model, T)

    @functools.cache
    def run(key_bits, value_bits, count=160, group=None):
        key_codec = Codec(key_bits, quantizer, group=group)
        value_codec = Codec(value_bits, quantizer, group=group)
        cache = W.new_cache(folded, scheme(T, key_codec, value_codec), WINDOWS, batch=2)
        cuts = [100, 30] + [1] * 30 if count > 100 else [count - 4, 4]
        return fed(folded, cache, ids[:, :count], cuts)

    off = run(16, 16)
    errors = []
    for bits in (2, 3, 4, 8):
        error = run(bits, bits) - off
        errors.append(error.square().mean().sqrt().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[3] > 0
    one_sided = [run(2, 16), run(16, 2), run(4, 2)]
    assert min(distance(logits, off) for logits in one_sided) > 1e-3
    others = [run(2, 2), run(4, 4), run(4, 2, group=8)]
    assert min(distance(run(4, 2), other) for other in others) > 1e-3
    assert distance(run(2, 2, 28), off[:, :28]) < 1e-5       # sink + keep: nothing is packed


# ---- generation

@pytest.mark.parametrize("pad_id", [0, 9])
@pytest.mark.parametrize("quantized", [False, True])
def test_left_padded_prompts_equal_themselves_alone(pad_id, quantized, pair):
    """Logits at the end of prefill and 40 steps later, in both kinds of cache; the pad token is nothing."""
    model = pair[1]
    prompts = [tokens(5, seed=5), tokens(37, seed=6)]
    more = tokens(2, 40, seed=7)
    pad = [32, 0]
    left = torch.full((32,), pad_id)
    padded = torch.stack([torch.cat([left, prompts[0]]), prompts[1]])
    if quantized:
        folded = W.fold_values(model, transforms(model))
        cache = W.new_cache(folded, scheme(transforms(model), OFF, OFF), WINDOWS, batch=2)
    else:
        folded = model
        cache = W.new_cache(model, batch=2)
    hidden = W.feed(folded, cache, padded, pad)[:, -1:]
    found = torch.cat([W.logits(folded, hidden), fed(folded, cache, more, [1] * 40)], 1)
    for i, prompt in enumerate(prompts):
        ids = torch.cat([prompt, more[i]])[None]
        alone = fed(model, W.new_cache(model), ids, 100)[:, len(prompt) - 1:]
        assert distance(found[i:i + 1], alone) < 1e-4

def test_copies_of_a_prompt_in_a_batch_continue_alike(pair):
    prompt = tokens(60).tolist()
    T = transforms(pair[1])
    folded = W.fold_values(pair[1], T)
    cache = W.new_cache(folded, scheme(T, TWO, TWO), WINDOWS, batch=4)
    steps = list(W.decode(folded, cache, [prompt] * 4, 64))
    assert all(len(set(step)) == 1 for step in steps)
    assert len({step[0] for step in steps}) > 5
    assert cache[0].n_packed == [88] * 4                     # (60 + 63 - 4 - 24) // 8 * 8
    for row in (1, 2, 3):
        assert share_of_differing(stored_bytes(cache, 0), stored_bytes(cache, row)) < 1e-3

def test_row_that_ends_first_leaves_the_others_as_alone(pair):
    """The unpadded row ends at its second token and yields padding from then on."""
    end, padding = 255, 7
    T = transforms(pair[1])
    folded = W.fold_values(pair[1], T)
    prompts = [tokens(count, seed=count).tolist() for count in (60, 41, 50)]

    def run(prompts, first_ends=False, bits=2):
        step = iter(range(99))

        def pick(scores):
            scores[:, end] = -math.inf
            if next(step) == 1 and first_ends:
                scores[0, end] = math.inf
            return W.sample(scores)

        codec = Codec(bits)
        cache = W.new_cache(folded, scheme(T, codec, codec), WINDOWS, batch=len(prompts))
        return list(zip(*W.decode(folded, cache, prompts, 60, [end], pick, padding)))

    batch = run(prompts, first_ends=True)
    alone = [run([prompt])[0] for prompt in prompts]
    assert batch[0] == (alone[0][0], end, *[padding] * 58)
    assert batch[1:] == alone[1:]
    assert run(prompts, bits=16)[1:] != alone[1:]

def test_cache_of_the_model_before_the_fold_is_refused_after_it_and_the_reverse(pair):
    model = pair[1]
    folded, empty_cache = W.quantize_kv_cache(model, [tokens(90)])
    runs = [(model, empty_cache()), (folded, W.new_cache(model)), (model, W.new_cache(folded))]
    for wrong, cache in runs:
        with pytest.raises(ValueError, match="another model's"):
            list(W.decode(wrong, cache, [[1, 2]], 3))
        assert cache[0].n_tokens == [0]
    assert len(list(W.decode(folded, W.new_cache(folded), [[1, 2]], 3))) == 3

WRONG_TOKENS = {
    "text": "What?",
    "texts": ["What?"],
    "nothing": None,
    "words": [["what", "else"]],
    "one tensor": torch.arange(9),
    "one list": [1, 2, 3],
    "cubes": torch.zeros(1, 2, 3, dtype=torch.long),
    "empty tensor": [torch.tensor([])],
    "empty list": [[1], []],
    "fractions": [torch.ones(3)],
    "negative": [[1, -1]],
    "beyond the vocabulary": [[1, 256]],
    "beyond the positions": [[1], [1] * 1025],
}

@pytest.mark.parametrize("wrong", WRONG_TOKENS.values(), ids=WRONG_TOKENS)
def test_tokens_are_sequences_of_the_models_ids_or_refused(wrong, pair):
    """Both to calibrate on and to continue, before the model runs; its vocabulary is 256, its positions are 1024."""
    model = pair[1]
    cache = W.new_cache(model)
    for refused in (
            lambda: W.quantize_kv_cache(model, wrong),
            lambda: W.collect_moments(model, wrong),
            lambda: list(W.decode(model, cache, wrong, 3))):
        with pytest.raises(ValueError, match="not text|1 to 1024 token ids .* from 0 to 255"):
            refused()
    assert cache[0].n_tokens == [0]

@pytest.mark.parametrize("kind", [
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.byte, torch.Tensor.unbind])
def test_tokens_may_be_lists_or_the_rows_of_an_array(kind, pair):
    model = pair[1]
    rows = tokens(2, 40)

    def continued(prompts):
        return list(W.decode(model, W.new_cache(model, batch=2), prompts, 3))

    moments = W.collect_moments(model, kind(rows))
    assert torch.equal(moments["keys"], W.collect_moments(model, rows)["keys"])
    assert continued(kind(rows)) == continued(rows)

@pytest.mark.parametrize("kind", [
    int, torch.tensor, np.int64, lambda x: [x], lambda x: {x}, lambda x: frozenset([x]),
    lambda x: torch.tensor([x, 1]), lambda x: [torch.tensor(x)]])
def test_end_tokens_are_one_or_a_list_or_a_set_or_a_tensor(kind, pair):
    def continued(eos):
        return list(W.decode(pair[1], W.new_cache(pair[1]), tokens(1, 30), 4, eos))

    first, second, *others = continued(())
    assert first != second and len(continued([])) == 2 + len(others) == 4
    assert continued(kind(second[0])) == [first, second]

@pytest.mark.parametrize("knobs", [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": 1, "top_p": 2},
    {"temperature": 1, "top_p": -1}, {"temperature": 1, "top_k": -1}, {"top_k": -5}])
def test_sampling_refuses_knobs_out_of_range(knobs):
    with pytest.raises(ValueError, match="temperature >= 0, 0 <= top_p <= 1 and top_k >= 0"):
        W.sample(torch.zeros(1, 9), **knobs)

@pytest.mark.parametrize("prompts, count", [([], 3), ([[1]], -1), ([[1]], 2.5), ([[1]], "3")])
def test_decoding_needs_a_prompt_and_a_whole_number_of_tokens(prompts, count, pair):
    with pytest.raises(ValueError, match="a prompt, and a whole number of max_new_tokens"):
        list(W.decode(pair[1], W.new_cache(pair[1]), prompts, count))

def test_decoding_refuses_end_tokens_that_are_text_and_takes_none_for_no_end(pair):
    def decoded(eos):
        return list(W.decode(pair[1], W.new_cache(pair[1]), tokens(1, 30), 4, eos))

    for text in ("text", ["text"]):
        with pytest.raises(ValueError, match="eos is a token id"):
            decoded(text)
    assert decoded(None) == decoded(())

def test_sampling_obeys_its_knobs():
    """Temperature 0, top_p 0 and top_k 1 are argmax; top_k beyond the vocabulary is all."""
    scores = normal(0, 64, 50) * 2
    ranks = scores.argsort(descending=True).argsort()

    def draw(seed=0, **knobs):
        return W.sample(scores, **knobs, generator=torch.Generator().manual_seed(seed))

    def drawn_ranks(**knobs):
        draws = torch.stack([draw(i, **knobs) for i in range(60)], 1)
        return ranks.gather(1, draws).mT

    knobs = [
        {"top_p": 1e-9},
        {"top_p": 0.0},
        {"top_k": 1},
        {"temperature": 0.0},
        {"temperature": 1e-300},
    ]
    for knob in knobs:
        assert torch.equal(draw(**{"temperature": 1.5} | knob), scores.argmax(-1)), knob
    assert torch.equal(draw(temperature=1.5), draw(temperature=1.5, top_k=99))
    assert not torch.equal(draw(temperature=1.5), draw(1, temperature=1.5))
    assert torch.equal(draw(temperature=1.5, top_k=5), draw(temperature=1.5, top_k=5))
    assert drawn_ranks(temperature=3.0, top_k=5).max() == 4

    # The fewest tokens that hold 0.7 of the probability.
    p = scores.softmax(-1).sort(descending=True).values
    allowed = (p.cumsum(-1) - p < 0.7).sum(-1)
    chosen = drawn_ranks(temperature=1.0, top_p=0.7)
    assert torch.equal(chosen.amax(0).clamp(max=2), (allowed - 1).clamp(max=2))
    assert (chosen < allowed).all()


# ---- the whole method

def test_whole_method_is_calibrating_deriving_folding_and_caching(pair):
    """Also without what needs no calibration, and refused where there is nothing to calibrate on."""
    model = pair[1]
    sequences = [tokens(96), tokens(96, seed=2)]
    folded, empty_cache = W.quantize_kv_cache(model, sequences, bits=(3, 2), windows=WINDOWS)
    by_steps = W.make_scheme(W.collect_moments(model, sequences), bits=(3, 2))
    cache = empty_cache(batch=2)
    for encoding, store in [(by_steps.keys, cache[1].keys), (by_steps.values, cache[1].values)]:
        assert store.encoding.codec == encoding.codec
        assert torch.equal(store.encoding.feedback, encoding.feedback[1])
    assert torch.equal(cache[1].keys.encoding.transform, by_steps.keys.transform[1])
    name = "model.layers.1.self_attn.v_proj.weight"
    expected = W.fold_values(model, by_steps.values.transform).weights[name]
    assert torch.equal(folded.weights[name], expected)

    hadamard, _ = W.quantize_kv_cache(model, [], transform="hadamard")
    assert hadamard.folded
    with pytest.raises(ValueError, match="needs tokens"):
        W.quantize_kv_cache(model, [])

WRONG_OPTIONS = [
    ({"transform": ["wush"]}, "is not one of"),
    ({"quantizer": "median"}, "is not one of"),
    ({"bits": "2"}, "bits are"),
    ({"refine": "off"}, "Refine"),
    ({"refine": None}, "Refine"),
    ({"group": "16"}, "'16' do not divide 16"),
    ({"group": 8.0}, "8.0 do not divide 16"),
    ({"windows": (16, 128)}, "windows need"),
    ({"windows": 16}, "windows need"),
    ({"windows": W.Windows(keep=2 ** 40)}, "windows need"),
]

@pytest.mark.parametrize("options, words", WRONG_OPTIONS)
def test_whole_method_refuses_options_before_it_calibrates(options, words, pair, monkeypatch):
    monkeypatch.setattr(W, "collect_moments", None)
    with pytest.raises(ValueError, match=words):
        W.quantize_kv_cache(pair[1], [tokens(9)], **options)

def test_whole_method_takes_plain_tuples_as_windows(pair):
    _, empty_cache = W.quantize_kv_cache(pair[1], [], "hadamard", windows=(4, 24, 8))
    assert empty_cache()[0].windows == WINDOWS
    assert empty_cache()[0].keys.windows.flush == 8

def test_transformers_model_in_the_place_of_ours_is_refused(pair):
    hf, model = pair
    for refused in (
            lambda: W.quantize_kv_cache(hf, [tokens(9)]),
            lambda: W.collect_moments(hf, [tokens(9)]),
            lambda: W.new_cache(hf),
            lambda: list(W.decode(hf, W.new_cache(model), [[1]], 2))):
        with pytest.raises(ValueError, match="Qwen3ForCausalLM .* WushCache"):
            refused()

def test_method_runs_where_the_compiler_has_no_folder(tmp_path):
    """Its folder would lie below a file. Importing and quantizing need no compiler, and reading does without."""
    (tmp_path / "file").touch()
    code = """
        import torch, wush_kv as W
        x = torch.randn(1, 1, 2100, 64)
        codes = W.kernels.pack(W.quantize(x, W.Codec(2))[0], 2)
        pairs = torch.ones(1, 1, 2100, 1, dtype=torch.int32)
        print(W.kernels.packed_scores(x[:, :, None, 0], codes, pairs, 2, 2100).shape[-1])"""
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], cwd=HERE, text=True,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "folder")},
        stdout=subprocess.PIPE, check=True).stdout
    assert printed == "2100\n"

def test_qwen3_8b_shapes_are_calibrated_folded_quantized_and_decoded(tmp_path):
    """The real widths, one layer, random weights: 2 bits move the logits, the transforms alone do not."""
    hf = tiny(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
              num_hidden_layers=1, intermediate_size=512, initializer_range=0.02)
    hf.config.save_pretrained(tmp_path)
    config = checkpoints.read_config(tmp_path)
    model = W.Model(config, dict(hf.state_dict()), *checkpoints.rope_frequencies(config))
    moments = W.collect_moments(model, [tokens(96)])
    two_bits = W.make_scheme(moments, refine=W.PAPER)
    assert two_bits.keys.transform.shape == (1, 8, 1, 128, 128)

    off = W.Scheme(*[encoding._replace(codec=OFF) for encoding in two_bits])
    ids = tokens(1, 64, seed=9)
    logits = {}
    for name, chosen in [("off", off), ("two", two_bits)]:
        folded, empty_cache = W.with_scheme(model, chosen, W.Windows(4, 8, 4))
        cache = empty_cache()
        logits[name] = fed(folded, cache, ids, [60, 1, 1, 1, 1])
    assert cache[0].n_packed == [52]
    assert cache[0].keys.codes.shape[-1] == 32
    assert distance(logits["off"], reference(hf, ids)) < 1e-3
    assert distance(logits["two"], logits["off"]) > 1e-3

def test_our_loop_runs_without_transformers_cache_classes(pair, tmp_path):
    pair[0].save_pretrained(tmp_path)
    code = f"""
        import sys; sys.modules["transformers.cache_utils"] = None
        from pathlib import Path
        import torch, wush_kv as W
        from wush_tools import checkpoints
        folder = Path({str(tmp_path)!r})
        config = checkpoints.read_config(folder)
        model = checkpoints.load_model(folder, config, torch.float32, "cpu")
        windows = W.Windows(4, 24, 8)
        folded, empty_cache = W.quantize_kv_cache(model, [torch.arange(90)], windows=windows)
        cache = empty_cache()
        print(len(list(W.decode(folded, cache, [list(range(60))], 5))), cache[0].n_packed)
        try: W.WushCache
        except ImportError: print("no cache")"""
    printed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=HERE, capture_output=True, text=True, check=True).stdout
    assert printed.split("\n")[:2] == ["5 [32]", "no cache"]
