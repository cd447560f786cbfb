"""Evaluation: module error, perplexity and divergence, harm by layer, retrieval, bytes held, seconds a step.

A figure over several texts is a pair (value, standard error over the texts). "none" names the unquantized model.
"""
import copy
import math
import random
import statistics
import time
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from wush_kv import (
    Encoding, PlainCache, Scheme, WindowCache, Windows, attention, causal_attention, feed,
    forward, logits, new_cache, project_out, roundtrip, scheme_of, with_scheme)

# ----------------------------------------------------------------------------------------------------------------
# Figures

def mean_and_error(x):
    """Return the mean over texts, x (texts,), and its standard error, which is nan for a single text."""
    error = x.std().item() / math.sqrt(len(x)) if len(x) > 1 else math.nan
    return x.mean().item(), error

def shown(value, error):
    """Write a figure for a table."""
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"

# ----------------------------------------------------------------------------------------------------------------
# Attention that sees quantized tokens
#
# A text goes through the model in one call, but each query attends to what a cache would hold had the text come in
# calls of `chunk` tokens. Masks are made for the queries at hand, so that long texts cost no t × t tensors.

def exact_attention(l, q, k, v):
    """Attend as the unquantized model does."""
    return causal_attention(q, k, v)

def restored(x, encoding):
    """Return what a cache gives back of x (b, g, s, d), 4096 tokens at a time: the steps between are float32."""
    parts = [roundtrip(part, encoding) for part in x.split(4096, 2)]
    return torch.cat(parts, 2)

def quantized_view(query, column, windows, chunk):
    """Say which columns (s,) the queries at positions (t, 1) find packed, (t, s), if calls have `chunk` tokens."""
    sink, keep, flush = windows
    length = query // chunk * chunk                              # of the cache as the query's call began
    due = (length - sink - keep).clamp(min=0) // flush * flush
    return (column >= sink) & (column < sink + due)

