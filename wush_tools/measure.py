"""The measurements behind README's tables and its picture, on a real model, as commands.

    python -m wush_tools.measure baselines retrieval agreement --model FOLDER --calib FILE --eval FILE
    python -m wush_tools.measure picture --figures 2.json 3.json 4.json --title TITLE

--seqs, 4 or more, scales them. transformers' cache: pip install --no-deps optimum-quanto ninja hqq termcolor
"""
import argparse
import copy
import functools
import json
import math
import random
import time
from pathlib import Path
from unittest import mock

import torch

import wush_kv as W
from wush_kv import Codec
from wush_tools import checkpoints, cli
from wush_tools.evaluate import (cache_bytes, divergence, mean_and_error as mean, perplexity, quantized_view,
                                 view_attention)


def two_bit_schemes(moments, *names):
    """Make a scheme for each transform; a name that is none is wush with all refinements."""
    schemes = {}
    for name in names:
        parts = [] if name in W.TRANSFORMS else [*W.REFINEMENTS]
        tensors = W.derive(moments, "wush" if parts else name, refine=parts)
        schemes[name] = W.Scheme(*cli.codecs(cli.Options(bits=2), parts), tensors)
    return schemes

@functools.cache
def calibrated(folder, calib, text, calib_seqs):
    """The model, its moments by --calib, what encodes text, and --eval's tokens; all in float32."""
    model = checkpoints.load_model(folder, checkpoints.read_config(folder), torch.float32)
    tokenizer = checkpoints.read_tokenizer(folder, model.config)
    encode = lambda text: torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    calib, text = (encode(Path(file).read_text(encoding="utf-8")) for file in (calib, text))
    return model, W.collect_moments(model, calib.split(2048)[:calib_seqs]), encode, text

def real(o):
    """As `calibrated`, with 2-bit schemes in place of the moments."""
    model, moments, encode, text = calibrated(o.model, o.calib, o.eval, o.calib_seqs)
    return model, two_bit_schemes(moments, "hadamard", "wush", "refined"), encode, text

def clearly_less(a, b):      # on the same texts, by more than two standard errors of the difference
    return mean(b - a)[0] > 2 * mean(b - a)[1]

def print_table(title, columns, rows):
    print(f"\n{title}\n{'':20}" + "".join(f"{column:>19}" for column in columns))
    for name, cells in rows.items():
        print(f"{name:20}" + "".join(f"{cli.shown(*cell):>19}" for cell in cells))

def run_packed(model, windows, bits, read, ids):
    """Run ids as if in calls of 16; read(side, l, x) is what the packed part of a cache gives back of x."""
    view = quantized_view(len(ids), *windows, 16)
    return W.forward(model, ids[None], lambda l, q, k, v: view_attention(
        q, k, v, read("k", l, k), read("v", l, v), view))[0], bits

def kivi(bits, sink, side, l, x):
    """Read x back from codes as KIVI's (arXiv 2402.02750): min/max of 32 tokens by key channel, 32 values."""
    turn = (lambda y: y.mT.contiguous()) if side == "k" else lambda y: y
    whole = torch.nn.functional.pad(x[:, :, sink:], (0, 0, 0, -(x.shape[2] - sink) % 32))
    y = turn(W.dequantize(*W.quantize(turn(whole), Codec(bits, "affine", 1.0, 32))))
    return torch.cat([x[:, :, :sink], y], 2)[:, :, :x.shape[2]]

def run_transformers(hf, backend, bits, ids):
    """Feed transformers' QuantizedCache 16 tokens a call: its defaults, with the axis that its guide names,
    a group being 64 channels of a token; each 128 tokens all is quantized anew. Scales count 16 bits."""
    from transformers import QuantizedCache
    axis, c, read = {"quanto": 0, "hqq": 1}[backend], hf.config, {}
    cache = QuantizedCache(backend, c, nbits=bits, axis_key=axis, axis_value=axis)
    def remembered(dequantize, q):     # or most of the time goes into reading the same again
        if id(q) not in read:
            read[id(q)] = q, dequantize(q)
        return read[id(q)][1]
    for layer in cache.layers:
        layer._dequantize = functools.partial(remembered, layer._dequantize)
    hidden = [hf.model(part, past_key_values=cache).last_hidden_state for part in ids[None].split(16, 1)]
    used = 32 * layer.keys.numel()
    for q in layer._quantized_keys, layer._quantized_values:
        codes, *pair = (q[0], q[1]["scale"], q[1]["zero"]) if axis else (q._data._data, q._scale, q._shift)
        used += 8 * codes.nbytes + 16 * sum(p.numel() for p in pair)
    read.clear()                       # a gigabyte, and a cycle holds it
    return torch.cat(hidden, 1)[0], used / (2 * len(ids) * c.num_key_value_heads * c.head_dim)

