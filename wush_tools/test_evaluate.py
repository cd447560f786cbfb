"""Tests of the evaluation: its one forward pass equals feeding a cache, its sums equal plain loops."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import wush_kv as W
from wush_kv import Codec
from wush_tools import evaluate
from wush_tools.testing import OFF, TWO, WINDOWS, fed, normal, softmax_attention, tokens, transforms

@pytest.mark.parametrize("k_bits, v_bits", [(4, 2), (3, 8), (16, 2), (2, 16)])
def test_cache_bytes_are_a_formula_per_side(k_bits, v_bits, pair):
    """P34, P50."""
    side = lambda b: 16 * b / 8 + 4 if b < 16 else 16 * 2
    sides = {"k": W.Side(codec=Codec(k_bits)), "v": W.Side(codec=Codec(v_bits))}
    got = evaluate.cache_bytes(pair[1].config, 2**15, **sides, sink=0, keep=0, flush=1)
    assert got == pytest.approx(2 * 2 * (side(k_bits) + side(v_bits)), rel=0.001)


@settings(max_examples=60, deadline=None)
@given(t=st.integers(1, 120), sink=st.integers(0, 9), keep=st.integers(0, 20), flush=st.integers(1, 9),
       chunk=st.integers(1, 30))
def test_quantized_view_equals_the_bookkeeping_of_the_cache(t, sink, keep, flush, chunk):
    cache = W.WindowCache(1, 1, 8, sink=sink, keep=keep, flush=flush)
    want = torch.zeros(t, t, dtype=torch.bool)
    for i in range(0, t, chunk):
        want[i:i + chunk, sink:sink + cache.n_packed[0]] = True
        x = torch.zeros(1, 1, min(chunk, t - i), 8)
        cache.attend(x[:, :, None], x, x)
    assert torch.equal(evaluate.quantized_view(t, sink, keep, flush, chunk), want)

@pytest.mark.parametrize("chunk, k_codec, v_codec", [
    (16, TWO, TWO), (1, TWO, TWO), (16, TWO, OFF), (16, OFF, TWO),
    (16, Codec(2, "affine", 0.96, 8), Codec(3, "affine", 0.92, 8)), (16, Codec(2, "centred", 1.3), TWO)])
def test_perplexity_in_one_forward_equals_feeding_the_cache(chunk, k_codec, v_codec, pair):
    """P45: the cache is really read: NLL to 1e-3 relative, KL and top-1 share too, and far from off."""
    _, model = pair
    sequences, T = list(tokens(2, 300)), {"k": transforms(model, 4.0, 3), "v": transforms(model, 4.0, 4)}
    if k_codec.rule == "centred":
        T |= {side + "_feedback": normal(5, *T[side].shape).float().triu(1) / 8 for side in "kv"}
    folded, rows, how = W.fold_values(model, T["v"]), [], W.Scheme(k_codec, v_codec, T)
    for ids in sequences:
        cache = W.new_cache(folded, 1, how, **WINDOWS)
        log_q = fed(folded, cache, ids[None], chunk)[0, :-1].log_softmax(-1)
        log_p = fed(model, W.new_cache(model), ids[None], 300)[0, :-1].log_softmax(-1)
        nll = [-x.gather(1, ids[1:, None]).mean().item() for x in (log_p, log_q)]
        rows.append([*nll, (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
                     (log_p.argmax(-1) == log_q.argmax(-1)).float().mean().item()])
    rows = torch.tensor(rows, dtype=torch.float64)
    (off, nll, kl, same), (_, error, kl_error, _) = rows.mean(0).tolist(), (rows.std(0) / 2**0.5).tolist()
    excess = rows[:, 1] - rows[:, 0]
    got = evaluate.perplexity(model, sequences, {"T": how}, **WINDOWS, chunk=chunk)
    assert abs(nll - off) > 1e-3 and kl > 1e-3 and same < 1
    assert math.log(got["none"]["perplexity"][0]) == pytest.approx(off, rel=1e-5)
    assert math.log(got["T"]["perplexity"][0]) == pytest.approx(nll, rel=1e-3)
    assert got["T"]["perplexity"][1] == pytest.approx(math.exp(nll) * error, rel=0.05)
    assert got["T"]["excess"] == pytest.approx((nll - off, excess.std().item() / 2**0.5), rel=0.02, abs=1e-3)
    assert got["T"]["kl"] == pytest.approx((kl, kl_error), rel=0.02, abs=1e-3)
    assert got["T"]["same_top1"][0] == pytest.approx(same, abs=0.01) and got["none"]["same_top1"][0] == 1
    assert got["none"]["kl"][0] == 0

@pytest.mark.parametrize("sink", [0, 5])
def test_module_error_equals_a_plain_loop(sink, pair):
    """T⁻¹ of what the codes say, in float64; geometric mean over layers; only the sinks exact."""
    hf, model = pair
    sequences, T = list(tokens(2, 90)), {"k": transforms(model, 4.0, 3), "v": transforms(model, 4.0, 4)}
    seen = []
    for ids in sequences:
        W.forward(model, ids[None], lambda *qkv: seen.append(qkv) or W.causal_attention(*qkv[1:]))
    logs = []
    for l, q, k, v in seen:
        hat = []
        for side, x in ("k", k), ("v", v):
            stored = W.dequantize(*W.quantize(W.apply(T[side][l], x), TWO)).double()
            back = torch.einsum("gij,bgsj->bgsi", torch.linalg.inv(T[side][l, :, 0].double()), stored)
            hat.append(torch.cat([x[:, :, :sink].double(), back[:, :, sink:]], 2)[0])
        W_O = hf.model.layers[l].self_attn.o_proj.weight.double()
        module = lambda *kv: softmax_attention(q[0], *kv, 0).permute(2, 0, 1, 3).flatten(1) @ W_O.T
        exact, noisy = module(k[0], v[0]), module(*hat)
        logs.append(((noisy - exact).square().sum() / exact.square().sum()).log())
    each = torch.stack(logs).view(2, 2).mean(1).exp()
    got = evaluate.module_error(model, sequences, {"T": W.Scheme(TWO, TWO, T)}, sink)["T"]
    assert got == pytest.approx((each.mean().item(), each.std().item() / 2**0.5), rel=2e-3) and got[0] > 1e-2
