"""Tests of the evaluation: its one forward pass equals feeding a cache, its sums equal plain loops.

And what it costs: bytes that caches hold, sizes of tensors over long texts. Last, every measurement runs.
"""
import json
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import wush_kv as W
from wush_kv import Codec, Encoding, Scheme, Windows
from wush_tools import evaluate, measure
from wush_tools.testing import (
    HERE, OFF, TWO, WINDOWS, fed, normal, softmax_attention, tokens, transforms)


def random_scheme(model, key_codec, value_codec, feedback=False):
    """Make a scheme of random transforms; with `feedback` errors are fed back too, and groups are centred."""
    encodings = []
    for seed, codec in ((3, key_codec), (4, value_codec)):
        T = transforms(model, 4.0, seed)
        H = None
        F = None
        if feedback:
            H = W.error_hessian(T, torch.eye(T.shape[-1]).expand_as(T)[:, :, 0], centred=True)
            F = W.feedback_matrix(H).float()
            H = H.float()
        encodings.append(Encoding(codec, T, H, F, centred=feedback))
    return Scheme(*encodings)

def without_transforms(key_bits, value_bits):
    return Scheme(Encoding(Codec(key_bits)), Encoding(Codec(value_bits)))


# ---- perplexity and divergence

@settings(max_examples=60, deadline=None)
@given(
    t=st.integers(1, 120), first=st.integers(0, 119), chunk=st.integers(1, 30),
    sink=st.integers(0, 9), keep=st.integers(0, 20), flush=st.integers(1, 9))
def test_quantized_view_equals_the_bookkeeping_of_the_cache(t, first, chunk, sink, keep, flush):
    windows = Windows(sink, keep, flush)
    cache = W.WindowCache(1, 1, 8, windows=windows)
    view = torch.zeros(t, t, dtype=torch.bool)
    for i in range(0, t, chunk):
        view[i:i + chunk, sink:sink + cache.n_packed[0]] = True
        x = torch.zeros(1, 1, min(chunk, t - i), 8)
        cache.attend(x[:, :, None], x, x)

    first = min(first, t - 1)
    query = torch.arange(first, t)[:, None]
    assert torch.equal(
        evaluate.quantized_view(query, torch.arange(t), windows, chunk), view[first:])

@pytest.mark.parametrize("length, chunk, key_codec, value_codec, feedback", [
    (300, 16, TWO, TWO, False),
    (150, 1, TWO, TWO, False),
    (300, 16, TWO, OFF, False),
    (300, 16, OFF, TWO, False),
    (300, 16, Codec(2, "affine", 0.96, 8), Codec(3, "affine", 0.92, 8), False),
    (300, 16, Codec(2, "quest", 1.3), TWO, True),
])
def test_perplexity_in_one_forward_equals_feeding_the_cache(
        length, chunk, key_codec, value_codec, feedback, pair):
    """The cache is really read: NLL to 1e-3 relative, KL and top-1 share too, and far from off."""
    _, model = pair
    sequences = list(tokens(2, length))
    scheme = random_scheme(model, key_codec, value_codec, feedback)
    folded, empty_cache = W.with_scheme(model, scheme, WINDOWS)

    # Feed the caches call by call, and compare the two distributions of every next token.
    rows = []
    for ids in sequences:
        log_q = fed(folded, empty_cache(), ids[None], chunk)[0, :-1].log_softmax(-1)
        log_p = fed(model, W.new_cache(model), ids[None], length)[0, :-1].log_softmax(-1)
        off = -log_p.gather(1, ids[1:, None]).mean()
        nll = -log_q.gather(1, ids[1:, None]).mean()
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        is_same = (log_p.argmax(-1) == log_q.argmax(-1)).float().mean()
        rows.append(torch.stack([off, nll, kl, is_same]).double())
    rows = torch.stack(rows)
    off, nll, kl, same = rows.mean(0).tolist()
    _, nll_error, kl_error, _ = (rows.std(0) / 2 ** 0.5).tolist()
    excess_error = (rows[:, 1] - rows[:, 0]).std().item() / 2 ** 0.5

    scores = evaluate.perplexity(model, sequences, {"T": scheme}, WINDOWS, chunk)
    none = scores["none"]
    score = scores["T"]
    assert abs(nll - off) > 1e-3 and kl > 1e-3 and same < 1
    assert math.log(none["perplexity"][0]) == pytest.approx(off, rel=1e-5)
    assert math.log(score["perplexity"][0]) == pytest.approx(nll, rel=1e-3)
    assert score["perplexity"][1] == pytest.approx(math.exp(nll) * nll_error, rel=0.05)
    assert score["excess"] == pytest.approx((nll - off, excess_error), rel=0.02, abs=1e-3)
    assert score["kl"] == pytest.approx((kl, kl_error), rel=0.02, abs=1e-3)
    assert score["same_top1"][0] == pytest.approx(same, abs=0.01)
    assert none["same_top1"][0] == 1 and none["kl"][0] == 0

