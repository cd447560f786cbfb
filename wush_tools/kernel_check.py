"""What `python kernels.py [--compile | --bench]` does: compare the kernels with their references, and count their cost.

`check` runs them on the device at hand, or in Triton's interpreter where there is none. `compile_all` compiles them for
six generations of GPUs, which need not be there, and prints what they compile to. `bench` times attention over packed
tokens beside other ways to attend.
"""
import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch.nn import functional

import wush_kv
from wush_kv import kernels

triton = kernels.triton

# ----------------------------------------------------------------------------------------------------------------
# The kernels beside their references

def make_ragged(x, count, fill):
    """Put `fill` into the slots of x (b, g, slots, ...) from `count` (b,) on: what lies there must not matter."""
    slot = torch.arange(x.shape[2])[:, None]
    return x.masked_fill(slot >= count[:, None, None, None], fill)

def random_packed(b, g, tokens, d, bits, quantizer, count):
    """Encode random tokens: codes and pairs, with pairs of NaN beyond `count`."""
    x = torch.randn(b, g, tokens, d)
    codec = wush_kv.Codec(bits, quantizer, 0.92)
    codes, pairs = wush_kv.encode_reference(x, wush_kv.Encoding(codec))
    return make_ragged(codes, count, 255), make_ragged(pairs, count, -1)

def example(b, g, r, d, bits, slots, dtype=torch.float32, device="cpu", seed=0):
    """Make arguments of `decode_attention`: random counts up to `slots` (sinks, packed, recent), and NaN beyond."""
    torch.manual_seed(seed)
    counts = [torch.randint(0, most + 1, (b,), dtype=torch.int32) for most in slots]
    n_sink, n_packed, n_recent = counts
    k_bits, v_bits = bits
    keys = random_packed(b, g, slots[1], d, k_bits, "quest", n_packed)
    values = random_packed(b, g, slots[1], d, v_bits, "affine", n_packed)
    q, q_packed = torch.randn(2, b, g, r, d)

    def window(size, count):
        k, v = torch.randn(2, b, g, size, d).to(dtype)
        return make_ragged(k, count, torch.nan), make_ragged(v, count, torch.nan), count

    def on_device(parts):
        return tuple(part.to(device) for part in parts)

    sinks = on_device(window(slots[0], n_sink))
    packed = on_device([*keys, *values, n_packed])
    recent = on_device(window(slots[2], n_recent))
    return q.to(device, dtype), q_packed.to(device), sinks, packed, recent, bits

def encodings(d, bits, device):
    """Make one encoding of each kind, with random T: plain, clamped, and centred with feedback and sweeps."""
    T = torch.randn(2, 1, d, d, device=device)
    H = wush_kv.error_hessian(T, torch.eye(d, device=device).expand(2, d, d), centred=True)
    F = wush_kv.feedback_matrix(H)
    quest = wush_kv.Codec(bits, "quest", 0.96)
    affine = wush_kv.Codec(bits, "affine", 0.96)
    return [
        wush_kv.Encoding(quest, T),
        wush_kv.Encoding(affine, T),
        wush_kv.Encoding(quest, T, H.float(), F.float(), centred=True, own=0.5),
    ]

def encode_by_kernel(x, encoding):
    """Encode x by the kernel, with the numbers of the encoding's rule."""
    codec = encoding.codec
    row = wush_kv.QUANTIZERS[codec.quantizer]
    numbers = row.kernel_numbers(codec.bits, codec.clip, x.shape[-1])
    return kernels.encode(
        x, encoding.transform, encoding.hessian, encoding.feedback, codec.bits, wush_kv.SWEEPS,
        encoding.centred, encoding.own, **numbers)

def share_of_rows_that_differ(x, encoding):
    """Return which share of the tokens x get other codes, or another pair, from the kernel."""
    codes, pairs = encode_by_kernel(x, encoding)
    expected_codes, expected_pairs = wush_kv.encode_reference(x, encoding)
    differ = (codes != expected_codes).any(-1) | (pairs != expected_pairs).any(-1)
    return differ.float().mean().item()

