"""The Triton kernels equal their references, in Triton's interpreter; launchers refuse, or fall back; and what is compiled
for GPUs that are not here fits them.
"""
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported: its kernels run on the CPU

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import wush_kv as W
from wush_tools.testing import (
    WINDOWS, close, distance, law, normal, saved, seeds, sizes, tokens, transforms)
from wush_kv import Codec, Encoding, kernels
from wush_tools import kernel_check
from wush_tools.kernel_check import encode_by_kernel, example

needs_triton = pytest.mark.skipif(kernels.triton is None, reason="needs Triton")
slow = pytest.mark.skipif("SLOW" not in os.environ, reason="compiles for minutes: SLOW=1 pytest")
HERE = Path(W.__file__).parent
SERVES = kernels.serves

# Name -> quantizer, and whether its levels are placed about the mean.
RULES = {
    "quest": ("quest", False),
    "affine": ("affine", False),
    "centred": ("quest", True),
    "centred affine": ("affine", True),
}
KINDS = {
    "normal": 1.0,
    "tiny": 1e-30,
    "subnormal": 1e-39,
    "huge": 1e4,
}
rules = sizes(*RULES)
widths = sizes(2, 3, 4, 8)


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Let the kernels run on CPU tensors while the tests of this file run."""
    assert kernels.INTERPRET, "Triton was imported before TRITON_INTERPRET was set"
    kernels.serves = lambda x: kernels.triton is not None
    yield
    kernels.serves = SERVES


@pytest.fixture
def unspoiled():
    """No launch has failed yet, nor has any when the test is over."""
    kernels.switched_off.clear()
    yield
    kernels.switched_off.clear()


def random(seed):
    return torch.Generator().manual_seed(seed)


def whole_numbers(seed, low, high, *shape):
    return torch.randint(low, high, shape, generator=random(seed)).float()


def rows_of_kind(kind, x):
    if kind == "constant":
        return torch.full_like(x, -3.0)
    if kind == "zeros":
        return torch.zeros_like(x)
    if kind == "outlier":
        return x * torch.where(torch.arange(x.shape[-1]) == 3, 1e3, 1.0)
    return x * KINDS[kind]


def encoding(rule, bits, clip=1.0, T=None, H=None, F=None, own=0.0):
    quantizer, centred = RULES[rule]
    return Encoding(Codec(bits, quantizer, clip), T, H, F, centred, own)


def equal(ours, theirs):
    """Both the codes and the pairs are the same, bit for bit."""
    return torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


# ---- the layout and the bit tricks

def permuted_bytes(x, selector):
    """Do PTX's prmt of x and 0: each nibble of the selector says which of their 8 bytes comes there."""
    source = x.to_bytes(8, "little")
    chosen = [source[selector >> shift & 7] for shift in (0, 4, 8, 12)]
    return int.from_bytes(chosen, "little")


def run_ptx(text, x):
    """Execute the PTX of `unpack_ptx` on x, the operand that follows all outputs; return the outputs."""
    lines = text.strip("{ }").split(";")[1:-1]
    instructions = [line.replace(",", "").split() for line in lines]
    n_outputs = text.count("and.b32")
    values = {f"${n_outputs}": x}
    for operation, target, source, *numbers in instructions:
        numbers = [int(number, 0) for number in numbers]
        if operation == "mov.b32":
            values[target] = values[source]
        elif operation == "shr.b32":
            values[target] = values[source] >> numbers[0]
        elif operation == "and.b32":
            values[target] = values[source] & numbers[0]
        else:
            assert operation == "prmt.b32" and numbers[0] == 0
            values[target] = permuted_bytes(values[source], numbers[1])
    return [values[f"${i}"] for i in range(n_outputs)]


def subnormals(part, plane):
    """Return what `unpack_ptx` makes of a slice of a plane's bytes: float16, in the order of the words."""
    text, _ = kernels.unpack_ptx(part.width, part.word_bits)
    registers = 2 if part.word_bits == 8 else 1      # that a slice gets of 32 bits, of two float16 each
    first = part.bit // part.width * registers
    outputs = []
    for x in plane.view(np.uint32).tolist():
        outputs += run_ptx(text, x)[first:first + registers]
    return np.array(outputs, np.uint32).view(np.float16)


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_unpack_ptx_yields_every_code_exactly_times_a_power_of_two(bits, d):
    codes = torch.randint(0, 2**bits, (d,), dtype=torch.uint8, generator=random(d + bits))
    packed = kernels.pack(codes, bits).numpy()
    read = np.zeros(d)
    for part in kernels.slices(d, bits):
        plane_bytes = part.words * part.word_bits // 8
        plane = packed[part.plane_byte:part.plane_byte + plane_bytes]
        channels = part.channel + part.step * np.arange(part.words)
        read[channels] += subnormals(part, plane).astype(np.float64) * 2.0**(24 + part.exponent)
    assert np.array_equal(read, codes.numpy())


# ---- encode

@needs_triton
@law(
    seeds, rules, widths, sizes(0.92, 0.96, 1.0), sizes("constant", "zeros", "outlier", *KINDS),
    sizes(torch.float32, torch.bfloat16), sizes((1, 1, 0), (1, 2, 1), (2, 1, 15), (1, 2, 17)),
    sizes(64, 128))