# ---- module error

@pytest.mark.parametrize("sink", [0, 5])
def test_module_error_equals_a_plain_loop(sink, pair):
    """T⁻¹ of what the codes say, in float64; geometric mean over layers; only the sinks exact."""
    hf, model = pair
    scheme = random_scheme(model, TWO, TWO)
    sequences = list(tokens(2, 90))
    inputs = []

    def observe(l, q, k, v):
        inputs.append((l, q, k, v))
        return W.causal_attention(q, k, v)

    for ids in sequences:
        W.forward(model, ids[None], observe)

    def restored(x, T):
        stored = W.dequantize(*W.quantize(W.apply(T, x), TWO)).double()
        x_hat = torch.einsum("gij,bgsj->bgsi", torch.linalg.inv(T[:, 0].double()), stored)
        return torch.cat([x[:, :, :sink].double(), x_hat[:, :, sink:]], 2)[0]

    logs = []
    for l, q, k, v in inputs:
        W_O = hf.model.layers[l].self_attn.o_proj.weight.double()
        noisy_k = restored(k, scheme.keys.transform[l])
        noisy_v = restored(v, scheme.values.transform[l])
        o = softmax_attention(q[0], k[0], v[0], 0)
        o_hat = softmax_attention(q[0], noisy_k, noisy_v, 0)
        exact = o.permute(2, 0, 1, 3).flatten(1) @ W_O.T
        noisy = o_hat.permute(2, 0, 1, 3).flatten(1) @ W_O.T
        logs.append(((noisy - exact).square().sum() / exact.square().sum()).log())
    each = torch.stack(logs).view(2, 2).mean(1).exp()

    error = evaluate.module_error(model, sequences, {"T": scheme}, sink)["T"]
    expected = (each.mean().item(), each.std().item() / 2 ** 0.5)
    assert error == pytest.approx(expected, rel=2e-3)
    assert error[0] > 1e-2

# ---- long texts

class Largest(TorchDispatchMode):
    """Note the number of elements of the largest tensor, of any type and of one, that any operation returns."""

    def __init__(self, dtype=None):
        super().__init__()
        self.dtype = dtype
        self.elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and self.dtype in (None, x.dtype):
                self.elements = max(self.elements, x.numel())
        return result

def test_attention_through_windows_makes_no_tensor_of_t_times_t():
    """Masks and scores of 256 queries at most: at t = 6000 a thirtieth of t · t."""
    t = 6000
    q = normal(0, 1, 1, 1, t, 8).float()
    k, v, k_hat, v_hat = normal(1, 4, 1, 1, t, 8).float()
    with Largest() as largest:
        evaluate.view_attention(q, k, v, k_hat, v_hat, Windows(), chunk=16)
    assert largest.elements <= 256 * (t + 256)

