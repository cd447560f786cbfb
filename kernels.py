"""The bytes of a quantized cache, and the kernels that write and read them.

The d channels of one token and KV head are quantized to codes of 2, 3, 4 or 8 bits, which become d·bits/8 bytes, and
to one scale and one offset: channel i reads back as scale · code_i + offset. No code straddles two bytes. At 2, 4 and
8 bits the channels are cut into 8/bits runs of equal length, and byte j holds the j-th channel of every run. For
d = 128 at 2 bits that is

    bits of byte j     7  6   5  4   3  2   1  0
    channel            j+96   j+64   j+32   j             j = 0 .. 31

so that one shift and one mask over all bytes yield *consecutive* channels, which meet a consecutive piece of the query.
At 3 bits there are two such planes, one behind the other: first the upper two bits of all codes, laid out as above,
then their lowest bits, as codes of 1 bit (for d = 128, bit i of byte j belongs to channel j + 16·i). The scale and the
offset are bfloat16 and share one int32, the scale in its lower half: a *pair*.

Each kernel comes in four parts: a reference in torch that specifies it, the kernel in Triton, a public function with the
reference's signature, and the bytes it moves, in that function's docstring. Public functions check their arguments, then
use the kernel where one can run and the reference elsewhere, so this file needs neither a GPU nor Triton. (The reference
of `encode` is not in this file: it is pack(quantize(T x)), with wush_kv.py's `quantize` and the linear transform T that
tokens go through before. So where its kernel cannot run, `encode` returns None. The CPU's reading has compiled torch in
place of Triton.)

    python kernels.py               compare the kernels with their references, on the device at hand
    python kernels.py --compile     what the kernels cost on six generations of GPUs, none of which need be there
    python kernels.py --bench       the time of attention over a packed cache, beside other ways

Each dimension has one letter: b batch, g KV head, r query head of its KV head, s cached token, d head dim. G and R
count the KV heads and the query heads of each.
"""
from __future__ import annotations          # annotations stay strings, so those of the kernels need no Triton

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

