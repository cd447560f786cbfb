"""The hot path of WUSH-KV: the bytes of a quantized cache, and the kernels that write and read them.

The layout, once, in words. The d codes of one token and KV head become d·b/8 bytes, and no code straddles a
byte. At b = 2, 4 or 8 bits the channels are cut into 8/b equal runs; byte r holds channel r of every run, run
i in the bits from i·b upwards (2 bits: channels r, r + d/4, r + d/2, r + 3d/4). So one shift and one mask
over all bytes yield a *contiguous* run of channels, which meets a contiguous slice of the query. At 3 bits
there are two planes: the codes' upper two bits laid out as above, then their lowest bit laid out as 1-bit
codes (byte r: channels r, r + d/8, ...). Scale and offset of a group are one int32: the bfloat16 scale in the
low half, the bfloat16 offset in the high half.

Each kernel is a quartet: the torch reference, which is its specification, the Triton kernel, a launcher with
the reference's signature, and the bytes it moves. Launchers run the kernel on CUDA tensors, the reference on
others, so this file works without a GPU and without Triton. `python kernels.py` checks the kernels against
their references on the device at hand; `--bench` times them; `--compile` compiles every variant for six GPU
generations, none of which need be there, and prints its cost.

Index legend: b batch, g KV head, r query head of its group, s cached token, d head dim.
"""
from __future__ import annotations          # annotations stay strings, so those of the kernels need no Triton

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings

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

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}      # bits of a code -> bits of each plane, upper bits first


def pack_ref(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes` (..., d), uint8 in [0, 2^bits − 1], into (..., d·bits/8) bytes of the layout above."""
    d, below, planes = codes.shape[-1], bits, []
    if bits not in PLANES or d % 8:
        raise ValueError(f"{d} codes of {bits} bits do not pack: bits are 2, 3, 4 or 8, d a multiple of 8")
    for width in PLANES[bits]:
        below -= width
        runs = (codes >> below & (1 << width) - 1).chunk(8 // width, -1)
        planes.append(functools.reduce(torch.bitwise_or, (run << i * width for i, run in enumerate(runs))))
    return torch.cat(planes, -1)


def unpack_ref(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_ref`: (..., d·bits/8) bytes to (..., d) codes."""
    d = packed.shape[-1] * 8 // bits
    codes, below = 0, bits
    for width, plane in zip(PLANES[bits], packed.split([d * w // 8 for w in PLANES[bits]], -1)):
        below -= width
        runs = [plane >> i & (1 << width) - 1 for i in range(0, 8, width)]
        codes = codes | torch.cat(runs, -1) << below
    return codes


def join_pair(scale: Tensor, offset: Tensor) -> Tensor:
    """Join bfloat16 `scale` and `offset` into one int32 each."""
    return torch.stack([scale, offset], -1).view(torch.int32).squeeze(-1)


def split_pair(pair: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `join_pair`: two bfloat16 tensors of the shape of `pair`."""
    return pair.unsqueeze(-1).view(torch.bfloat16).unbind(-1)


def fused(reference):
    """Let a launcher fall back to `reference`: where its kernel cannot reach, and for good once it failed."""
    def decorate(launch):
        @functools.wraps(reference)
        def call(x: Tensor, *args):
            if triton and (x.is_cuda or INTERPRET) and not call.failed:
                try:
                    with torch.cuda.device_of(x):
                        return launch(x, *args)
                except Exception as error:
                    call.failed = True                  # one warning, not one for each layer and token
                    warnings.warn(f"{launch.__name__} failed, torch takes over: {error}", RuntimeWarning)
            return reference(x, *args)
        call.failed = False
        return call
    return decorate


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
            rule == "centred", d, bits, T is not None, push is not None, 16, 16)
    return codes, pair


# ------------------------------------------------------------------------------------------------------------
# Decode: a new token's queries attend to sinks, packed tokens and recent tokens, with one softmax.

Window = tuple[Tensor, Tensor, Tensor]                  # k and v (b, g, slots, d), number of valid slots (b,)
Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # k codes, k pair, v codes, v pair, number valid


