"""The measurements behind the tables and the picture of the README, one command each, on a real model.

    python -m wush_tools.measure baselines --model FOLDER --calib FILE --eval FILE --seqs 4
    python -m wush_tools.measure picture --figures 2.json 3.json 4.json --title TITLE

Everything runs in float32 on one CPU core. A command prints a table and what it claims of it, and ends with
status 1 if the figures do not show that. Other projects' caches need optimum-quanto and hqq:

    pip install --no-deps optimum-quanto ninja hqq termcolor
"""
import argparse
import json
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional

from wush_kv import (
    PAPER, REFINED, TRANSFORMS, Codec, Windows, collect_moments, decode, dequantize, derive, feed,
    forward, hadamard, logits, make_scheme, quantize, wush)
from wush_tools.checkpoints import fetch, load_model, read_config, read_tokenizer, read_tokens
from wush_tools.evaluate import (
    attend_through_windows, cache_bytes, divergence, exact_attention, haystack, mean_and_error,
    perplexity, retrieval, shown, step_times, summary, view_attention, with_schemes)

# ----------------------------------------------------------------------------------------------------------------
# What the commands share

class Bench(NamedTuple):
    """What a command works on."""
    folder: Path
    model: object
    tokenizer: object
    moments: dict               # of the calibration text

def load_bench(options):
    """Load --model and collect its moments over --calib."""
    folder = fetch(options.model, "*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")
    config = read_config(folder)
    tokenizer = read_tokenizer(folder, config)
    calib = read_tokens(
        options.calib, tokenizer, "--calib", options.calib_seqs, options.calib_len)
    model = load_model(folder, config, torch.float32, "cpu")
    return Bench(folder, model, tokenizer, collect_moments(model, calib))

def texts(options, bench, count, length):
    """Cut `count` sequences of `length` tokens from --eval."""
    return read_tokens(options.eval, bench.tokenizer, "--eval", count, length)

def two_bit_schemes(moments):
    """Make the three schemes that are compared."""
    return {
        "hadamard": make_scheme(moments, "hadamard"),
        "wush": make_scheme(moments, refine=PAPER),
        "refined": make_scheme(moments),
    }

def load_transformers(bench):
    """Load the model into transformers."""
    from transformers import AutoModelForCausalLM
    hf = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.float32)
    return hf.requires_grad_(False)

def clearly_less(a, b):
    """Say whether a is less than b on the same texts, (texts,), by over two standard errors of the difference."""
    difference, error = mean_and_error(b - a)
    return difference > 2 * error

def print_table(title, columns, rows):
    """Print {name: its cells (value, standard error)}."""
    print("\n" + title)
    print(" " * 20 + "".join(f"{column:>19}" for column in columns))
    for name, cells in rows.items():
        print(f"{name:20}" + "".join(f"{shown(*cell):>19}" for cell in cells))

# ----------------------------------------------------------------------------------------------------------------
# Baselines: other projects' caches

def kivi(x, bits, sink, by_channel):
    """Return what KIVI (arXiv 2402.02750) gives back of x (b, g, s, d): min and max of 32 elements, sinks exact.

    The 32 are tokens of one channel for keys, and channels of one token for values.
    """
    tokens = x.shape[2]
    packed = functional.pad(x[:, :, sink:], (0, 0, 0, -(tokens - sink) % 32))
    if by_channel:
        packed = packed.mT.contiguous()
    packed = dequantize(*quantize(packed, Codec(bits, "affine", 1.0, group=32)))
    if by_channel:
        packed = packed.mT
    return torch.cat([x[:, :, :sink], packed], 2)[:, :, :tokens]

def attend_through_kivi(bits, windows, l, q, k, v):
    k_hat = kivi(k, bits, windows.sink, by_channel=True)
    v_hat = kivi(v, bits, windows.sink, by_channel=False)
    return view_attention(q, k, v, k_hat, v_hat, windows, chunk=16)

def kivi_bits(bits, windows, tokens):
    """Return the bits an element at so many tokens: 32 codes share a scale and a zero of 16 bits."""
    packed = (tokens - windows.sink - windows.keep) // 32 * 32
    return 16 - (16 - bits - 1) * packed / tokens

def remember_last(layer):
    """Let a transformers layer dequantize the same bytes only once: most of the time would go into that."""
    dequantize_layer = layer._dequantize
    known = {}

    def remembered(packed):
        if id(packed) not in known:
            known[id(packed)] = (packed, dequantize_layer(packed))       # keeps the id in use
        return known[id(packed)][1]

    layer._dequantize = remembered
    return known