def test_attention_in_pieces_equals_attention_with_one_mask():
    """Pieces of 256 queries, and of fewer than a call has, see what one t × t mask shows them."""
    t = 700
    q = normal(0, 1, 2, 2, t, 8).float()
    k, v, k_hat, v_hat = normal(1, 4, 1, 2, t, 8).float()
    windows = Windows(4, 24, 8)
    o = evaluate.view_attention(q, k, v, k_hat, v_hat, windows, chunk=48)

    column = torch.arange(t)
    view = evaluate.quantized_view(column[:, None], column, windows, 48)
    scores = torch.einsum("bgrtd,bgsd->bgrts", q.double(), k.double())
    noisy_scores = torch.einsum("bgrtd,bgsd->bgrts", q.double(), k_hat.double())
    scores = torch.where(view, noisy_scores, scores) * 8 ** -0.5
    p = scores.masked_fill(column > column[:, None], -math.inf).softmax(-1)
    expected = torch.where(view, 0, p) @ v[:, :, None].double()
    expected += torch.where(view, p, 0) @ v_hat[:, :, None].double()
    assert (o - expected).abs().max() <= 1e-5

def test_module_error_copies_no_whole_activation_to_float64(pair):
    """Of 3000 tokens, 1024 outputs of D channels are in float64 at a time."""
    _, model = pair
    scheme = without_transforms(2, 2)
    with Largest(torch.float64) as largest:
        evaluate.module_error(model, [tokens(3000)], {"T": scheme})

    # The quantizer's float64 sums are one number a token and head.
    config = model.config
    assert largest.elements <= max(1024 * config.hidden_size, 3000 * config.num_key_value_heads)

def test_divergence_has_the_logits_of_32_tokens_at_a_time(pair):
    _, model = pair
    config = model.config
    hidden = normal(0, 2, 1000, config.hidden_size).float()
    ids = tokens(1000)
    states = {"none": hidden[0], "T": hidden[1]}
    with Largest() as largest:
        figures = evaluate.divergence(model, states, ids)
    weights = config.vocab_size * config.hidden_size
    assert largest.elements <= max(32 * config.vocab_size, weights)

    # The same as of all logits at once.
    log_p, log_q = W.logits(model, hidden[:, :-1]).double().log_softmax(-1)
    nll = -log_q.gather(1, ids[1:, None]).mean()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    is_same = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    assert figures["T"].tolist() == pytest.approx([nll.item(), kl.item(), is_same.item()], rel=1e-5)

# ---- harm

def test_harm_is_the_divergence_of_one_layers_keys_or_values_alone(pair):
    _, model = pair
    ids = tokens(200)
    derived = W.derive(W.collect_moments(model, [ids]))
    keys, values, *_ = evaluate.measure_harm(model, ids, derived, windows=WINDOWS)

    # The same by a scheme whose other parts are off.
    whole = W.scheme_of(derived, 2)
    off = Codec(16)
    for l in range(2):
        for side, harm in (("keys", keys.harm), ("values", values.harm)):
            codecs = [off, off]
            encoding = getattr(whole, side)
            codecs[l] = encoding.codec
            alone = W.Scheme()._replace(**{side: encoding._replace(codec=codecs)})
            kl, _ = evaluate.perplexity(model, [ids], {"alone": alone}, WINDOWS)["alone"]["kl"]
            assert harm[l].item() == pytest.approx(kl, rel=1e-4)
    assert min(keys.harm.min(), values.harm.min()) > 0

def test_harm_refuses_a_text_that_the_windows_hold(pair):
    _, model = pair
    ids = tokens(36)
    derived = W.derive(W.collect_moments(model, [ids]))
    with pytest.raises(ValueError, match="36 tokens fit into the windows"):
        evaluate.measure_harm(model, ids, derived, windows=WINDOWS)


# ---- bytes

@pytest.mark.parametrize("key_bits, value_bits", [(4, 2), (3, 8), (16, 2), (2, 16)])
def test_cache_bytes_are_a_formula_per_side(key_bits, value_bits, pair):
    config = pair[1].config
    per_head = 0
    for bits in (key_bits, value_bits):
        per_head += 16 * bits / 8 + 4 if bits < 16 else 16 * 2
    scheme = without_transforms(key_bits, value_bits)
    assert evaluate.packed_bytes(config, scheme) == 2 * 2 * per_head
    held = evaluate.cache_bytes(config, 2 ** 15, scheme, Windows(sink=0, keep=0, flush=1))
    assert held == pytest.approx(2 * 2 * per_head, rel=0.001)