def baselines(o):
    """At 2 bits refined diverges less than wush, wush than hadamard, and refined than the others' caches."""
    from transformers import AutoModelForCausalLM, utils
    (model, schemes, _, text), bind, seen, kl, rows = real(o), functools.partial, {}, {}, {}
    c = model.config
    hf = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32).requires_grad_(False)
    held = cache_bytes(c, 2048) * 4 / (c.num_hidden_layers * c.num_key_value_heads * c.head_dim)  # 2 bits
    ways = {"none": lambda ids: (W.forward(model, ids[None], lambda l, *x: W.causal_attention(*x))[0], 16)}
    ways |= {name: bind(run_packed, model, (16, 128, 16), held, lambda side, l, x, s=s: W.roundtrip(
        x, *s.of(side, l))) for name, s in schemes.items()}
    for bits, sink, keep in (2, 0, 32), (2, 16, 128), (4, 0, 32), (4, 16, 128):
        held = 16 - (15 - bits) * ((2048 - sink - keep) // 32 / 64)  # 32 codes share a 16-bit scale and zero
        ways[f"kivi-{bits} {sink}/{keep}/32"] = bind(
            run_packed, model, (sink, keep, 32), held, bind(kivi, bits, sink))
    for backend, there in ("quanto", utils.is_optimum_quanto_available()), ("hqq", utils.is_hqq_available()):
        ways |= {f"{backend}-{bits}": bind(run_transformers, hf, backend, bits) for bits in (2, 4) if there}
        print("" if there else f"no rows of {backend}: it is not installed")
    for ids in text.split(2048)[:o.seqs]:
        runs = {name: way(ids) for name, way in ways.items()}
        for name, figures in divergence(model, {name: run[0] for name, run in runs.items()}, ids).items():
            seen.setdefault(name, []).append(figures)
    for name, figures in seen.items():
        nll, kl[name], same = torch.stack(figures, 1)
        ppl = math.exp(nll.mean())
        rows[name] = mean(kl[name]), mean(same), (ppl, ppl * mean(nll)[1]), (runs[name][1], math.nan)
    print_table(f"{o.seqs} sequences of 2048 tokens, in calls of 16",
                ["KL, nats", "same top-1", "perplexity", "bits an element"], rows)
    assert clearly_less(kl["refined"], kl["wush"]) and clearly_less(kl["wush"], kl["hadamard"])
    assert all(clearly_less(kl["refined"], kl[name]) for name in kl if "-2" in name)

def haystack(encode, text, seed):
    """Hide five needles of one form, one a fifth, in 412 tokens: ids, (place, question, whole) of each."""
    draw, ids, asked = random.Random(seed), [], []
    words = draw.sample("apple river candle window garden mirror bridge castle silver forest".split(), 5)
    for part, word in zip(text[seed * 412:][:412].tensor_split(5), words):
        tell = f"\nThe special magic number for {word} is {draw.randrange(10 ** 4, 10 ** 5)}"
        ask, tell, start = encode(tell[:-6]), encode(tell), draw.randrange(len(part))
        asked.append((sum(map(len, ids)) + start + len(ask), len(ask), tell))
        ids += part[:start], tell, encode(".\n"), part[start:]
    return torch.cat(ids)[None], asked

def answered(model, scheme, windows, kv, asked):
    """Ask caches packed from a first call's exact `kv`: [found, log-probability, slot of the flush] each."""
    rows, cache = [], W.new_cache(model, 1, scheme, *windows)
    for l, (held, (k, v)) in enumerate(zip(cache, kv)):
        held.append(k, W.apply(scheme.tensors["v"][l], v) if scheme else v, [0])
        held.flush()
    for place, n, tell in asked:       # found: each token is the likeliest one after those before it
        log_p = W.logits(model, W.feed(model, copy.deepcopy(cache), tell[None])[0, n - 1:-1]).log_softmax(-1)
        own, slot = log_p.gather(1, tell[n:, None])[:, 0], (place - windows[0]) % windows[2]
        rows.append([(own == log_p.amax(-1)).all().item(), own.sum().item(), slot])
    return rows

def retrieval(o):
    """The number that is asked for, one of five, is given more probability by refined than by wush."""
    (model, schemes, encode, text), seen, rows = real(o), {}, {}
    models = {name: W.fold_values(model, s.tensors["v"]) for name, s in schemes.items()} | {"none": model}
    ways = ("none", (16, 128, 16)), *((name, w) for w in ((16, 128, 16), (4, 16, 16)) for name in schemes)
    for seed in range(5 * o.seqs):
        kv, (ids, asked) = [], haystack(encode, text, seed)
        W.forward(model, ids, lambda l, *qkv: kv.append(qkv[1:]) or W.causal_attention(*qkv))
        for name, w in ways:
            row = answered(models[name], schemes.get(name), w, kv, asked)
            seen.setdefault(f"{name} {w[0]}/{w[1]}/{w[2]}", []).append(row)
    seen = {name: torch.tensor(row).unbind(-1) for name, row in seen.items()}
    for name, (hit, log_p, slot) in seen.items():        # errors over contexts, whose questions share a cache
        quarters = (mean(hit[slot // 4 == i]) for i in range(4))
        rows[name] = mean(hit.mean(1)), mean(log_p.mean(1)), *map(mean, hit.T), *quarters
    print_table(f"{5 * o.seqs} contexts of 500 tokens, five questions each: by depth, by slot of the flush",
                "found,log-prob,at 0.1,at 0.3,at 0.5,at 0.7,at 0.9,slots 0-3,4-7,8-11,12-15".split(","), rows)
    assert rows["none 16/128/16"][0][0] >= 0.8
    assert clearly_less(seen["wush 16/128/16"][1].mean(1), seen["refined 16/128/16"][1].mean(1))
    assert clearly_less(seen["wush 4/16/16"][1].mean(1), seen["refined 4/16/16"][1].mean(1))

def continued(model, scheme, prompts, given=None):
    """Decode 256 tokens greedily, (prompt, step); the greedy choices all the same if others are `given`."""
    cache, chosen = W.new_cache(model, len(prompts), scheme), []
    for step in range(256):
        ids = prompts if step == 0 else (chosen if given is None else given.T)[step - 1][:, None]
        chosen.append(W.logits(model, W.feed(model, cache, ids)[:, -1]).argmax(-1))
    return torch.stack(chosen, 1)

def agreement(o):
    """Fed the 16-bit continuation, refined agrees with it more often than wush; free text is too noisy."""
    (model, schemes, _, text), rows, fed = real(o), {}, {}
    prompts = text[:4096 * o.seqs].view(-1, 512)[::4]
    exact = continued(model, None, prompts)
    for name, s in schemes.items():
        folded = W.fold_values(model, s.tensors["v"])
        free = (continued(folded, s, prompts) == exact).double()
        fed[name] = (continued(folded, s, prompts, exact) == exact).double().mean(1)
        rows[name] = mean(free.cumprod(1).sum(1)), mean(free.mean(1)), mean(fed[name])
    print_table(f"256 greedy tokens after {len(prompts)} prompts of 512 tokens, windows 16/128/16",
                ["common prefix", "equal tokens", "equal if fed"], rows)
    assert clearly_less(fed["wush"], fed["refined"])

def alternate(ways, rounds):
    """Run every way in turn, `rounds` times: seconds of each, so that a busy machine slows all alike."""
    seconds = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name] += time.perf_counter() - start
    return seconds

def speed(o):
    """Feeding errors back costs prefill at most half as much again. Ratios of times; flushes are included."""
    model, schemes, _, text = real(o)
    schemes = {name: schemes.get(name) for name in ("none", "wush", "refined")}
    models = {name: s and W.fold_values(model, s.tensors["v"]) or model for name, s in schemes.items()}
    def prefilled(name, n):
        cache = W.new_cache(models[name], 1, schemes[name])
        W.logits(models[name], W.feed(models[name], cache, text[None, :n])[:, -1])
        return cache
    prefill = alternate({name: functools.partial(prefilled, name, 2048) for name in models}, 4)
    print(f"\nprefill of 2048 tokens, refined / wush: {prefill['refined'] / prefill['wush']:.2f}")
    for n in 2000, 4000, 7500:
        caches = {name: prefilled(name, n) for name in models}
        feed = lambda name: W.logits(models[name], W.feed(models[name], caches[name], text[None, :1]))
        ways = {name: functools.partial(feed, name) for name in models}
        alternate(ways, 20)                                # compiles, and anew after a flush
        step = alternate(ways, 64)
        print(f"step after {n} tokens, wush / 16 bits: {step['wush'] / step['none']:.2f}, "
              f"refined / wush: {step['refined'] / step['wush']:.2f}")
    assert prefill["refined"] < 1.5 * prefill["wush"]

def speed_through_transformers(o):
    """WushCache decodes faster than QuantizedCache with quanto, both at 2 bits after 4000 tokens."""
    from transformers import AutoModelForCausalLM, QuantizedCache, utils
    if not utils.is_optimum_quanto_available():
        return print("no speed through transformers: optimum-quanto is not installed")
    _, schemes, _, text = real(o)
    hf = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32).requires_grad_(False)
    caches = {"wush": W.WushCache(hf.config, schemes["refined"].tensors),
              "quanto": QuantizedCache("quanto", hf.config, nbits=2, axis_key=0, axis_value=0)}
    hf.set_attn_implementation("wush")                     # of a cache that is not ours: "sdpa"
    for cache in caches.values():
        hf(text[None, :4000], past_key_values=cache, logits_to_keep=1)
    feed = lambda name: hf(text[None, :1], past_key_values=caches[name])
    ways = {name: functools.partial(feed, name) for name in caches}
    alternate(ways, 20)
    step = alternate(ways, 128)                            # quanto quantizes anew every 128 tokens
    print(f"\nsteps after 4000 tokens, quanto / wush: {step['quanto'] / step['wush']:.2f}")
    assert step["wush"] < step["quanto"]

def signs(o):
    """Eigenvectors' signs are LAPACK's choice: T's loss does not see them, rounding does, refined less."""
    model, moments, _, text = calibrated(o.model, o.calib, o.eval, o.calib_seqs)
    eigh, rows = torch.linalg.eigh, {}
    for seed in range(5):
        def flipped(A):
            draw = torch.Generator().manual_seed(seed)
            signs = 2 * torch.randint(0, 2, (*A.shape[:-2], 1, A.shape[-1]), generator=draw) - 1
            return (answer := eigh(A)).eigenvalues, answer.eigenvectors * signs
        with mock.patch.object(torch.linalg, "eigh", flipped):
            schemes = two_bit_schemes(moments, "wush", "refined")
        scores = perplexity(model, text.split(2048)[:o.seqs], schemes)
        rows[f"signs {seed}"] = scores["wush"]["kl"], scores["refined"]["kl"]
    print_table(f"{o.seqs} sequences of 2048 tokens: KL, nats", ["wush", "refined"], rows)
    assert max(refined for _, (refined, _) in rows.values()) < min(wush for (wush, _), _ in rows.values())

def picture(o):
    """Draw assets/bits.png, with --title, from --figures: what `--task ppl --json` wrote at 2, 3, 4 bits."""
    import matplotlib.pyplot as plt
    runs = [json.loads(Path(file).read_text()) for file in o.figures]
    runs = {run["bits"] + 0.5: run["perplexity"] for run in runs}      # 64 codes share a pair of 32 bits
    figure, axes = plt.subplots(figsize=(7.04, 3.96), layout="constrained")
    colours = {"hadamard": "#0072B2", "oscar": "#E69F00", "wush": "#D55E00", "refined": "#009E73"}
    for name, colour in colours.items():
        axes.plot(sorted(runs), [runs[bits][name] for bits in sorted(runs)], "o-", color=colour,
                  label=name + " (the paper)" * (name == "wush"), lw=3 if name == "refined" else 1.8)
    axes.axhline(runs[2.5]["none"], color="0.3", ls="--", lw=1, label="16 bits")
    axes.set(title=o.title, ylabel="perplexity", xticks=sorted(runs),
             xlabel="bits an element of a packed token, scales included")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(Path(W.__file__).parent / "assets" / "bits.png", dpi=100)
    assert all(run["none"] < run["refined"] < run["wush"] for run in runs.values())

MEASUREMENTS = {f.__name__: f for f in (
    baselines, retrieval, agreement, speed, speed_through_transformers, signs)}

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="+", choices=[*MEASUREMENTS, "picture"], help="what to measure or draw")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--calib", help="text file to calibrate on")
    parser.add_argument("--eval", help="text file to measure on")
    parser.add_argument("--seqs", type=int, default=4, help="evaluation sequences (default: 4)")
    parser.add_argument("--calib-seqs", type=int, default=12, help="calibration sequences (default: 12)")
    parser.add_argument("--figures", nargs="+", help="picture: what --task ppl --json wrote")
    parser.add_argument("--title", help="picture: its title")
    o = parser.parse_args(argv)
    if {*o.name} & {*MEASUREMENTS} and not (o.model and o.calib and o.eval):
        parser.error("measuring needs --model, --calib and --eval")
    if "picture" in o.name and not o.figures:
        parser.error("the picture needs --figures")
    torch.set_num_threads(1)                               # the published figures are those of one core
    for name in o.name:
        (MEASUREMENTS | {"picture": picture})[name](o)


if __name__ == "__main__":
    main()