def check(device):
    """Compare both kernels with their references. Sums in another order may move a few pairs and codes."""
    dtypes = torch.float32, torch.bfloat16
    tokens = 200 if device == "cuda" else 33      # the interpreter is slow
    for dtype, d, bits in itertools.product(dtypes, (64, 128), (2, 3, 4)):
        arguments = example(2, 2, 4, d, (bits, bits), (16, 700, 100), dtype, device)
        x = torch.randn(1, 2, tokens, d).to(device, dtype)
        moved = [share_of_rows_that_differ(x, encoding) for encoding in encodings(d, bits, device)]
        moved = statistics.mean(moved)
        out = kernels.decode_attention(*arguments)
        error = (out - kernels.decode_attention_ref(*arguments)).abs().max().item()

        print(f"{device} {dtype} d={d} bits={bits}: ", end="")
        print(f"{moved:.2%} of rows differ, attention {error:.0e}", flush=True)
        if kernels.switched_off or moved > 0.02 or error > 8 * torch.finfo(dtype).eps:
            sys.exit("kernels.py: a kernel does not do what its reference does")

# ----------------------------------------------------------------------------------------------------------------
# What the kernels compile to, for GPUs that need not be there

CAPABILITIES = 80, 86, 89, 90, 100, 120

def compile_for(capability, kernel, kinds, constants, **options):
    """Compile a kernel whose pointers and integers, of the types `kinds`, are divisible by 16."""
    signature = dict(zip(kernel.arg_names, [*kinds, *("constexpr" for _ in constants)]))
    places = triton._utils.find_paths_if(kinds, lambda *_: True)
    divisible = {place: [["tt.divisibility", 16]] for place in places}
    values = {(len(kinds) + i,): value for i, value in enumerate(constants)}
    source = triton.compiler.ASTSource(kernel, signature, values, divisible)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target, options)

def compile_decode(capability, d, bits, fast, rows=8, model="bf16"):
    """Compile `_decode_kernel` as `decode_attention` launches it, for a model in that dtype."""
    window = f"*{model}", f"*{model}", "*i32"
    packed = "*u8", "*i32", "*u8", "*i32", "*i32"
    strides = tuple((("i32",) * 3,) * buffers for buffers in (2, 4, 2))
    kinds = (
        f"*{model}", "*fp32", window, packed, window, strides,
        "*fp32", "*fp32", "i32", "i32", "i32", "i32")
    dot = kernels.tl.float32 if model == "fp32" else kernels.tl.float16
    variant, options = kernels.variant(d, bits, rows, fast, capability, dot)
    return compile_for(capability, kernels._decode_kernel, kinds, (variant,), **options)

def compile_encode(capability, d, bits, alpha=0.0, centred=False, has_F=False):
    """Compile `_encode_kernel` as `encode` launches it, with a transform."""
    kinds = "*bf16", "*fp32", "*fp32", "*fp32", "*u8", "*i32", ("i32",) * 4, "i32", "i32"
    constants = (
        d - 5, alpha, centred, wush_kv.SWEEPS, wush_kv.OWN_DIRECTION, d, bits, True, has_F,
        kernels.ENCODE_TOKENS, kernels.ENCODE_CHANNELS)
    return compile_for(
        capability, kernels._encode_kernel, kinds, constants,
        maxnreg=kernels.ENCODE_REGISTERS, num_warps=kernels.ENCODE_WARPS)

class Cost(NamedTuple):
    registers: int      # per thread
    spilled: int        # bytes per thread that find no room in registers
    shared: int         # bytes of shared memory
    loop: int           # instructions of the longest loop

