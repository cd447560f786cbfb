"""The hot path of WUSH-KV: how the codes of a quantized cache lie in bytes.

The layout, once, in words. The d codes of one token and KV head become d·b/8 bytes, and no code straddles a
byte. At b = 2, 4 or 8 bits the channels are cut into 8/b equal runs; byte r holds channel r of every run, run
i in the bits from i·b upwards (2 bits: channels r, r + d/4, r + d/2, r + 3d/4). So one shift and one mask
over all bytes yield a *contiguous* run of channels, which meets a contiguous slice of the query. At 3 bits
there are two planes: the codes' upper two bits laid out as above, then their lowest bit laid out as 1-bit
codes (byte r: channels r, r + d/8, ...). Scale and offset of a group are one int32: the bfloat16 scale in the
low half, the bfloat16 offset in the high half.

Importable without a GPU and without Triton.
"""
import functools
import warnings

import torch
from torch import Tensor

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


# ----------------------------------------------------------------------------------------------------------
# Packed codes under a dot product, on the CPU. Scale and offset act on the score, not on each element, and
# torch.compile fuses unpack and dot into one pass over the bytes, so that nothing is ever restored.

def packed_scores_ref(q: Tensor, codes: Tensor, pair: Tensor, bits: int) -> Tensor:
    """Return q · x̂, q (b, g, r, d) and packed x̂ (b, g, s, d) with a pair a token: (b, g, r, s), float32."""
    scale, offset = (p.float().mT for p in split_pair(pair))
    return q @ unpack_ref(codes, bits).float().mT * scale + q.sum(-1, keepdim=True) * offset


def packed_values_ref(p: Tensor, codes: Tensor, pair: Tensor, bits: int) -> Tensor:
    """Return Σ_s p_s x̂_s for p (b, g, r, s): (b, g, r, d), float32."""
    scale, offset = (p.float().mT for p in split_pair(pair))
    return (p * scale) @ unpack_ref(codes, bits).float() + (p * offset).sum(-1, keepdim=True)


def code_runs(codes: Tensor, bits: int) -> list[list[tuple[int, Tensor]]]:
    """List, plane by plane, the runs of channels in packed codes: (first channel, value in float32)."""
    d, below, planes = codes.shape[-1] * 8 // bits, bits, []
    for width, plane in zip(PLANES[bits], codes.split([d * w // 8 for w in PLANES[bits]], -1)):
        below -= width
        run = lambda i: (plane >> i & (1 << width) - 1).float() * 2 ** below
        planes.append([(i * d // 8, run(i)) for i in range(0, 8, width)])
    return planes


def scores_in_one_pass(q: Tensor, codes: Tensor, pair: Tensor, bits: int) -> Tensor:
    """`packed_scores_ref` for the compiler: one sum over a token's bytes serves all runs and all queries."""
    scale, offset = (half.view(torch.float32)[..., 0] for half in (pair << 16, pair & -65536))
    planes, scores = code_runs(codes, bits), []
    for query in q.unbind(2):
        dots = (sum(query[:, :, None, i:i + x.shape[-1]] * x for i, x in runs).sum(-1) for runs in planes)
        scores.append(sum(dots) * scale + query.sum(-1, keepdim=True) * offset)
    return torch.stack(scores, 2)


def values_in_one_pass(p: Tensor, codes: Tensor, pair: Tensor, bits: int) -> Tensor:
    """`packed_values_ref` for the compiler."""
    scale, offset = (half.view(torch.float32)[..., 0] for half in (pair << 16, pair & -65536))
    planes, values = code_runs(codes, bits), []
    for weight in p.unbind(2):
        scaled = (weight * scale)[..., None]
        sums = (torch.cat([(scaled * x).sum(-2) for _, x in runs], -1) for runs in planes)
        values.append(sum(sums) + (weight * offset).sum(-1, keepdim=True))
    return torch.stack(values, 2)


WORTH_COMPILING = 2048      # packed tokens: shorter contexts never earn the compiler's ten seconds back


def in_one_pass(reference, one_pass):
    """Make a CPU launcher: compiled for one step's queries on a long cache, else the reference itself."""
    compiled = torch.compile(one_pass, dynamic=True)

    @functools.wraps(reference)
    def launch(x: Tensor, codes: Tensor, pair: Tensor, bits: int) -> Tensor:
        if launch.compiles and not x.is_cuda and codes.shape[2] >= WORTH_COMPILING and x.shape[2] <= 16:
            try:
                return compiled(x, codes, pair, bits)
            except Exception as e:       # no C++ compiler, most likely; torch raises several types
                launch.compiles = False
                warnings.warn(f"packed caches are read by plain torch, slower: compiling failed: {e}"[:300])
        return reference(x, codes, pair, bits)

    launch.compiles = True
    return launch


packed_scores = in_one_pass(packed_scores_ref, scores_in_one_pass)
packed_values = in_one_pass(packed_values_ref, values_in_one_pass)