def test_cache_bytes_of_layers_with_other_widths_add_up(pair):
    config = pair[1].config
    layered = W.Scheme(Encoding([Codec(2), Codec(4)]), Encoding([Codec(3), Codec(3)]))
    one_by_one = [without_transforms(2, 3), without_transforms(4, 3)]
    packed = [evaluate.packed_bytes(config, scheme) for scheme in one_by_one]
    assert evaluate.packed_bytes(config, layered) == sum(packed) / 2
    held = [evaluate.cache_bytes(config, 300, scheme, WINDOWS) for scheme in one_by_one]
    assert evaluate.cache_bytes(config, 300, layered, WINDOWS) == sum(held) / 2

@pytest.mark.parametrize("steps", [0, 1, 40])
@pytest.mark.parametrize("is_quantized", [True, False])
def test_cache_bytes_equal_what_a_models_caches_hold_after_decoding(steps, is_quantized, pair):
    _, model = pair
    weights = {name: weight.bfloat16() for name, weight in model.weights.items()}
    model = model._replace(weights=weights)
    scheme = without_transforms(2, 3) if is_quantized else None
    cache = W.new_cache(model, scheme, WINDOWS)
    ids = tokens(1, 300)
    prompt = ids.shape[1] - steps
    W.feed(model, cache, ids[:, :prompt])
    for i in range(prompt, 300):
        W.feed(model, cache, ids[:, i:i + 1])
    held = sum(layer.nbytes for layer in cache)
    assert evaluate.cache_bytes(model.config, 300, scheme, WINDOWS, steps) * 300 == held

@pytest.mark.parametrize("tokens, steps", [(0, 0), (5, 5), (5, 6), (5, -1)])
def test_cache_bytes_refuses_steps_without_a_prompt(tokens, steps, pair):
    with pytest.raises(ValueError, match="no prompt"):
        evaluate.cache_bytes(pair[1].config, tokens, steps=steps)

def tokens_bytes(cache, heads, d, bits, dtype):
    """Count the bytes of the tokens in a cache: windows in `dtype`, codes and a pair for each packed token."""
    total = 0
    for row in range(len(cache.n_tokens)):
        counts = cache.counts(row)
        total += (counts.sink + counts.recent) * d * dtype.itemsize
        total += counts.packed * (d * bits // 8 + 4)
    return 2 * heads * total

@pytest.mark.parametrize("windows, bits, batch, prompts", [
    (Windows(), 2, 1, [0, 5, 17, 60, 150, 161, 700, 2048]),
    (Windows(), 2, 5, [0, 17, 150, 2048]),
    (Windows(), 8, 1, [0, 17, 150, 2048]),
    (Windows(64, 256, 8), 2, 1, [0, 17, 150, 2048]),
    (Windows(4, 24, 8), 2, 1, [0, 17, 150, 2048]),
    (Windows(0, 64, 64), 2, 1, [0, 17, 150, 2048]),
    (Windows(0, 0, 64), 2, 1, [0, 17, 150, 2048]),
    (Windows(3, 2, 40), 3, 2, [0, 17, 150, 2048]),
    (Windows(0, 0, 1), 2, 1, [0, 17, 150, 2048]),
])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [64, 128])
def test_a_cache_holds_little_more_than_its_tokens_at_every_step(
        windows, bits, batch, prompts, dtype, d):
    """Within 1.15 × of codes, pairs and windows, and at no length over 1.1 × what an exact cache would hold."""
    for prompt in prompts:
        cache = W.WindowCache(batch, 1, d, without_transforms(bits, bits), windows, dtype)
        evaluate.take_in(cache, torch.zeros(batch, 1, prompt, d, dtype=dtype))
        token = torch.zeros(batch, 1, 1, d, dtype=dtype)
        for step in range(300):
            exact = 2 * batch * cache.n_tokens[0] * d * dtype.itemsize
            assert cache.nbytes <= 1.15 * tokens_bytes(cache, 1, d, bits, dtype), (prompt, step)
            assert cache.nbytes <= 1.1 * exact, (prompt, step)
            evaluate.take_in(cache, token)

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_unquantized_cache_holds_little_more_than_its_tokens_at_every_step(dtype):
    for prompt in (1, 17, 150, 2048):
        cache = W.PlainCache(2, 1, 64, dtype)
        evaluate.take_in(cache, torch.zeros(2, 1, prompt, 64, dtype=dtype))
        for step in range(100):
            exact = 2 * 2 * cache.n_tokens[0] * 64 * dtype.itemsize
            assert exact <= cache.nbytes <= 1.1 * exact, (prompt, step)
            evaluate.take_in(cache, torch.zeros(2, 1, 1, 64, dtype=dtype))

