"""The hot path of WUSH-KV: the bytes of a quantized cache, and the kernels that write and read them.

The layout, once, in words. The d codes of one token and KV head become d·b/8 bytes, and no code straddles a
byte. At b = 2, 4 or 8 bits the channels are cut into 8/b equal runs; byte r holds channel r of every run, run
i in the bits from i·b upwards (2 bits: channels r, r + d/4, r + d/2, r + 3d/4). So one shift and one mask
over all bytes yield a *contiguous* run of channels, which meets a contiguous slice of the query. At 3 bits
there are two planes: the codes' upper two bits laid out as above, then their lowest bit laid out as 1-bit
codes (byte r: channels r, r + d/8, ...). Scale and offset of a group are one int32: the bfloat16 scale in the
low half, the bfloat16 offset in the high half.

Each kernel is a quartet: the torch reference, which is its specification, the Triton kernel, a launcher with
the reference's signature, and the bytes it moves. Launchers use the kernel on CUDA tensors and the reference
on others, so this file needs neither a GPU nor Triton. `python kernels.py` checks the kernels on the device
at hand; `--bench` times them; `--compile` prints what they compile to, for six generations of absent GPUs.

Index legend: b batch, g KV head, r query head of its group, s cached token, d head dim.
"""
from __future__ import annotations          # annotations stay strings, so those of the kernels need no Triton

import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

jit = triton.jit if triton else lambda kernel: kernel                       # never launched without Triton
at_compile_time = triton.constexpr_function if triton else lambda function: function
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"                       # kernels run on the CPU, as numpy

PLANES = {2: [(2, 0)], 3: [(2, 1), (1, 0)], 4: [(4, 0)], 8: [(8, 0)]}  # each plane's bits, and those below