def quantized_cache_bytes(layer, backend):
    """Count the bytes of one layer of transformers' QuantizedCache, its scales as 16 bits each."""
    total = 2 * layer.keys.numel() + 2 * layer.values.numel()
    for packed in (layer._quantized_keys, layer._quantized_values):
        if backend == "hqq":
            codes, about = packed
            pair = (about["scale"], about["zero"])
        else:
            codes = packed._data._data
            pair = (packed._scale, packed._shift)
        total += codes.nbytes + 2 * sum(numbers.numel() for numbers in pair)
    return total

QUANTIZED_AXIS = {"quanto": 0, "hqq": 1}      # the axis that transformers' guide names

def run_quantized_cache(hf, backend, bits, ids):
    """Feed transformers' QuantizedCache 16 tokens a call: final hidden states (t, D), bits an element.

    It comes with its defaults: groups of 64 channels of a token, and after each 128 tokens all is quantized anew.
    """
    from transformers import QuantizedCache
    axis = QUANTIZED_AXIS[backend]
    cache = QuantizedCache(backend, hf.config, nbits=bits, axis_key=axis, axis_value=axis)
    known = [remember_last(layer) for layer in cache.layers]
    parts = ids[None].split(16, 1)
    hidden = [hf.model(part, cache=cache).last_hidden_state for part in parts]

    # A gigabyte that a cycle of references would keep.
    for values in known:
        values.clear()
    config = hf.config
    elements = 2 * len(ids) * config.num_key_value_heads * config.head_dim
    used = 8 * quantized_cache_bytes(cache.layers[-1], backend)
    return torch.cat(hidden, 1)[0], used / elements

def missing_backends():
    """List the packages behind transformers' QuantizedCache that are not installed."""
    from transformers import utils
    is_installed = {
        "quanto": utils.is_optimum_quanto_available(),
        "hqq": utils.is_hqq_available(),
    }
    return [backend for backend in is_installed if not is_installed[backend]]