def test_encode_kernel_packs_what_quantize_gives_bit_for_bit(
        seed, rule, bits, clip, kind, dtype, shape, d):
    """Of tokens that do not lie side by side."""
    b, g, s = shape
    x = rows_of_kind(kind, torch.randn(b, s, g, d, generator=random(seed)))
    x = x.to(dtype).transpose(1, 2)
    how = encoding(rule, bits, clip)
    assert equal(encode_by_kernel(x, how), W.encode_reference(x, how))


@needs_triton
@law(seeds, rules, sizes(2, 3, 4), sizes(64, 128))
def test_encode_kernel_with_a_transform_packs_what_quantize_gives_where_sums_are_exact(
        seed, rule, bits, d):
    """Bit for bit: of small integers and half-integers, every partial sum is a float32, whatever the order."""
    x = whole_numbers(seed, -40, 41, 1, 2, 5, d)
    T = whole_numbers(seed + 1, -4, 5, 2, 1, d, d) / 2
    how = encoding(rule, bits, 0.96, T)
    assert equal(encode_by_kernel(x, how), W.encode_reference(x, how))


@needs_triton
@law(seeds, rules, widths, sizes((1, 5), (2, 1)), examples=10)
def test_encode_kernel_with_feedback_packs_what_quantize_gives_where_sums_are_exact(
        seed, rule, bits, heads_and_tokens):
    """Bit for bit: each channel hears of one other at most, and by a power of two. That is a product, no sum.

    Few examples, as the interpreter takes half a second for each; every rule and width meets each other above.
    """
    g, s = heads_and_tokens
    x = torch.randn(1, g, s, 64, generator=random(seed))
    later = torch.randint(1, 40, (g,), generator=random(seed + 1)).tolist()
    F = torch.stack([torch.eye(64).roll(i, 1).triu(1) / 2 for i in later])[:, None]
    how = encoding(rule, bits, H=torch.eye(64).expand_as(F), F=F)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(W, "SWEEPS", 0)
        theirs = W.encode_reference(x, how)
        assert equal(encode_by_kernel(x, how), theirs)
    without, _ = W.encode_reference(x, how._replace(hessian=None, feedback=None))
    assert s == 1 or not torch.equal(without, theirs[0])


@needs_triton
@law(seeds, sizes(2, 3, 4), sizes(1, 2, 3), sizes(1, 5), examples=6)
def test_encode_kernel_with_sweeps_packs_what_quantize_gives_where_sums_are_exact(
        seed, bits, sweeps, s):
    """Bit for bit: errors are quarters of steps, up to 15, and H' is of whole numbers: sums are below 2^24 quarters."""
    top = 2 ** bits - 1
    x = whole_numbers(seed, 0, 4 * top + 1, 1, 2, s, 64)
    x[..., 0] = 0
    x[..., 63] = 4 * top                                     # so that a step is 4
    factor = whole_numbers(seed + 1, -1, 2, 2, 1, 64, 64)
    H = factor @ factor.mT + 16 * torch.eye(64)
    F = torch.eye(64).roll(20, 1).triu(1).expand_as(H) / 2
    how = encoding("affine", bits, H=H, F=F)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(W, "SWEEPS", sweeps)
        theirs = W.encode_reference(x, how)
        assert equal(encode_by_kernel(x, how), theirs)
        patch.setattr(W, "SWEEPS", sweeps - 1)
        assert not equal(W.encode_reference(x, how), theirs)


def loss(codes, pairs, bits, y, cost, own):
    """Return Σ eᵀ cost e + own · (yᵀ cost e)² over the errors e of tokens y (1, 1, s, d)."""
    error = (kernels.dequantized(codes, pairs, bits) - y).double()[0, 0]
    along = (y.double()[0, 0] @ cost * error).sum(-1)
    return ((error @ cost) * error).sum().item() + own * along.square().sum().item()


def random_moments(seed, d):
    """Draw a Gram matrix and a Hessian (1, d, d), with axes of their own and strengths of 0.2 to 5."""
    strengths = torch.logspace(-0.7, 0.7, d, dtype=torch.float64)
    rows = normal(seed, 2, 1, 3 * d, d) * strengths
    rows = rows @ torch.linalg.qr(normal(seed + 1, 2, 1, d, d)).Q
    return (rows.mT @ rows).unbind()


def damped_cost(T, H):
    """Return what an error of T x costs, its mean being free, as `error_hessian` damps it."""
    d = T.shape[-1]
    I = torch.eye(d, dtype=torch.float64)
    T_inverse = torch.linalg.inv(T)
    cost = (I - 1 / d) @ T_inverse.mT @ H @ T_inverse @ (I - 1 / d)
    return cost + 1e-2 * cost.trace() / d * I


@needs_triton
@pytest.mark.parametrize("bits, d, sweeps, own", [
    (2, 128, 1, 0.5), (3, 64, 0, 0.0), (4, 64, 2, 0.0), (4, 64, 2, 0.5)])
