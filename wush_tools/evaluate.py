"""Evaluation: module error, perplexity and divergence, with standard errors over sequences; speed; bytes."""
import math
import time

import torch
from torch import Tensor
from tqdm import tqdm

from wush_kv import (Model, Scheme, WindowCache, causal_attention, feed, forward, logits, project_out,
                     roundtrip)


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean over sequences and its standard error (nan for a single sequence)."""
    return x.mean().item(), (x.std().item() / math.sqrt(len(x)) if len(x) > 1 else math.nan)

def quantized_view(t: int, sink: int, keep: int, flush: int, chunk: int, device="cpu") -> Tensor:
    """Say which keys a query finds quantized, (t, t), if tokens come in calls of `chunk` each."""
    column = torch.arange(t, device=device)
    length = column // chunk * chunk                             # of the cache as the query's call began
    packed = (length - sink - keep).div(flush, rounding_mode="floor").clamp(min=0) * flush
    return (column >= sink) & (column < sink + packed[:, None])

def view_attention(q: Tensor, k: Tensor, v: Tensor, k_hat: Tensor, v_hat: Tensor, view: Tensor) -> Tensor:
    """Attend causally, to k_hat and v_hat where `view` (t, t) says so, else to k and v, with one softmax.

    Equal to feeding a cache call by call. For 256 queries at a time the exact and the quantized tokens that
    any of them sees are concatenated, and a mask says which of these each query sees.
    """
    causal, o = torch.ones_like(view).tril(), []
    for rows in torch.arange(len(view), device=view.device).split(256):
        exact, hat = causal[rows] & ~view[rows], causal[rows] & view[rows]
        e, h = exact.any(0), hat.any(0)
        side_by_side = (torch.cat([x[:, :, e], x_hat[:, :, h]], 2) for x, x_hat in ((k, k_hat), (v, v_hat)))
        mask = torch.cat([exact[:, e], hat[:, h]], 1)[None, None]
        o.append(causal_attention(q[..., rows, :], *side_by_side, mask))
    return torch.cat(o, -2)

def module_error(model: Model, sequences: list[Tensor], schemes: dict[str, Scheme],
                 sink: int = 0) -> dict[str, tuple[float, float]]:
    """Measure the relative squared error of the attention modules' outputs: {name: (value, standard error)}.

    Each layer gets exact activations; all keys and values but the first `sink` are quantized. Squared error
    after the output projection over squared norm, per layer and sequence; geometric mean over layers, mean
    over sequences.
    """
    ratios = {name: torch.zeros(len(sequences), model.config.num_hidden_layers) for name in schemes}
    for i, ids in enumerate(tqdm(sequences, desc="module error", unit="seq", disable=None)):
        def compare(l, q, k, v):
            o = causal_attention(q, k, v)
            exact = project_out(model, l, o).double()
            for name, scheme in schemes.items():
                hats = [torch.cat([x[:, :, :sink], roundtrip(x, *scheme.of(side, l))[:, :, sink:]], 2)
                        for side, x in (("k", k), ("v", v))]
                error = project_out(model, l, causal_attention(q, *hats)).double() - exact
                ratios[name][i, l] = error.square().sum() / exact.square().sum()
            return o
        forward(model, ids[None].to(model.inv_freq.device), compare)
    return {name: mean_and_error(ratio.log().mean(1).exp()) for name, ratio in ratios.items()}

def divergence(model: Model, hidden: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Compare final hidden states (t, D) with hidden["none"]: means of [NLL, KL, same top-1]."""
    sums = {name: torch.zeros(3, dtype=torch.float64, device=ids.device) for name in hidden}
    for part in torch.arange(len(ids) - 1, device=ids.device).split(256):    # 256 rows of logits at a time
        log_p = logits(model, hidden["none"][part]).float().log_softmax(-1)
        for name, h in hidden.items():
            log_q = log_p if name == "none" else logits(model, h[part]).float().log_softmax(-1)
            nll = -log_q.gather(1, ids[part + 1, None])
            kl = log_p.exp() * (log_p - log_q)
            same = log_p.argmax(-1) == log_q.argmax(-1)
            sums[name] += torch.stack([nll.double().sum(), kl.double().sum(), same.double().sum()])
    return {name: total / (len(ids) - 1) for name, total in sums.items()}

def perplexity(model: Model, sequences: list[Tensor], schemes: dict[str, Scheme], sink: int = 16,
               keep: int = 128, flush: int = 16, chunk: int = 16) -> dict:
    """Score sequences (t,) as if fed in calls of `chunk` tokens through the windows; "none" is unquantized.

    Returns {name: {"perplexity", "excess", "kl", "same_top1": (value, standard error)}}: excess is what the
    log-perplexity has over the unquantized model's, with the error of that difference; kl, in nats, the mean
    divergence of the next-token distribution from that model's; same_top1 how often both put one token first.
    """
    rows = []
    for ids in tqdm(sequences, desc="perplexity", unit="seq", disable=None):
        ids = ids.to(model.inv_freq.device)
        view = quantized_view(len(ids), sink, keep, flush, chunk, ids.device)
        hidden = {"none": forward(model, ids[None], lambda l, *qkv: causal_attention(*qkv))[0]}
        for name, scheme in schemes.items():
            hidden[name] = forward(model, ids[None], lambda l, q, k, v: view_attention(
                q, k, v, roundtrip(k, *scheme.of("k", l)), roundtrip(v, *scheme.of("v", l)), view))[0]
        rows.append(divergence(model, hidden, ids))
    result, exact = {}, torch.stack([row["none"][0] for row in rows])
    for name in rows[0]:
        nll, kl, same = torch.stack([row[name] for row in rows]).unbind(1)
        mean, error = mean_and_error(nll)
        result[name] = {"perplexity": (math.exp(mean), math.exp(mean) * error),
                        "excess": mean_and_error(nll - exact), "kl": mean_and_error(kl),
                        "same_top1": mean_and_error(same)}
    return result

WARM_UP, STEPS = 20, 32      # the first pass a flush, since what is compiled may be compiled anew after one

def decode_speed(model: Model, cache: list[WindowCache], context: Tensor) -> float:
    """Return tokens/s of STEPS one-token steps after `context` (t,), warm-up and compilation left out."""
    feed(model, cache, context[None])
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            start = time.perf_counter()
        scores = logits(model, feed(model, cache, context[None, :1])[:, -1])
        scores.argmax(-1).item()                                 # waits for an asynchronous device
    return STEPS / (time.perf_counter() - start)

def cache_bytes(config, tokens: int, **how) -> float:
    """Measure the bytes per token that all bfloat16 caches hold after `tokens` tokens, windows and all."""
    cache = WindowCache(1, config.num_key_value_heads, config.head_dim, dtype=torch.bfloat16, **how)
    x = torch.zeros(1, config.num_key_value_heads, tokens, config.head_dim, dtype=torch.bfloat16)
    cache.append(x, x, [0])
    cache.flush()
    return cache.nbytes * config.num_hidden_layers / tokens