def ways_to_attend(schemes, config, tokens):
    """Return {name: (attend, bits an element after decoding `tokens` tokens)} of our schemes and of KIVI."""
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    ways = {}
    for name, scheme in schemes.items():
        bits = 8 * cache_bytes(config, tokens, scheme, steps=tokens // 16) / elements
        ways[name] = (partial(attend_through_windows, scheme, Windows(), 16), bits)
    for bits in (2, 4):
        for windows in (Windows(0, 32, 32), Windows(16, 128, 32)):
            name = f"kivi-{bits} {windows.sink}/{windows.keep}/32"
            held = kivi_bits(bits, windows, tokens)
            ways[name] = (partial(attend_through_kivi, bits, windows), held)
    return ways

def baselines(options):
    """Divergence from 16 bits of our schemes, of KIVI's and of transformers' QuantizedCache, in calls of 16 tokens."""
    bench = load_bench(options)
    model = bench.model
    hf = load_transformers(bench)
    sequences = texts(options, bench, options.seqs, options.len)
    ways = ways_to_attend(two_bit_schemes(bench.moments), model.config, options.len)
    missing = missing_backends()
    for backend in missing:
        print(f"no rows of {backend}: it is not installed")

    # Final hidden states by every cache, compared with the unquantized ones.
    rows = []
    bits = {"none": 16.0}
    for ids in sequences:
        hidden = {"none": forward(model, ids[None], exact_attention)[0]}
        for name, (attend, held) in ways.items():
            hidden[name] = forward(model, ids[None], attend)[0]
            bits[name] = held
        for backend in QUANTIZED_AXIS.keys() - set(missing):
            for width in (2, 4):
                name = f"{backend}-{width}"
                hidden[name], bits[name] = run_quantized_cache(hf, backend, width, ids)
        rows.append(divergence(model, hidden, ids))

    table = {}
    for name, figures in summary(rows).items():
        cells = [figures[figure] for figure in ("kl", "same_top1", "perplexity")]
        table[name] = [*cells, (bits[name], math.nan)]
    print_table(
        f"{options.seqs} sequences of {options.len} tokens, in calls of 16",
        ["KL, nats", "same top-1", "perplexity", "bits an element"], table)

    kl = {name: torch.stack([row[name][1] for row in rows]) for name in table}
    claims = {
        "wush diverges less than hadamard": clearly_less(kl["wush"], kl["hadamard"]),
        "refined diverges less than wush": clearly_less(kl["refined"], kl["wush"]),
    }
    for name in kl:
        if "-2" in name:
            claims[f"refined diverges less than {name}"] = clearly_less(kl["refined"], kl[name])
    return claims

# ----------------------------------------------------------------------------------------------------------------
# Retrieval and agreement

HAYSTACK_TOKENS = 412      # with the needles about 500

def retrieval_rows(answers, slots):
    """Make a row of the table: all questions, then those of each depth, then those of each part of a flush."""
    found, log_probability = answers
    cells = [mean_and_error(found.mean(1)), mean_and_error(log_probability.mean(1))]
    cells += [mean_and_error(of_depth) for of_depth in found.T]
    for quarter in range(4):
        cells.append(mean_and_error(found[slots // 4 == quarter]))
    return cells

def retrieve(options):
    """How often numbers that are hidden in texts, five in 500 tokens, are found again, through two windows."""
    bench = load_bench(options)
    schemes = two_bit_schemes(bench.moments)
    schemes["oscar"] = make_scheme(bench.moments, "oscar")

    def encode(text):
        ids = bench.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids)

    count = math.ceil(options.seqs * options.len / HAYSTACK_TOKENS)
    fillers = texts(options, bench, count, HAYSTACK_TOKENS)
    haystacks = [haystack(encode, filler, seed) for seed, filler in enumerate(fillers)]
    places = [[question.place for question in questions] for _, questions in haystacks]

    # The errors are over texts, since the questions of one text share a cache.
    table = {}
    log_probability = {}
    for windows in (Windows(16, 128, 16), Windows(4, 16, 16)):
        slots = (torch.tensor(places) - windows.sink) % windows.flush
        for name, answers in retrieval(bench.model, haystacks, schemes, windows).items():
            row = f"{name} {windows.sink}/{windows.keep}/{windows.flush}"
            table[row] = retrieval_rows(answers, slots)
            log_probability[row] = answers[1].mean(1)

    columns = ["found", "log-prob", "at 0.1", "at 0.3", "at 0.5", "at 0.7", "at 0.9"]
    columns += ["slots 0-3", "4-7", "8-11", "12-15"]
    print_table(
        f"{count} texts of about 500 tokens, five questions each: by depth, by slot of the flush",
        columns, table)
    claims = {"16 bits find most": table["none 16/128/16"][0][0] >= 0.8}
    for windows in ("16/128/16", "4/16/16"):
        wush_row = log_probability[f"wush {windows}"]
        refined_row = log_probability[f"refined {windows}"]
        sentence = f"refined gives the numbers more probability than wush, windows {windows}"
        claims[sentence] = clearly_less(wush_row, refined_row)
    return claims

def continued(model, cache, prompts, steps, fed=None):
    """Continue prompts greedily: (prompt, step). If `fed` is passed, its tokens are fed instead of those chosen."""
    chosen = []

    def pick(scores):
        chosen.append(scores.argmax(-1))
        return chosen[-1] if fed is None else fed[:, len(chosen) - 1]

    for _ in decode(model, cache, prompts, steps, pick=pick):
        pass
    return torch.stack(chosen, 1)

def agreement(options):
    """How far greedy continuations agree with 16 bits, running freely and fed the tokens that 16 bits chose.

    The prompts are the first quarters of 2 · --seqs sequences; half as many tokens follow.
    """
    bench = load_bench(options)
    quarter = options.len // 4
    sequences = texts(options, bench, 2 * options.seqs, options.len)
    prompts = [ids[:quarter].tolist() for ids in sequences]
    steps = quarter // 2

    runs = with_schemes(bench.model, two_bit_schemes(bench.moments))
    model, empty_cache = runs.pop("none")
    exact = continued(model, empty_cache(batch=len(prompts)), prompts, steps)
    table = {}
    fed = {}
    for name, (model, empty_cache) in runs.items():
        caches = [empty_cache(batch=len(prompts)) for _ in range(2)]
        free = continued(model, caches[0], prompts, steps) == exact
        forced = continued(model, caches[1], prompts, steps, fed=exact) == exact
        fed[name] = forced.double().mean(1)
        prefix = free.double().cumprod(1).sum(1)
        figures = (prefix, free.double().mean(1), fed[name])
        table[name] = [mean_and_error(figure) for figure in figures]
    print_table(
        f"{steps} greedy tokens after {len(prompts)} prompts of {quarter} tokens",
        ["common prefix", "equal tokens", "equal if fed"], table)
    return {"fed 16 bits' tokens, refined agrees more often than wush":
            clearly_less(fed["wush"], fed["refined"])}

# ----------------------------------------------------------------------------------------------------------------
# Speed

def speed(options):
    """Seconds of a prefill of --len tokens and of the steps after it, as ratios; the caches take turns."""
    bench = load_bench(options)
    schemes = two_bit_schemes(bench.moments)
    del schemes["hadamard"]
    runs = with_schemes(bench.model, schemes)
    [context] = texts(options, bench, 1, options.len)

    prefill = dict.fromkeys(runs, 0.0)
    for _ in range(4):
        for name, (model, empty_cache) in runs.items():
            start = time.perf_counter()
            logits(model, feed(model, empty_cache(), context[None])[:, -1])
            prefill[name] += time.perf_counter() - start
    ratio = prefill["refined"] / prefill["wush"]
    print(f"\nprefill of {len(context)} tokens, refined / wush: {ratio:.2f}")

    # Means, not medians: the flushes count.
    filled = {name: (model, empty_cache()) for name, (model, empty_cache) in runs.items()}
    times = step_times(filled, context, steps=options.steps)
    step = {name: statistics.mean(seconds) for name, seconds in times.items()}
    print(f"step after {len(context)} tokens, wush / 16 bits: {step['wush'] / step['none']:.2f}, "
          f"refined / wush: {step['refined'] / step['wush']:.2f}")
    return {"feedback costs a prefill at most half as much again":
            prefill["refined"] < 1.5 * prefill["wush"]}

def speed_through_transformers(options):
    """Seconds of a step of WushCache and of QuantizedCache with quanto, both with 2 bits after --len tokens."""
    if "quanto" in missing_backends():
        raise ValueError("this needs optimum-quanto: pip install --no-deps optimum-quanto ninja")
    from transformers import QuantizedCache
    from wush_tools.transformers_cache import WushCache
    bench = load_bench(options)
    hf = load_transformers(bench)
    caches = {
        "wush": WushCache(hf.config, derive(bench.moments)),
        "quanto": QuantizedCache("quanto", hf.config, nbits=2, axis_key=0, axis_value=0),
    }

    # "wush" attends to any other cache as "sdpa" does. quanto quantizes anew every 128 tokens.
    hf.set_attn_implementation("wush")
    [context] = texts(options, bench, 1, options.len)
    for cache in caches.values():
        hf(context[None], cache=cache, logits_to_keep=1)
    seconds = dict.fromkeys(caches, 0.0)
    for step in range(20 + 2 * options.steps):
        for name, cache in caches.items():
            start = time.perf_counter()
            hf(context[None, :1], cache=cache)
            if step >= 20:
                seconds[name] += time.perf_counter() - start
    ratio = seconds["quanto"] / seconds["wush"]
    print(f"\nsteps after {options.len} tokens, quanto / wush: {ratio:.2f}")
    return {"WushCache is faster than quanto": seconds["wush"] < seconds["quanto"]}

# ----------------------------------------------------------------------------------------------------------------
# Signs and the picture

def wush_with_signs(seed, gram, hess, m=None, **arguments):
    """Derive `wush` as if eigh had returned other signs: 𝓗 S 𝓗 T for a random diagonal S of ±1."""
    T = wush(gram, hess, m, **arguments)
    generator = torch.Generator().manual_seed(seed)
    signs = 2 * torch.randint(0, 2, T.shape[:-1], generator=generator) - 1
    H = hadamard(T.shape[-1]).to(T)
    return H @ (signs[..., None] * (H @ T))

def signs(options):
    """How much five choices of the eigenvectors' signs move the divergence: T's loss does not see them."""
    bench = load_bench(options)
    sequences = texts(options, bench, options.seqs, options.len)
    table = {}
    for seed in range(options.choices):
        row = TRANSFORMS["wush"]._replace(rule=partial(wush_with_signs, seed))
        with mock.patch.dict(TRANSFORMS, {"wush with signs": row}):
            schemes = {
                "wush": make_scheme(bench.moments, "wush with signs", refine=PAPER),
                "refined": make_scheme(bench.moments, "wush with signs", refine=REFINED),
            }
        scores = perplexity(bench.model, sequences, schemes)
        table[f"signs {seed}"] = [scores["wush"]["kl"], scores["refined"]["kl"]]
    print_table(
        f"{options.seqs} sequences of {options.len} tokens: KL, nats", ["wush", "refined"], table)
    least_of_wush = min(of_wush for (of_wush, _), _ in table.values())
    most_of_refined = max(of_refined for _, (of_refined, _) in table.values())
    return {"the worst refined is better than the best wush": most_of_refined < least_of_wush}

COLOURS = {"hadamard": "#0072B2", "oscar": "#E69F00", "wush": "#D55E00", "refined": "#009E73"}

def draw(axes, perplexities, title):
    """Draw perplexity over bits: {bits: {name: perplexity}}."""
    bits = sorted(perplexities)
    for name, colour in COLOURS.items():
        curve = [perplexities[width][name] for width in bits]
        label = "wush (the paper)" if name == "wush" else name
        width = 3 if name == "refined" else 1.8
        axes.plot(bits, curve, "o-", color=colour, label=label, lw=width)
    axes.axhline(perplexities[bits[0]]["none"], color="0.3", ls="--", lw=1, label="16 bits")
    axes.set(
        title=title, ylabel="perplexity", xticks=bits,
        xlabel="bits an element of a packed token, scales included")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)

def picture(options):
    """Draw perplexity over bits from --figures, what `wush_kv.py --task ppl --json` wrote with --bits 2, 3 and 4."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install matplotlib") from None

    # The 64 codes of a head share 32 bits of scale and offset: half a bit each.
    perplexities = {}
    for file in options.figures:
        run = json.loads(Path(file).read_text(encoding="utf-8"))
        perplexities[statistics.mean([run["k_bits"], run["v_bits"]]) + 0.5] = run["perplexity"]
    figure, axes = plt.subplots(figsize=(7.04, 3.96), layout="constrained")
    draw(axes, perplexities, options.title)
    figure.savefig(options.out, dpi=100)
    plt.close(figure)
    return {f"refined lies below wush at {bits} bits": run["none"] < run["refined"] < run["wush"]
            for bits, run in perplexities.items()}

# ----------------------------------------------------------------------------------------------------------------
# The command line

COMMANDS = {
    "baselines": baselines,
    "retrieval": retrieve,
    "agreement": agreement,
    "speed": speed,
    "speed_through_transformers": speed_through_transformers,
    "signs": signs,
    "picture": picture,
}
ASSETS = Path(__file__).parent.parent / "assets"

def parse(argv):
    summaries = [f"{name}: {command.__doc__.splitlines()[0]}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(summaries),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "name", metavar="NAME", choices=[*COMMANDS], help="what to measure or draw, see below")
    parser.add_argument("--model", help="folder or hub id of the checkpoint")
    parser.add_argument("--calib", help="text file to calibrate on")
    parser.add_argument("--calib-seqs", type=int, default=12, help="calibration sequences (12)")
    parser.add_argument("--calib-len", type=int, default=2048, help="tokens of each (2048)")
    parser.add_argument("--eval", help="text file to measure on")
    parser.add_argument("--seqs", type=int, default=4, help="evaluation sequences (4)")
    parser.add_argument("--len", type=int, default=2048, help="tokens of each (2048)")
    parser.add_argument("--steps", type=int, default=64, help="speed: timed steps (64)")
    parser.add_argument("--choices", type=int, default=5, help="signs: choices of signs (5)")
    parser.add_argument("--figures", nargs="+", help="picture: what --task ppl --json wrote")
    parser.add_argument("--title", help="picture: its title")
    parser.add_argument("--out", default=str(ASSETS / "bits.png"), help="picture: file to write")
    options = parser.parse_args(argv)
    needed = ["figures"] if options.name == "picture" else ["model", "calib", "eval"]
    for flag in needed:
        if not getattr(options, flag):
            parser.error(f"{options.name} needs --{flag}")
    return options

def main(argv=None):
    options = parse(argv)
    torch.set_num_threads(1)
    try:
        claims = COMMANDS[options.name](options)
    except (ValueError, OSError) as error:
        sys.exit(f"measure: {error}")
    for sentence, is_shown in claims.items():
        print(f"{'shown' if is_shown else 'NOT SHOWN'}: {sentence}")
    if not all(claims.values()):
        sys.exit(1)

if __name__ == "__main__":
    main()