def view_attention(q, k, v, k_hat, v_hat, windows, chunk):
    """Attend causally from q (b, g, r, t, d): to k_hat and v_hat where `quantized_view` says so, else to k and v.

    Equal to feeding a cache call by call.
    """
    outputs = []
    t = q.shape[3]
    size = min(256, max(1, 2 ** 22 // t))
    for start in range(0, t, size):
        end = min(start + size, t)
        column = torch.arange(end, device=q.device)
        query = column[start:, None]

        # A piece of queries sees few tokens both exactly and quantized: only what one of them sees is taken.
        is_packed = quantized_view(query, column, windows, chunk)        # (t, s)
        is_exact = (column <= query) & ~is_packed
        packed = is_packed.any(0).nonzero()[:, 0]
        exact = is_exact.any(0).nonzero()[:, 0]
        keys = torch.cat([k[:, :, exact], k_hat[:, :, packed]], 2)
        values = torch.cat([v[:, :, exact], v_hat[:, :, packed]], 2)

        # One softmax over both; the mask says which of them each query sees.
        mask = torch.cat([is_exact[:, exact], is_packed[:, packed]], 1)
        outputs.append(attention(q[..., start:end, :], keys, values, mask[None, None]))
    return torch.cat(outputs, 3)

def attend_through_windows(scheme, windows, chunk, l, q, k, v):
    """Attend in layer l as a window cache of the scheme does."""
    encodings = scheme.layer(l, k.device)
    k_hat = restored(k, encodings.keys)
    v_hat = restored(v, encodings.values)
    return view_attention(q, k, v, k_hat, v_hat, windows, chunk)

# ----------------------------------------------------------------------------------------------------------------
# Module error

def quantized_after(sink, x, encoding):
    """Return x (b, g, s, d) as a cache gives it back that keeps only the first `sink` tokens exact."""
    return torch.cat([x[:, :, :sink], restored(x, encoding)[:, :, sink:]], 2)

def squared_norm(x, minus=None):
    """Sum the squares of x (b, t, D), or of its difference from another, in float64, 1024 tokens at a time."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], 1024):
        part = x[:, start:start + 1024].double()
        if minus is not None:
            part -= minus[:, start:start + 1024].double()
        total += part.square().sum()
    return total

def module_error(model, sequences, schemes, sink=0):
    """Measure the relative squared error of the attention modules' outputs: {name: (value, standard error)}.

    Each layer gets exact activations; all keys and values but the first `sink` are quantized. Squared error
    after the output projection over squared norm, per layer and sequence (t,); geometric mean over layers, mean
    over sequences.
    """
    layers = model.config.num_hidden_layers
    ratios = {name: torch.zeros(len(sequences), layers) for name in schemes}

    def compare(i, l, q, k, v):
        o = causal_attention(q, k, v)
        exact = project_out(model, l, o)
        energy = squared_norm(exact)
        for name, scheme in schemes.items():
            encodings = scheme.layer(l, k.device)
            k_hat = quantized_after(sink, k, encodings.keys)
            v_hat = quantized_after(sink, v, encodings.values)
            noisy = project_out(model, l, causal_attention(q, k_hat, v_hat))
            ratios[name][i, l] = squared_norm(noisy, minus=exact) / energy
        return o

    for i, ids in enumerate(tqdm(sequences, desc="module error", unit="seq", disable=None)):
        forward(model, ids[None].to(model.inv_freq.device), partial(compare, i))
    return {name: mean_and_error(ratio.log().mean(1).exp()) for name, ratio in ratios.items()}

# ----------------------------------------------------------------------------------------------------------------
# Perplexity and divergence

def divergence(model, hidden, ids):
    """Compare final hidden states (t, D) by name with hidden["none"]: by name, means of [NLL, KL, same top-1]."""
    sums = {name: torch.zeros(3, dtype=torch.float64, device=ids.device) for name in hidden}
    predicting = len(ids) - 1

    # 32 tokens at a time: logits are wide, and more of them would not stay in a CPU's caches.
    for start in range(0, predicting, 32):
        part = slice(start, min(start + 32, predicting))
        targets = ids[1:][part, None]
        log_p = logits(model, hidden["none"][part]).float().log_softmax(-1)
        p = log_p.exp()
        likeliest = log_p.argmax(-1)
        for name, states in hidden.items():
            log_q = log_p
            if name != "none":
                log_q = logits(model, states[part]).float().log_softmax(-1)
            nll = -log_q.gather(1, targets)
            kl = p * (log_p - log_q)
            is_same = log_q.argmax(-1) == likeliest
            sums[name][0] += nll.sum(dtype=torch.float64)
            sums[name][1] += kl.sum(dtype=torch.float64)
            sums[name][2] += is_same.sum()
    return {name: total / predicting for name, total in sums.items()}

def summary(rows):
    """Turn `divergence`'s results on several texts into {name: {figure: (value, standard error)}}.

    The figures are kl, in nats, the mean divergence of the next-token distribution from the unquantized model's;
    same_top1, how often both put one token first; excess, what the log-perplexity has over that model's, with the
    error of that difference; perplexity.
    """
    figures = {}
    exact_nll = torch.stack([row["none"][0] for row in rows])
    for name in rows[0]:
        nll, kl, is_same = torch.stack([row[name] for row in rows], 1)
        mean, error = mean_and_error(nll)
        figures[name] = {
            "kl": mean_and_error(kl),
            "same_top1": mean_and_error(is_same),
            "excess": mean_and_error(nll - exact_nll),
            "perplexity": (math.exp(mean), math.exp(mean) * error),
        }
    return figures

def perplexity(model, sequences, schemes, windows=Windows(), chunk=16):
    """Score sequences (t,) as if fed in calls of `chunk` tokens through the windows: `summary`'s figures by name."""
    rows = []
    for ids in tqdm(sequences, desc="perplexity", unit="seq", disable=None):
        ids = ids.to(model.inv_freq.device)
        hidden = {"none": forward(model, ids[None], exact_attention)[0]}
        for name, scheme in schemes.items():
            attend = partial(attend_through_windows, scheme, windows, chunk)
            hidden[name] = forward(model, ids[None], attend)[0]
        rows.append(divergence(model, hidden, ids))
    return summary(rows)

# ----------------------------------------------------------------------------------------------------------------
# Harm
#
# Layers differ in what 2 bits do to the model's output, by orders of magnitude, and keys do more harm than values.
# `allot_bits` gives more bits to where it is most.

HARM_TOKENS = 1024      # of the text that shows it

def measure_harm(model, ids, transforms, quantizer="quest", windows=Windows()):
    """Measure the divergence, in nats, if the keys or the values of one layer alone have 2 bits; all else is exact.

    Returns the transforms with their `harm`. The model runs over ids (t,), of the calibration text, once for the keys
    and once for the values of each layer. Raises ValueError for a text that the windows hold.
    """
    if len(ids) <= sum(windows):
        raise ValueError(f"{len(ids)} tokens fit into the windows: nothing would be quantized")
    ids = ids[:HARM_TOKENS].to(model.inv_freq.device)
    exact = forward(model, ids[None], exact_attention)[0]
    scheme = scheme_of(transforms, 2, quantizer)

    def harm_of(layer, one_side):
        def attend(l, q, k, v):
            if l != layer:
                return exact_attention(l, q, k, v)
            return attend_through_windows(one_side, windows, 16, l, q, k, v)

        hidden = {"none": exact, "rounded": forward(model, ids[None], attend)[0]}
        _, kl, _ = divergence(model, hidden, ids)["rounded"]
        return kl.item()

    sides = {
        "keys": scheme._replace(values=Encoding()),
        "values": scheme._replace(keys=Encoding()),
    }
    layers = range(model.config.num_hidden_layers)
    harm = {name: [] for name in sides}
    for l in tqdm(layers, desc="harm", unit="layer", disable=None):
        for name, one_side in sides.items():
            harm[name].append(harm_of(l, one_side))
    keys = transforms.keys._replace(harm=torch.tensor(harm["keys"]))
    values = transforms.values._replace(harm=torch.tensor(harm["values"]))
    return transforms._replace(keys=keys, values=values)

# ----------------------------------------------------------------------------------------------------------------
# Retrieval
#
# Numbers are hidden in a text, each by a sentence of one form that names it after a word, or after a name that is made
# up, so that no model knows it. The text goes through in one call, which is exact, and is packed; then each number is
# asked for.

WORDS = "apple river candle window garden mirror bridge castle silver forest".split()
NAMES = (
    "Alard Barlius Corwin Eljan Falund Garlene Innor Jorglas Lorgar Marrick Oren Perpin Quinbeth "
    "Salion Toryth Valbert Warmond Yorfin Belkin Calvio Fendric Giltius Horham").split()

def fact(word):
    """Begin the sentence that a number ends."""
    return f"The special magic number for {word} is"

def occurs(part, text):
    """Say whether the tokens `part` stand in a row in `text`, both (t,)."""
    return len(part) <= len(text) and text.unfold(0, len(part), 1).eq(part).all(1).any().item()

class Question(NamedTuple):
    tokens: Tensor              # (t,) the question and its answer
    question_tokens: int        # how many of them are the question
    place: int                  # position of the answer's first token in the text

def haystack(
        encode, filler, seed, words=WORDS, count=5, digits=5, windows=Windows(0, 0, 0), lead="\n"):
    """Hide `count` numbers in the tokens `filler` (t,), one in each part: the text's tokens, as many Questions.

    `encode` maps a string to its tokens (t,); a question begins with `lead`. No sentence begins before the sink is
    full, and keep + flush tokens follow the last: through these windows all are packed when they are asked for.
    """
    draw = random.Random(seed)
    sink, keep, flush = windows
    end = len(filler) - keep - flush
    pieces = [filler[:sink]]
    questions = []
    for part, word in zip(filler[sink:end].tensor_split(count), draw.sample(words, count)):
        start = fact(word)
        sentence = f"{start} {draw.randrange(10 ** (digits - 1), 10 ** digits)}"
        stated = encode("\n" + sentence)
        cut = draw.randrange(len(part))
        pieces += [part[:cut], stated, encode(".\n"), part[cut:]]

        # The number follows the start of its sentence.
        before = sum(len(piece) for piece in pieces[:-3])
        place = before + len(encode("\n" + start))
        questions.append(Question(encode(lead + sentence), len(encode(lead + start)), place))
    pieces.append(filler[end:])
    return torch.cat(pieces), questions

def with_schemes(model, schemes, windows=Windows()):
    """Return {name: (model, maker of its empty caches)} of each scheme, T_V folded in, and of "none"."""
    runs = {"none": (model, partial(new_cache, model))}
    for name, scheme in schemes.items():
        runs[name] = with_scheme(model, scheme, windows)
    return runs

def repeated(layer, count):
    """Copy a layer's cache of one batch row into a cache of `count` rows, which all hold its tokens."""
    new = copy.copy(layer)
    new.n_tokens = layer.n_tokens * count
    repeat = partial(torch.repeat_interleave, repeats=count, dim=0)
    if isinstance(layer, PlainCache):
        new.valid = repeat(layer.valid)
        new.k = repeat(layer.k)
        new.v = repeat(layer.v)
        return new

    new.n_packed = layer.n_packed * count
    new.keys = copy.copy(layer.keys)
    new.values = copy.copy(layer.values)
    for store in (new.keys, new.values):
        store.sink = repeat(store.sink)
        store.codes = repeat(store.codes)
        store.pairs = repeat(store.pairs)
        store.recent = repeat(store.recent)
    return new

def retrieval(model, haystacks, schemes, windows=Windows()):
    """Ask `haystack`s for their numbers: {name: (found, log_probability)}, (texts, questions) each.

    A number is found if each of its tokens is the likeliest one after those before it.
    """
    device = model.inv_freq.device
    answers = {}
    for name, (folded, empty_cache) in with_schemes(model, schemes, windows).items():
        found = []
        log_probability = []
        for text, questions in haystacks:
            cache = empty_cache()
            feed(folded, cache, text[None].to(device))

            # All questions of a text are rows of one batch, padded on the left.
            cache = [repeated(layer, len(questions)) for layer in cache]
            longest = max(len(question.tokens) for question in questions)
            pad = [longest - len(question.tokens) for question in questions]
            rows = [functional.pad(q.tokens, (skipped, 0)) for q, skipped in zip(questions, pad)]
            hidden = feed(folded, cache, torch.stack(rows).to(device), pad)

            for row, question in zip(hidden, questions):
                answer = question.tokens[question.question_tokens:].to(device)
                predicting = row[-len(answer) - 1:-1]
                log_p = logits(folded, predicting).float().log_softmax(-1)
                of_answer = log_p.gather(1, answer[:, None])[:, 0]
                found.append((of_answer == log_p.amax(-1)).all().item())
                log_probability.append(of_answer.sum().item())
        answers[name] = [
            torch.tensor(column, dtype=torch.float32).view(len(haystacks), -1)
            for column in (found, log_probability)]
    return answers

# ----------------------------------------------------------------------------------------------------------------
# Bytes

def kinds_of_layers(scheme, count):
    """Count the layers that store alike: {scheme of one such layer: how many}.

    The schemes are without their transforms, on which the bytes of a cache do not depend.
    """
    kinds = Counter()
    for l in range(count):
        layer = scheme.layer(l)
        kinds[Scheme(Encoding(layer.keys.codec), Encoding(layer.values.codec))] += 1
    return kinds

def take_in(cache, x):
    """Add tokens to a layer's cache, x (b, g, t, d) for both keys and values, almost without attending."""
    if isinstance(cache, PlainCache):
        query = x[:, :, None, -1:]                               # a single one attends
        cache.attend(query, x, x)
    else:
        cache.append(x, x, [0] * len(x))
        cache.flush()

def cache_bytes(config, tokens, scheme=None, windows=Windows(), steps=0):
    """Measure the bytes per token that all layers' bfloat16 caches hold, windows and spare room included.

    The cache has taken in a prompt of `tokens - steps` tokens and then `steps` single ones. None is unquantized.
    """
    if not 0 <= steps < tokens:
        raise ValueError(f"{steps} steps leave no prompt of a cache of {tokens} tokens")
    shape = (1, config.num_key_value_heads, config.head_dim)
    layers = config.num_hidden_layers
    if scheme is None:
        caches = [(PlainCache(*shape, torch.bfloat16), layers)]
    else:
        caches = []
        for kind, count in kinds_of_layers(scheme, layers).items():
            caches.append((WindowCache(*shape, kind, windows, torch.bfloat16), count))

    x = torch.zeros(1, shape[1], tokens - steps, shape[2], dtype=torch.bfloat16)
    total = 0
    for cache, count in caches:
        take_in(cache, x)
        for _ in range(steps):
            take_in(cache, x[:, :, :1])
        total += count * cache.nbytes
    return total / tokens

def packed_bytes(config, scheme):
    """Return the bytes of one packed token in all layers, scales and offsets included."""
    shape = (1, config.num_key_value_heads, config.head_dim)
    row_bytes = 0
    for kind, count in kinds_of_layers(scheme, config.num_hidden_layers).items():
        cache = WindowCache(*shape, kind, dtype=torch.bfloat16)
        for store in (cache.keys, cache.values):
            row_bytes += count * store.codes.shape[-1] * store.codes.itemsize
            row_bytes += count * store.pairs.shape[-1] * store.pairs.itemsize
    return row_bytes * config.num_key_value_heads

# ----------------------------------------------------------------------------------------------------------------
# Speed

WARM_UP = 20      # untimed steps; a flush is among them, since what is compiled may be compiled anew after one
STEPS = 32        # timed ones, if nothing else is said

def time_step(model, cache, token):
    """Return the seconds of a one-token step; token is (1, 1)."""
    start = time.perf_counter()
    scores = logits(model, feed(model, cache, token)[:, -1])
    scores.argmax(-1).item()                                     # waits for an asynchronous device
    return time.perf_counter() - start

def step_times(runs, context, steps=STEPS):
    """Time one-token steps after `context` (t,): {name: seconds of each step}; runs are {name: (model, cache)}.

    The caches take turns step by step, so that a busy machine slows all of them alike. The first WARM_UP steps
    are not timed: WARM_UP + steps tokens are added to each cache.
    """
    for model, cache in runs.values():
        feed(model, cache, context[None])

    seconds = {name: [] for name in runs}
    for step in range(WARM_UP + steps):
        for name, (model, cache) in runs.items():
            seconds[name].append(time_step(model, cache, context[None, :1]))
    return {name: times[WARM_UP:] for name, times in seconds.items()}

def step_seconds(runs, context, steps=STEPS):
    """As `step_times`, the median step of each: {name: seconds}. It hides a flush, which few steps have."""
    times = step_times(runs, context, steps)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