def cost(compiled):
    """Count the cost of a compiled kernel, by the disassembler that comes with Triton."""
    folder = Path(triton.__file__).parent
    tool = folder / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()

    # A loop ends with a branch back to its beginning; an instruction is 16 bytes.
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/ .*\bBRA\b.* 0x([0-9a-f]+) *;", text)
    lengths = [int(end, 16) - int(start, 16) for end, start in branches]
    return Cost(int(registers), int(spilled), compiled.metadata.shared, max(lengths) // 16 + 1)

def instructions_per_code(loop, d, bits, fast, capability):
    """Divide the decode loop's instructions, of 32 lanes each, by the codes of keys and values in a tile."""
    tile, _ = kernels.tiling(d, (bits, bits), 8, fast, capability)
    return loop * 32 / (tile * 2 * d)

def print_cost(capability, name, counted, per_code=""):
    print(f"{capability:<4} {name:32}", end="")
    figures = f"{counted.registers:>9} {counted.spilled:>7} {counted.shared:>7} {per_code:>6}"
    print(figures, flush=True)

def compile_all():
    """Print the cost of every kernel on every target; for decode also the lane-instructions of its loop per code."""
    print("cc   kernel                          registers spilled  shared  instructions per code")
    for capability, d, bits in itertools.product(CAPABILITIES, (64, 128), (2, 3, 4)):
        for fast in (True, False):
            counted = cost(compile_decode(capability, d, (bits, bits), fast))
            per_code = instructions_per_code(counted.loop, d, bits, fast, capability)
            way = "two codes at once" if fast else "single codes"
            print_cost(capability, f"decode d={d} bits={bits} {way}", counted, f"{per_code:.2f}")

        alpha = wush_kv.gaussian_clip(bits)
        plain = cost(compile_encode(capability, d, bits, alpha))
        refined = cost(compile_encode(capability, d, bits, alpha, centred=True, has_F=True))
        print_cost(capability, f"encode d={d} bits={bits}", plain)
        print_cost(capability, f"encode d={d} bits={bits} with feedback", refined)

# ----------------------------------------------------------------------------------------------------------------
# Time

class Way(NamedTuple):
    """A way from queries to attention over n tokens."""
    make_cache: Callable      # () -> the tensors of a cache
    attend: Callable          # (*tensors) -> attention output

def ways_to_attend(q, n, bits):
    """List the ways to attend from q (b, g, r, d) to n tokens, by name."""
    b, g, _, d = q.shape

    def make_plain(dtype):
        return torch.randn(2, b, g, n, d, device=q.device, dtype=dtype).unbind()

    def make_packed():
        # All tokens are copies of one: what they hold does not change the time.
        encoding = wush_kv.Encoding(wush_kv.Codec(bits, "affine", 0.92))
        keys = wush_kv.encode_reference(q.new_empty(b, g, 1, d).normal_(), encoding)
        values = wush_kv.encode_reference(q.new_empty(b, g, 1, d).normal_(), encoding)
        return [x.expand(-1, -1, n, -1).contiguous() for x in (*keys, *values)]

    def sdpa(k, v):
        heads = q.to(k.dtype).flatten(1, 2)[:, :, None]
        return functional.scaled_dot_product_attention(heads, k, v, enable_gqa=True)

    def dequantize_first(k, k_pairs, v, v_pairs):
        return sdpa(kernels.dequantized(k, k_pairs, bits), kernels.dequantized(v, v_pairs, bits))

    def over_bytes(scores, values, k, k_pairs, v, v_pairs):
        p = (scores(q, k, k_pairs, bits, n) * d**-0.5).softmax(-1)
        return values(p, v, v_pairs, bits, n)

    def read_only(*tensors):
        return [x.view(torch.int32).amax() for x in tensors]

    bfloat16 = Way(functools.partial(make_plain, torch.bfloat16), sdpa)
    if q.is_cuda:
        nothing = q.new_zeros(b, g, 0, d)
        count = torch.full((b,), n, dtype=torch.int32, device=q.device)
        window = nothing, nothing, count * 0

        def by_kernel(*tensors):
            return kernels.decode_attention(
                q, q.float(), window, (*tensors, count), window, (bits, bits))

        return {
            "SDPA bfloat16": bfloat16,
            "plain read": Way(make_packed, read_only),
            "decode_attention": Way(make_packed, by_kernel),
        }
    references = kernels.packed_scores_ref, kernels.packed_values_ref
    launchers = kernels.packed_scores, kernels.packed_values
    return {
        "SDPA float32": Way(functools.partial(make_plain, torch.float32), sdpa),
        "SDPA bfloat16": bfloat16,
        "dequantize+SDPA": Way(make_packed, dequantize_first),
        "plain unpack": Way(make_packed, functools.partial(over_bytes, *references)),
        "one pass": Way(make_packed, functools.partial(over_bytes, *launchers)),
    }

def median_ms(steps, cuda):
    """Return milliseconds per step: the median of 10 runs of all, or on a GPU of 50 replays as one CUDA graph."""
    def run():
        for step in steps:
            step()

    # The first runs compile, and touch memory.
    run()
    run()
    if not cuda:
        return statistics.median(timeit.repeat(run, number=1, repeat=10)) * 1e3 / len(steps)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(50)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(50)]
    for start, end in zip(starts, ends):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in zip(starts, ends)]
    return statistics.median(times) / len(steps)