def decode_attention_ref(q: Tensor, qt: Tensor, sinks: Window, packed: Packed, recent: Window,
                         bits: tuple[int, int]) -> Tensor:
    """Attend with q (b, g, r, d), or qt = T⁻ᵀ q where keys are packed; a row without any token gets zeros."""
    def read(codes, pair, width):
        scale, offset = split_pair(pair)
        return scale.float() * unpack_ref(codes, width) + offset.float()

    scores, values = [], []
    packed = read(*packed[0:2], bits[0]), read(*packed[2:4], bits[1]), packed[4]
    for query, (k, v, n) in (q, sinks), (qt, packed), (q, recent):
        valid = (torch.arange(k.shape[2], device=n.device) < n[:, None])[:, None, None]         # (b, 1, 1, s)
        score = query.float() @ k.float().mT * q.shape[-1] ** -0.5
        scores.append(score.masked_fill(~valid, -1e30))         # finite: a row without tokens averages zeros
        values.append(v.float().masked_fill(~valid.mT, 0))
    return (torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)).to(q.dtype)


@at_compile_time
def slices(d, bits):
    """What one mask at a time takes out of the words of packed tokens, plane by plane, as tuples of

    width, byte, word, words  how to load the plane: from which byte, how many words of how many bits (bytes
                              where 16-bit words would be too few for the 16 columns of a tensor core's tile)
    bit, first, step          the slice's bit in each word, its first channel, the step to the next word's
    exponent                  of the power of two its codes lack: for planes below, less its bit in the byte
    """
    found, byte, below = [], 0, bits
    for width in PLANES[bits]:
        below, word = below - width, 16 if d * width >= 256 else 8
        for bit in range(0, word, width):
            first = bit % 8 // width * (d * width // 8) + bit // 8
            found.append((width, byte, word, d * width // word, bit, first, word // 8, below - bit % 8))
        byte += d * width // 8
    return found


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
    outputs = [(register, i) for register in "ab" for i in range(0, 8, width)]
    if word == 8:
        outputs.sort(key=lambda output: output[1])      # both halves of a slice together
    masks = [((1 << width) - 1 << i) * 0x10001 for _, i in outputs]
    ands = [f"and.b32 ${n}, {outputs[n][0]}, {mask:#x};" for n, mask in enumerate(masks)]
    ptx = " ".join(["{ .reg .b32 a, b;", spread.replace("X", str(len(outputs))), *ands, "}"])
    return ptx, "=r," * len(outputs) + "r"


@jit
def _codes(ptr, token, live, AXIS: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr,
           DOT: tl.constexpr, WIDTH: tl.constexpr, BYTE: tl.constexpr, WORD: tl.constexpr,
           WORDS: tl.constexpr, BIT: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
           EXPONENT: tl.constexpr):
    """Load one of `slices` of a tile of tokens, words along AXIS. (Compiled, the words are loaded once.)"""
    word = tl.expand_dims(tl.arange(0, max(WORDS, 16)), 1 - AXIS)
    at = (ptr + BYTE).to(tl.pointer_type(tl.uint16 if WORD == 16 else tl.uint8))
    at += tl.expand_dims(token, AXIS) * (ROW * 8 // WORD) + word
    if MASKED or WORDS < 16:
        words = tl.load(at, mask=tl.expand_dims(live, AXIS) & (word < WORDS), other=0)
    else:
        words = tl.load(at)
    if FAST:
        every = tl.inline_asm_elementwise(
            unpack_ptx(WIDTH, WORD)[0], unpack_ptx(WIDTH, WORD)[1], [words],
            dtype=(tl.float16,) * (WORD // WIDTH), is_pure=True, pack=32 // WORD)
        codes = every[BIT // WIDTH]
    else:                                               # the same, a code at a time
        codes = words.to(tl.uint16) >> BIT // 8 * 8 & (2**WIDTH - 1) * 2**(BIT % 8)
    return codes.to(tl.float16, bitcast=True).to(DOT)


@jit
def _channels(slice: tl.constexpr):
    """The channels of a slice's words, as a column, and which of the words exist."""
    word = tl.arange(0, max(slice[3], 16))[:, None]
    return slice[5] + word * slice[6], word < slice[3]


@jit
def _split_pair(pair):
    """`split_pair`, to float32."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@jit
def _packed_tile(state, query, size, bias, k, k_pair, v, v_pair, start, end, K_ROW: tl.constexpr,
                 V_ROW: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
                 TILE: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, MASKED: tl.constexpr):
    """Add a tile of packed tokens, those before `end` if MASKED, to the running softmax `state`."""
    peak, total, shift, top, acc = state
    token, at = tl.arange(0, TILE), tl.cast(start, tl.int64)
    live = start + token < end
    some, fill = (live, 0) if MASKED else (None, None)
    k_scale, k_offset = _split_pair(tl.load(k_pair + at + token, mask=some, other=fill))
    v_scale, v_offset = _split_pair(tl.load(v_pair + at + token, mask=some, other=fill))
    score = tl.zeros([TILE, size.shape[0]], tl.float32)
    for i in tl.static_range(len(query)):
        codes = _codes(k + at * K_ROW, token, live, 1, K_ROW, MASKED, FAST, DOT, *slices(D, K_BITS)[i])
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
    weight = (p * (v_scale * (16384 / new_top))[:, None]).to(DOT)
    decay *= top / new_top
    sums = ()
    for i in tl.static_range(len(acc)):                 # words first: to transpose codes takes shared memory
        codes = _codes(v + at * V_ROW, token, live, 0, V_ROW, MASKED, FAST, DOT, *slices(D, V_BITS)[i])
        sums = sums + (tl.dot(codes, weight, acc[i] * decay[None, :], input_precision="tf32x3"),)
    return new_peak, total, shift, new_top, sums


@jit
def _packed_part(q_ptr, acc_ptr, here, packed, strides, b, g, part, PARTS, K_ROW: tl.constexpr,
                 V_ROW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, K_BITS: tl.constexpr,
                 V_BITS: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr):
    """Softmax over one of PARTS shares of the packed tokens: store weighted sums, return peaks and totals."""
    k, k_pair, v, v_pair, n = packed
    k, k_pair = k + b * strides[0][0] + g * strides[0][1], k_pair + b * strides[1][0] + g * strides[1][1]
    v, v_pair = v + b * strides[2][0] + g * strides[2][1], v_pair + b * strides[3][0] + g * strides[3][1]
    n = tl.load(n + b)
    share = tl.cdiv(tl.cdiv(n, PARTS), TILE) * TILE
    start = tl.minimum(part * share, n)
    end = tl.minimum(start + share, n)
    middle = start + (end - start) // TILE * TILE

    # Queries are scaled to ±2^14, as float16 has little room, and by what their codes lack; `size` undoes it.
    q = tl.load(q_ptr + tl.arange(0, D)[:, None], mask=here, other=0)
    largest = tl.maximum(tl.max(tl.abs(q), 0), 1e-30)
    size = largest * (1024 * D**-0.5 * 1.4426950408889634)      # and softmax becomes a power of 2
    bias = tl.sum(q, 0) / (largest * 1024)
    query, acc = (), ()
    for i in tl.static_range(len(slices(D, K_BITS))):
        at, there = _channels(slices(D, K_BITS)[i])
        q = tl.load(q_ptr + at, mask=there & here, other=0) / largest[None, :]
        query = query + ((q * 2.0**(14 + slices(D, K_BITS)[i][7])).to(DOT),)
    for i in tl.static_range(len(slices(D, V_BITS))):
        acc = acc + (tl.zeros([max(slices(D, V_BITS)[i][3], 16), ROWS], tl.float32),)
    zero = tl.zeros([ROWS], tl.float32)
    state = (zero - 1e30, zero, zero, 1e-30, acc)

    for at in range(start, middle, TILE):
        state = _packed_tile(state, query, size, bias, k, k_pair, v, v_pair, at, end, K_ROW, V_ROW, D, K_BITS,
                             V_BITS, TILE, FAST, DOT, False)
    if middle < end:                                    # apart, so that the loop needs no masks
        state = _packed_tile(state, query, size, bias, k, k_pair, v, v_pair, middle, end, K_ROW, V_ROW, D,
                             K_BITS, V_BITS, TILE, FAST, DOT, True)

    peak, total, shift, top, acc = state
    for i in tl.static_range(len(acc)):
        at, there = _channels(slices(D, V_BITS)[i])
        out = acc[i] * (top * 2.0**(10 + slices(D, V_BITS)[i][7]))
        if slices(D, V_BITS)[i][1] == 0:
            out += shift[None, :]
        else:                                           # a second plane adds to what other threads stored
            if slices(D, V_BITS)[i][4] == 0:
                tl.debug_barrier()
            out += tl.load(acc_ptr + at, mask=there, other=0)
        tl.store(acc_ptr + at, out, mask=there)
    return peak, total


@jit
def _window_part(q_ptr, acc_ptr, here, window, strides, b, g, part, D: tl.constexpr, WINDOW: tl.constexpr,
                 DOT: tl.constexpr):
    """As `_packed_part`, over WINDOW slots of a window."""
    k, v, n = window
    d, slot = tl.arange(0, D), part * WINDOW + tl.arange(0, WINDOW)
    live, slot = slot < tl.load(n + b), slot.to(tl.int64)
    k += b * strides[0][0] + g * strides[0][1]
    v += b * strides[1][0] + g * strides[1][1]
    q = tl.load(q_ptr + d[:, None], mask=here, other=0)
    k = tl.load(k + slot[:, None] * strides[0][2] + d[None, :], mask=live[:, None], other=0)
    if DOT == tl.float32:                               # the interpreter would multiply bfloat16's bits
        q, k = q.to(tl.float32), k.to(tl.float32)
    score = tl.dot(k, q, input_precision="tf32x3") * (D**-0.5 * 1.4426950408889634)
    score = tl.where(live[:, None], score, -1e30)
    peak = tl.max(score, 0)
    p = tl.where(live[:, None], tl.exp2(score - peak[None, :]), 0)
    v = tl.load(v + slot[None, :] * strides[1][2] + d[:, None], mask=live[None, :], other=0)
    if DOT == tl.float32:
        v = v.to(tl.float32)
    tl.store(acc_ptr + d[:, None], tl.dot(v, p.to(v.dtype), input_precision="tf32x3"))
    return peak, tl.sum(p, 0)


@jit
def _decode_kernel(q_ptr, qt_ptr, sinks, packed, recent, acc_ptr, stat_ptr, strides, G, R, PARTS, SINK_PARTS,
                   K_ROW: tl.constexpr, V_ROW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                   K_BITS: tl.constexpr, V_BITS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
                   FAST: tl.constexpr, DOT: tl.constexpr):
    """A group's query heads, as columns of the tiles, over a share of the packed tokens or of a window."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g, r = head // G, head % G, tl.arange(0, ROWS)
    to, q_at, here = head * tl.num_programs(0) + part, (head * R + r[None, :]) * D, r[None, :] < R
    acc_ptr += (to * ROWS + r[None, :]) * D
    if part < PARTS:
        peak, total = _packed_part(qt_ptr + q_at, acc_ptr, here, packed, strides[2:6], b, g, part, PARTS,
                                   K_ROW, V_ROW, D, ROWS, K_BITS, V_BITS, TILE, FAST, DOT)
    elif part < PARTS + SINK_PARTS:
        peak, total = _window_part(q_ptr + q_at, acc_ptr, here, sinks, strides[0:2], b, g, part - PARTS, D,
                                   WINDOW, DOT)
    else:
        peak, total = _window_part(q_ptr + q_at, acc_ptr, here, recent, strides[6:8], b, g,
                                   part - PARTS - SINK_PARTS, D, WINDOW, DOT)
    tl.store(stat_ptr + to * 2 * ROWS + r, peak)
    tl.store(stat_ptr + (to * 2 + 1) * ROWS + r, total)


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


@fused(decode_attention_ref)
def decode_attention(q, qt, sinks, packed, recent, bits):
    """Launch `_decode_kernel` and `_merge_kernel`. Moves d·(k_bits + v_bits)/8 + 8 bytes a packed token and
    KV head, 2·d elements a window slot, and 4·(d + 2) bytes, twice, a part and query head.
    """
    (b, g, r, d), (k_codes, k_pair, v_codes, v_pair, _) = q.shape, packed
    steps = [x.stride(-1) for x in (*sinks[:2], k_codes, v_codes, *recent[:2])]
    steps += [pair.stride(2) for pair in (k_pair, v_pair)]
    if set(steps) != {1}:
        raise ValueError("channels, and the pairs of successive tokens, must lie side by side")
    cuda, exact = q.is_cuda, INTERPRET or q.dtype == torch.float32
    cc = 10 * torch.cuda.get_device_capability(q.device)[0] if cuda else 0
    fast, rows = cc >= 80 and not exact, max(8, triton.next_power_of_2(r))
    cores = torch.cuda.get_device_properties(q.device).multi_processor_count if cuda else 1
    # Eight programs a multiprocessor, by the buffers' sizes: to ask the device for lengths would wait for it.
    parts = min(triton.cdiv(8 * cores, b * g), triton.cdiv(k_codes.shape[2], 512), 256)
    sink_parts, recent_parts = (triton.cdiv(k.shape[2], WINDOW) for k in (sinks[0], recent[0]))
    every = parts + sink_parts + recent_parts
    acc, stat = (torch.empty(b * g * every * rows, size, device=q.device) for size in (d, 2))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    strides = tuple(x.stride()[:3] for x in (*sinks[:2], k_codes, k_pair, v_codes, v_pair, *recent[:2]))
    if every:
        _decode_kernel[every, b * g](
            q.contiguous(), qt.contiguous(), sinks, packed, recent, acc, stat, strides, g, r, parts,
            sink_parts, k_codes.stride(2), v_codes.stride(2), d, rows, *bits, WINDOW=WINDOW, FAST=fast,
            DOT=tl.float32 if exact else tl.float16, **tiling(d, bits, rows, fast, cc))
    _merge_kernel[b * g * r, triton.cdiv(d, 32)](acc, stat, out, every, r, d, rows, 32, min(d, 32))
    return out


# ----------------------------------------------------------------------------------------------------------
# Packed codes under a dot product, on the CPU. Scale and offset act on the score, not on each element, and
# torch.compile fuses unpack and dot into one pass over the bytes, so that nothing is ever restored.

def tiles(count: int, size: int = 1024) -> list[slice]:
    """Cut `count` tokens into pieces, of which one at a time is unpacked; none are one empty piece."""
    return [slice(i, min(i + size, count)) for i in range(0, max(count, 1), size)]


def packed_scores_ref(q: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """Return q · x̂ for the first `count` packed tokens, a pair each: q (b, g, r, d) -> (b, g, r, count)."""
    scores = []
    for tile in tiles(count):
        scale, offset = (p.float().mT for p in split_pair(pair[:, :, tile]))
        dots = q @ unpack_ref(codes[:, :, tile], bits).float().mT
        scores.append(dots * scale + q.sum(-1, keepdim=True) * offset)
    return torch.cat(scores, -1)


def packed_values_ref(p: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """Return Σ_s p_s x̂_s over the first `count` packed tokens: p (b, g, r, count) -> (b, g, r, d)."""
    values = 0
    for tile in tiles(count):
        scale, offset = (half.float().mT for half in split_pair(pair[:, :, tile]))
        weight = p[..., tile]
        values = values + (weight * scale) @ unpack_ref(codes[:, :, tile], bits).float()
        values = values + (weight * offset).sum(-1, keepdim=True)
    return values


def code_runs(codes: Tensor, bits: int) -> list[list[tuple[int, Tensor]]]:
    """List, plane by plane, the runs of channels in packed codes: (first channel, value in float32)."""
    d, below, planes = codes.shape[-1] * 8 // bits, bits, []
    for width, plane in zip(PLANES[bits], codes.split([d * w // 8 for w in PLANES[bits]], -1)):
        below -= width
        run = lambda i: (plane >> i & (1 << width) - 1).float() * 2 ** below
        planes.append([(i * d // 8, run(i)) for i in range(0, 8, width)])
    return planes


def scores_in_one_pass(q: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """`packed_scores_ref` for the compiler: one sum over a token's bytes serves all runs and all queries."""
    codes, pair = codes[:, :, :count], pair[:, :, :count, 0]
    scale, offset = (half.view(torch.float32) for half in (pair << 16, pair & -65536))
    planes, scores = code_runs(codes, bits), []
    for query in q.unbind(2):
        dots = (sum(query[:, :, None, i:i + x.shape[-1]] * x for i, x in runs).sum(-1) for runs in planes)
        scores.append(sum(dots) * scale + query.sum(-1, keepdim=True) * offset)
    return torch.stack(scores, 2)


def values_in_one_pass(p: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
    """`packed_values_ref` for the compiler."""
    codes, pair = codes[:, :, :count], pair[:, :, :count, 0]
    scale, offset = (half.view(torch.float32) for half in (pair << 16, pair & -65536))
    planes, values = code_runs(codes, bits), []
    for weight in p.unbind(2):
        scaled = (weight * scale)[..., None]
        sums = (torch.cat([(scaled * x).sum(-2) for _, x in runs], -1) for runs in planes)
        values.append(sum(sums) + (weight * offset).sum(-1, keepdim=True))
    return torch.stack(values, 2)


WORTH_COMPILING = 1024      # packed tokens: shorter contexts never earn the compiler's ten seconds back


def in_one_pass(reference, one_pass):
    """Make a CPU launcher: compiled for one step's queries on a long cache, else the reference itself."""
    @functools.wraps(reference)
    def launch(x: Tensor, codes: Tensor, pair: Tensor, bits: int, count: int) -> Tensor:
        if launch.compiles and not x.is_cuda and count >= WORTH_COMPILING and x.shape[2] <= 16:
            try:
                launch.compiled = launch.compiled or torch.compile(one_pass, dynamic=True)
                return launch.compiled(x, codes, pair, bits, count)
            except Exception as e:       # no C++ compiler, most likely; torch raises several types
                launch.compiles = False
                warnings.warn(f"packed caches are read by plain torch, slower: {e}"[:300], RuntimeWarning)
        return reference(x, codes, pair, bits, count)

    launch.compiles, launch.compiled = True, None       # on first use: torch.compile takes long to import
    return launch


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

    def window(i):
        k, v = torch.randn(2, b, g, slots[i], d).masked_fill(beyond[i], torch.nan).to(device, dtype)
        return k, v, lengths[i].to(device)

    packed = []
    for width, rule in zip(bits, ("quest", "affine")):
        codes, pair = encode_ref(torch.randn(b, g, slots[1], d), None, width, rule, 0.92)
        packed += codes.masked_fill(beyond[1], 255), pair.masked_fill(beyond[1], -1)    # −1: a pair of NaN
    packed = tuple(x.to(device) for x in (*packed, lengths[1]))
    q, qt = torch.randn(2, b, g, r, d).to(device)
    return q.to(dtype), qt, window(0), packed, window(2), bits


def check(device: str):
    """Compare both kernels with their references. Sums in another order may move a few pairs and codes."""
    for dtype in (torch.float32, torch.bfloat16):
        for d, bits in ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3), (128, 4)):
            args = example(2, 2, 4, d, (bits, bits), (16, 700, 100), dtype, device)
            x, (T, push) = torch.randn(2, 2, 100, d).to(device, dtype), torch.randn(2, 2, 1, d, d).to(device)
            moved = 0
            for rule, feed in (("quest", None), ("affine", None), ("centred", push.triu(1) / 16)):
                ours, theirs = (torch.cat(f(x, T, bits, rule, 0.96, feed), -1) for f in (encode, encode_ref))
                moved += (ours != theirs).any(-1).float().mean().item() / 3
            error = (decode_attention(*args) - decode_attention_ref(*args)).abs().max().item()
            print(f"{device} {dtype} d={d} bits={bits}: {moved:.2%} of rows differ, attention {error:.0e}")
            assert not (encode.failed or decode_attention.failed)
            assert moved <= 0.02 and error <= 8 * torch.finfo(dtype).eps


def compile_for(cc: int, kernel, arguments: dict, constants: dict, **options):
    """Compile `kernel` for compute capability `cc`, its pointers and integers taken as multiples of 16."""
    def leaves(kind, path):
        if isinstance(kind, tuple):
            return [leaf for i, part in enumerate(kind) for leaf in leaves(part, (*path, i))]
        return [path]

    place = {name: i for i, name in enumerate(kernel.arg_names)}
    paths = [path for name, kind in arguments.items() for path in leaves(kind, (place[name],))]
    source = triton.compiler.ASTSource(
        kernel, {name: arguments.get(name, "constexpr") for name in kernel.arg_names},
        {(place[name],): value for name, value in constants.items()},
        {path: [["tt.divisibility", 16]] for path in paths})
    return triton.compile(source, triton.backends.compiler.GPUTarget("cuda", cc, 32), options)


def compile_decode(cc: int, d: int, bits: tuple[int, int], fast: bool, rows: int = 8, model: str = "bf16"):
    """Compile `_decode_kernel` as `decode_attention` calls it."""
    window = (f"*{model}", f"*{model}", "*i32")
    arguments = dict(
        q_ptr=f"*{model}", qt_ptr="*fp32", sinks=window, packed=("*u8", "*i32", "*u8", "*i32", "*i32"),
        recent=window, acc_ptr="*fp32", stat_ptr="*fp32", strides=(("i32",) * 3,) * 8, G="i32", R="i32",
        PARTS="i32", SINK_PARTS="i32")
    how = tiling(d, bits, rows, fast, cc)
    constants = dict(
        K_ROW=d * bits[0] // 8, V_ROW=d * bits[1] // 8, D=d, ROWS=rows, K_BITS=bits[0], V_BITS=bits[1],
        TILE=how.pop("TILE"), WINDOW=WINDOW, FAST=fast, DOT=tl.float32 if model == "fp32" else tl.float16)
    return compile_for(cc, _decode_kernel, arguments, constants, **how)


def compile_encode(cc: int, d: int, bits: int, rule: str, transform: bool, feedback: bool = False):
    """Compile `_encode_kernel` as `encode` calls it."""
    arguments = dict(x_ptr="*bf16", t_ptr="*fp32", push_ptr="*fp32", codes_ptr="*u8", pair_ptr="*i32",
                     stride=("i32",) * 4, n="i32", G="i32")
    constants = dict(RANK=d - 5, ALPHA=0 if rule == "affine" else GAUSSIAN_CLIP[bits],
                     CENTRED=rule == "centred", D=d, BITS=bits, TRANSFORM=transform, FEEDBACK=feedback,
                     BLOCK=16, CHUNK=16)
    return compile_for(cc, _encode_kernel, arguments, constants)


def cost(compiled) -> tuple[int, int, int, int]:
    """Registers and spilled bytes a thread, bytes of shared memory, instructions of the longest loop."""
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run(f"{tools}/cuobjdump", "-res-usage", file.name)
        sass = run(f"{tools}/nvdisasm", "-c", file.name)
    labels, count, loop = {}, 0, 0
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            count += 1
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if jump and jump[1] in labels:              # backwards
                loop = max(loop, count - labels[jump[1]])
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack), compiled.metadata.shared, loop


def compile_all():
    """Print the cost of every kernel on every target, for decode with a loop's lane-instructions a code."""
    print("cc   kernel                         registers spilled  shared  instructions a code")
    variants = [(d, bits, flag) for d in (64, 128) for bits in (2, 3, 4) for flag in (True, False)]
    for cc in TARGETS:
        for d, bits, fast in variants:
            *usage, loop = cost(compile_decode(cc, d, (bits, bits), fast))
            tile = tiling(d, (bits, bits), 8, fast, cc)["TILE"]
            print(f"{cc:<4} {f'decode d={d} bits={bits} ' + ('fast' if fast else 'plain'):30}",
                  *(f"{x:8}" for x in usage), f"{loop * 32 / (tile * 2 * d):8.2f}", flush=True)
        for d, bits, refined in variants:
            rule = "centred" if refined else "quest"
            *usage, _ = cost(compile_encode(cc, d, bits, rule, True, refined))
            print(f"{cc:<4} {f'encode d={d} bits={bits} {rule}':30}", *(f"{x:8}" for x in usage), flush=True)


def full_cache(b: int, g: int, n: int, d: int, bits: int, device: str) -> tuple:
    """A cache of n packed tokens a row and two empty windows, as `decode_attention` takes them."""
    token = [encode_ref(x, None, bits, "affine", 0.92) for x in torch.randn(2, b, g, 1, d, device=device)]
    packed = [part.expand(-1, -1, n, -1).contiguous() for side in token for part in side]
    length = torch.full((b,), n, dtype=torch.int32, device=device)
    none = torch.empty(b, g, 0, d, dtype=torch.bfloat16, device=device)
    window = (none, none, torch.zeros_like(length))
    return window, (*packed, length), window, (bits, bits)


def bench_cpu(g: int = 8, r: int = 4, d: int = 128, bits: int = 2):
    """Time one step's attention over n tokens: the ways to read a packed cache beside SDPA on a plain one."""
    def median(step) -> float:
        times = []
        for _ in range(12):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return sorted(times[2:])[5]                     # the first two compile and touch memory

    def packed(scores, values):
        k_codes, k_pair, v_codes, v_pair, _ = cache[1]
        p = (scores(q, k_codes, k_pair, bits, n) * d ** -0.5).softmax(-1)
        return values(p, v_codes, v_pair, bits, n)

    def dequantized():
        restored = (unpack_ref(codes, bits).float() * pair.float()[..., :1] for codes, pair in
                    (cache[1][:2], cache[1][2:4]))
        return sdpa(*restored)

    def sdpa(k, v):
        return F.scaled_dot_product_attention(q.to(k.dtype).flatten(1, 2)[:, :, None], k, v, enable_gqa=True)

    print(f"{g} KV heads of {r} queries, d = {d}, {bits} bits, {torch.get_num_threads()} threads: ms (GB/s)")
    print("tokens    SDPA float32   SDPA bfloat16  dequantize+SDPA  plain unpack   one pass     / float32")
    for n in (1024, 4096, 16384, 65536):
        q, plain = torch.randn(1, g, r, d), torch.randn(2, 1, g, n, d)
        cache, half = full_cache(1, g, n, d, bits, "cpu"), plain.bfloat16()
        held = sum(x.nbytes for x in cache[1][:4])
        ways = [(lambda: sdpa(*plain), plain.nbytes), (lambda: sdpa(*half), half.nbytes), (dequantized, held),
                (lambda: packed(packed_scores_ref, packed_values_ref), held),
                (lambda: packed(packed_scores, packed_values), held)]
        times = [median(way) for way, _ in ways]
        print(f"{n:6}", *(f"{t * 1e3:8.2f} ({size / t / 1e9:4.1f})" for t, (_, size) in zip(times, ways)),
              f"  {times[-1] / times[0]:.2f}", flush=True)


def graph_median(steps) -> float:
    """Time steps on the GPU as one CUDA graph: the median of 50 replays, in microseconds a step."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    for _ in range(50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(steps))
    return sorted(times)[25]


def bench_gpu(g: int = 8, r: int = 4, d: int = 128):
    """Time `decode_attention` beside bfloat16 SDPA and a plain read of its bytes: medians of CUDA graphs.

    Four caches of over 200 MB together take turns, so that the level-2 cache does not answer.
    """
    check("cuda")
    print(torch.cuda.get_device_name(), "- us (GB/s of its own bytes)")
    print("tokens   b   SDPA bfloat16  " + "  ".join(f"{bits} bits, / read, SDPA /" for bits in (2, 3, 4)))
    for b in (1, 8, 32):
        for n in (4096, 32768, 81920, 131072):
            if 4 * b * g * n * d * 4 > 0.8 * torch.cuda.mem_get_info()[0]:
                continue
            q = torch.randn(b, g, r, d, device="cuda", dtype=torch.bfloat16)
            turns = max(4, -(-200_000_000 // (b * g * n * 72)))
            plain = [torch.randn(2, b, g, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            sdpa = graph_median([lambda kv=kv: F.scaled_dot_product_attention(
                q.flatten(1, 2)[:, :, None], *kv, enable_gqa=True) for kv in plain])
            line = [f"{n:6} {b:3} {sdpa:9.1f} ({plain[0].nbytes / sdpa / 1e3:5.0f})"]
            del plain
            for bits in (2, 3, 4):
                caches = [full_cache(b, g, n, d, bits, "cuda") for _ in range(turns)]
                size = sum(x.nbytes for x in caches[0][1][:4])
                ours = graph_median([lambda c=c: decode_attention(q, q.float(), *c) for c in caches])
                read = graph_median([lambda c=c: [x.view(torch.int32).amax() for x in c[1][:4]]
                                     for c in caches])
                line.append(f"{ours:9.1f} ({size / ours / 1e3:5.0f}) {ours / read:5.2f} {sdpa / ours:5.2f}")
            print(*line, flush=True)


def main():
    if triton is None:
        sys.exit("kernels.py: Triton is not installed, so there is nothing to check")
    if "--compile" in sys.argv:
        compile_all()
    elif "--bench" in sys.argv:
        bench_gpu() if torch.cuda.is_available() else bench_cpu()
    elif torch.cuda.is_available() or INTERPRET:
        check("cpu" if INTERPRET else "cuda")
    else:                                               # Triton reads the variable when it is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})


if __name__ == "__main__":
    main()
