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