if __name__ == "kernels":
    # Hugging Face publishes a package of this name, which transformers imports where it is installed. wush_kv.py loads
    # this file under another name. Whoever asks for `kernels` gets that package, if there is one: a module may put another
    # into its place in sys.modules while it is being imported.
    here = os.path.dirname(os.path.realpath(__file__))
    elsewhere = [folder for folder in sys.path if os.path.realpath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("kernels", elsewhere)
    if spec is not None and spec.loader is not None:
        sys.modules["kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["kernels"])

try:
    import triton
    import triton.language as tl
    from triton import constexpr_function, jit
    constant = tl.constexpr
except ImportError:                         # Triton is absent or too old: the references serve alone
    triton = None
    constant = float

    def jit(function):
        return function

    constexpr_function = jit

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"      # Triton then runs kernels on the CPU, as numpy


# ----------------------------------------------------------------------------------------------------------------
# Bytes
#
# `pack` and `unpack` are the layout. PLANES lists, by the bits of a code, the planes that it is stored in. A plane holds
# some neighbouring bits of every code: `width` of them, above the code's `below` lowest bits. A code of 3 bits has its
# upper two in one plane, (2, 1), and its lowest in another, (1, 0).

class Plane(NamedTuple):
    width: int
    below: int

PLANES = {
    2: [Plane(2, 0)],
    3: [Plane(2, 1), Plane(1, 0)],
    4: [Plane(4, 0)],
    8: [Plane(8, 0)],
}

def check_bits(bits):
    if bits not in PLANES:
        raise ValueError(f"there are codes of 2, 3, 4 and 8 bits, not of {bits}")

def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., d), uint8 in [0, 2^bits − 1], into bytes (..., d·bits/8)."""
    d = codes.shape[-1]
    if bits not in PLANES or d % 8:
        raise ValueError(
            f"{d} codes of {bits} bits do not pack: bits are 2, 3, 4 or 8, d a multiple of 8")

    planes = []
    for plane in PLANES[bits]:
        mask = 2**plane.width - 1
        runs = ((codes >> plane.below) & mask).chunk(8 // plane.width, -1)
        packed = 0
        for i, run in enumerate(runs):
            packed = packed | (run << (i * plane.width))
        planes.append(packed)
    return torch.cat(planes, -1)

def split_planes(packed, bits):
    """Cut packed bytes (..., d·bits/8) into those of each plane."""
    d = packed.shape[-1] * 8 // bits
    return packed.split([d * plane.width // 8 for plane in PLANES[bits]], -1)

def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`: bytes (..., d·bits/8) to codes (..., d)."""
    check_bits(bits)
    codes = 0
    for plane, part in zip(PLANES[bits], split_planes(packed, bits)):
        mask = 2**plane.width - 1
        runs = [(part >> bit) & mask for bit in range(0, 8, plane.width)]
        codes = codes | (torch.cat(runs, -1) << plane.below)
    return codes

def join_pair(scale: Tensor, offset: Tensor) -> Tensor:
    """Join a bfloat16 scale and offset into one int32 each."""
    return torch.stack([scale, offset], -1).view(torch.int32).squeeze(-1)

def split_pair(pair: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `join_pair`: scale and offset, bfloat16, of the shape of `pair`."""
    return pair.unsqueeze(-1).view(torch.bfloat16).unbind(-1)

def dequantized(codes, pairs, bits):
    """Read packed tokens (b, g, s, ...) back, in float32: (b, g, s, d)."""
    scale, offset = split_pair(pairs)
    return scale.float() * unpack(codes, bits) + offset.float()


# ----------------------------------------------------------------------------------------------------------------
# Launching
#
# Wrong arguments are refused before anything runs, and lack of memory is the caller's to know. Whatever else goes wrong
# with a kernel (Triton or a C++ compiler does not work here, say) costs speed but no answer: `attempt` warns once, and
# from then on the reference serves in that kernel's place.

HEAD_DIMS = 64, 128, 256        # those that the tiles of the Triton kernels fit
switched_off = set()            # names of the launches that failed in this process

def serves(x: Tensor) -> bool:
    """Say whether Triton kernels may run on x. (Tests replace this, and run them in Triton's interpreter.)"""
    return triton is not None and x.is_cuda

def attempt(launch, x, *args):
    """Return what `launch` returns, or None where it fails or has failed before."""
    if launch.__name__ in switched_off:
        return None
    try:
        with torch.cuda.device_of(x), no_autocast(x), no_warnings_as_errors():
            return launch(x, *args)
    except Exception as error:              # Triton and compilers raise many types
        if is_lack_of_memory(error):
            raise
        switched_off.add(launch.__name__)
        warn(f"{launch.__name__} does not work here, and torch takes over, slower: {error}"[:1000])
        return None

def is_lack_of_memory(error):
    words = "out of memory", "can't allocate memory"       # of Triton, and of torch on the CPU
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(word in str(error) for word in words)

def warn(message):
    """Warn, or print the message where warnings are errors: a slower answer is better than none."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:
        print(message, file=sys.stderr)

@contextlib.contextmanager
def no_warnings_as_errors():
    """Keep the caller's warnings-as-errors from torch and Triton, where a deprecation would stop a kernel."""
    if any(action == "error" for action, *_ in warnings.filters):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    else:
        yield

def no_autocast(x):
    """Return a context in which `torch.autocast` does not round what is computed from x."""
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)

def exactly(reference):
    """Decorate a reference: autocast does not change what it computes."""
    @functools.wraps(reference)
    def call(x, *args):
        with no_autocast(x):
            return reference(x, *args)
    return call


# ----------------------------------------------------------------------------------------------------------------
# Encoding
#
# A token is encoded once, when it leaves the recent window: transformed, quantized and packed in one pass, 16 tokens of
# one head per program. Its specification is pack(quantize(T x)), bit for bit where T x itself is exact; elsewhere the
# order of sums may move a value over a rounding edge. The kernel is given numbers, alpha and rank, and not the name of a
# quantizer of wush_kv.py: so a new quantizer, which the kernel does not know, cannot run as another one by mistake.

ENCODE_TOKENS = 16              # of one program
ENCODE_CHANNELS = 16            # of T, or of F, that are in registers at a time
ENCODE_REGISTERS = 255          # per thread, at most. Left alone, ptxas takes fewer and spills
ENCODE_WARPS = 8                # of one program: with four, sweeps spill at d = 128
SMALLEST_NORMAL = constant(2.0**-126)
SMALLEST_NORMAL_BITS = constant(0x80)      # as a bfloat16
FAR = constant(2.0**36)         # products and sums of squares of such numbers do not overflow
INTEGERS = constant(2.0**23)    # from here on, a float32 has no fraction: adding this rounds, and ties go to even

@jit
def _bfloat16_bits(x):
    """Round float32 to bfloat16, ties to even, and return its bits. By hand: the interpreter's cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    lowest_kept = (bits >> 16) & 1
    return (bits + 0x7FFF + lowest_kept) >> 16

@jit
def _bfloat16_value(bits):
    """Return the float32 that a bfloat16's bits stand for."""
    return (bits << 16).to(tl.float32, bitcast=True)

@jit
def _mean(y):
    """Return each row's mean, (s, 1), summed in float64 so that the order of the sum does not show."""
    total = tl.sum(y.to(tl.float64), 1)[:, None]
    return (total / y.shape[1]).to(tl.float32)

@jit
def _smallest(y, RANK: tl.constexpr):
    """Return the RANK-th smallest |y| of each row, (s, 1), by counting: floats are ordered as their bits are."""
    magnitudes = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    threshold = tl.zeros([y.shape[0], 1], tl.int32)

    # From the highest bit down, set each bit with which at most RANK magnitudes lie below the threshold. What is left in
    # the end is the largest such number, and that is the magnitude with RANK others before it.
    for i in range(31):
        candidate = threshold | (1 << (30 - i))
        smaller = tl.sum((magnitudes < candidate).to(tl.int32), 1)[:, None]
        threshold = tl.where(smaller <= RANK, candidate, threshold)
    return threshold.to(tl.float32, bitcast=True)

@jit
def _levels(y, RANK: tl.constexpr, ALPHA: tl.constexpr, BITS: tl.constexpr):
    """Place each row's levels: scale and offset, (s, 1), float32, before they are rounded."""
    TOP: tl.constexpr = 2**BITS - 1
    if ALPHA > 0:
        # On ±ALPHA · RMS. Dividing by the largest value keeps the squares from under- or overflowing.
        largest = tl.max(tl.abs(y), 1)[:, None]
        unit = tl.div_rn(y, tl.maximum(largest, SMALLEST_NORMAL))
        rms = largest * tl.sqrt_rn(_mean(unit * unit))
        scale = rms * (2 * ALPHA / TOP)
        offset = rms * -ALPHA
    else:
        # From the least to the largest value, after all are clamped to the RANK-th smallest magnitude.
        threshold = _smallest(y, RANK)
        clamped = tl.minimum(tl.maximum(y, -threshold), threshold)
        offset = tl.min(clamped, 1)[:, None]
        span = tl.max(clamped, 1)[:, None] - offset
        scale = tl.div_rn(span, tl.full([y.shape[0], 1], TOP, tl.float32))
    return scale, offset

@jit
def _nearest_code(steps, BITS: tl.constexpr):
    """Round to the nearest of the levels 0 .. 2^BITS − 1, still in floating point."""
    clamped = tl.minimum(tl.maximum(steps, 0.0), 2**BITS - 1)
    return clamped + INTEGERS - INTEGERS

@jit
def _feed_back(steps, F_ptr, BITS: tl.constexpr, SLICE: tl.constexpr):
    """Round steps (s, d) channel by channel, pushing each error e_i onto later channels, steps_j −= e_i F_ij: the codes.

    The SLICE channels of a slice are rounded one by one, in registers; then one dot product pushes their errors onto all
    later slices.
    """
    S: tl.constexpr = steps.shape[0]
    D: tl.constexpr = steps.shape[1]
    channel = tl.arange(0, SLICE)
    slice_number = tl.arange(0, D // SLICE)[None, :, None]
    d = tl.arange(0, D)
    for i in range(0, D // SLICE):
        # Take slice i out: all others are zero under the sum.
        steps = tl.reshape(steps, [S, D // SLICE, SLICE])
        part = tl.sum(tl.where(slice_number == i, steps, 0.0), 1)

        # Round its channels in order. F is zero on and below the diagonal, so earlier channels stay.
        errors = tl.zeros([S, SLICE], tl.float32)
        for j in range(0, SLICE):
            is_j = (channel == j)[None, :]
            value = tl.sum(tl.where(is_j, part, 0.0), 1)[:, None]
            error = value - _nearest_code(value, BITS)
            errors = tl.where(is_j, error, errors)
            F_row = tl.load(F_ptr + (i * SLICE + j) * D + i * SLICE + channel)
            part -= error * F_row[None, :]

        # Put the slice back, and push its errors onto the later ones.
        steps = tl.reshape(tl.where(slice_number == i, part[:, None, :], steps), [S, D])
        later = (d >= (i + 1) * SLICE)[None, :]
        F_rows = F_ptr + (i * SLICE + channel)[:, None] * D + d[None, :]
        F = tl.load(F_rows, mask=later, other=0)
        steps -= tl.dot(errors, F, input_precision="tf32x3")
    return _nearest_code(steps, BITS)

@jit
def _own_direction(y, H_ptr, WEIGHT: tl.constexpr, SLICE: tl.constexpr):
    """Return u = √WEIGHT · H' y, (s, d), slice by slice of SLICE channels."""
    S: tl.constexpr = y.shape[0]
    D: tl.constexpr = y.shape[1]
    channel = tl.arange(0, SLICE)
    slice_number = tl.arange(0, D // SLICE)[None, :, None]
    d = tl.arange(0, D)
    u = tl.zeros([S, D // SLICE, SLICE], tl.float32)
    for i in range(0, D // SLICE):
        # H' is symmetric: its rows of the slice are read as columns, (d, SLICE).
        H_columns = H_ptr + (i * SLICE + channel)[None, :] * D + d[:, None]
        part = tl.dot(y, tl.load(H_columns), input_precision="tf32x3") * WEIGHT**0.5
        u = tl.where(slice_number == i, part[:, None, :], u)
    return tl.reshape(u, [S, D])

@jit
def _sweep(codes, steps, u, H_ptr, BITS: tl.constexpr, SLICE: tl.constexpr):
    """Move each code in turn to where it costs least, e = codes − steps costing eᵀ H' e + (uᵀ e)²: the codes (s, d).

    One dot product makes the gradient H' e of a slice of SLICE channels, which then move one by one, in registers.
    """
    S: tl.constexpr = steps.shape[0]
    D: tl.constexpr = steps.shape[1]
    channel = tl.arange(0, SLICE)
    slice_number = tl.arange(0, D // SLICE)[None, :, None]
    d = tl.arange(0, D)
    u_slices = tl.reshape(u, [S, D // SLICE, SLICE])
    shrinkage = tl.sum(u * (codes - steps), 1)[:, None]        # uᵀ e
    for i in range(0, D // SLICE):
        H_columns = H_ptr + (i * SLICE + channel)[None, :] * D + d[:, None]
        gradient = tl.dot(codes - steps, tl.load(H_columns), input_precision="tf32x3")

        # Take the slice out: all others are zero under the sum.
        codes = tl.reshape(codes, [S, D // SLICE, SLICE])
        part = tl.sum(tl.where(slice_number == i, codes, 0.0), 1)
        u_part = tl.sum(tl.where(slice_number == i, u_slices, 0.0), 1)
        for j in range(0, SLICE):
            # To the level nearest to the lowest point of the cost.
            is_j = (channel == j)[None, :]
            H_row = tl.load(H_ptr + (i * SLICE + j) * D + i * SLICE + channel)
            u_j = tl.sum(tl.where(is_j, u_part, 0.0), 1)[:, None]
            curvature = tl.sum(tl.where(channel == j, H_row, 0.0), 0) + u_j * u_j
            code = tl.sum(tl.where(is_j, part, 0.0), 1)[:, None]
            slope = tl.sum(tl.where(is_j, gradient, 0.0), 1)[:, None] + u_j * shrinkage
            best = _nearest_code(code - slope / curvature, BITS)
            part = tl.where(is_j, best, part)
            gradient += (best - code) * H_row[None, :]
            shrinkage += u_j * (best - code)
        codes = tl.reshape(tl.where(slice_number == i, part[:, None, :], codes), [S, D])
    return codes

@jit
def _store_plane(ptr, codes, exists, WIDTH: tl.constexpr, BELOW: tl.constexpr):
    """Store one plane of codes (s, d) as `pack` lays it out: of each code, WIDTH bits above the BELOW lowest."""
    RUNS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = codes.shape[1] // RUNS
    part = (codes >> BELOW) & (2**WIDTH - 1)
    runs = tl.reshape(part, [codes.shape[0], RUNS, BYTES])
    shifts = (tl.arange(0, RUNS) * WIDTH)[None, :, None]
    packed = tl.sum(runs << shifts, 1)
    tl.store(ptr + tl.arange(0, BYTES), packed.to(tl.uint8), mask=exists)

@jit
def _encode_kernel(
        x_ptr, T_ptr, H_ptr, F_ptr, codes_ptr, pairs_ptr, x_strides, tokens, G,
        RANK: tl.constexpr, ALPHA: tl.constexpr, CENTRED: tl.constexpr, SWEEPS: tl.constexpr,
        OWN: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, HAS_T: tl.constexpr,
        HAS_F: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Encode BLOCK tokens of one head."""
    # Where this program reads and writes. Heads count (b, g), in 64 bits, or offsets would wrap at 2^31.
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    exists = token < tokens
    row = head * tokens + token
    d = tl.arange(0, D)[None, :]
    x_ptr += head // G * x_strides[0] + head % G * x_strides[1] + token * x_strides[2]

    # y = T x, some columns of T at a time, as all of T would fill the registers.
    if HAS_T:
        y = tl.zeros([BLOCK, D], tl.float32)
        T_ptr += head % G * D * D + d * D
        for i in range(0, D, CHUNK):
            channel = i + tl.arange(0, CHUNK)
            x = tl.load(x_ptr + channel[None, :] * x_strides[3], mask=exists, other=0)
            T = tl.load(T_ptr + channel[:, None])              # transposed: (channel, d)
            y = tl.dot(x.to(tl.float32), T, y, input_precision="tf32x3")      # tf32 would move codes
    else:
        y = tl.load(x_ptr + d * x_strides[3], mask=exists, other=0).to(tl.float32)

    # Place the levels, and round scale and offset to bfloat16. No scale is 0: it will divide.
    if CENTRED:
        mean = _mean(y)
        scale, offset = _levels(y - mean, RANK, ALPHA, BITS)
        offset += mean
    else:
        scale, offset = _levels(y, RANK, ALPHA, BITS)
    scale_bits = tl.maximum(_bfloat16_bits(scale), SMALLEST_NORMAL_BITS)
    scale = _bfloat16_value(scale_bits)
    offset = _bfloat16_value(_bfloat16_bits(offset))

    # Round y to the levels of this pair.
    steps = tl.div_rn(y - offset, scale)
    steps = tl.minimum(tl.maximum(steps, -FAR), FAR)
    if HAS_F:
        codes = _feed_back(steps, F_ptr + head % G * D * D, BITS, CHUNK)
        H_ptr += head % G * D * D
        u = tl.zeros([BLOCK, D], tl.float32)
        if OWN > 0:
            u = _own_direction(y, H_ptr, OWN, CHUNK)
            u = tl.minimum(tl.maximum(u, -FAR), FAR)
        for _ in range(SWEEPS):
            codes = _sweep(codes, steps, u, H_ptr, BITS, CHUNK)
    else:
        codes = _nearest_code(steps, BITS)

    # The offset takes up the mean error, and only now is the pair stored.
    if CENTRED:
        offset += _mean(y - (scale * codes + offset))
    pair = scale_bits | (_bfloat16_bits(offset) << 16)
    tl.store(pairs_ptr + row, pair.to(tl.int32, bitcast=True), mask=exists)

    codes = codes.to(tl.int32)
    codes_ptr += row * (D * BITS // 8)
    if BITS == 3:
        _store_plane(codes_ptr, codes, exists, 2, 1)
        _store_plane(codes_ptr + D // 4, codes, exists, 1, 0)
    else:
        _store_plane(codes_ptr, codes, exists, BITS, 0)

def check_encode(x, T, H, F, bits, alpha, rank):
    """Refuse what the encode kernel would misread."""
    check_bits(bits)
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"tokens to encode are (b, g, s, d), not {tuple(x.shape)} in {x.dtype}")
    _, g, _, d = x.shape
    if (H is None) != (F is None):
        raise ValueError("H' and F belong together: both or neither")
    for name, matrix in ("T", T), ("H'", H), ("F", F):
        if matrix is not None and matrix.shape != (g, 1, d, d):
            raise ValueError(f"{name} is ({g}, 1, {d}, {d}) here, not {tuple(matrix.shape)}")
    if alpha < 0 or not 0 <= rank < d:
        raise ValueError(
            f"alpha = {alpha} and rank = {rank} place no levels: alpha >= 0, 0 <= rank < {d}")

def encode(
        x: Tensor, T: Tensor | None, H: Tensor | None, F: Tensor | None, bits: int, sweeps: int = 0,
        centred: bool = False, own: float = 0.0,
        alpha: float = 0.0, rank: int = 0) -> tuple[Tensor, Tensor] | None:
    """Encode x (b, g, s, d): codes (b, g, s, d·bits/8) and pairs (b, g, s, 1); None where the kernel cannot run.

    With alpha > 0 the levels of y = T x span ±alpha · RMS(y). With alpha = 0 they span the values of y from the least to
    the largest, after these are clamped to the rank-th smallest |y|, counted from 0. If `centred`, all this is about the
    mean of y, and at last the offset takes up the mean error. With H' and F, rounding errors are fed back, and `sweeps`
    times all codes move to where they cost least: an error δ costs δᵀ H' δ + own · (yᵀ H' δ)². T, H' and F are
    (g, 1, d, d), None for none.

    Moves, per token and head, d elements of x and d·bits/8 + 4 bytes; and per 16 tokens 4·d² bytes of T, half as many of
    F, and in each sweep as many of H' as of T.
    """
    check_encode(x, T, H, F, bits, alpha, rank)
    if not serves(x) or x.shape[-1] not in HEAD_DIMS:
        return None
    return attempt(launch_encode, x, T, H, F, bits, sweeps, centred, own, alpha, rank)

def launch_encode(x, T, H, F, bits, sweeps, centred, own, alpha, rank):
    """Launch `_encode_kernel`, one program per 16 tokens and head."""
    b, g, s, d = x.shape
    codes = torch.empty(b, g, s, d * bits // 8, dtype=torch.uint8, device=x.device)
    pairs = torch.empty(b, g, s, 1, dtype=torch.int32, device=x.device)
    if pairs.numel() == 0:
        return codes, pairs

    # What is absent gets x in its place, which is not read.
    T_buffer = x if T is None else T.float().contiguous()
    H_buffer = x if H is None else H.float().contiguous()
    F_buffer = x if F is None else F.float().contiguous()
    grid = triton.cdiv(s, ENCODE_TOKENS), b * g
    _encode_kernel[grid](
        x, T_buffer, H_buffer, F_buffer, codes, pairs, x.stride(), s, g,
        rank, alpha, centred, sweeps, own, d, bits,
        T is not None, F is not None, ENCODE_TOKENS, ENCODE_CHANNELS,
        maxnreg=ENCODE_REGISTERS, num_warps=ENCODE_WARPS)
    return codes, pairs


# ----------------------------------------------------------------------------------------------------------------
# Decoding
#
# The queries of a new token attend to sinks, packed tokens and recent tokens with one softmax. The kernel never restores
# a key: q · k̂ = scale · (q · codes) + offset · Σq, and for the values likewise. Nor does it move a code to the lowest bits
# of a number, or convert it from an integer.
# Each program takes a share of the packed tokens, or of a window, and leaves a partial softmax in memory; a second kernel
# merges these. Tiles of scores have a row for each packed token and a column for each query head of the KV head. Packed
# values are not transformed back: what comes out is Σ p T_V v, for an output projection that has T_V⁻¹ folded in.

Window = tuple[Tensor, Tensor, Tensor]      # k and v (b, g, slots, d), count of valid slots (b,) int32
Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]      # k codes, k pairs, v codes, v pairs, count

@exactly
def decode_attention_ref(
        q: Tensor, q_packed: Tensor, sinks: Window, packed: Packed, recent: Window,
        bits: tuple[int, int]) -> Tensor:
    """Attend with q (b, g, r, d), or with q_packed = T⁻ᵀ q where keys are packed; a row without tokens gets zeros."""
    k_bits, v_bits = bits
    k_codes, k_pairs, v_codes, v_pairs, count = packed
    middle = dequantized(k_codes, k_pairs, k_bits), dequantized(v_codes, v_pairs, v_bits), count

    scores = []
    values = []
    for query, (k, v, count) in (q, sinks), (q_packed, middle), (q, recent):
        slot = torch.arange(k.shape[2], device=count.device)
        valid = (slot < count[:, None])[:, None, None]                  # (b, 1, 1, s)
        score = query.float() @ k.float().mT * q.shape[-1] ** -0.5

        # A finite number in place of −∞, so that a row without tokens becomes the average of zeros.
        scores.append(score.masked_fill(~valid, -1e30))
        values.append(v.float().masked_fill(~valid.mT, 0))
    p = torch.cat(scores, -1).softmax(-1)
    return (p @ torch.cat(values, 2)).to(q.dtype)

# How codes are unpacked: one instruction yields two of them, and nothing is converted. The plane of d = 128 at 2 bits is read as 16
# words of 16 bits; word w is the bytes 2w and 2w + 1:
#
#     bits of word w    15 14  13 12  11 10    9  8     7  6    5  4    3  2   1  0
#     channel           2w+97  2w+65  2w+33    2w+1     2w+96   2w+64   2w+32  2w
#
# The register `a`, of 32 bits, holds two such words, w and w + 1. The register `b` is `a` shifted right by 8:
#
#     register a     | upper byte of w+1, lower byte of w+1 | upper byte of w,   lower byte of w |
#     register b     | 0,                 upper byte of w+1 | lower byte of w+1, upper byte of w |
#
# One `and` with the same mask in both halves leaves one code in each, where it is, and each half of the result *is* a
# float16. (No mask reaches a half's upper byte.) The half of word w is, for each mask:
#
#     mask of each half         what is left              as a float16      channel, from a  from b
#     0 00000 0000000011        0 00000 00000000cc        code · 2^-24      2w               2w + 1
#     0 00000 0000001100        0 00000 000000cc00        code · 2^-22      2w + 32          2w + 33
#     0 00000 0000110000        0 00000 0000cc0000        code · 2^-20      2w + 64          2w + 65
#     0 00000 0011000000        0 00000 00cc000000        code · 2^-18      2w + 96          2w + 97
#     sign, exponent, mantissa
#
# A float16 whose exponent bits are 0 is subnormal: it is its mantissa times 2^-24, and tensor cores multiply
# subnormals exactly (Fasi et al., 2021). The powers of two are made up for elsewhere: in the queries for the keys, in
# the finished sums for the values. What one mask takes out of one register, over all words of a plane, is a *slice*: a
# cell of the last two columns. A token at 2 bits has eight.

class Slice(NamedTuple):
    """The codes of a packed token that one mask takes out of all words of a plane, one code of each word."""
    width: int          # bits of a code in this plane
    plane_byte: int     # where in the token the plane begins
    word_bits: int      # 16, or 8 where 16-bit words would be fewer than 16, a tensor core's least inner dimension
    words: int          # how many the plane has
    bit: int            # where in each word the slice lies
    channel: int        # which channel lies in the first word
    step: int           # from a word's channel to the next word's
    exponent: int       # the masked float16 times 2^(24 + exponent) is what these bits contribute to the code

def slices(d, bits):
    """List all slices of d packed codes, plane by plane."""
    listed = []
    plane_byte = 0
    for plane in PLANES[bits]:
        plane_bytes = d * plane.width // 8
        word_bits = 16 if plane_bytes >= 32 else 8
        for bit in range(0, word_bits, plane.width):
            byte_in_word = bit // 8
            bit_in_byte = bit % 8
            run = bit_in_byte // plane.width
            listed.append(Slice(
                plane.width,
                plane_byte,
                word_bits,
                words=plane_bytes * 8 // word_bits,
                bit=bit,
                channel=run * plane_bytes + byte_in_word,
                step=word_bits // 8,
                exponent=plane.below - bit_in_byte))
        plane_byte += plane_bytes
    return tuple(listed)

@constexpr_function
def unpack_ptx(width, word_bits):
    """Write the PTX that takes 32 bits of packed codes apart, and the constraints of its operands.

    An output is a register of two float16, and outputs come slice by slice. Of two 16-bit words (Triton's pack=2) a slice
    is one register, and `a` and `b` are those of the table above. Of four 8-bit words (pack=4) a slice is two registers:
    `a` has the first two bytes, one in each half, and `b` the other two.
    """
    outputs = []                # of each: the register it is taken from, and the bit of the byte where the code lies
    if word_bits == 16:
        spread = "mov.b32 a, $X; shr.b32 b, $X, 8;"
        for register in ("a", "b"):
            for bit in range(0, 8, width):
                outputs.append((register, bit))
    else:
        spread = "prmt.b32 a, $X, 0, 0x4140; prmt.b32 b, $X, 0, 0x4342;"
        for bit in range(0, 8, width):
            for register in ("a", "b"):
                outputs.append((register, bit))

    # The input's number, X, follows those of the outputs.
    lines = [spread.replace("X", str(len(outputs)))]
    for i in range(len(outputs)):
        register, bit = outputs[i]
        mask = (2**width - 1) << bit
        lines.append(f"and.b32 ${i}, {register}, {mask * 0x10001:#x};")
    return "{ .reg .b32 a, b; " + " ".join(lines) + " }", "=r," * len(outputs) + "r"

class Variant(NamedTuple):
    """What a decode kernel is compiled for."""
    D: int
    K_BITS: int
    V_BITS: int
    K_SLICES: tuple[Slice, ...]
    V_SLICES: tuple[Slice, ...]
    ROWS: int           # query heads of a KV head, padded
    TILE: int           # packed tokens that are read at a time
    WINDOW: int         # slots of a window that one program takes
    FAST: bool          # whether codes are unpacked by `unpack_ptx`
    DOT: type           # of the operands of dot products

LOG2E = constant(1.4426950408889634)
RANGE = constant(2.0**14)       # queries and weights are scaled to about this; float16 ends at 2^16
REMAINDER = constant(2.0**10)   # 2^24 / RANGE: masked codes are 2^24 too small, the scaling makes up for RANGE of it
LEAST = constant(-1e30)         # a score in place of −∞: the merge gives an empty part weight 0, and no NaN

@jit
def _load_slice(
        ptr, token, exists, AXIS: tl.constexpr, BITS: tl.constexpr, SLICE: tl.constexpr,
        MASKED: tl.constexpr, VARIANT: tl.constexpr):
    """Load a plane of some tokens, words along AXIS, and keep one slice of it: subnormal float16, in VARIANT.DOT.

    The compiler merges what the slices of a plane have in common: one load and one unpacking for all.
    """
    WIDTH: tl.constexpr = SLICE.width
    WORD_BITS: tl.constexpr = SLICE.word_bits
    word = tl.expand_dims(tl.arange(0, max(SLICE.words, 16)), 1 - AXIS)
    ptr = (ptr + SLICE.plane_byte).to(tl.pointer_type(tl.uint16 if WORD_BITS == 16 else tl.uint8))
    ptr += tl.expand_dims(token, AXIS) * (VARIANT.D * BITS // WORD_BITS) + word
    if MASKED or SLICE.words < 16:
        words = tl.load(ptr, mask=tl.expand_dims(exists, AXIS) & (word < SLICE.words), other=0)
    else:
        words = tl.load(ptr)

    if VARIANT.FAST:
        plane_slices = tl.inline_asm_elementwise(
            unpack_ptx(WIDTH, WORD_BITS)[0], unpack_ptx(WIDTH, WORD_BITS)[1], [words],
            dtype=(tl.float16,) * (WORD_BITS // WIDTH), is_pure=True, pack=32 // WORD_BITS)
        codes = plane_slices[SLICE.bit // WIDTH]
    else:
        # The same, one code at a time.
        byte = words.to(tl.uint16) >> (SLICE.bit // 8 * 8)
        codes = byte & ((2**WIDTH - 1) * 2**(SLICE.bit % 8))
    return codes.to(tl.float16, bitcast=True).to(VARIANT.DOT)

@jit
def _slice_channels(SLICE: tl.constexpr):
    """Return the channels of a slice's words, as a column, and which of the words exist."""
    word = tl.arange(0, max(SLICE.words, 16))[:, None]
    return SLICE.channel + word * SLICE.step, word < SLICE.words

@jit
def _split_pair(pair):
    """Do `split_pair`, to float32."""
    scale = (pair << 16).to(tl.float32, bitcast=True)
    offset = (pair & -65536).to(tl.float32, bitcast=True)
    return scale, offset

@jit
def _load_queries(q_ptr, is_query, VARIANT: tl.constexpr):
    """Load the queries slice by slice, in the range of float16, with the factors that undo what is done to them.

        masked codes              code · 2^-(24 + exponent), with `code` what the slice's bits contribute to it
        queries                   q / largest · RANGE · 2^exponent
        so their dot product is   q · code / (largest · REMAINDER): this is how scores are kept
        unit                      largest · REMAINDER · d^-1/2 · log2(e): score · unit is softmax's exponent, of 2
        offset_factor             Σq / (largest · REMAINDER): what a key's offset adds to such a score
    """
    q = tl.load(q_ptr + tl.arange(0, VARIANT.D)[:, None], mask=is_query, other=0)
    largest = tl.maximum(tl.max(tl.abs(q), 0), 1e-30)
    unit = largest * (REMAINDER * VARIANT.D**-0.5 * LOG2E)
    offset_factor = tl.sum(q, 0) / (largest * REMAINDER)

    queries = ()
    for i in tl.static_range(len(VARIANT.K_SLICES)):
        channel, exists = _slice_channels(VARIANT.K_SLICES[i])
        q = tl.load(q_ptr + channel, mask=exists & is_query, other=0) / largest[None, :]
        query = q * (RANGE * 2.0**VARIANT.K_SLICES[i].exponent)
        queries = queries + (query.to(VARIANT.DOT),)
    return queries, unit, offset_factor

@jit
def _attend_tile(state, query, packed, start, end, MASKED: tl.constexpr, VARIANT: tl.constexpr):
    """Add a tile of packed tokens, those before `end` if MASKED, to the running softmax `state`."""
    peak, total, offsets, largest_scale, sums = state
    queries, unit, offset_factor = query
    k_ptr, k_pairs_ptr, v_ptr, v_pairs_ptr = packed
    token = tl.arange(0, VARIANT.TILE)
    exists = start + token < end
    start = tl.cast(start, tl.int64)
    k_ptr += start * (VARIANT.D * VARIANT.K_BITS // 8)
    v_ptr += start * (VARIANT.D * VARIANT.V_BITS // 8)

    # Load the pairs.
    if MASKED:
        k_pairs = tl.load(k_pairs_ptr + start + token, mask=exists, other=0)
        v_pairs = tl.load(v_pairs_ptr + start + token, mask=exists, other=0)
    else:
        k_pairs = tl.load(k_pairs_ptr + start + token)
        v_pairs = tl.load(v_pairs_ptr + start + token)
    k_scale, k_offset = _split_pair(k_pairs)
    v_scale, v_offset = _split_pair(v_pairs)

    # Scores: scale · (q · codes) + offset · Σq.
    score = tl.full([VARIANT.TILE, VARIANT.ROWS], 0, tl.float32)
    for i in tl.static_range(len(queries)):
        codes = _load_slice(
            k_ptr, token, exists, 1, VARIANT.K_BITS, VARIANT.K_SLICES[i], MASKED, VARIANT)
        score = tl.dot(codes, queries[i], score, input_precision="tf32x3")
    score = score * k_scale[:, None] + k_offset[:, None] * offset_factor[None, :]
    if MASKED:
        score = tl.where(exists[:, None], score, -float("inf"))

    # Softmax, with the largest score so far taken off, both times `unit`. (peak begins at LEAST, so −∞ makes no NaN.)
    new_peak = tl.maximum(peak, tl.max(score, 0) * unit)
    p = tl.exp2(score * unit[None, :] - new_peak[None, :])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(p, 0)
    offsets = offsets * decay + tl.sum(p * v_offset[:, None], 0)

    # Weights p · scale, in units of the largest scale so far: float16 neither overflows nor loses what counts.
    new_largest_scale = tl.maximum(largest_scale, tl.max(v_scale, 0))
    weight = p * (v_scale * (RANGE / new_largest_scale))[:, None]
    weight = weight.to(VARIANT.DOT)
    sums_decay = decay * (largest_scale / new_largest_scale)

    # Values: Σ p · scale · codes. Here codes are (words, tokens), since transposing them would take shared memory.
    new_sums = ()
    for i in tl.static_range(len(sums)):
        codes = _load_slice(
            v_ptr, token, exists, 0, VARIANT.V_BITS, VARIANT.V_SLICES[i], MASKED, VARIANT)
        rescaled = sums[i] * sums_decay[None, :]
        new_sums = new_sums + (tl.dot(codes, weight, rescaled, input_precision="tf32x3"),)
    return new_peak, total, offsets, new_largest_scale, new_sums

@jit
def _store_slice(sums_ptr, sums, largest_scale, offsets, SLICE: tl.constexpr):
    """Store a slice's weighted sum of values, in full units; a second plane adds to the first."""
    channel, exists = _slice_channels(SLICE)
    values = sums * (largest_scale * (REMAINDER * 2.0**SLICE.exponent))
    if SLICE.plane_byte == 0:
        values += offsets[None, :]
    else:
        if SLICE.bit == 0:
            tl.debug_barrier()          # before any of it is loaded: other threads stored the first plane
        values += tl.load(sums_ptr + channel, mask=exists, other=0)
    tl.store(sums_ptr + channel, values, mask=exists)

@jit
def _row_pointers(buffers, strides, b, g):
    """Return where each of the buffers (b, g, ...) begins for one b and g."""
    pointers = ()
    for i in tl.static_range(len(strides)):
        pointers = pointers + (buffers[i] + b * strides[i][0] + g * strides[i][1],)
    return pointers

@jit
def _attend_packed(
        q_ptr, sums_ptr, is_query, packed, strides, b, g, part, parts, VARIANT: tl.constexpr):
    """Attend to one of `parts` shares of the packed tokens: store weighted sums, return largest scores and totals."""
    # The share: whole tiles, but for the last.
    tokens = tl.load(packed[4] + b)
    pointers = _row_pointers(packed, strides, b, g)
    share = tl.cdiv(tl.cdiv(tokens, parts), VARIANT.TILE) * VARIANT.TILE
    start = tl.minimum(part * share, tokens)
    end = tl.minimum(start + share, tokens)
    whole_tiles_end = start + (end - start) // VARIANT.TILE * VARIANT.TILE

    # An empty softmax: largest score, total, sum of offsets, largest scale, and the sums of values in units of that scale.
    # (tl.full and not tl.zeros, which takes no numbers out of a Variant in some versions of Triton.)
    query = _load_queries(q_ptr, is_query, VARIANT)
    sums = ()
    for i in tl.static_range(len(VARIANT.V_SLICES)):
        sums = sums + (tl.full([max(VARIANT.V_SLICES[i].words, 16), VARIANT.ROWS], 0, tl.float32),)
    zero = tl.full([VARIANT.ROWS], 0, tl.float32)
    state = (zero + LEAST, zero, zero, 1e-30, sums)

    # The last tile stands apart, so that the loop needs no masks.
    for tile in range(start, whole_tiles_end, VARIANT.TILE):
        state = _attend_tile(state, query, pointers, tile, end, False, VARIANT)
    if whole_tiles_end < end:
        state = _attend_tile(state, query, pointers, whole_tiles_end, end, True, VARIANT)

    peak, total, offsets, largest_scale, sums = state
    for i in tl.static_range(len(sums)):
        _store_slice(sums_ptr, sums[i], largest_scale, offsets, VARIANT.V_SLICES[i])
    return peak, total

@jit
def _attend_window(q_ptr, sums_ptr, is_query, window, strides, b, g, part, VARIANT: tl.constexpr):
    """Attend to some slots of a window: as `_attend_packed`."""
    k_ptr, v_ptr = _row_pointers(window, strides, b, g)
    d = tl.arange(0, VARIANT.D)
    slot = part * VARIANT.WINDOW + tl.arange(0, VARIANT.WINDOW)
    exists = slot < tl.load(window[2] + b)
    slot = slot.to(tl.int64)

    # Scores, and a softmax of their own.
    q = tl.load(q_ptr + d[:, None], mask=is_query, other=0)
    k_ptr += slot[:, None] * strides[0][2] + d[None, :]
    k = tl.load(k_ptr, mask=exists[:, None], other=0)
    if VARIANT.DOT == tl.float32:       # the interpreter would multiply the bits of bfloat16
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    score = tl.dot(k, q, input_precision="tf32x3") * (VARIANT.D**-0.5 * LOG2E)
    score = tl.where(exists[:, None], score, LEAST)
    peak = tl.max(score, 0)
    p = tl.where(exists[:, None], tl.exp2(score - peak[None, :]), 0)

    # Values are loaded only now: with keys beside them they would take twice the shared memory.
    v_ptr += slot[None, :] * strides[1][2] + d[:, None]
    v = tl.load(v_ptr, mask=exists[None, :], other=0)
    if VARIANT.DOT == tl.float32:
        v = v.to(tl.float32)
    sums = tl.dot(v, p.to(v.dtype), input_precision="tf32x3")
    tl.store(sums_ptr + d[:, None], sums)
    return peak, tl.sum(p, 0)

@jit
def _decode_kernel(
        q_ptr, q_packed_ptr, sinks, packed, recent, strides, sums_ptr, stats_ptr, G, R,
        packed_parts, sink_parts, VARIANT: tl.constexpr):
    """Attend, for the query heads of one KV head, to one part: of the packed tokens, the sinks or the recent window."""
    # Heads count (b, g), in 64 bits, or offsets would wrap at 2^31.
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // G
    g = head % G
    r = tl.arange(0, VARIANT.ROWS)
    is_query = r[None, :] < R
    query_offset = (head * R + r[None, :]) * VARIANT.D
    partial = head * tl.num_programs(0) + part
    sums_ptr += (partial * VARIANT.ROWS + r[None, :]) * VARIANT.D

    q_ptr += query_offset
    if part < packed_parts:
        peak, total = _attend_packed(
            q_packed_ptr + query_offset, sums_ptr, is_query, packed, strides[1], b, g,
            part, packed_parts, VARIANT)
    elif part < packed_parts + sink_parts:
        peak, total = _attend_window(
            q_ptr, sums_ptr, is_query, sinks, strides[0], b, g, part - packed_parts, VARIANT)
    else:
        part -= packed_parts + sink_parts
        peak, total = _attend_window(
            q_ptr, sums_ptr, is_query, recent, strides[2], b, g, part, VARIANT)
    tl.store(stats_ptr + partial * 2 * VARIANT.ROWS + r, peak)
    tl.store(stats_ptr + (partial * 2 + 1) * VARIANT.ROWS + r, total)

@jit
def _merge_kernel(
        sums_ptr, stats_ptr, out_ptr, parts, R, D: tl.constexpr, ROWS: tl.constexpr,
        BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Merge the partial softmaxes of all parts, for CHUNK channels of one query head; an empty part holds zeros."""
    row = tl.program_id(0).to(tl.int64)
    head = row // R
    r = row % R
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    peak = -1e30
    total = 0.0
    sums = tl.zeros([CHUNK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        exists = part < parts
        partial = head * parts + part
        peaks = tl.load(stats_ptr + partial * 2 * ROWS + r, mask=exists, other=-1e30)
        totals = tl.load(stats_ptr + (partial * 2 + 1) * ROWS + r, mask=exists, other=0)
        part_sums_ptr = sums_ptr + (partial * ROWS + r)[:, None] * D + d[None, :]
        part_sums = tl.load(part_sums_ptr, mask=exists[:, None], other=0)

        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weight = tl.exp2(peaks - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(totals * weight, 0)
        sums = sums * decay + tl.sum(part_sums * weight[:, None], 0)
        peak = new_peak
    values = sums / tl.where(total > 0, total, 1)
    tl.store(out_ptr + row * D + d, values.to(out_ptr.dtype.element_ty))

WINDOW_SLOTS = 32               # of a window, per program
PART_TOKENS = 512               # packed tokens that are worth a program of their own
MOST_PARTS = 256
MERGE_PARTS = 32                # partial softmaxes that the merge reads at a time
MERGE_CHANNELS = 32             # of one merging program

def tiling(d, bits, rows, fast, capability):
    """Choose the tile (packed tokens read at a time) and the compiler's options: one warp, loads two tiles ahead.

    Tiles are small where large ones spill registers: for more than 8 queries, for codes unpacked singly but 2-bit ones, and
    for 3 bits in more than 64 channels on consumer Blackwell. Small tiles spend 1.5 times the instructions. Where ptxas
    would take too many registers, these are bounded.
    """
    uneven = d > 64 and set(bits) not in ({2}, {4}, {8})
    small = rows > 8
    if not fast and set(bits) != {2}:
        small = True
    if uneven and 3 in bits and capability >= 120:
        small = True

    options = dict(num_warps=1, num_stages=3)
    if uneven and rows == 8:
        options["maxnreg"] = 200
    return 16 if small else 64, options

@functools.cache
def variant(d, bits, rows, fast, capability, dot):
    """Return what to compile the decode kernel for, and the compiler's options."""
    tile, options = tiling(d, bits, rows, fast, capability)
    k_bits, v_bits = bits
    k_slices = slices(d, k_bits)
    v_slices = slices(d, v_bits)
    return Variant(
        d, k_bits, v_bits, k_slices, v_slices, rows, tile, WINDOW_SLOTS, fast, dot), options

def check_packed(codes, pairs, bits, d):
    """Refuse buffers that do not hold packed tokens of d channels, one pair each."""
    check_bits(bits)
    b, g, s, _ = codes.shape
    if codes.dtype != torch.uint8 or codes.shape[3] * 8 != d * bits:
        raise ValueError(
            f"{bits}-bit codes of {d} channels are {d * bits // 8} bytes of uint8 per token, "
            f"not {codes.shape[3]} of {codes.dtype}")
    if pairs.dtype != torch.int32 or pairs.shape != (b, g, s, 1):
        raise ValueError(
            f"pairs of these codes are int32 ({b}, {g}, {s}, 1), "
            f"not {pairs.dtype} {tuple(pairs.shape)}"
        )

def check_dense(buffer):
    """Refuse packed tokens that do not lie one behind the other, without a gap: the kernel relies on it."""
    width = buffer.shape[3]
    tokens_apart = buffer.shape[2] > 1 and buffer.stride(2) != width
    if tokens_apart or (width > 1 and buffer.stride(3) != 1) or buffer.data_ptr() % 2:
        raise ValueError(
            f"packed tokens of shape {tuple(buffer.shape)} have strides {buffer.stride()}: "
            "the bytes of each token, and successive tokens, must lie side by side")

def check_window(window, q):
    """Refuse a window whose keys and values do not fit the queries q (b, g, r, d)."""
    b, g, _, d = q.shape
    for x in window[:2]:
        if x.shape != (b, g, x.shape[2], d) or x.dtype != q.dtype or x.stride(3) != 1:
            raise ValueError(
                f"windows are ({b}, {g}, slots, {d}) in {q.dtype} with channels side by side, "
                f"not {tuple(x.shape)} in {x.dtype} with strides {x.stride()}")

def check_decode(q, q_packed, sinks, packed, recent, bits):
    """Refuse what the decode kernel would misread."""
    b, g, _, d = q.shape
    if q_packed.shape != q.shape:
        raise ValueError(
            f"queries are {tuple(q.shape)}, but the transformed ones {tuple(q_packed.shape)}")
    if q_packed.dtype != torch.float32:
        raise ValueError(f"transformed queries are float32 here, not {q_packed.dtype}")
    k_codes, k_pairs, v_codes, v_pairs, _ = packed
    k_bits, v_bits = bits
    check_packed(k_codes, k_pairs, k_bits, d)
    check_packed(v_codes, v_pairs, v_bits, d)
    for buffer in packed[:4]:
        check_dense(buffer)
        if buffer.shape[:2] != (b, g):
            raise ValueError(
                f"packed tokens are of {b} rows and {g} heads here, not {tuple(buffer.shape)}")
    check_window(sinks, q)
    check_window(recent, q)
    for count in sinks[2], packed[4], recent[2]:
        if count.dtype != torch.int32 or count.shape != (b,):
            raise ValueError(
                f"counts of tokens are int32 ({b},), not {count.dtype} {tuple(count.shape)}")

def decode_attention(
        q: Tensor, q_packed: Tensor, sinks: Window, packed: Packed, recent: Window,
        bits: tuple[int, int]) -> Tensor:
    """Do `decode_attention_ref`, by `_decode_kernel` and `_merge_kernel` where these can run.

    Moves, per KV head, d·(k_bits + v_bits)/8 + 8 bytes per packed token and 2·d elements per window slot; and, once out
    and once in, 4·(d + 2) bytes per part and query head, of which there are at least 8.
    """
    check_decode(q, q_packed, sinks, packed, recent, bits)
    if serves(q) and q.shape[-1] in HEAD_DIMS:
        out = attempt(launch_decode, q, q_packed, sinks, packed, recent, bits)
        if out is not None:
            return out
    return decode_attention_ref(q, q_packed, sinks, packed, recent, bits)

def launch_decode(q, q_packed, sinks, packed, recent, bits):
    """Cut the tokens into parts, attend to each and merge."""
    b, g, r, d = q.shape
    capability = 0
    processors = 1
    if q.is_cuda:
        major, _ = torch.cuda.get_device_capability(q.device)
        capability = 10 * major
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    dot = tl.float32 if INTERPRET or q.dtype == torch.float32 else tl.float16
    fast = capability >= 80 and dot == tl.float16
    rows = max(8, triton.next_power_of_2(r))

    # Eight programs per multiprocessor, by the sizes of buffers: to ask the device for counts would wait for it.
    wanted_parts = triton.cdiv(8 * processors, b * g)
    packed_parts = min(wanted_parts, triton.cdiv(packed[0].shape[2], PART_TOKENS), MOST_PARTS)
    sink_parts = triton.cdiv(sinks[0].shape[2], WINDOW_SLOTS)
    recent_parts = triton.cdiv(recent[0].shape[2], WINDOW_SLOTS)
    parts = packed_parts + sink_parts + recent_parts

    sums = torch.empty(b * g * parts, rows, d, dtype=torch.float32, device=q.device)
    stats = torch.empty(b * g * parts, 2, rows, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    strides = tuple(
        tuple(x.stride()[:3] for x in buffers) for buffers in (sinks[:2], packed[:4], recent[:2]))
    if parts:
        compiled_for, options = variant(d, tuple(bits), rows, fast, capability, dot)
        _decode_kernel[parts, b * g](
            q.contiguous(), q_packed.contiguous(), tuple(sinks), tuple(packed), tuple(recent),
            strides, sums, stats, g, r, packed_parts, sink_parts, compiled_for, **options)
    _merge_kernel[b * g * r, triton.cdiv(d, MERGE_CHANNELS)](
        sums, stats, out, parts, r, d, rows, MERGE_PARTS, MERGE_CHANNELS)
    return out


# ----------------------------------------------------------------------------------------------------------------
# Reading packed tokens on the CPU
#
# Here too scale and offset act on the score, not on each element. torch.compile makes one pass over the bytes of what
# is written below for it, so nothing is ever restored in memory; short caches and several new tokens take the reference.

PIECE_TOKENS = 1024         # that a reference unpacks at a time
WORTH_COMPILING = 1024      # packed tokens: shorter contexts never earn the compiler's ten seconds back
MOST_QUERIES = 16           # per KV head: the compiled code is written out for each

def unpacked_pieces(codes, pairs, bits, count):
    """Unpack the first `count` tokens piece by piece: yield each piece's slice of tokens, codes, scales and offsets.

    Codes are (b, g, s, d) in float32, scales and offsets (b, g, 1, s). No tokens are one empty piece.
    """
    for start in range(0, max(count, 1), PIECE_TOKENS):
        piece = slice(start, min(start + PIECE_TOKENS, count))
        scale, offset = split_pair(pairs[:, :, piece])
        yield piece, unpack(codes[:, :, piece], bits).float(), scale.float().mT, offset.float().mT

@exactly
def packed_scores_ref(q: Tensor, codes: Tensor, pairs: Tensor, bits: int, count: int) -> Tensor:
    """Return q · x̂ for the first `count` packed tokens: q (b, g, r, d) -> (b, g, r, count)."""
    q_sum = q.sum(-1, keepdim=True)
    scores = []
    for _, x, scale, offset in unpacked_pieces(codes, pairs, bits, count):
        scores.append(q @ x.mT * scale + q_sum * offset)
    return torch.cat(scores, -1)

@exactly
def packed_values_ref(p: Tensor, codes: Tensor, pairs: Tensor, bits: int, count: int) -> Tensor:
    """Return Σ_s p_s x̂_s over the first `count` packed tokens: p (b, g, r, count) -> (b, g, r, d)."""
    values = 0
    for piece, x, scale, offset in unpacked_pieces(codes, pairs, bits, count):
        weights = p[..., piece]
        values = values + (weights * scale) @ x
        values = values + (weights * offset).sum(-1, keepdim=True)
    return values

def runs_of_channels(codes, pairs, bits, count):
    """Return scales and offsets (b, g, s) of the first `count` tokens, and plane by plane the runs of channels.

    A run comes with a power of two: its codes, which stay where they lie in their bytes, times this are what they
    contribute. A mask is one instruction for 32 bytes, but a CPU has none that shifts bytes.
    """
    codes = codes.narrow(2, 0, count)
    scale = (pairs[..., 0] << 16).view(torch.float32).narrow(2, 0, count)
    offset = (pairs[..., 0] & -65536).view(torch.float32).narrow(2, 0, count)

    planes = []
    for plane, part in zip(PLANES[bits], split_planes(codes, bits)):
        mask = 2**plane.width - 1
        shifts = range(0, 8, plane.width)
        runs = [(part & (mask << bit)).float() for bit in shifts]
        factors = [2.0**(plane.below - bit) for bit in shifts]
        planes.append(list(zip(runs, factors)))
    return scale, offset, planes

def scores_in_one_pass(q, codes, pairs, bits, count):
    """Do `packed_scores_ref`, for the compiler: one sum over a token's bytes serves all runs and all queries."""
    scale, offset, planes = runs_of_channels(codes, pairs, bits, count)
    scores = []
    for query in q[:, :, :, None].unbind(2):
        dots = 0
        for runs in planes:
            pieces = query.chunk(len(runs), -1)
            products = [piece * factor * run for piece, (run, factor) in zip(pieces, runs)]
            dots = dots + sum(products).sum(-1)
        scores.append(dots * scale + query.sum(-1) * offset)
    return torch.stack(scores, 2)

def values_in_one_pass(p, codes, pairs, bits, count):
    """Do `packed_values_ref`, for the compiler."""
    scale, offset, planes = runs_of_channels(codes, pairs, bits, count)
    values = []
    for weight in p.unbind(2):
        scaled = (weight * scale)[..., None]
        sums = 0
        for runs in planes:
            sums = sums + torch.cat([(scaled * run).sum(-2) * factor for run, factor in runs], -1)
        values.append(sums + (weight * offset).sum(-1, keepdim=True))
    return torch.stack(values, 2)

@functools.cache
def compiled(function):
    """Compile a function on its first use, since the compiler imports much."""
    options = {"cpp.enable_floating_point_contract_flag": "fast"}        # products and sums in one instruction
    return torch.compile(function, dynamic=True, options=options)

def any_size():
    """Return a context in which the compiler takes no two sizes for one, though they are equal in its first call.

    After a prefill there is no spare room: all tokens that have room are read. Without this, the first flush would have
    everything compiled anew.
    """
    from torch.fx.experimental import _config
    return _config.patch(backed_size_oblivious=True, use_duck_shape=False)

compiled_kinds = set()      # of calls: entering the context takes as long as reading some hundred tokens

def call_compiled(function, x, codes, pairs, bits, count):
    kind = function, bits, x.shape[:3]
    if kind in compiled_kinds:
        return compiled(function)(x, codes, pairs, bits, count)
    with any_size():
        result = compiled(function)(x, codes, pairs, bits, count)
    compiled_kinds.add(kind)
    return result

def launch_scores(q, *args):
    return call_compiled(scores_in_one_pass, q, *args)

def launch_values(p, *args):
    return call_compiled(values_in_one_pass, p, *args)

def check_read(x, codes, pairs, bits, count):
    """Refuse packed tokens, or a number of them, that are not there."""
    d = codes.shape[-1] * 8 // bits if bits in PLANES else 0
    check_packed(codes, pairs, bits, d)
    if x.dim() != 4 or x.shape[:2] != codes.shape[:2]:
        raise ValueError(
            f"{tuple(x.shape)} and packed tokens {tuple(codes.shape)} do not fit in rows and heads")
    if not 0 <= count <= codes.shape[2]:
        raise ValueError(f"{count} packed tokens are asked for, of {codes.shape[2]}")

def is_worth_compiling(x, count):
    return not x.is_cuda and count >= WORTH_COMPILING and x.shape[2] <= MOST_QUERIES

def packed_scores(q: Tensor, codes: Tensor, pairs: Tensor, bits: int, count: int) -> Tensor:
    """Do `packed_scores_ref`, compiled where that is worth it. Moves d·bits/8 + 4 bytes per token and KV head."""
    check_read(q, codes, pairs, bits, count)
    if q.shape[3] * bits != codes.shape[3] * 8:
        raise ValueError(
            f"queries of {q.shape[3]} channels do not fit "
            f"{codes.shape[3]} bytes of {bits}-bit codes"
        )
    if is_worth_compiling(q, count):
        scores = attempt(launch_scores, q, codes, pairs, bits, count)
        if scores is not None:
            return scores
    return packed_scores_ref(q, codes, pairs, bits, count)

def packed_values(p: Tensor, codes: Tensor, pairs: Tensor, bits: int, count: int) -> Tensor:
    """Do `packed_values_ref`, compiled where that is worth it. Moves d·bits/8 + 4 bytes per token and KV head."""
    check_read(p, codes, pairs, bits, count)
    if p.shape[3] != count:
        raise ValueError(f"{p.shape[3]} weights do not fit {count} packed tokens")
    if is_worth_compiling(p, count):
        values = attempt(launch_values, p, codes, pairs, bits, count)
        if values is not None:
            return values
    return packed_values_ref(p, codes, pairs, bits, count)


if __name__ == "__main__":
    # This file runs as the module "__main__", and only hands over: kernel_check works on the copy that wush_kv.py loads.
    # Python does not look beside a script if it runs with -P or -I, and never beside the file that a link points to.
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
    from wush_tools.kernel_check import main
    main()