# ---- speed

def test_caches_take_turns_step_by_step(pair, monkeypatch):
    """What is timed is also what is fed: each cache ends with the context, the warm-up and the steps."""
    _, model = pair
    folded, empty_cache = W.with_scheme(model, without_transforms(2, 2), WINDOWS)
    runs = {"none": (model, W.new_cache(model)), "wush": (folded, empty_cache())}
    fed_caches = []
    feed = evaluate.feed

    def feed_and_note(model, cache, ids):
        fed_caches.append((id(cache), ids.shape[1]))
        return feed(model, cache, ids)

    monkeypatch.setattr(evaluate, "feed", feed_and_note)
    seconds = evaluate.step_seconds(runs, tokens(50), steps=5)

    plain = id(runs["none"][1])
    packed = id(runs["wush"][1])
    steps = evaluate.WARM_UP + 5
    turns = [(plain, 1), (packed, 1)] * steps
    assert fed_caches == [(plain, 50), (packed, 50), *turns]
    assert runs["none"][1][0].n_tokens == runs["wush"][1][0].n_tokens == [50 + steps]
    assert seconds.keys() == runs.keys() and min(seconds.values()) > 0

def test_step_seconds_are_the_median_of_the_timed_steps(pair, monkeypatch):
    _, model = pair
    durations = iter([100.0] * evaluate.WARM_UP + [1.0, 9.0, 2.0, 50.0, 3.0])

    def time_step(*_):
        return next(durations)

    monkeypatch.setattr(evaluate, "time_step", time_step)
    runs = {"none": (model, W.new_cache(model))}
    assert evaluate.step_seconds(runs, tokens(4), steps=5) == {"none": 3.0}

# ---- retrieval

def byte_tokens(text):
    return torch.tensor(list(text.encode()))

def test_a_haystack_hides_what_its_questions_ask():
    text, questions = evaluate.haystack(byte_tokens, tokens(400), seed=3)
    assert len(questions) == 5
    for question in questions:
        answer = question.tokens[question.question_tokens:]
        assert bytes(answer.tolist()).decode().strip().isdigit()
        assert torch.equal(text[question.place:question.place + len(answer)], answer)
        asked = text[question.place - question.question_tokens:question.place]
        assert torch.equal(asked, question.tokens[:question.question_tokens])

@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99), count=st.integers(1, 8), length=st.integers(120, 300),
    sink=st.integers(0, 20), keep=st.integers(0, 40), flush=st.integers(1, 40))
def test_every_hidden_number_is_packed_when_it_is_asked_for(
        seed, count, length, sink, keep, flush):
    windows = Windows(sink, keep, flush)
    words = evaluate.WORDS + evaluate.NAMES
    text, questions = evaluate.haystack(
        byte_tokens, tokens(length), seed, words, count, 2, windows, lead="")
    cache = W.WindowCache(1, 1, 8, windows=windows)
    x = torch.zeros(1, 1, len(text), 8)
    cache.attend(x[:, :, None], x, x)
    assert len(questions) == count
    for question in questions:
        answer = question.tokens[question.question_tokens:]
        end = question.place + len(answer)
        assert torch.equal(text[question.place:end], answer)
        assert sink <= question.place and end <= sink + cache.n_packed[0]
        assert bytes(question.tokens.tolist()).startswith(b"The special magic number for ")