def time_of(way, cuda):
    """Return milliseconds and gigabytes per second. On a GPU, caches of over 200 MB together take turns.

    There are at least four: the level-2 cache shall not answer.
    """
    caches = [way.make_cache()]
    size = sum(x.nbytes for x in caches[0])
    if cuda:
        others = max(3, 200_000_000 // size)
        caches += [way.make_cache() for _ in range(others)]
    ms = median_ms([functools.partial(way.attend, *cache) for cache in caches], cuda)
    return ms, size / ms / 1e6

def bench(device, g=8, r=4, d=128):
    """Time the ways to attend with the queries of one step; the last way also as a share of each other."""
    cuda = device == "cuda"
    if cuda:
        check(device)
        shapes = itertools.product((1, 8, 32), (4, 32, 80, 128), (2, 3, 4))
        place = torch.cuda.get_device_name()
        dtype = torch.bfloat16
    else:
        shapes = itertools.product((1,), (1, 4, 16, 64), (2,))
        place = f"{torch.get_num_threads()} threads"
        dtype = torch.float32
    print(f"{g} KV heads of {r} queries, d = {d}, {place}: ms (GB/s), and the last / each other")

    header = None
    for b, thousands, bits in shapes:
        # Five caches in bfloat16 must have room.
        tokens = thousands * 1024
        torch.cuda.empty_cache()
        if cuda and 5 * b * g * tokens * d * 4 > torch.cuda.mem_get_info()[0]:
            continue
        q = torch.randn(b, g, r, d, device=device, dtype=dtype)
        ways = ways_to_attend(q, tokens, bits)
        if header is None:
            header = " b tokens bits " + " ".join(f"{name:>18}" for name in ways)
            print(header)

        measured = [time_of(way, cuda) for way in ways.values()]
        cells = [f"{ms:9.3f} ({speed:6.1f})" for ms, speed in measured]
        last = measured[-1][0]
        shares = [f"{last / ms:5.2f}" for ms, _ in measured[:-1]]
        print(f"{b:2} {thousands:5}k {bits:4}", *cells, *shares, flush=True)

def serve_by_interpreter():
    """Let the kernels run on CPU tensors. Triton reads the variable when it is imported: so Python starts anew."""
    if not kernels.INTERPRET:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})
    kernels.serves = lambda x: True

def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if triton is None:
        sys.exit("kernels.py: Triton is not installed, so there is nothing to check")
    if "--compile" in sys.argv:
        compile_all()
    elif "--bench" in sys.argv:
        bench(device)
    else:
        if device == "cpu" or kernels.INTERPRET:
            serve_by_interpreter()
            device = "cpu"
        check(device)