def pack_ref(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes` (..., d), uint8 in [0, 2^bits − 1], into (..., d·bits/8) bytes of the layout above."""
    d, planes = codes.shape[-1], []
    if bits not in PLANES or d % 8:
        raise ValueError(f"{d} codes of {bits} bits do not pack: bits are 2, 3, 4 or 8, d a multiple of 8")
    for width, below in PLANES[bits]:
        runs = (codes >> below & 2**width - 1).chunk(8 // width, -1)
        planes.append(functools.reduce(torch.bitwise_or, (run << i * width for i, run in enumerate(runs))))
    return torch.cat(planes, -1)

def unpack_ref(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_ref`: (..., d·bits/8) bytes to (..., d) codes."""
    d, codes = packed.shape[-1] * 8 // bits, 0
    for (width, below), plane in zip(PLANES[bits], packed.split([d * w // 8 for w, _ in PLANES[bits]], -1)):
        runs = [plane >> i & 2**width - 1 for i in range(0, 8, width)]
        codes = codes | torch.cat(runs, -1) << below
    return codes

def join_pair(scale: Tensor, offset: Tensor) -> Tensor:
    """Join bfloat16 `scale` and `offset` into one int32 each."""
    return torch.stack([scale, offset], -1).view(torch.int32).squeeze(-1)

def split_pair(pair: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `join_pair`: two bfloat16 tensors of the shape of `pair`."""
    return pair.unsqueeze(-1).view(torch.bfloat16).unbind(-1)

def or_else(reference, launch, reaches):
    """Return `launch`, but `reference` where `reaches` denies the arguments, and for good once it failed."""
    @functools.wraps(reference)
    def call(x: Tensor, *args):
        if not call.failed and reaches(x, *args):
            try:
                with torch.cuda.device_of(x):
                    return launch(x, *args)
            except Exception as error:                  # Triton and C++ compilers raise many types
                call.failed = True                      # one warning, not one for each layer and token
                message = f"{reference.__name__} takes over, slower, as its fast form failed: {error}"
                warnings.warn(message[:1000], RuntimeWarning)
        return reference(x, *args)
    call.failed = False
    return call

def fused(reference):
    """Decorate a Triton kernel's launcher: without Triton or CUDA tensors, `reference` runs instead."""
    return lambda launch: or_else(reference, launch, lambda x, *_: triton and (x.is_cuda or INTERPRET))


# ------------------------------------------------------------------------------------------------------------
# Encode: transform, quantize and pack tokens. Once a token, at prefill or flush.

GAUSSIAN_CLIP = {2: 1.4935300289152602, 3: 2.051068045052207, 4: 2.5140045914998, 8: 3.9222044167470385}

def encode_ref(x: Tensor, T: Tensor | None, bits: int, rule: str, clip: float,
               push: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize y = T x: x (b, g, s, d), T (g, 1, d, d) to codes (b, g, s, d·bits/8) and pairs (b, g, s, 1).

    `rule` "quest": the levels span ±clip·α·RMS(y), α the Gaussian-optimal clip; "centred": the same about the
    mean of y, and at last the offset takes up the mean of y − ŷ. "affine": they span the values within ±τ, τ
    the ⌊clip·d⌋-th smallest |y|. Codes are taken against the pair rounded to bfloat16. With `push` (g, 1, d,
    d), strictly upper, channel i's rounding error times push[i, j] is taken from every later channel j.
    """
    y, top = x.float() if T is None else x.float() @ T.squeeze(1).mT, 2**bits - 1
    mean = lambda y: y.mean(-1, keepdim=True, dtype=torch.float64).float()      # the order does not show
    if rule == "affine":
        tau = y.abs().sort(-1).values[..., rank(clip, y.shape[-1]), None]
        offset, highest = y.clamp(-tau, tau).aminmax(dim=-1, keepdim=True)
        scale = (highest - offset) / top
    else:
        middle = mean(y) if rule == "centred" else -0.0         # unlike 0.0, changes no sign
        peak = (y - middle).abs().amax(-1, keepdim=True)        # as squares may under- or overflow
        ratio = (y - middle) / torch.where(peak > 0, peak, 1)
        rms, alpha = peak * mean(ratio.square()).sqrt(), clip * GAUSSIAN_CLIP[bits]
        scale, offset = rms * (2 * alpha / top), rms * -alpha + middle
    scale, offset = scale.bfloat16().clamp(min=2.0**-126).float(), offset.bfloat16().float()   # never 0/0
    nearest, z = lambda z: ((z - offset) / scale).clamp(0, top).round(), y.clone()
    for i in range(y.shape[-1] if push is not None else 0):
        error = z[..., i:i + 1] - (scale * nearest(z[..., i:i + 1]) + offset)
        z -= error * push[..., i, :]
    codes = nearest(z)
    if rule == "centred":
        offset = offset + mean(y - (scale * codes + offset))
    return pack_ref(codes.byte(), bits), join_pair(scale.bfloat16(), offset.bfloat16())

def rank(clip: float, d: int) -> int:
    """Which of a row's d sorted magnitudes, counted from 0, is the clip threshold."""
    return min(int(clip * d), d - 1)

@jit
def _bfloat16_bits(x):
    """float32 to the bits of bfloat16, ties to even. By hand, since the interpreter's cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16

@jit
def _mean(y):
    """The mean of each row, in float64, so that the order of the sum does not show."""
    return (tl.sum(y.to(tl.float64), 1)[:, None] / y.shape[1]).to(tl.float32)

@jit
def _smallest(y, RANK: tl.constexpr):
    """The RANK-th smallest |y| of each row, bit by bit, by counting: floats are ordered as their bits are."""
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    found = tl.zeros([y.shape[0], 1], tl.int32)
    for i in range(31):
        more = found | 1 << 30 - i
        found = tl.where(tl.sum((bits < more).to(tl.int32), 1)[:, None] <= RANK, more, found)
    return found.to(tl.float32, bitcast=True)

@jit
def _pack(ptr, codes, live, WIDTH: tl.constexpr, BELOW: tl.constexpr):
    """Store one plane as `pack_ref` packs it: WIDTH bits, above the BELOW lowest, of codes (s, d)."""
    BYTES: tl.constexpr = codes.shape[1] * WIDTH // 8
    runs = tl.reshape(codes >> BELOW & 2**WIDTH - 1, [codes.shape[0], 8 // WIDTH, BYTES])
    byte = tl.sum(runs << (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None], 1)
    tl.store(ptr + tl.arange(0, BYTES), byte.to(tl.uint8), mask=live)

@jit
def _levels(y, RANK: tl.constexpr, ALPHA: tl.constexpr, CENTRED: tl.constexpr, BITS: tl.constexpr):
    """Scale and offset of each row, float32; ALPHA 0 means the affine rule."""
    if ALPHA > 0:
        middle = _mean(y) if CENTRED else -0.0
        peak = tl.max(tl.abs(y - middle), 1)[:, None]
        ratio = tl.div_rn(y - middle, tl.where(peak > 0, peak, 1.0))
        rms = peak * tl.sqrt_rn(_mean(ratio * ratio))
        scale, offset = rms * (2 * ALPHA / (2**BITS - 1)), rms * -ALPHA + middle
    else:
        tau = _smallest(y, RANK)
        clamped = tl.minimum(tl.maximum(y, -tau), tau)
        offset = tl.min(clamped, 1)[:, None]
        top = tl.full([y.shape[0], 1], 2**BITS - 1, tl.float32)
        scale = tl.div_rn(tl.max(clamped, 1)[:, None] - offset, top)
    return scale, offset

@jit
def _nearest(y, offset, scale, BITS: tl.constexpr):
    """The code of the level nearest to y, a whole float; adding 2^23 rounds to an integer, ties to even."""
    return tl.minimum(tl.maximum(tl.div_rn(y - offset, scale), 0.0), 2**BITS - 1) + 8388608.0 - 8388608.0

@jit
def _feed_back(y, offset, scale, push_ptr, BITS: tl.constexpr, SLICE: tl.constexpr):
    """Push each channel's rounding error onto later channels of y (s, d), as `encode_ref` does.

    Inside a slice of SLICE channels one by one, in registers; then one dot pushes the slice's errors on.
    """
    S: tl.constexpr = y.shape[0]
    D: tl.constexpr = y.shape[1]
    c, slice, d = tl.arange(0, SLICE), tl.arange(0, D // SLICE)[None, :, None], tl.arange(0, D)
    for i in range(0, D // SLICE):
        y = tl.reshape(y, [S, D // SLICE, SLICE])
        part = tl.sum(tl.where(slice == i, y, 0.0), 1)                          # takes the slice out
        errors = tl.zeros([S, SLICE], tl.float32)
        for j in range(0, SLICE):
            channel = tl.sum(tl.where(c[None, :] == j, part, 0.0), 1)[:, None]
            error = channel - (scale * _nearest(channel, offset, scale, BITS) + offset)
            errors = tl.where(c[None, :] == j, error, errors)
            part -= error * tl.load(push_ptr + (i * SLICE + j) * D + i * SLICE + c)[None, :]
        y = tl.reshape(tl.where(slice == i, part[:, None, :], y), [S, D])       # and puts it back
        later = (d >= (i + 1) * SLICE)[None, :]
        push = tl.load(push_ptr + (i * SLICE + c)[:, None] * D + d[None, :], mask=later, other=0)
        y -= tl.dot(errors, push, input_precision="tf32x3")
    return y

@jit
def _encode_kernel(x_ptr, t_ptr, push_ptr, codes_ptr, pair_ptr, stride, n, G, RANK: tl.constexpr,
                   ALPHA: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
                   TRANSFORM: tl.constexpr, FEEDBACK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Encode BLOCK tokens of one head."""
    head = tl.program_id(1).to(tl.int64)                # counts (b, g); int64, or offsets wrap at 2^31
    token = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d, c, live, row = tl.arange(0, D)[None, :], tl.arange(0, CHUNK), token < n, head * n + token
    x_ptr += head // G * stride[0] + head % G * stride[1] + token * stride[2]
    if TRANSFORM:
        y = tl.zeros([BLOCK, D], tl.float32)
        for i in range(0, D, CHUNK):                    # some inputs at a time: T would fill all registers
            x = tl.load(x_ptr + (i + c)[None, :] * stride[3], mask=live, other=0).to(tl.float32)
            T = tl.load(t_ptr + head % G * D * D + d * D + (i + c)[:, None])
            y = tl.dot(x, T, y, input_precision="tf32x3")                       # mere tf32 would move codes
    else:
        y = tl.load(x_ptr + d * stride[3], mask=live, other=0).to(tl.float32)
    scale, offset = _levels(y, RANK, ALPHA, CENTRED, BITS)
    scale_bits = tl.maximum(_bfloat16_bits(scale), 0x80)                        # 0x80: smallest normal
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    offset = (_bfloat16_bits(offset) << 16).to(tl.float32, bitcast=True)
    z = y
    if FEEDBACK:
        z = _feed_back(y, offset, scale, push_ptr + head % G * D * D, BITS, CHUNK)
    codes = _nearest(z, offset, scale, BITS)
    if CENTRED:
        offset += _mean(y - (scale * codes + offset))
    pair = scale_bits | _bfloat16_bits(offset) << 16
    tl.store(pair_ptr + row, pair.to(tl.int32, bitcast=True), mask=live)
    codes, codes_ptr = codes.to(tl.int32), codes_ptr + row * (D * BITS // 8)
    if BITS == 3:
        _pack(codes_ptr, codes, live, 2, 1)
        _pack(codes_ptr + D // 4, codes, live, 1, 0)
    else:
        _pack(codes_ptr, codes, live, BITS, 0)

REGISTERS = 160         # a thread: three programs a multiprocessor. Left alone, ptxas uses fewer and spills

@fused(encode_ref)
def encode(x, T, bits, rule, clip, push=None):
    """Launch `_encode_kernel`. Moves d·(size of x + bits/8) + 4 bytes a row, T and `push` per 16 tokens."""
    b, g, n, d = x.shape
    codes = torch.empty(b, g, n, d * bits // 8, dtype=torch.uint8, device=x.device)
    pair = torch.empty(b, g, n, 1, dtype=torch.int32, device=x.device)
    if pair.numel():
        _encode_kernel[triton.cdiv(n, 16), b * g](
            x, x if T is None else T.contiguous(), x if push is None else push.contiguous(), codes, pair,
            x.stride(), n, g, rank(clip, d), 0 if rule == "affine" else clip * GAUSSIAN_CLIP[bits],
            rule == "centred", d, bits, T is not None, push is not None, 16, 16, maxnreg=REGISTERS)
    return codes, pair


# ------------------------------------------------------------------------------------------------------------
# Decode: a new token's queries attend to sinks, packed tokens and recent tokens, with one softmax.

Window = tuple[Tensor, Tensor, Tensor]                  # k and v (b, g, slots, d), number of valid slots (b,)
Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # k codes, k pair, v codes, v pair, number valid

def read_packed(codes: Tensor, pair: Tensor, bits: int) -> Tensor:
    """Dequantize packed tokens to float32."""
    scale, offset = split_pair(pair)
    return scale.float() * unpack_ref(codes, bits) + offset.float()

def decode_attention_ref(q: Tensor, qt: Tensor, sinks: Window, packed: Packed, recent: Window,
                         bits: tuple[int, int]) -> Tensor:
    """Attend with q (b, g, r, d), or qt = T⁻ᵀ q where keys are packed; a row without any token gets zeros."""
    scores, values = [], []
    packed = read_packed(*packed[0:2], bits[0]), read_packed(*packed[2:4], bits[1]), packed[4]
    for query, (k, v, n) in (q, sinks), (qt, packed), (q, recent):
        valid = (torch.arange(k.shape[2], device=n.device) < n[:, None])[:, None, None]         # (b, 1, 1, s)
        score = query.float() @ k.float().mT * q.shape[-1] ** -0.5
        scores.append(score.masked_fill(~valid, -1e30))         # finite: a row without tokens averages zeros
        values.append(v.float().masked_fill(~valid.mT, 0))
    return (torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)).to(q.dtype)

class Slice(NamedTuple):
    """What one mask takes out of all words of a packed token."""
    width: int          # bits of a code in this plane
    byte: int           # where in the token the plane begins
    word: int           # bits of a word: bytes where 16-bit ones were too few for a tensor core's 16 columns
    words: int          # how many the plane has
    bit: int            # where in each word the slice lies
    first: int          # the channel that lies in the first word
    step: int           # from a word's channel to the next word's
    exponent: int       # of the power of two its codes lack: for planes below, less its bit in the byte

def slices(d: int, bits: int) -> tuple[Slice, ...]:
    """List all slices of d packed codes, plane by plane."""
    found, byte = [], 0
    for width, below in PLANES[bits]:
        size = d * width // 8
        word = 16 if size >= 32 else 8
        for bit in range(0, word, width):
            first = bit % 8 // width * size + bit // 8
            found.append(Slice(width, byte, word, size * 8 // word, bit, first, word // 8, below - bit % 8))
        byte += size
    return tuple(found)

@at_compile_time
def unpack_ptx(width, word):
    """PTX and constraints to take 32 bits of packed codes apart, two codes an instruction.

    A float16 with none but low mantissa bits is subnormal: code bits left where they lie in their byte, at
    bit i, are code · 2^(i − 24), exactly, and tensor cores multiply subnormals exactly (Fasi et al., 2021).
    So the neighbours are masked away and that is all: no shift for each code, no exponent, no conversion.
    Register a gets the lower bytes of 16-bit words, b the upper; of four single bytes, a gets two and b two.
    """
    spread = {16: "mov.b32 a, $X; shr.b32 b, $X, 8;",
              8: "prmt.b32 a, $X, 0, 0x4140; prmt.b32 b, $X, 0, 0x4342;"}[word]
    outputs = [(i, register) for register in "ab" for i in range(0, 8, width)]
    outputs = sorted(outputs) if word == 8 else outputs             # of bytes, a slice's halves together
    ands = [f"and.b32 ${n}, {register}, {(2**width - 1 << i) * 0x10001:#x};"
            for n, (i, register) in enumerate(outputs)]
    ptx = " ".join(["{ .reg .b32 a, b;", spread.replace("X", str(len(outputs))), *ands, "}"])
    return ptx, "=r," * len(outputs) + "r"

class Variant(NamedTuple):
    """What a decode kernel is compiled for. Its numbers reach tl.zeros in Triton 3.9, tl.full also in 3.7."""
    D: int
    K_BITS: int
    V_BITS: int
    K_SLICES: tuple[Slice, ...]
    V_SLICES: tuple[Slice, ...]
    ROWS: int           # query heads of a group, padded
    TILE: int           # packed tokens that are read at a time
    WINDOW: int         # slots of a window that one program takes
    FAST: bool          # codes are unpacked by `unpack_ptx`
    DOT: type           # of the operands of dot products with codes

@jit
def _codes(ptr, token, live, AXIS: tl.constexpr, BITS: tl.constexpr, SLICE: tl.constexpr,
           MASKED: tl.constexpr, HOW: tl.constexpr):
    """Load a slice of a tile of tokens, words along AXIS. (Compiled, the words are loaded once for all.)"""
    WIDTH: tl.constexpr = SLICE.width
    WORD: tl.constexpr = SLICE.word
    word = tl.expand_dims(tl.arange(0, max(SLICE.words, 16)), 1 - AXIS)
    at = (ptr + SLICE.byte).to(tl.pointer_type(tl.uint16 if WORD == 16 else tl.uint8))
    at += tl.expand_dims(token, AXIS) * (HOW.D * BITS // WORD) + word
    if MASKED or SLICE.words < 16:
        words = tl.load(at, mask=tl.expand_dims(live, AXIS) & (word < SLICE.words), other=0)
    else:
        words = tl.load(at)
    if HOW.FAST:
        every = tl.inline_asm_elementwise(
            unpack_ptx(WIDTH, WORD)[0], unpack_ptx(WIDTH, WORD)[1], [words],
            dtype=(tl.float16,) * (WORD // WIDTH), is_pure=True, pack=32 // WORD)
        codes = every[SLICE.bit // WIDTH]
    else:                                               # the same, a code at a time
        codes = words.to(tl.uint16) >> SLICE.bit // 8 * 8 & (2**WIDTH - 1) * 2**(SLICE.bit % 8)
    return codes.to(tl.float16, bitcast=True).to(HOW.DOT)

@jit
def _channels(SLICE: tl.constexpr):
    """The channels of a slice's words, as a column, and which of the words exist."""
    word = tl.arange(0, max(SLICE.words, 16))[:, None]
    return SLICE.first + word * SLICE.step, word < SLICE.words

@jit
def _split_pair(pair):
    """`split_pair`, to float32."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)

@jit
def _scaled_queries(q_ptr, here, HOW: tl.constexpr):
    """Load the queries slice by slice, scaled to ±2^14, as float16 has little room, and by what codes lack.

    Also return what undoes it, and makes softmax a power of 2; and the sums that key offsets multiply.
    """
    q = tl.load(q_ptr + tl.arange(0, HOW.D)[:, None], mask=here, other=0)
    largest = tl.maximum(tl.max(tl.abs(q), 0), 1e-30)
    size, bias = largest * (1024 * HOW.D**-0.5 * 1.4426950408889634), tl.sum(q, 0) / (largest * 1024)
    query = ()
    for i in tl.static_range(len(HOW.K_SLICES)):
        at, there = _channels(HOW.K_SLICES[i])
        q = tl.load(q_ptr + at, mask=there & here, other=0) / largest[None, :]
        query = query + ((q * 2.0**(14 + HOW.K_SLICES[i].exponent)).to(HOW.DOT),)
    return query, size, bias

@jit
def _packed_tile(state, queries, packed, start, end, MASKED: tl.constexpr, HOW: tl.constexpr):
    """Add a tile of packed tokens, those before `end` if MASKED, to the running softmax `state`."""
    peak, total, shift, top, acc = state
    query, size, bias = queries
    k, k_pair, v, v_pair = packed
    token, at = tl.arange(0, HOW.TILE), tl.cast(start, tl.int64)
    live = start + token < end
    some, fill = (live, 0) if MASKED else (None, None)
    k_scale, k_offset = _split_pair(tl.load(k_pair + at + token, mask=some, other=fill))
    v_scale, v_offset = _split_pair(tl.load(v_pair + at + token, mask=some, other=fill))
    score = tl.full([HOW.TILE, HOW.ROWS], 0, tl.float32)
    k, v = k + at * (HOW.D * HOW.K_BITS // 8), v + at * (HOW.D * HOW.V_BITS // 8)
    for i in tl.static_range(len(query)):
        codes = _codes(k, token, live, 1, HOW.K_BITS, HOW.K_SLICES[i], MASKED, HOW)
        score = tl.dot(codes, query[i], score, input_precision="tf32x3")
    score = score * k_scale[:, None] + k_offset[:, None] * bias[None, :]
    if MASKED:
        score = tl.where(live[:, None], score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 0) * size)
    p = tl.exp2(score * size[None, :] - new_peak[None, :])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(p, 0)
    shift = shift * decay + tl.sum(p * v_offset[:, None], 0)

    # Weights in units of the largest scale so far: float16 neither overflows nor loses what counts.
    new_top = tl.maximum(top, tl.max(v_scale, 0))
    weight = (p * (v_scale * (16384 / new_top))[:, None]).to(HOW.DOT)
    decay *= top / new_top
    sums = ()
    for i in tl.static_range(len(acc)):                 # words first: to transpose codes takes shared memory
        codes = _codes(v, token, live, 0, HOW.V_BITS, HOW.V_SLICES[i], MASKED, HOW)
        sums = sums + (tl.dot(codes, weight, acc[i] * decay[None, :], input_precision="tf32x3"),)
    return new_peak, total, shift, new_top, sums

@jit
def _store_slice(acc_ptr, sums, top, shift, SLICE: tl.constexpr):
    """Store the weighted sums of a slice of the values, in full units; a second plane adds to the first."""
    at, there = _channels(SLICE)
    out = sums * (top * 2.0**(10 + SLICE.exponent))
    if SLICE.byte == 0:
        out += shift[None, :]
    else:
        if SLICE.bit == 0:
            tl.debug_barrier()                          # as other threads stored the first
        out += tl.load(acc_ptr + at, mask=there, other=0)
    tl.store(acc_ptr + at, out, mask=there)

@jit
def _rows(buffers, strides, b, g):
    """Where each of the buffers (b, g, ...) begins for one b and g."""
    found = ()
    for i in tl.static_range(len(strides)):
        found = found + (buffers[i] + b * strides[i][0] + g * strides[i][1],)
    return found

@jit
def _packed_part(q_ptr, acc_ptr, here, packed, strides, b, g, part, PARTS, HOW: tl.constexpr):
    """Softmax over one of PARTS shares of the packed tokens: store weighted sums, return peaks and totals."""
    n, buffers = tl.load(packed[4] + b), _rows(packed, strides, b, g)
    share = tl.cdiv(tl.cdiv(n, PARTS), HOW.TILE) * HOW.TILE
    start = tl.minimum(part * share, n)
    end = tl.minimum(start + share, n)
    middle = start + (end - start) // HOW.TILE * HOW.TILE
    queries, acc = _scaled_queries(q_ptr, here, HOW), ()
    for i in tl.static_range(len(HOW.V_SLICES)):
        acc = acc + (tl.full([max(HOW.V_SLICES[i].words, 16), HOW.ROWS], 0, tl.float32),)
    zero = tl.full([HOW.ROWS], 0, tl.float32)
    state = (zero - 1e30, zero, zero, 1e-30, acc)       # peaks, totals, sums of offsets, largest scale, sums

    for at in range(start, middle, HOW.TILE):
        state = _packed_tile(state, queries, buffers, at, end, False, HOW)
    if middle < end:                                    # apart, so that the loop needs no masks
        state = _packed_tile(state, queries, buffers, middle, end, True, HOW)

    peak, total, shift, top, acc = state
    for i in tl.static_range(len(acc)):
        _store_slice(acc_ptr, acc[i], top, shift, HOW.V_SLICES[i])
    return peak, total

@jit
def _window_part(q_ptr, acc_ptr, here, window, strides, b, g, part, HOW: tl.constexpr):
    """As `_packed_part`, over some slots of a window."""
    k, v = _rows(window, strides, b, g)
    d, slot = tl.arange(0, HOW.D), part * HOW.WINDOW + tl.arange(0, HOW.WINDOW)
    live, slot = slot < tl.load(window[2] + b), slot.to(tl.int64)
    q = tl.load(q_ptr + d[:, None], mask=here, other=0)
    k = tl.load(k + slot[:, None] * strides[0][2] + d[None, :], mask=live[:, None], other=0)
    if HOW.DOT == tl.float32:                           # the interpreter would multiply bfloat16's bits
        q, k = q.to(tl.float32), k.to(tl.float32)
    score = tl.dot(k, q, input_precision="tf32x3") * (HOW.D**-0.5 * 1.4426950408889634)
    score = tl.where(live[:, None], score, -1e30)
    peak = tl.max(score, 0)
    p = tl.where(live[:, None], tl.exp2(score - peak[None, :]), 0)
    v = tl.load(v + slot[None, :] * strides[1][2] + d[:, None], mask=live[None, :], other=0)
    if HOW.DOT == tl.float32:
        v = v.to(tl.float32)
    tl.store(acc_ptr + d[:, None], tl.dot(v, p.to(v.dtype), input_precision="tf32x3"))
    return peak, tl.sum(p, 0)

@jit
def _decode_kernel(q_ptr, qt_ptr, sinks, packed, recent, strides, acc_ptr, stat_ptr, G, R, PARTS, SINK_PARTS,
                   HOW: tl.constexpr):
    """A group's query heads, as columns of the tiles, over a share of the packed tokens or of a window."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g, r = head // G, head % G, tl.arange(0, HOW.ROWS)
    to, q_at, here = head * tl.num_programs(0) + part, (head * R + r[None, :]) * HOW.D, r[None, :] < R
    acc_ptr += (to * HOW.ROWS + r[None, :]) * HOW.D
    if part < PARTS:
        peak, total = _packed_part(qt_ptr + q_at, acc_ptr, here, packed, strides[1], b, g, part, PARTS, HOW)
    elif part < PARTS + SINK_PARTS:
        peak, total = _window_part(q_ptr + q_at, acc_ptr, here, sinks, strides[0], b, g, part - PARTS, HOW)
    else:
        peak, total = _window_part(q_ptr + q_at, acc_ptr, here, recent, strides[2], b, g,
                                   part - PARTS - SINK_PARTS, HOW)
    tl.store(stat_ptr + to * 2 * HOW.ROWS + r, peak)
    tl.store(stat_ptr + (to * 2 + 1) * HOW.ROWS + r, total)

@jit
def _merge_kernel(acc_ptr, stat_ptr, out_ptr, parts, R, D: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Join the softmaxes of all parts, for CHUNK channels of a query head; empty parts hold zeros."""
    row = tl.program_id(0).to(tl.int64)
    head, r, d = row // R, row % R, tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    peak, total, acc = -1e30, 0.0, tl.zeros([CHUNK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        live, at = part < parts, head * parts + part
        peaks = tl.load(stat_ptr + at * 2 * ROWS + r, mask=live, other=-1e30)
        totals = tl.load(stat_ptr + (at * 2 + 1) * ROWS + r, mask=live, other=0)
        accs = tl.load(acc_ptr + (at * ROWS + r)[:, None] * D + d[None, :], mask=live[:, None], other=0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weight, decay = tl.exp2(peaks - new_peak), tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(totals * weight, 0)
        acc = acc * decay + tl.sum(accs * weight[:, None], 0)
        peak = new_peak
    tl.store(out_ptr + row * D + d, (acc / tl.where(total > 0, total, 1)).to(out_ptr.dtype.element_ty))

WINDOW = 32                                             # slots of a window that one program takes

def tiling(d: int, bits: tuple[int, int], rows: int, fast: bool, cc: int) -> dict:
    """Tokens a tile, a warp a program, loads two tiles ahead, a bound on registers where ptxas overdoes them.

    Small tiles where large ones spill: many queries, codes unpacked singly, 3 bits in 128 channels on
    Blackwell. They spend half as many instructions again.
    """
    wide = d > 64 and set(bits) not in ({2}, {4}, {8})
    small = rows > 8 or (not fast and set(bits) != {2}) or (wide and 3 in bits and cc >= 120)
    bound = dict(maxnreg=200) if wide and rows == 8 else {}
    return dict(TILE=16 if small else 64, num_warps=1, num_stages=3) | bound

@functools.cache
def variant(d: int, bits: tuple[int, int], rows: int, fast: bool, cc: int, dot) -> tuple[Variant, dict]:
    """Return what to compile the decode kernel for, and the compiler's options."""
    options = tiling(d, bits, rows, fast, cc)
    tile = options.pop("TILE")
    return Variant(d, *bits, *(slices(d, width) for width in bits), rows, tile, WINDOW, fast, dot), options

@fused(decode_attention_ref)
def decode_attention(q, qt, sinks, packed, recent, bits):
    """Launch `_decode_kernel` and `_merge_kernel`. Moves d·(k_bits + v_bits)/8 + 8 bytes a packed token and
    KV head, 2·d elements a window slot, and 4·(d + 2) bytes, twice, a part and query head.
    """
    b, g, r, d = q.shape
    if not all(x.stride(-1) == 1 for x in (*sinks[:2], *packed[0:4:2], *recent[:2])) or \
            not all(x.stride(2) == x.shape[3] for x in packed[:4]):
        raise ValueError("channels, and the codes and pairs of successive tokens, must lie side by side")
    cuda, dot = q.is_cuda, tl.float32 if INTERPRET or q.dtype == torch.float32 else tl.float16
    cc = 10 * torch.cuda.get_device_capability(q.device)[0] if cuda else 0
    fast, rows = cc >= 80 and dot == tl.float16, max(8, triton.next_power_of_2(r))
    cores = torch.cuda.get_device_properties(q.device).multi_processor_count if cuda else 1
    # Eight programs a multiprocessor, by the buffers' sizes: to ask the device for lengths would wait for it.
    parts = min(triton.cdiv(8 * cores, b * g), triton.cdiv(packed[0].shape[2], 512), 256)
    sink_parts, recent_parts = (triton.cdiv(k.shape[2], WINDOW) for k in (sinks[0], recent[0]))
    every = parts + sink_parts + recent_parts
    acc, stat = (torch.empty(b * g * every * rows, size, device=q.device) for size in (d, 2))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    strides = tuple(tuple(x.stride()[:3] for x in part) for part in (sinks[:2], packed[:4], recent[:2]))
    if every:
        how, options = variant(d, tuple(bits), rows, fast, cc, dot)
        _decode_kernel[every, b * g](q.contiguous(), qt.contiguous(), sinks, packed, recent, strides, acc,
                                     stat, g, r, parts, sink_parts, how, **options)
    _merge_kernel[b * g * r, triton.cdiv(d, 32)](acc, stat, out, every, r, d, rows, 32, min(d, 32))
    return out


# ----------------------------------------------------------------------------------------------------------
# Packed codes under a dot product, on the CPU. Scale and offset act on the score, not on each element, and
# torch.compile fuses unpack and dot into one pass over the bytes, so that nothing is ever restored.

def tiles(codes: Tensor, pair: Tensor, bits: int, count: int, size: int = 1024):
    """Unpack the first `count` tokens piece by piece: yield a piece's place, codes, scales and offsets."""
    for start in range(0, max(count, 1), size):         # no tokens are one empty piece
        place = slice(start, min(start + size, count))
        scale, offset = (half.float().mT for half in split_pair(pair[:, :, place]))
        yield place, unpack_ref(codes[:, :, place], bits).float(), scale, offset

def packed_scores_ref(q: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """Return q · x̂ for the first `count` packed tokens, a pair each: q (b, g, r, d) -> (b, g, r, count)."""
    total, pieces = q.sum(-1, keepdim=True), tiles(codes, pair, bits, count)
    return torch.cat([q @ x.mT * scale + total * offset for _, x, scale, offset in pieces], -1)

def packed_values_ref(p: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """Return Σ_s p_s x̂_s over the first `count` packed tokens: p (b, g, r, count) -> (b, g, r, d)."""
    values = 0
    for place, x, scale, offset in tiles(codes, pair, bits, count):
        values = values + (p[..., place] * scale) @ x
        values = values + (p[..., place] * offset).sum(-1, keepdim=True)
    return values

def runs_of(codes: Tensor, pair: Tensor, bits: int, count: int) -> tuple[Tensor, Tensor, list]:
    """Scales and offsets (b, g, s) of the first `count` tokens; plane by plane, their runs of channels."""
    codes, pair, planes = codes[:, :, :count], pair[:, :, :count, 0], []
    scale, offset = (half.view(torch.float32) for half in (pair << 16, pair & -65536))
    sizes = [codes.shape[-1] * width // bits for width, _ in PLANES[bits]]
    for (width, below), plane in zip(PLANES[bits], codes.split(sizes, -1)):
        planes.append([(plane >> i & 2**width - 1).float() * 2**below for i in range(0, 8, width)])
    return scale, offset, planes

def scores_in_one_pass(q: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """`packed_scores_ref` for the compiler: one sum over a token's bytes serves all runs and all queries."""
    (scale, offset, planes), scores = runs_of(codes, pair, bits, count), []
    for query in q[:, :, :, None].unbind(2):
        dots = (sum(part * x for part, x in zip(query.chunk(len(runs), -1), runs)).sum(-1) for runs in planes)
        scores.append(sum(dots) * scale + query.sum(-1) * offset)
    return torch.stack(scores, 2)

def values_in_one_pass(p: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """`packed_values_ref` for the compiler."""
    (scale, offset, planes), values = runs_of(codes, pair, bits, count), []
    for weight in p.unbind(2):
        scaled = (weight * scale)[..., None]
        sums = (torch.cat([(scaled * x).sum(-2) for x in runs], -1) for runs in planes)
        values.append(sum(sums) + (weight * offset).sum(-1, keepdim=True))
    return torch.stack(values, 2)

WORTH_COMPILING = 1024      # packed tokens: shorter contexts never earn the compiler's ten seconds back

def in_one_pass(reference, one_pass):
    """Make a CPU launcher: compiled for one step's queries on a long cache, else the reference itself."""
    compiled = functools.cache(lambda: torch.compile(one_pass, dynamic=True))   # on first use: imports much

    def pays(x, codes, pair, bits, count):
        return not x.is_cuda and count >= WORTH_COMPILING and x.shape[2] <= 16

    return or_else(reference, lambda *args: compiled()(*args), pays)

packed_scores = in_one_pass(packed_scores_ref, scores_in_one_pass)
packed_values = in_one_pass(packed_values_ref, values_in_one_pass)


# ------------------------------------------------------------------------------------------------------------
# python kernels.py: check the kernels on the device at hand; --compile: their cost on GPUs that are not.

TARGETS = 80, 86, 89, 90, 100, 120                      # compute capabilities

def example(b, g, r, d, bits, slots, dtype=torch.float32, device="cpu", seed=0):
    """Arguments of `decode_attention`: lengths up to `slots` (sinks, packed, recent), NaN beyond."""
    torch.manual_seed(seed)
    lengths = [torch.randint(0, most + 1, (b,), dtype=torch.int32) for most in slots]
    beyond = [torch.arange(most)[:, None] >= n[:, None, None, None] for n, most in zip(lengths, slots)]
    packed, here = [], lambda *parts: tuple(x.to(device) for x in parts)
    for width, rule in zip(bits, ("quest", "affine")):
        codes, pair = encode_ref(torch.randn(b, g, slots[1], d), None, width, rule, 0.92)
        packed += codes.masked_fill(beyond[1], 255), pair.masked_fill(beyond[1], -1)    # −1: a pair of NaN
    q, qt = torch.randn(2, b, g, r, d)
    ends = [torch.randn(2, b, g, slots[i], d).masked_fill(beyond[i], torch.nan).to(dtype) for i in (0, 2)]
    sinks, packed, recent = (here(*x, n) for x, n in zip((ends[0], packed, ends[1]), lengths))
    return *here(q.to(dtype), qt), sinks, packed, recent, bits

def check(device: str):
    """Compare both kernels with their references. Sums in another order may move a few pairs and codes."""
    for dtype, d, bits in itertools.product((torch.float32, torch.bfloat16), (64, 128), (2, 3, 4)):
        args, moved = example(2, 2, 4, d, (bits, bits), (16, 700, 100), dtype, device), 0
        x, (T, push) = torch.randn(2, 2, 100, d).to(device, dtype), torch.randn(2, 2, 1, d, d).to(device)
        for rule, feed in (("quest", None), ("affine", None), ("centred", push.triu(1) / 16)):
            ours, theirs = (torch.cat(f(x, T, bits, rule, 0.96, feed), -1) for f in (encode, encode_ref))
            moved += (ours != theirs).any(-1).float().mean().item() / 3
        error = (decode_attention(*args) - decode_attention_ref(*args)).abs().max().item()
        print(f"{device} {dtype} d={d} bits={bits}: {moved:.2%} of rows differ, attention {error:.0e}")
        assert not (encode.failed or decode_attention.failed)
        assert moved <= 0.02 and error <= 8 * torch.finfo(dtype).eps

def compile_for(cc: int, kernel, kinds: tuple, constants: tuple, **options):
    """Compile `kernel` for compute capability `cc`; pointers and integers, the `kinds`, divide by 16."""
    signature = dict(zip(kernel.arg_names, [*kinds, *("constexpr" for _ in constants)]))
    paths = triton._utils.find_paths_if(kinds, lambda *_: True)
    source = triton.compiler.ASTSource(
        kernel, signature, {(len(kinds) + i,): value for i, value in enumerate(constants)},
        {path: [["tt.divisibility", 16]] for path in paths})
    return triton.compile(source, triton.backends.compiler.GPUTarget("cuda", cc, 32), options)

def compile_decode(cc: int, d: int, bits: tuple[int, int], fast: bool, rows: int = 8, model: str = "bf16"):
    """Compile `_decode_kernel` as `decode_attention` calls it."""
    window, packed = (f"*{model}", f"*{model}", "*i32"), ("*u8", "*i32", "*u8", "*i32", "*i32")
    strides = tuple((("i32",) * 3,) * buffers for buffers in (2, 4, 2))
    kinds = f"*{model}", "*fp32", window, packed, window, strides, "*fp32", "*fp32", *("i32",) * 4
    how, options = variant(d, bits, rows, fast, cc, tl.float32 if model == "fp32" else tl.float16)
    return compile_for(cc, _decode_kernel, kinds, (how,), **options)

def compile_encode(cc: int, d: int, bits: int, rule: str, feedback: bool = False):
    """Compile `_encode_kernel` as `encode` calls it, with a transform."""
    kinds = "*bf16", "*fp32", "*fp32", "*u8", "*i32", ("i32",) * 4, "i32", "i32"
    alpha = 0 if rule == "affine" else GAUSSIAN_CLIP[bits]
    constants = d - 5, alpha, rule == "centred", d, bits, True, feedback, 16, 16
    return compile_for(cc, _encode_kernel, kinds, constants, maxnreg=REGISTERS)

def cost(compiled) -> tuple[int, int, int, int]:
    """Registers and spilled bytes a thread, bytes of shared memory, instructions of the longest loop."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    jumps = re.findall(r"/\*([0-9a-f]{4,})\*/ .*\bBRA\b.* 0x([0-9a-f]+) *;", text)
    loop = max(int(at, 16) - int(to, 16) for at, to in jumps) // 16 + 1     # an instruction is 16 bytes
    return registers, stack, compiled.metadata.shared, loop

def compile_all():
    """Print the cost of every kernel on every target, for decode with a loop's lane-instructions a code."""
    print("cc   kernel                         registers spilled  shared  instructions a code")
    for cc, d, bits, flag in itertools.product(TARGETS, (64, 128), (2, 3, 4), (True, False)):
        codes, rule = 2 * d * tiling(d, (bits, bits), 8, flag, cc)["TILE"], "centred" if flag else "quest"
        *usage, loop = cost(compile_decode(cc, d, (bits, bits), flag))
        rows = [("decode", "fast" if flag else "plain", *usage, f"{32 * loop / codes:.2f}"),
                ("encode", rule, *cost(compile_encode(cc, d, bits, rule, flag))[:3])]
        for kernel, kind, *figures in rows:
            name = f"{kernel} d={d} bits={bits} {kind}"
            print(f"{cc:<4} {name:30}", *(f"{x:>8}" for x in figures), flush=True)

def ways_to_attend(q: Tensor, n: int, bits: int) -> dict:
    """Ways from q (b, g, r, d) to attention over n tokens: name -> (what makes a cache, what reads it)."""
    b, g, _, d = q.shape
    none, length = q.new_zeros(b, g, 0, d), torch.full((b,), n, dtype=torch.int32, device=q.device)
    window = none, none, length * 0

    def packed():
        sides = [encode_ref(q.new_empty(b, g, 1, d).normal_(), None, bits, "affine", 0.92) for _ in "kv"]
        return [x.expand(-1, -1, n, -1).contiguous() for side in sides for x in side]

    def sdpa(k, v):
        return F.scaled_dot_product_attention(q.to(k.dtype).flatten(1, 2)[:, :, None], k, v, enable_gqa=True)

    def over_bytes(scores, values):
        softmax = lambda k, k_pair: (scores(q, k, k_pair, bits, n) * d**-0.5).softmax(-1)
        return lambda k, k_pair, v, v_pair: values(softmax(k, k_pair), v, v_pair, bits, n)

    plain = lambda dtype: lambda: torch.randn(2, b, g, n, d, device=q.device, dtype=dtype).unbind()
    restored = lambda *x: sdpa(read_packed(*x[:2], bits), read_packed(*x[2:], bits))
    touch = lambda *x: [part.view(torch.int32).amax() for part in x]
    kernel = lambda *x: decode_attention(q, q.float(), window, (*x, length), window, (bits, bits))
    half = {"SDPA bfloat16": (plain(torch.bfloat16), sdpa)}
    if q.is_cuda:
        return half | {"plain read": (packed, touch), "decode_attention": (packed, kernel)}
    return {"SDPA float32": (plain(torch.float32), sdpa), **half, "dequantize+SDPA": (packed, restored),
            "plain unpack": (packed, over_bytes(packed_scores_ref, packed_values_ref)),
            "one pass": (packed, over_bytes(packed_scores, packed_values))}

def median_ms(steps, cuda: bool) -> float:
    """Milliseconds a step: median of 10 runs, or on a GPU of 50 replays of all steps as one CUDA graph."""
    run = lambda: [step() for step in steps]
    run(), run()                                        # compiles, and touches memory
    if not cuda:
        return statistics.median(timeit.repeat(run, number=1, repeat=10)) * 1e3 / len(steps)
    torch.cuda.synchronize()
    graph, event = torch.cuda.CUDAGraph(), lambda: torch.cuda.Event(enable_timing=True)
    with torch.cuda.graph(graph):
        run()
    spans = [(event(), event()) for _ in range(50)]
    for start, end in spans:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans) / len(steps)

def bench(device: str, g: int = 8, r: int = 4, d: int = 128):
    """Time the ways to attend from a step's queries; the last is also printed as a share of each other.

    On a GPU at least four caches of over 200 MB together take turns: the level-2 cache shall not answer.
    """
    cuda, sizes = device == "cuda", ((1,), (1, 4, 16, 64), (2,))                # b, 1024 tokens, bits
    if cuda:
        check(device)
        sizes = (1, 8, 32), (4, 32, 80, 128), (2, 3, 4)
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads"
    print(f"{g} KV heads of {r} queries, d = {d}, {where}: ms (GB/s), and the last / each other")
    for row, (b, n, bits) in enumerate(itertools.product(*sizes)):
        torch.cuda.empty_cache()
        if cuda and 5 * b * g * n * 1024 * d * 4 > torch.cuda.mem_get_info()[0]:
            continue                                    # five caches in bfloat16 have no room
        q = torch.randn(b, g, r, d, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
        ways, times, cells = ways_to_attend(q, n * 1024, bits), [], []
        if row == 0:
            print(" b tokens bits", *(f"{name:>18}" for name in ways))
        for make, step in ways.values():
            caches = [make()]
            size = sum(x.nbytes for x in caches[0])
            caches += [make() for _ in range(max(4, 200_000_000 // size + 1) - 1 if cuda else 0)]
            times.append(median_ms([functools.partial(step, *cache) for cache in caches], cuda))
            cells.append(f"{times[-1]:9.3f} ({size / times[-1] / 1e6:6.1f})")
            del caches
        print(f"{b:2} {n:5}k {bits:4}", *cells, *(f"{times[-1] / t:5.2f}" for t in times[:-1]), flush=True)

def main():
    gpu = torch.cuda.is_available()
    if triton is None:
        sys.exit("kernels.py: Triton is not installed, so there is nothing to check")
    if "--compile" in sys.argv:
        compile_all()
    elif "--bench" in sys.argv:
        bench("cuda" if gpu else "cpu")
    elif gpu or INTERPRET:
        check("cpu" if INTERPRET else "cuda")
    else:                                               # Triton reads the variable when it is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})


if __name__ == "__main__":
    main()