def test_encode_kernel_with_dense_feedback_moves_few_rows_and_loses_as_much(
        bits, d, sweeps, own, monkeypatch):
    """One code that crosses a rounding edge moves those after it in its row: other codes, the same loss."""
    monkeypatch.setattr(W, "SWEEPS", sweeps)
    M, H = [S / (3 * d) for S in random_moments(bits, d)]
    H = H / d                                                # of scores q·k/√d
    T = W.strongest_first(W.wush(M, H, exponent=0.4))
    error_H = W.error_hessian(T, H, centred=True)
    F = W.feedback_matrix(error_H).float()
    cost = damped_cost(T[0, 0], H[0])
    x = normal(1, 1, 1, 64, d) @ torch.linalg.cholesky(M).mT
    y = W.apply(T, x).float()
    how = encoding("centred", bits, 1.3, H=error_H.float(), F=F, own=own)
    ours = encode_by_kernel(y, how)
    theirs = W.encode_reference(y, how)
    assert (ours[0] != theirs[0]).any(-1).double().mean() <= 0.02
    expected = loss(*theirs, bits, y, cost, own)
    assert loss(*ours, bits, y, cost, own) == pytest.approx(expected, rel=0.01)


@needs_triton
@pytest.mark.parametrize("rule, rows", [("quest", 512), ("affine", 256), ("centred", 256)])
def test_encode_kernel_moves_at_most_one_code_in_ten_thousand_and_by_one_step(rule, rows):
    """An eighth of a million values in all; the interpreter is slow at counting, so most go to "quest"."""
    x = torch.randn(1, 1, rows, 128, generator=random(0)).bfloat16()
    T = torch.randn(1, 1, 128, 128, generator=random(1))
    how = encoding(rule, 2, 0.96, T)
    codes, pairs = encode_by_kernel(x, how)
    expected_codes, expected_pairs = W.encode_reference(x, how)
    apart = (kernels.unpack(codes, 2).int() - kernels.unpack(expected_codes, 2).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() <= 1e-4
    step = kernels.split_pair(expected_pairs)[0].float()
    read = kernels.dequantized(codes, pairs, 2)
    expected = kernels.dequantized(expected_codes, expected_pairs, 2)
    assert ((read - expected).abs() <= 1.01 * step).all()


@needs_triton
@pytest.mark.parametrize("bits", (2, 3, 4))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("encode", (encode_by_kernel, W.encode_reference))
def test_encode_keeps_zero_and_constant_rows(encode, rule, bits):
    """Under "quest", the level next to a constant is off by 0.494 of it at worst: at 2 bits, half a step."""
    constants = torch.tensor([0.01, -3.0, 1e-6])
    random_row = torch.randn(1, 64, generator=random(0))
    x = torch.cat([torch.zeros(1, 64), random_row, constants[:, None].expand(3, 64)])[None, None]
    how = encoding(rule, bits)
    read = kernels.dequantized(*encode(x, how), bits)[0, 0]
    assert read.isfinite().all() and read[0].abs().max() <= 1e-6
    alone = kernels.dequantized(*encode(x[:, :, 1:2], how), bits)[0, 0, 0]
    assert torch.equal(read[1], alone)
    share = 0.51 if rule == "quest" or rule == "centred" else 0.01
    assert ((read[2:] - constants[:, None]).abs() <= share * constants[:, None].abs()).all()


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow encountered")       # the interpreter's; what overflows is clamped
def test_encode_kernel_searches_codes_of_huge_constants_as_its_reference_does():
    """Such a row lies more of the smallest steps from its rounded offset than float32 can count."""
    x = torch.tensor([3e3, -1e4, 1e30])[:, None].expand(1, 1, 3, 64)
    F = torch.eye(64).roll(9, 1).triu(1).expand(1, 1, 64, 64) / 2
    how = encoding("centred", 2, H=torch.eye(64).expand_as(F), F=F, own=0.5)
    codes, pairs = encode_by_kernel(x, how)
    read = kernels.dequantized(codes, pairs, 2)
    assert ((read - x).abs() <= x.abs() * 2.0 ** -8).all()
    assert equal((codes, pairs), W.encode_reference(x, how))


@needs_triton
@pytest.mark.parametrize("tokens", (1, 13, 17, 31, 33))
def test_encode_kernel_reads_and_writes_nothing_beyond_its_tokens(tokens):
    """"""
    buffer = torch.randn(1, 1, 160, 64, generator=random(tokens))
    buffer[:, :, tokens:] = torch.nan
    codes = torch.full((160, 24), 0xAB, dtype=torch.uint8)
    pairs = torch.full((160, 1), -7, dtype=torch.int32)
    kernels._encode_kernel[-(-tokens // 16), 1](
        buffer, buffer, buffer, buffer, codes, pairs, buffer.stride(), tokens, 1,
        63, 0.0, False, 0, 0.0, 64, 3, False, False, 16, 16)

    x = buffer[:, :, :tokens]
    how = encoding("affine", 3)
    expected = W.encode_reference(x, how)
    written = codes[:tokens][None, None], pairs[:tokens][None, None]
    assert equal(encode_by_kernel(x, how), expected) and equal(written, expected)
    assert (codes[tokens:] == 0xAB).all() and (pairs[tokens:] == -7).all()


@needs_triton
def test_encode_takes_transforms_of_any_floating_type_and_layout():
    T = whole_numbers(1, -4, 5, 2, 1, 64, 64)
    x = whole_numbers(2, -40, 41, 1, 2, 5, 64)
    expected = kernels.encode(x, T, None, None, 2, rank=60)
    assert equal(kernels.encode(x, T.double(), None, None, 2, rank=60), expected)
    assert equal(kernels.encode(x, T.mT.contiguous().mT, None, None, 2, rank=60), expected)
    assert equal(kernels.encode(x, T.bfloat16(), None, None, 2, rank=60), expected)


def test_encode_leaves_head_dims_that_fit_no_tile_to_its_caller():
    assert kernels.encode(torch.randn(1, 1, 3, 96), None, None, None, 2, rank=90) is None


# ---- decode

def agree(arguments, tolerance=1e-5):
    out = kernels.decode_attention(*arguments)
    expected = kernels.decode_attention_ref(*arguments)
    assert not kernels.switched_off and out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)


def with_counts(arguments, n_sink, n_packed, n_recent):
    """Return the same arguments with these counts, and no NaN left where they would now matter."""
    q, q_packed, sinks, packed, recent, bits = arguments
    k_codes, k_pairs, v_codes, v_pairs, _ = packed

    def window(k, v, count):
        return k.nan_to_num(0), v.nan_to_num(0), torch.tensor(count, dtype=torch.int32)

    k_pairs = k_pairs.masked_fill(k_pairs == -1, 0)
    v_pairs = v_pairs.masked_fill(v_pairs == -1, 0)
    packed = k_codes, k_pairs, v_codes, v_pairs, torch.tensor(n_packed, dtype=torch.int32)
    return q, q_packed, window(*sinks[:2], n_sink), packed, window(*recent[:2], n_recent), bits


@needs_triton
@law(
    seeds, sizes((1, 1), (2, 1), (1, 2)), sizes(1, 3, 4, 5, 7, 8, 16), sizes(64, 64, 128),
    st.tuples(sizes(2, 3, 4), sizes(2, 3, 4)),
    st.tuples(sizes(0, 1, 16, 40), st.integers(0, 90), sizes(0, 16, 33, 70)), examples=12)
def test_decode_kernel_equals_its_reference(seed, rows_and_heads, r, d, bits, slots):
    """Counts are ragged, and all that lies beyond them is NaN. Every r and width is sure to be met below."""
    agree(example(*rows_and_heads, r, d, bits, slots, seed=seed))


@needs_triton
@pytest.mark.parametrize("tokens", (0, 1, 63, 64, 65, 513))
def test_decode_kernel_equals_its_reference_at_the_edges_of_tiles(tokens):
    """513 tokens are two parts, of which the second row leaves one empty."""
    arguments = example(2, 1, 4, 128, (2, 2), (3, tokens, 5))
    agree(with_counts(arguments, [3, 0], [tokens, tokens // 10], [5, 0]))


@needs_triton
@pytest.mark.parametrize("bits", [(2, 3), (4, 8)])
@pytest.mark.parametrize("r", (1, 3, 4, 5, 7, 8, 16))
def test_decode_kernel_serves_every_number_of_query_heads(r, bits):
    """Each width meets keys and values, as r is odd or even."""
    key_and_value = bits if r % 2 else bits[::-1]
    agree(example(1, 1, r, 64, key_and_value, (4, 70, 8), seed=r))


@needs_triton
def test_decode_kernel_gives_zeros_for_a_row_without_tokens_beside_full_rows():
    arguments = example(3, 1, 2, 64, (2, 4), (8, 70, 24))
    arguments = with_counts(arguments, [8, 0, 0], [70, 0, 7], [24, 0, 0])
    agree(arguments)
    assert (kernels.decode_attention(*arguments)[1] == 0).all()


def test_decode_attention_without_any_slot_is_zero():
    assert (kernels.decode_attention(*example(2, 1, 3, 64, (2, 2), (0, 0, 0))) == 0).all()


def inside_a_larger_buffer(x):
    """Return a view of x's values inside a larger buffer, which is full of NaN around it."""
    fill = torch.nan
    if not x.is_floating_point():
        fill = -1 if x.dtype == torch.int32 else 255
    b, g, s, d = x.shape
    larger = torch.full((b + 1, g + 2, s + 64, d), fill, dtype=x.dtype)
    view = larger[1:, 1:-1, 32:-32]
    view.copy_(x)
    return view


@needs_triton
def test_decode_kernel_reads_narrowed_buffers_and_transposed_queries():
    q, q_packed, sinks, packed, recent, bits = example(2, 2, 2, 64, (3, 2), (9, 70, 40), seed=1)
    parts = []
    for part in sinks, packed, recent:
        *buffers, count = part
        parts.append([*map(inside_a_larger_buffer, buffers), count])
    views = q.mT.contiguous().mT, q_packed.mT.contiguous().mT, *parts, bits
    agree(views)
    expected = kernels.decode_attention(q, q_packed, sinks, packed, recent, bits)
    assert torch.equal(kernels.decode_attention(*views), expected)


@needs_triton
@pytest.mark.parametrize("peak", (1e4, -1e4))
def test_decode_kernel_stands_scores_of_ten_thousand(peak):
    """A float32 score s is off by eps·|s| on either side, its weight relatively so; values are below 5."""
    q, q_packed, sinks, packed, recent, bits = example(1, 1, 4, 64, (2, 2), (8, 300, 24), seed=2)
    pairs = packed[1].masked_fill(packed[1] == -1, 0)
    keys = kernels.dequantized(packed[0], pairs, 2)
    largest = (q_packed @ keys.mT).abs().max() * 64**-0.5
    arguments = q * 1e3, q_packed * (peak / largest), sinks, packed, recent, bits
    tolerance = 2 * torch.finfo(torch.float32).eps * 1e4 * 5 * 2
    agree(arguments, tolerance)
    agree(with_counts(arguments, [0], [300], [0]), tolerance)      # the packed tokens alone


@needs_triton
def test_decode_kernel_finds_tokens_beyond_two_to_the_thirty_one_bytes():
    """3 GB of codes, untouched but for the last row: a 32-bit offset would wrap.

    Launched directly, as the reference, which a launcher falls back on, would touch them all.
    """
    b, capacity, d = 3, 2**25, 128
    small = example(1, 1, 4, d, (2, 2), (0, 100, 0), seed=3)
    q, q_packed, _, (*small_buffers, small_count), _, _ = small
    buffers = []
    for x in small_buffers:
        large = torch.empty(b, 1, capacity, x.shape[-1], dtype=x.dtype)
        large[-1:, :, :100] = x
        buffers.append(large)
    count = torch.zeros(b, dtype=torch.int32)
    count[-1] = small_count[0]
    nothing = torch.empty(b, 1, 0, d), torch.empty(b, 1, 0, d), torch.zeros(b, dtype=torch.int32)
    assert buffers[0][-1].data_ptr() - buffers[0].data_ptr() >= 2**31 and count[-1] > 0

    queries = q.expand(b, -1, -1, -1), q_packed.expand(b, -1, -1, -1)
    out = kernels.launch_decode(*queries, nothing, (*buffers, count), nothing, (2, 2))
    torch.testing.assert_close(out[-1:], kernels.decode_attention_ref(*small), atol=1e-5, rtol=0)


# ---- arguments are refused before the attempt, and nothing is switched off by it

def transposed(buffer):
    """Return the same values with channels first in memory."""
    return buffer.mT.contiguous().mT


def example_with(place, change):
    """Return arguments of `decode_attention`, of which the one at `place`, (part, index), is changed."""
    part, index = place
    arguments = list(example(2, 2, 4, 64, (2, 3), (4, 70, 9)))
    changed = list(arguments[part])
    changed[index] = change(changed[index])
    arguments[part] = tuple(changed)
    return arguments


WRONG_DECODE = {
    "transposed codes": ((3, 0), transposed, "side by side"),
    "strided codes": ((3, 2), lambda x: x.repeat(1, 1, 2, 1)[:, :, ::2], "side by side"),
    "strided pairs": ((3, 1), lambda x: x.repeat(1, 1, 2, 1)[:, :, ::2], "side by side"),
    "codes cut out of wider ones": (
        (3, 0),
        lambda x: x.repeat(1, 1, 1, 2)[..., :16],
        "side by side",
    ),
    "codes of int8": ((3, 0), lambda x: x.view(torch.int8), "uint8"),
    "pairs of float32": ((3, 1), lambda x: x.view(torch.float32), "int32"),
    "pairs of another length": ((3, 1), lambda x: x[:, :, 1:], "int32"),
    "codes of too few channels": ((3, 0), lambda x: x[..., :8].contiguous(), "bytes of uint8"),
    "another number of heads": ((2, 0), lambda x: x[:, :1], "windows are"),
    "a window in another dtype": ((2, 1), lambda x: x.double(), "windows are"),
    "a transposed window": ((4, 0), transposed, "side by side"),
    "counts of int64": ((3, 4), lambda x: x.long(), "counts"),
    "a count for one row": ((2, 2), lambda x: x[:1], "counts"),
    "unknown bits": ((5, 0), lambda x: 5, "not of 5"),
}


@pytest.mark.parametrize("name", WRONG_DECODE)
def test_decode_attention_refuses_what_its_kernel_would_misread(name):
    place, change, words = WRONG_DECODE[name]
    with pytest.raises(ValueError, match=words) as refusal:
        kernels.decode_attention(*example_with(place, change))
    assert len(str(refusal.value).splitlines()) == 1 and not kernels.switched_off


EYES = torch.eye(64).expand(2, 1, 64, 64)
WRONG_ENCODE = {
    "unknown bits": (dict(bits=5), "not of 5"),
    "one bit": (dict(bits=1), "not of 1"),
    "a rank beyond the channels": (dict(rank=64), "rank = 64"),
    "a rank below 0": (dict(rank=-1), "rank = -1"),
    "negative levels": (dict(alpha=-1.0), "alpha = -1.0"),
    "T of another head count": (dict(T=torch.eye(64).expand(3, 1, 64, 64)), "T is"),
    "T of two blocks": (dict(T=torch.eye(32).expand(2, 2, 32, 32)), "T is"),
    "F of another head dim": (dict(H=EYES, F=torch.eye(32).expand(2, 1, 32, 32)), "F is"),
    "H' of another head count": (dict(H=torch.eye(64).expand(3, 1, 64, 64), F=EYES), "H' is"),
    "F without H'": (dict(F=EYES), "H' and F belong together"),
    "H' without F": (dict(H=EYES), "H' and F belong together"),
    "tokens without heads": (dict(x=torch.randn(2, 5, 64)), "tokens to encode"),
    "integers": (dict(x=torch.ones(1, 2, 5, 64, dtype=torch.int32)), "tokens to encode"),
}


@pytest.mark.parametrize("name", WRONG_ENCODE)
def test_encode_refuses_what_its_kernel_would_misread(name):
    changes, words = WRONG_ENCODE[name]
    arguments = dict(x=torch.randn(1, 2, 5, 64), T=None, H=None, F=None, bits=2) | changes
    with pytest.raises(ValueError, match=words) as refusal:
        kernels.encode(**arguments)
    assert len(str(refusal.value).splitlines()) == 1 and not kernels.switched_off


def packed_tokens(tokens, bits=2, d=64, seed=2):
    x = torch.randn(1, 2, tokens, d, generator=random(seed))
    return W.encode_reference(x, encoding("quest", bits))


@pytest.mark.parametrize("read", (kernels.packed_scores, kernels.packed_values))
def test_reading_packed_tokens_refuses_what_does_not_fit(read):
    codes, pairs = packed_tokens(30)
    x = torch.randn(1, 2, 3, 64 if read is kernels.packed_scores else 30)
    wrong = [
        ((x, codes, pairs, 5, 30), "not of 5"),
        ((x, codes, pairs, 2, 31), "31 packed tokens"),
        ((x, codes, pairs[:, :, 1:], 2, 30), "pairs"),
        ((x[..., :-1], codes, pairs, 2, 30), "do not fit"),
        ((x[:, :1], codes, pairs, 2, 30), "do not fit"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ValueError, match=words):
            read(*arguments)
    assert not kernels.switched_off


def test_reading_packed_tokens_serves_transposed_and_strided_buffers():
    codes, pairs = packed_tokens(30)
    q = torch.randn(1, 2, 3, 64, generator=random(0))
    expected = kernels.packed_scores(q, codes, pairs, 2, 30)
    assert torch.equal(kernels.packed_scores(q, transposed(codes), pairs, 2, 30), expected)
    apart = [x.repeat_interleave(2, 2)[:, :, ::2] for x in (codes, pairs)]
    assert torch.equal(kernels.packed_scores(q, *apart, 2, 30), expected)



@pytest.mark.parametrize("bits, refined, layers", [((2, 2), True, 1), ((3, 4), False, 2)])
def test_decoding_by_the_kernels_equals_decoding_by_torch(
        bits, refined, layers, tmp_path, monkeypatch):
    """A ragged batch through prefill, flushes and steps, with the kernels and without."""
    model = saved(tmp_path, head_dim=64, num_attention_heads=4, num_hidden_layers=layers)[1]
    folded = W.fold_values(model, transforms(model, 4.0))
    T = transforms(model, 4.0, seed=5)
    H = None
    F = None
    if refined:
        pair = torch.tensor([[1, 0.5], [0.5, 1]])
        H = torch.block_diag(*[pair] * 32).expand_as(T)
        F = -H.triu(1)
    scheme = W.Scheme(
        Encoding(Codec(bits[0], clip=1.3), T, H, F, refined),
        Encoding(Codec(bits[1], clip=1.3), None, H, F, refined))
    ids = tokens(2, 54)
    launched = set()
    attempt = kernels.attempt

    def attempt_and_note(launch, *arguments):
        launched.add(launch.__name__)
        return attempt(launch, *arguments)

    monkeypatch.setattr(kernels, "attempt", attempt_and_note)
    logits = {}
    for by_kernels in (False, True):
        monkeypatch.setattr(kernels, "serves", lambda x: by_kernels)
        cache = W.new_cache(folded, scheme, WINDOWS, batch=2)
        parts = [W.feed(folded, cache, ids[:, :50], [0, 9])[:, -1:]]
        parts += [W.feed(folded, cache, step) for step in ids[:, 50:].split(1, 1)]
        logits[by_kernels] = W.logits(folded, torch.cat(parts, 1))
        assert bool(launched) == by_kernels
    assert launched == {"launch_encode", "launch_decode"}
    assert not kernels.switched_off
    assert cache[0].n_packed == [24, 16]                     # one flush of each row was in the steps
    assert distance(logits[False], logits[True]) < 1e-4


# ---- failures, memory, warnings and autocast

class Broken:
    """A kernel whose launch fails."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        raise self.error


@needs_triton
def test_failing_decode_kernel_gives_one_warning_and_the_references_result(monkeypatch, unspoiled):
    monkeypatch.setattr(kernels, "_decode_kernel", Broken(RuntimeError("no such luck")))
    arguments = example(1, 1, 2, 64, (2, 2), (4, 70, 9))
    with pytest.warns(RuntimeWarning, match="no such luck") as caught:
        outputs = [kernels.decode_attention(*arguments) for _ in range(3)]
    expected = kernels.decode_attention_ref(*arguments)
    assert len(caught) == 1 and all(torch.equal(out, expected) for out in outputs)


@needs_triton
def test_failing_encode_kernel_gives_one_warning_and_leaves_the_work_to_its_caller(
        monkeypatch, unspoiled):
    """A ValueError of the compiler counts as any other failure."""
    monkeypatch.setattr(kernels, "_encode_kernel", Broken(ValueError("no such luck")))
    x = torch.randn(1, 2, 5, 64)
    with pytest.warns(RuntimeWarning, match="no such luck") as caught:
        assert all(kernels.encode(x, None, None, None, 2, rank=60) is None for _ in range(3))
    assert len(caught) == 1 and kernels.switched_off == {"launch_encode"}


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
]


@needs_triton
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "python", "triton", "cpu"])
def test_lack_of_memory_is_passed_on_and_switches_nothing_off(error, monkeypatch, unspoiled):
    arguments = example(1, 1, 2, 64, (2, 2), (4, 70, 9))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_decode_kernel", Broken(error))
        patch.setattr(kernels, "_encode_kernel", Broken(error))
        with pytest.raises(type(error)):
            kernels.decode_attention(*arguments)
        with pytest.raises(type(error)):
            kernels.encode(torch.randn(1, 2, 5, 64), None, None, None, 2, rank=60)
    agree(arguments)


@needs_triton
def test_failure_where_warnings_are_errors_is_printed_and_the_reference_answers(
        monkeypatch, unspoiled, capsys):
    monkeypatch.setattr(kernels, "_decode_kernel", Broken(RuntimeError("no such luck")))
    arguments = example(1, 1, 2, 64, (2, 2), (4, 70, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = [kernels.decode_attention(*arguments) for _ in range(2)]
    expected = kernels.decode_attention_ref(*arguments)
    assert all(torch.equal(out, expected) for out in outputs)
    assert capsys.readouterr().err.count("no such luck") == 1


@needs_triton
def test_deprecation_inside_a_launch_is_no_failure_where_warnings_are_errors(
        monkeypatch, unspoiled):
    empty_like = torch.empty_like

    def deprecated(*args, **kwargs):
        warnings.warn("torch will do this otherwise", DeprecationWarning)
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", deprecated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(example(1, 1, 2, 64, (2, 2), (4, 70, 9)))


def test_compiled_reading_of_a_long_cache_equals_the_reference_where_warnings_are_errors(unspoiled):
    """1500 tokens are enough to be compiled for; sums of 64 or 1500 terms in another order."""
    codes, pairs = packed_tokens(1500)
    q = torch.randn(1, 2, 3, 64, generator=random(1))
    p = torch.rand(1, 2, 3, 1500, generator=random(2)).softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = kernels.packed_scores(q, codes, pairs, 2, 1500)
        values = kernels.packed_values(p, codes, pairs, 2, 1500)
    assert not kernels.switched_off
    assert distance(scores, kernels.packed_scores_ref(q, codes, pairs, 2, 1500)) < 1e-3
    assert distance(values, kernels.packed_values_ref(p, codes, pairs, 2, 1500)) < 1e-3


def test_failing_compiler_gives_one_warning_per_function_and_the_references_result(
        monkeypatch, unspoiled):
    """"""
    def no_compiler(function):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "compiled", no_compiler)
    codes, pairs = packed_tokens(1500)
    q = torch.randn(1, 2, 3, 64, generator=random(1))
    expected = kernels.packed_scores_ref(q, codes, pairs, 2, 1500)
    with pytest.warns(RuntimeWarning, match="no compiler") as caught:
        scores = [kernels.packed_scores(q, codes, pairs, 2, 1500) for _ in range(3)]
    assert len(caught) == 1 and all(torch.equal(score, expected) for score in scores)


def test_reading_is_compiled_once_for_all_lengths(unspoiled):
    """Also if the first call reads all there is room for, as after a prefill: a flush makes spare room."""
    q = torch.randn(1, 2, 3, 64, generator=random(1))
    graphs = None
    for tokens, count in [(1500, 1500), (1593, 1516), (1593, 1532), (4000, 3000)]:
        codes, pairs = packed_tokens(tokens)
        scores = kernels.packed_scores(q, codes, pairs, 2, count)
        expected = kernels.packed_scores_ref(q, codes, pairs, 2, count)
        assert close(scores, expected, 1e-5)
        graphs = graphs or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs and torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not kernels.switched_off


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_changes_nothing(dtype, unspoiled):
    codes, pairs = packed_tokens(1500)
    q = torch.randn(1, 2, 3, 64, generator=random(1))
    p = torch.rand(1, 2, 3, 1500, generator=random(2))
    x = torch.randn(1, 2, 17, 64, generator=random(3))
    T = torch.randn(2, 1, 64, 64, generator=random(4))
    decode = example(1, 2, 3, 64, (2, 3), (4, 70, 9))

    def everything():
        results = [
            kernels.packed_scores(q, codes, pairs, 2, 1500),
            kernels.packed_values(p, codes, pairs, 2, 1500),
            kernels.packed_scores_ref(q, codes, pairs, 2, 1500),
            kernels.packed_values_ref(p, codes, pairs, 2, 1500),
            kernels.decode_attention(*decode),
            kernels.decode_attention_ref(*decode),
        ]
        encoded = kernels.encode(x, T, None, None, 2, alpha=1.5, centred=True)
        return results + list(encoded or [])

    expected = everything()
    with torch.autocast("cpu", dtype=dtype):
        results = everything()
    assert not kernels.switched_off
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


# ---- without Triton, without a GPU, from anywhere

def outside():
    """Return the environment without the interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def in_python(code):
    """Run code in a fresh Python without the interpreter, in which a RuntimeWarning is an error."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=outside(), cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("triton", [types.ModuleType("triton"), None], ids=["too old", "none"])
def test_kernels_work_without_triton_and_with_one_too_old(triton, monkeypatch):
    """Loaded again, as another module; a RuntimeWarning is an error."""
    monkeypatch.setitem(sys.modules, "wush_kernels", kernels)
    monkeypatch.setitem(sys.modules, "triton", triton)
    arguments = example(1, 2, 3, 64, (2, 3), (4, 70, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        alone = W.load_kernels()
        out = alone.decode_attention(*arguments)
        encoded = alone.encode(torch.randn(1, 1, 5, 64), None, None, None, 2, rank=60)
    assert alone is not kernels and alone.triton is None
    assert not alone.serves(torch.ones(1)) and not alone.switched_off
    assert torch.equal(out, alone.decode_attention_ref(*arguments))
    assert encoded is None


def test_cpu_tensors_reach_no_kernel(monkeypatch, unspoiled):
    monkeypatch.setattr(kernels, "serves", SERVES)
    monkeypatch.setattr(kernels, "_decode_kernel", None)
    monkeypatch.setattr(kernels, "_encode_kernel", None)
    arguments = example(1, 2, 3, 64, (2, 3), (4, 70, 9))
    out = kernels.decode_attention(*arguments)
    assert torch.equal(out, kernels.decode_attention_ref(*arguments))
    assert kernels.encode(torch.randn(1, 1, 5, 64), None, None, None, 2, rank=60) is None


@needs_triton
def test_script_compares_the_kernels_from_any_folder(tmp_path):
    """Through a link, and in Python's isolated mode, which looks in no folder. Its first line says enough."""
    link = tmp_path / "link.py"
    link.symlink_to(HERE / "kernels.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-u", str(link)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=outside(), cwd=tmp_path)
    line = process.stdout.readline()
    process.kill()
    _, errors = process.communicate()
    assert re.match(r"(cpu|cuda) torch.float32 d=64 bits=2: \d+\.\d+% of rows differ", line), errors


# ---- compiled ahead of time

@needs_triton
def test_installed_triton_compiles_both_kernels():
    """Else the references take over, slower, where there is a GPU. Slow tests below look at every variant."""
    in_python("""
from wush_tools.kernel_check import compile_decode, compile_encode
assert compile_decode(90, 64, (2, 2), True).asm["cubin"]
assert compile_encode(90, 64, 2).asm["cubin"]
""")


@slow
@pytest.mark.parametrize("fast", (True, False))
@pytest.mark.parametrize("capability", kernel_check.CAPABILITIES)
def test_decode_kernel_fits_every_gpu_generation(capability, fast):
    """No spills, 200 registers, 24 KB shared; at 2 bits, d = 128, 2.4 instructions per code, 4.5 plain."""
    print(in_python(f"""
import itertools
from wush_tools.kernel_check import compile_decode, cost, instructions_per_code
for d, bits in itertools.product((128, 64), (2, 3, 4)):
    counted = cost(compile_decode({capability}, d, (bits, bits), {fast}))
    per_code = instructions_per_code(counted.loop, d, bits, {fast}, {capability})
    print({capability}, d, bits, counted, round(per_code, 2))
    assert counted.spilled == 0 and counted.registers <= 200, counted
    assert counted.shared <= 24 * 1024, counted
    assert per_code <= (2.4 if {fast} else 4.5) or (d, bits) != (128, 2), per_code
"""))


@slow
@pytest.mark.parametrize("capability", kernel_check.CAPABILITIES)
def test_encode_kernel_with_and_without_feedback_fits_every_gpu_generation(capability):
    """No spills. Plain rounding: 160 registers, 24 KB shared. The search for codes holds H' and F beside the tokens' steps:

    255 registers, 40 KB, with which a multiprocessor of every generation has room for one program of 8 warps.
    """
    print(in_python(f"""
import itertools
from wush_tools.kernel_check import compile_encode, cost
for d, bits, refined in itertools.product((128, 64), (2, 3, 4), (True, False)):
    counted = cost(compile_encode({capability}, d, bits, 1.5, refined, refined))
    print({capability}, d, bits, refined, counted)
    most = (255, 40 * 1024) if refined else (160, 24 * 1024)
    assert counted.spilled == 0 and counted.registers <= most[0], counted
    assert counted.shared <= most[1], counted
"""))


@slow
def test_offsets_of_batch_head_and_token_are_64_bits_wide():
    """Compiled, a pointer moves as a whole by 64-bit numbers or constants; 32 bits count in a tile."""
    in_python(r"""
import re
from wush_tools.kernel_check import compile_decode, compile_encode
for compiled in compile_decode(90, 128, (2, 3), True), compile_encode(90, 64, 2, 1.5):
    text = compiled.asm["ttir"]
    offsets = re.findall(r"tt.addptr %\S+, (%\S+) : !tt.ptr<\w+>, (\w+)", text)
    moving = [width for name, width in offsets if not re.match(r"%c\d+_i32", name)]
    assert moving and all(width == "i64" for width in moving), offsets
    assert re.search(r"arith.muli .* : (tensor<.*x)?i64", text)
""")