def test_a_word_occurs_where_its_tokens_stand_in_a_row():
    text = torch.tensor([5, 1, 2, 3])
    assert evaluate.occurs(torch.tensor([1, 2]), text)
    assert evaluate.occurs(text, text)
    assert not evaluate.occurs(torch.tensor([1, 3]), text)
    assert not evaluate.occurs(torch.tensor([5, 1, 2, 3, 4]), text)

def test_retrieval_equals_a_forward_of_text_and_question(pair):
    """Unquantized and with 16 bits; two bits give the numbers another probability."""
    _, model = pair
    haystacks = [evaluate.haystack(byte_tokens, tokens(60, seed=i), i) for i in range(2)]
    schemes = {"sixteen": without_transforms(16, 16), "two": random_scheme(model, TWO, TWO)}
    answers = evaluate.retrieval(model, haystacks, schemes, WINDOWS)

    expected = torch.zeros(2, 5)
    for i, (text, questions) in enumerate(haystacks):
        for j, question in enumerate(questions):
            asked = len(text) + question.question_tokens
            ids = torch.cat([text, question.tokens])
            hidden = W.forward(model, ids[None], evaluate.exact_attention)[0]
            log_p = W.logits(model, hidden[:-1]).log_softmax(-1)
            expected[i, j] = log_p.gather(1, ids[1:, None])[asked - 1:].sum()
    found, log_probability = answers["none"]
    assert found.shape == (2, 5) and set(found.flatten().tolist()) <= {0.0, 1.0}
    assert (log_probability - expected).abs().max() < 1e-2
    assert (answers["sixteen"][1] - expected).abs().max() < 1e-2
    assert (answers["two"][1] - expected).abs().max() > 1e-2

# ---- the measurements

BUNDLED = HERE / "tiny-qwen3"
SMALL = [
    "--model", str(BUNDLED),
    "--calib", str(BUNDLED / "calib.txt"),
    "--eval", str(BUNDLED / "eval.txt"),
    *"--seqs 1 --calib-seqs 1 --calib-len 64 --steps 2 --choices 1".split(),
]
PRINTED = {
    "baselines --len 200": ["refined", "kivi-2 0/32/32", "bits an element"],
    "retrieval --len 200": ["refined 4/16/16", "at 0.9", "slots 0-3"],
    "agreement --len 64": ["8 greedy tokens after 2 prompts of 16 tokens", "equal if fed"],
    "speed --len 200": ["prefill of 200 tokens", "step after 200 tokens"],
    "signs --len 200": ["signs 0"],
}

def run_measurement(*arguments):
    """Run a command; one small text shows little, so its exit status is either."""
    try:
        measure.main(list(arguments))
    except SystemExit as exit:
        assert exit.code == 1

@pytest.mark.parametrize("command", PRINTED)
def test_a_measurement_prints_its_table(command, capsys):
    run_measurement(*command.split(), *SMALL)
    out = capsys.readouterr().out
    assert [piece for piece in PRINTED[command] if piece not in out] == []
    assert "shown: " in out.lower()

def test_a_measurement_without_its_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(measure, "missing_backends", lambda: ["quanto", "hqq"])
    with pytest.raises(SystemExit, match="^measure: this needs optimum-quanto"):
        measure.main(["speed_through_transformers", *SMALL])

def test_the_picture_is_drawn_from_the_reports_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    curve = {"hadamard": 9.0, "oscar": 8.0, "wush": 7.0, "refined": 6.0, "none": 5.0}
    files = []
    for bits in (2, 3, 4):
        run = {"k_bits": bits, "v_bits": bits, "perplexity": curve}
        files.append(tmp_path / f"{bits}.json")
        files[-1].write_text(json.dumps(run))
    out = tmp_path / "bits.png"
    flags = ["--figures", *map(str, files), "--title", "a title", "--out", str(out)]
    measure.main(["picture", *flags])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("shown: refined lies below wush") == 3

@pytest.mark.parametrize("arguments", [["baselines"], ["picture"], ["unheard"]])
def test_a_measurement_without_its_flags_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        measure.main(arguments)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err
