"""Tests of WushCache, calibration and folding in transformers, and of what users do to a cache."""
import copy
import functools
import gc
import json
import math
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wush_kv as W
from wush_kv import PAPER, REFINED, Basis, Refine, Transforms, Windows
from wush_tools import checkpoints, evaluate, transformers_cache
from wush_tools.testing import (
    HERE, WINDOWS, close, distance, moment, normal, reference, saved, tiny, tokens, transforms)
from wush_tools.transformers_cache import (
    WushCache, calibrate, folded_values, shard_transforms, wush_attention)

ARCHITECTURES = {
    "llama": {},
    "qwen2": {"head_dim": None, "num_attention_heads": 4},
    "qwen3": {},
    "mistral": {"sliding_window": None},
}
FEEDBACK_AND_STEP = Refine(feedback=True, exponent=0.25, offset=False, widen=True)
one_attention = pytest.mark.parametrize("attention", ["wush", "sdpa"])
each_attention = pytest.mark.parametrize("attention", ["wush", "sdpa", "eager"])

# What WushCache warns of under another attention than its own; the tests of the warnings record them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:WushCache"),
    pytest.mark.filterwarnings("ignore:.*past_key_values"),
]


def random_transforms(hf, condition=9.0, seed=3):
    """Draw transforms of a condition, others for the values, without refinement."""
    keys = Basis(transforms(hf, condition, seed))
    values = Basis(transforms(hf, condition, seed + 1))
    return Transforms(keys, values)


@functools.cache
def their_model(kind="qwen3", attention="wush", **changes):
    """Make transformers' model of a kind, with an attention, and random transforms."""
    hf = tiny(kind, **ARCHITECTURES[kind] | changes).requires_grad_(False)
    hf.set_attn_implementation(attention)
    return hf, random_transforms(hf)


def own_model(attention="wush", **changes):
    """As `their_model`, for a test that changes the model."""
    hf = tiny(**changes).requires_grad_(False)
    hf.set_attn_implementation(attention)
    return hf, random_transforms(hf)


class Numbers:
    """A tokenizer of texts that are token ids."""

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}


NUMBERS = " ".join(map(str, tokens(600, seed=8).tolist()))


def calibrated(hf, **options):
    return calibrate(hf, Numbers(), NUMBERS, **{"length": 200, "sequences": 3} | options)


def padded(*lengths):
    """Draw prompts of these lengths: their ids with padding 0 at the left, and the mask."""
    columns = torch.arange(max(lengths))
    mask = (columns >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return mask * (1 + tokens(*mask.shape, seed=len(lengths))), mask


def generated(hf, ids, cache=None, mask=None, steps=36, **options):
    """Generate greedily, to no end token, with transformers' own cache if `cache` is None."""
    options = {"pad_token_id": 0, "eos_token_id": 256} | options
    if mask is None:
        mask = torch.ones_like(ids)
    if cache is not None:
        options["past_key_values"] = cache
    return hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, **options)


@torch.no_grad()
def through(hf, ids, cache, cuts=1000, **options):
    """Feed ids (b, t) in calls of `cuts` tokens through a cache: logits (b, t, v)."""
    parts = [hf(part, past_key_values=cache, **options).logits for part in ids.split(cuts, 1)]
    return torch.cat(parts, 1)


def is_tensor(x):
    """Say whether any object is a tensor, by its type: to ask it may import modules and warn."""
    return issubclass(type(x), torch.Tensor)


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


# ---- A cache in few bits and the model's own

def ways_to_generate():
    """Greedy, beams, left-padded, with guesses from the prompt and from another model: prompts and options."""
    ids, mask = padded(50, 21, 37)
    cycle = torch.arange(1, 20).repeat(3)[None]          # guesses from it are sometimes right
    guess = tiny("llama", seed=1, num_hidden_layers=1).requires_grad_(False)
    return [
        (ids[:1], {}),
        (ids[:1], {"num_beams": 3, "num_return_sequences": 2}),
        (ids, {"mask": mask}),
        (ids, {"mask": mask, "num_beams": 2}),
        (cycle, {"prompt_lookup_num_tokens": 4}),
        (cycle, {"assistant_model": guess}),
    ]


@functools.cache
def plainly_generated(kind):
    """What transformers' own cache gives in each of the ways."""
    plain = their_model(kind, "sdpa")[0]
    return [generated(plain, ids, steps=10, **options) for ids, options in ways_to_generate()]


@each_attention
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_generation_with_quantization_off_gives_the_tokens_of_transformers_own_cache(
        kind, attention):
    hf, T = their_model(kind, attention)
    for (prompt, options), expected in zip(ways_to_generate(), plainly_generated(kind)):
        cache = WushCache(hf.config, T, 16, WINDOWS)
        got = generated(hf, prompt, cache, steps=10, **options)
        assert torch.equal(got, expected), options
        assert type(cache.get_seq_length()) is int and cache.is_initialized
        assert max(cache.layers[1].window.n_packed) >= 3 * 8


@functools.cache
def calibrated_once(kind):
    """Transforms of a kind's model, whose weights do not depend on the attention."""
    return calibrated(their_model(kind, initializer_range=0.02)[0], refine=PAPER)


@each_attention
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_eight_bits_move_logits_by_less_than_a_hundredth(kind, attention):
    """Two bits move them by more. Weights as transformers draws them, T calibrated; one warning."""
    hf = their_model(kind, attention, initializer_range=0.02)[0]
    ids = tokens(2, 92)
    T = calibrated_once(kind)

    def run(bits):
        return through(hf, ids, WushCache(hf.config, T, bits, WINDOWS), [80] + [1] * 12)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        off = run(16)
    said = [str(w.message) for w in caught if w.category is UserWarning]
    advice = ["set_attn_implementation('wush')" in text for text in said]
    assert advice == ([] if attention == "wush" else [True])
    assert distance(off, reference(hf, ids)) < 1e-4 and off.std() > 0.1
    assert distance(run(8), off) < 1e-2 < distance(run(2), off)


@pytest.mark.parametrize("refine", [PAPER, REFINED])
def test_padded_rows_at_2_bits_get_the_tokens_they_get_alone_though_one_ends_early(refine):
    """The unpadded row ends at its second token; the padding's id makes no difference."""
    hf = their_model()[0]
    ids, mask = padded(60, 33, 48)
    T = calibrated(hf, refine=refine)
    alone = []
    for row, is_text in zip(ids, mask.bool()):
        cache = WushCache(hf.config, T, windows=WINDOWS)
        tokens_alone = generated(hf, row[None, is_text], cache, steps=16)
        alone.append(tokens_alone[0, is_text.sum():])

    def first_row_ends(ids, scores):
        return torch.tensor([ids.shape[1] >= 62, False, False])

    cache = WushCache(hf.config, T, windows=WINDOWS)
    options = {"stopping_criteria": [first_row_ends], "pad_token_id": 9}
    batch = generated(hf, ids + 7 * (1 - mask), cache, mask, steps=16, **options)[:, 60:]
    assert batch[0].tolist() == [*alone[0][:2], *[9] * 14]
    assert torch.equal(batch[1], alone[1]) and torch.equal(batch[2], alone[2])
    assert cache.layers[0].window.n_tokens == [75, 48, 63] and cache.get_seq_length() == 75
    off = generated(hf, ids, WushCache(hf.config, T, 16, WINDOWS), mask, steps=16)[:, 60:]
    assert not torch.equal(off[1:], batch[1:])


@one_attention
@pytest.mark.parametrize("refine", [PAPER, FEEDBACK_AND_STEP, REFINED])
def test_perplexity_through_transformers_equals_perplexity_of_our_loop(refine, attention, tmp_path):
    """300 tokens in calls of 16, to 5e-4 relative; and quantization moves it by more."""
    hf, model = saved(tmp_path)
    hf.set_attn_implementation(attention)
    T = calibrated(hf, refine=refine)
    ids = tokens(1, 300, seed=9)
    want = evaluate.perplexity(model, [ids[0]], {"T": W.scheme_of(T)}, WINDOWS)
    scores = through(hf, ids, WushCache(hf.config, T, windows=WINDOWS), 16)[0, :-1].log_softmax(-1)
    nll = -scores.gather(1, ids[0, 1:, None]).mean().item()
    assert math.exp(nll) == pytest.approx(want["T"]["perplexity"][0], rel=5e-4)
    assert abs(math.log(want["none"]["perplexity"][0]) - nll) > 5e-4


@each_attention
def test_scores_are_scaled_as_the_model_says(attention):
    hf, T = own_model("sdpa")
    for layer in hf.model.layers:
        layer.self_attn.scaling = 0.1
    ids = tokens(1, 80)
    want = reference(hf, ids)
    hf.set_attn_implementation(attention)
    got = through(hf, ids, WushCache(hf.config, T, 16, WINDOWS), [60] + [1] * 20)
    assert distance(got, want) < 1e-4 < distance(want, reference(their_model()[0], ids))


@each_attention
def test_gradients_are_refused_on_the_way_back_and_only_there(attention):
    hf = tiny()
    ids = tokens(1, 60)
    hf.set_attn_implementation(attention)
    cache = WushCache(hf.config, their_model()[1], 16, WINDOWS)
    out = hf(ids, past_key_values=cache).logits
    assert distance(out, reference(hf, ids)) < 1e-4
    with pytest.raises(ValueError, match="gradients"):
        out.sum().backward()


@each_attention
def test_logits_with_quantization_off_in_bfloat16_are_transformers_own(attention):
    """3e-2 of the largest: some of bfloat16's steps of 2^-8."""
    hf = tiny().requires_grad_(False).bfloat16()
    ids = tokens(2, 120)
    want = reference(hf, ids)
    cache = WushCache(hf.config, random_transforms(hf, 4.0), 16, WINDOWS)
    hf.set_attn_implementation(attention)
    got = through(hf, ids, cache, [90] + [1] * 30)
    assert got.dtype == torch.bfloat16 and distance(got, want) < 3e-2 * want.abs().max()


@each_attention
def test_keys_and_values_of_a_cache_are_those_of_transformers_own(attention):
    """With blocks of T."""
    from transformers import DynamicCache
    hf = their_model("qwen3", attention)[0]
    ids = tokens(2, 120)
    T = calibrated(hf, group=8)
    own = DynamicCache()
    cache = WushCache(hf.config, T, 16, WINDOWS)
    through(hf, ids, own)
    through(hf, ids, cache, [90] + [1] * 30)
    eight = WushCache(hf.config, T, 8).layers[0].scheme.keys
    assert eight.codec.group == 8 and eight.transform.shape == (2, 2, 2, 8, 8)
    for ours, theirs in zip(cache.layers, own.layers):
        assert distance(ours.keys, theirs.keys) < 1e-4
        assert distance(ours.values, theirs.values) < 1e-4


def test_wush_attention_without_its_cache_is_sdpa():
    from transformers import DynamicCache
    hf = their_model("llama")[0]
    plain = their_model("llama", "sdpa")[0]
    ids, mask = padded(40, 22)
    for options in {"use_cache": False}, {"past_key_values": DynamicCache(config=hf.config)}:
        with torch.no_grad():
            a = hf(ids, attention_mask=mask, **copy.deepcopy(options)).logits
            b = plain(ids, attention_mask=mask, **copy.deepcopy(options)).logits
        assert torch.equal(a, b)


# ---- Calibration

@each_attention
@pytest.mark.parametrize("transform", ["wush", "wush_a", "oscar"])
def test_calibrating_transformers_model_gives_what_calibrating_ours_gives(transform, attention):
    """Signs of eigenvectors are not in TᵀT; float32 noise grows by 1 + d/γ at most. F is T's own."""
    hf = tiny(attention_bias=True).requires_grad_(False).train()
    hf.set_attn_implementation(attention)
    hf.model.layers[1].eval()

    def state():
        modules = [(m.training, sorted(vars(m)), len(m._forward_hooks)) for m in hf.modules()]
        return modules, hf.config._attn_implementation, sorted(vars(hf.config))

    before = state()
    texts = [NUMBERS[:500], NUMBERS[500:]]
    got = calibrate(hf, Numbers(), texts, length=150, sequences=3, transform=transform)
    assert state() == before
    with pytest.raises(IndexError):                      # a token beyond the vocabulary
        calibrate(hf, Numbers(), "1 2 999", length=3, sequences=1)
    assert state() == before

    ours = W.Model(hf.config, hf.state_dict(), *checkpoints.rope_frequencies(hf.config))
    ids = []
    for text in texts:
        ids += Numbers()(text)["input_ids"]
    pieces = list(torch.tensor(ids[:450]).split(150))
    moments = W.collect_moments(ours, pieces, transform == "wush_a")
    want = W.derive(moments, transform)
    assert (got.refine, got.group) == (want.refine, want.group)
    assert got.refine == (PAPER if transform == "oscar" else REFINED)
    row = W.TRANSFORMS[transform]
    key_hess = W.shrunk(moments[row.key_moments[1]], moments["tokens"])
    key_hess = W.in_score_units(key_hess, moments)
    value_hess = moments[row.value_moments[1]]
    if row.value_moments[1] != "outputs":
        value_hess = W.shrunk(value_hess, moments["tokens"])
    sides = [(got.keys, want.keys, key_hess), (got.values, want.values, value_hess)]
    for basis, wanted, hess in sides:
        assert close(moment(basis.transform.double()), moment(wanted.transform.double()), 1e-4)
        assert (basis.hessian is None) == (transform == "oscar")
        if basis.hessian is not None:
            H = W.error_hessian(basis.transform, hess, True).float()
            assert close(basis.hessian, H, 1e-3)


WRONG_CALIBRATIONS = [
    ({"transform": "nosuch"}, "nosuch"),
    ({"sequences": 0}, "sequences"),
    ({"sequences": -1}, "sequences"),
    ({"length": -5}, "length"),
    ({"length": 20.0}, "length"),
    ({"length": 1025}, "1024 positions"),
    ({"text": ""}, "no text"),
    ({"text": []}, "no text"),
    ({"text": None}, "string"),
    ({"text": [1, 2]}, "string"),
    ({"group": 5}, "groups of 5"),
    ({"group": 0}, "groups of 0"),
    ({"group": 8.0}, "groups of 8.0"),
    ({"refine": "off"}, "Refine"),
    ({"refine": ()}, "Refine"),
]

@pytest.mark.parametrize("options, words", WRONG_CALIBRATIONS)
def test_calibration_is_refused_before_it_runs(options, words, monkeypatch):
    def run(*_, **__):
        pytest.fail("it ran")

    hf = tiny()
    monkeypatch.setattr(hf.base_model, "forward", run)
    with pytest.raises(ValueError, match=words):
        calibrate(hf, Numbers(), **{"text": NUMBERS} | options)


def test_calibration_on_far_fewer_tokens_than_asked_warns_with_their_count():
    hf = their_model()[0]
    with pytest.warns(UserWarning, match="600 tokens.* 1600 were asked"):
        calibrated(hf, sequences=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(hf, sequences=4)


def test_calibration_keeps_the_group_of_a_transform_that_is_one_block():
    """OSCAR's is one block of a head, though groups have fewer channels; they decide the cache's pairs."""
    hf = their_model()[0]
    T = calibrated(hf, transform="oscar", group=8)
    cache = WushCache(hf.config, T)
    through(hf, tokens(1, 200), cache)
    assert T.keys.transform.shape == (2, 2, 1, 16, 16) and T.group == 8
    assert cache.layers[0].window.keys.pairs.shape[-1] == 2


def test_calibration_under_autocast_is_calibration_without():
    """The moments are sums in float64; only the model's own arithmetic is in bfloat16 then."""
    hf = tiny(initializer_range=0.02).requires_grad_(False)
    want = calibrated(hf, refine=PAPER)
    with torch.autocast("cpu"):
        got = calibrated(hf, refine=PAPER)
    assert close(moment(got.keys.transform), moment(want.keys.transform), 0.1)


def test_calibration_holds_on_to_nothing():
    """Attentions are registered for good: the one of a calibration must not keep its moments alive."""
    calibrated(their_model()[0])
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is W.LayerMoments]


# ---- Models that a window cache would serve wrongly

def refusing(hf, T):
    def fold():
        with folded_values(hf, T):
            pass

    return [functools.partial(calibrated, hf), fold]


SLIDING_FROM_LAYER_1 = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
WRONG_MODELS = [
    ("mistral", {"sliding_window": 16}, "full attention"),
    ("qwen2", {"head_dim": 24}, "head_dim 24"),
    ("qwen2", SLIDING_FROM_LAYER_1, "full attention"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "full attention"),
]

@pytest.mark.parametrize("kind, changes, words", WRONG_MODELS)
def test_model_that_a_window_cache_would_serve_wrongly_is_refused(kind, changes, words):
    hf = tiny(kind, **changes)
    T = their_model()[1]
    for refused in [*refusing(hf, T), functools.partial(WushCache, hf.config, T)]:
        with pytest.raises(ValueError, match=words) as caught:
            refused()
        assert str(caught.value).count(".") < 2 and len(str(caught.value)) < 120


LATENT = {
    "DeepseekV2": {"qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16},
    "DeepseekV3": {"qk_nope_head_dim": 32, "v_head_dim": 16, "kv_lora_rank": 8},
    "MiniCPM3": {"qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16},
}

@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_refused_before_calibrating(name):
    import transformers
    if not hasattr(transformers, name + "Config"):
        pytest.skip("this transformers does not know it")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = getattr(transformers, name + "Config")(
        hidden_size=64, num_hidden_layers=2, qk_rope_head_dim=16, **heads, **LATENT[name])
    config.head_dim = 16
    hf = torch.nn.Module()               # no layer of it is looked at
    hf.config = config
    T = their_model()[1]
    for refused in [*refusing(hf, T), functools.partial(WushCache, config, T)]:
        with pytest.raises(ValueError, match="latent attention"):
            refused()


@pytest.mark.parametrize("name, features", [("o_proj", (64, 64)), ("v_proj", (64, 16))])
def test_projections_of_another_head_dim_are_refused_before_calibrating(
        name, features, monkeypatch):
    hf, T = own_model()
    monkeypatch.setattr(hf.base_model, "forward", None)
    setattr(hf.model.layers[1].self_attn, name, torch.nn.Linear(*features))
    for refused in refusing(hf, T):
        with pytest.raises(ValueError, match="one head dim"):
            refused()


def test_model_without_the_usual_projections_is_refused():
    hf, T = own_model()
    hf.model.layers[1].self_attn.dense = hf.model.layers[1].self_attn.o_proj
    del hf.model.layers[1].self_attn.o_proj
    for refused in refusing(hf, T):
        with pytest.raises(ValueError, match="o_proj"):
            refused()


# ---- What users do to a cache

@one_attention
@pytest.mark.parametrize("bits, question", [(16, 60), (2, 5)])
def test_second_question_over_a_cached_context_is_answered_as_by_a_fresh_cache(
        bits, question, attention):
    """A long first answer packs some of the context, which only shows with quantization on."""
    hf, T = their_model("qwen3", attention)
    context = tokens(1, 71)
    first = tokens(1, question, seed=5)
    second = tokens(1, 9, seed=6)
    windows = Windows(sink=4, keep=16, flush=24)
    cache = WushCache(hf.config, T, bits, windows)
    prefix = through(hf, context, cache)
    generated(hf, torch.cat([context, first], 1), cache, steps=3)
    used = question + 2                        # the last token of an answer is never fed back
    assert cache.get_seq_length() == 71 + used and cache.get_mask_sizes(5, 0) == (76 + used, 0)
    cache.crop(-used)
    assert cache.get_seq_length() == 71 and type(cache.get_seq_length()) is int

    both = torch.cat([context, second], 1)
    fresh = WushCache(hf.config, T, bits, windows)
    through(hf, context, fresh)
    again = generated(hf, both, cache, steps=20)
    assert torch.equal(again, generated(hf, both, fresh, steps=20))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert distance(through(hf, context, cache), prefix) == 0
    k = torch.zeros(1, 2, 1, 16)
    assert prefix.dtype == cache.layers[0].update(k, k)[0].dtype


@pytest.mark.parametrize("length", [2, 4, 20, 52, 53, 60, 79, 0])
@pytest.mark.parametrize("old", [False, True])
def test_cropping_into_any_region_equals_never_having_fed_what_was_cropped(length, old):
    """80 tokens are 4 sinks, 48 packed and 28 recent. Both ways to name the length; -1 too much is all."""
    hf, T = their_model()
    ids = tokens(2, 80)
    more = tokens(2, 9, seed=4)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    through(hf, ids, cache)
    assert [cache.layers[0].window.counts(row) for row in (0, 1)] == [(4, 48, 28)] * 2
    cache.crop(length if old and length else length - 80 - (length == 0))
    assert cache.get_seq_length() == length
    assert cache.layers[1].window.n_packed == [min(48, max(length - 4, 0))] * 2
    want = reference(hf, torch.cat([ids[:, :length], more], 1))[:, length:]
    assert distance(through(hf, more, cache, [5, 1, 3]), want) < 1e-4
    cache.crop(0)
    assert cache.get_seq_length() == length + 9


def test_rows_can_be_reordered_selected_and_repeated():
    hf, T = their_model()
    ids, mask = padded(60, 41, 53)
    more = tokens(6, 4, seed=4)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    through(hf, ids, cache, attention_mask=mask, position_ids=positions_of(mask))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(3)
    rows = [2] * 3 + [1] * 3
    assert cache.layers[0].window.n_tokens == [53] * 3 + [41] * 3 and cache.get_seq_length() == 60

    positions = mask[rows].sum(1, keepdim=True) + torch.arange(4)
    visible = torch.cat([mask[rows], torch.ones_like(more)], 1)
    got = through(hf, more, cache, attention_mask=visible, position_ids=positions)
    for i, row in enumerate(rows):
        alone = torch.cat([ids[row][mask[row].bool()], more[i]])[None]
        assert distance(got[i], reference(hf, alone)[0, -4:]) < 1e-4


def buffers(cache):
    """All that the layers hold, for a comparison."""
    return [(layer.length, transformers_cache.state(layer.window)) for layer in cache.layers]


def identical(a, b):
    """Say whether two trees of tensors and numbers are the same, bit for bit."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def with_harm(transforms):
    """Add harm, most of it done by the second layer's keys."""
    keys = transforms.keys._replace(harm=torch.tensor([0.1, 1.0]))
    values = transforms.values._replace(harm=torch.tensor([0.01, 0.01]))
    return transforms._replace(keys=keys, values=values)


def test_layers_have_the_bits_that_their_average_allots():
    hf = their_model()[0]
    T = with_harm(calibrated(hf))
    cache = WushCache(hf.config, shard_transforms(T, 1, 2), bits=2.5)
    for l, bits in enumerate([(2, 2), (4, 2)]):
        scheme = cache.layers[l].scheme.layer(l)
        assert (scheme.keys.codec.bits, scheme.values.codec.bits) == bits
    with pytest.raises(ValueError, match="average"):
        WushCache(hf.config, calibrated(hf), bits=2.5)


@pytest.mark.parametrize("bits", [2, (16, 3), [3, 2], 2.5])
def test_cache_read_back_from_disk_goes_on_bit_for_bit(bits, tmp_path):
    """And a deep copy, which examples make of a prompt's cache, and a pickled one; batches of unequal rows too."""
    hf = their_model()[0]
    ids, mask = padded(60, 47)
    cache = WushCache(hf.config, with_harm(calibrated(hf)), bits, WINDOWS)
    through(hf, ids[:, :50], cache, attention_mask=mask[:, :50])
    cache.save(tmp_path / "cache.pt")
    back = WushCache.load(tmp_path / "cache.pt", hf.config)
    copied = copy.deepcopy(cache)
    pickled = pickle.loads(pickle.dumps(cache))
    assert back.get_seq_length() == 50 and back.layers[0].window.n_tokens == [50, 37]

    want = generated(hf, ids, cache, mask, steps=12)
    for other in (copied, back, pickled):
        assert torch.equal(generated(hf, ids, other, mask, steps=12), want)
        assert identical(buffers(other), buffers(cache))
    empty = WushCache(hf.config, their_model()[1])
    empty.save(tmp_path / "cache.pt")
    assert not WushCache.load(tmp_path / "cache.pt", hf.config).is_initialized


def test_copies_share_the_transforms_and_not_the_tokens():
    hf, T = their_model()
    cache = WushCache(hf.config, T, windows=WINDOWS)
    through(hf, tokens(1, 60), cache)
    copied = copy.deepcopy(cache)
    assert copied.transforms.keys.transform is T.keys.transform
    for old, new in zip(cache.layers, copied.layers):
        ours, theirs = old.window.keys, new.window.keys
        assert theirs.encoding.transform is ours.encoding.transform
        assert theirs.consumer_transform is ours.consumer_transform
        assert new.T_V_inverse is old.T_V_inverse
        assert theirs.codes.data_ptr() != ours.codes.data_ptr()


@one_attention
def test_cache_begun_in_inference_mode_goes_on_outside_of_it(attention):
    hf, T = their_model("qwen3", attention)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    ids = tokens(1, 90)
    with torch.inference_mode():
        through(hf, ids[:, :80], cache, 40)
    assert distance(through(hf, ids[:, 80:], cache, 1), reference(hf, ids)[:, 80:]) < 1e-4


@torch.no_grad()
def layer_call(hf, cache, k, v, l=0):
    """Run layer l's call as an attention of transformers does: its output (b, t, h, d), of queries of ones."""
    module = hf.model.layers[l].self_attn
    keys, values = cache.update(k, v, l)
    q = torch.ones(len(k), 8, *k.shape[2:], dtype=k.dtype, device=k.device)
    if hf.config._attn_implementation == "wush":
        return wush_attention(module, q, keys, values, None, 0.25)[0]
    assert keys.shape == values.shape == (*k.shape[:2], cache.get_seq_length(), 16)
    o = W.causal_attention(q.unflatten(1, (2, 4)), keys, values)
    return o.flatten(1, 2).transpose(1, 2)


@one_attention
@pytest.mark.parametrize("filled", [0, 60])
def test_empty_call_changes_nothing(attention, filled):
    """Nothing is added, to an empty cache and to a filled one, and the next token is answered as ever."""
    hf, T = their_model("qwen3", attention)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    k, v = normal(0, 2, 2, 2, 61, 16).float()
    layer_call(hf, cache, k[:, :, :filled], v[:, :, :filled])
    before = transformers_cache.state(cache.layers[0].window)
    assert layer_call(hf, cache, k[:, :, :0], v[:, :, :0]).shape == (2, 0, 8, 16)
    assert identical(transformers_cache.state(cache.layers[0].window), before)
    assert cache.get_seq_length() == filled
    fresh = WushCache(hf.config, T, 16, WINDOWS)
    want = layer_call(hf, fresh, k, v)[:, filled:]
    assert distance(layer_call(hf, cache, k[:, :, filled:], v[:, :, filled:]), want) < 1e-5


@one_attention
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_transforms_of_any_dtype_are_used_in_float32(dtype, attention):
    """As serving files hold them: the two tensors, in one floating dtype."""
    hf, T = their_model("qwen3", attention)
    T = {"k": T.keys.transform.to(dtype), "v": T.values.transform.to(dtype)}
    in_float32 = {key: tensor.float() for key, tensor in T.items()}
    ids = tokens(1, 80)
    got = through(hf, ids, WushCache(hf.config, T, 8, WINDOWS), [60] + [1] * 20)
    want = through(hf, ids, WushCache(hf.config, in_float32, 8, WINDOWS), [60] + [1] * 20)
    assert torch.equal(got, want) and got.isfinite().all()


@one_attention
def test_transformed_values_stay_in_the_range_of_float16(attention):
    """Values of 3e4 in a direction that T_V makes 30 times larger; float16 ends at 65504. One layer's update."""
    hf, _ = their_model("qwen3", attention)
    T = torch.eye(16).expand(2, 2, 1, 16, 16).clone()
    T[..., 0, 0] = 30
    v = torch.randn(1, 2, 60, 16).half()
    v[..., 0] = 3e4
    cache = WushCache(hf.config, {"k": T, "v": T}, 16, WINDOWS)
    k = torch.randn(1, 2, 60, 16).half()
    assert layer_call(hf, cache, k, v).isfinite().all()
    assert close(cache.layers[0].values.float(), v.float(), 2 ** -10)


@one_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("refine", [PAPER, REFINED])
def test_cache_under_autocast_gives_the_logits_of_transformers_own(attention, dtype, refine):
    """At 8 bits, in calls that flush and single steps; a hundredth of the largest is some of bfloat16's steps."""
    hf = their_model("qwen3", attention)[0]
    T = calibrated(hf, refine=refine)
    ids = tokens(2, 90)
    cache = WushCache(hf.config, T, 8, WINDOWS)
    with torch.autocast("cpu", dtype=dtype):
        want = reference(their_model("qwen3", "sdpa")[0], ids)
        got = through(hf, ids, cache, [60, 10] + [1] * 20)
    assert max(cache.layers[0].window.n_packed) == 56
    assert close(got.float(), want.float(), 0.05)


# ---- Folding, sharding, devices

@one_attention
def test_folding_values_changes_no_logits_and_is_undone_bit_for_bit(attention):
    """A cache notices a fold, in the middle of a text too; one of other transforms is refused."""
    hf, T = own_model(attention, attention_bias=True)
    before = {name: p.clone() for name, p in hf.named_parameters()}
    ids = tokens(1, 100)
    want = reference(hf, ids)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    got = [through(hf, ids[:, :40], cache)]
    with folded_values(hf, T):
        name = "model.layers.0.self_attn.v_proj.weight"
        assert distance(hf.get_parameter(name), before[name]) > 0.1
        got.append(through(hf, ids[:, 40:80], cache, 1))
        assert distance(reference(hf, ids), want) < 1e-4
        for refused in refusing(hf, T):
            with pytest.raises(ValueError, match="folded"):
                refused()
        other = WushCache(hf.config, T._replace(values=T.keys), 16)
        with pytest.raises(ValueError, match="another T_V"):
            through(hf, ids, other)
    got.append(through(hf, ids[:, 80:], cache))
    assert distance(torch.cat(got, 1), want) < 1e-4

    with pytest.raises(ZeroDivisionError), folded_values(hf, T):
        1 / 0
    one_layer = T._replace(values=Basis(T.values.transform[:1]))
    with pytest.raises(ValueError), folded_values(hf, one_layer):
        pass
    assert all(torch.equal(p, before[name]) for name, p in hf.named_parameters())
    assert torch.equal(reference(hf, ids), want)


@one_attention
@pytest.mark.parametrize("way", ["save", "pickle", "deepcopy", "config"])
@pytest.mark.parametrize("fold_first", [False, True])
def test_cache_that_was_put_aside_sees_whether_values_are_folded_now(
        way, attention, fold_first, tmp_path):
    """The model is asked that runs, whatever the cache knew when it was saved, copied or made."""
    hf, T = own_model(attention)
    ids = tokens(1, 80)
    want = reference(hf, ids)
    config = copy.deepcopy(hf.config) if way == "config" else hf.config
    cache = WushCache(config, T, 16, WINDOWS)

    def put_aside():
        if way == "save":
            cache.save(tmp_path / "cache.pt")
            return WushCache.load(tmp_path / "cache.pt", copy.deepcopy(hf.config))
        if way == "pickle":
            return pickle.loads(pickle.dumps(cache))
        return copy.deepcopy(cache)

    if fold_first:
        with folded_values(hf, T):
            through(hf, ids[:, :50], cache)
            other = put_aside()
        got = through(hf, ids[:, 50:], other, [20] + [1] * 10)
    else:
        through(hf, ids[:, :50], cache)
        other = put_aside()
        with folded_values(hf, T):
            got = through(hf, ids[:, 50:], other, [20] + [1] * 10)
    assert distance(got, want[:, 50:]) < 1e-4


def test_copy_of_a_folded_model_stays_folded():
    """Its weights are; so the copy is not folded or calibrated again, and a cache serves it."""
    hf, T = own_model()
    ids = tokens(1, 60)
    want = reference(hf, ids)
    with folded_values(hf, T):
        copied = copy.deepcopy(hf)
    for refused in refusing(copied, T):
        with pytest.raises(ValueError, match="folded"):
            refused()
    got = through(copied, ids, WushCache(copied.config, T, 16, WINDOWS), [40] + [1] * 20)
    assert distance(got, want) < 1e-4
    got = through(hf, ids, WushCache(hf.config, T, 16, WINDOWS), [40] + [1] * 20)
    assert distance(got, want) < 1e-4


def test_call_that_fails_in_a_folded_model_leaves_no_trace_in_the_next():
    hf, T = own_model()
    plain, _ = their_model()
    ids = tokens(1, 50)
    right_padding = torch.tensor([[1] * 49 + [0]])
    with folded_values(hf, T):
        with pytest.raises(ValueError, match="left only"):
            through(hf, ids, WushCache(hf.config, T, 16), attention_mask=right_padding)
    got = through(plain, ids, WushCache(plain.config, T, 16, WINDOWS), [30] + [1] * 20)
    assert distance(got, reference(plain, ids)) < 1e-4


def test_values_are_not_folded_into_weights_with_something_beside_them():
    """LoRA's matrices act beside the weight: folding the weight alone would be silently wrong."""
    class Beside(torch.nn.Linear):
        def __init__(self, linear):
            super().__init__(linear.in_features, linear.out_features, bias=False)
            self.lora_A = torch.nn.Parameter(torch.ones(2, linear.in_features))

    hf, T = own_model()
    attention = hf.model.layers[1].self_attn
    for name in ("v_proj", "o_proj"):
        plain = getattr(attention, name)
        setattr(attention, name, Beside(plain))
        with pytest.raises(ValueError, match="LoRA"), folded_values(hf, T):
            pass
        setattr(attention, name, plain)


SHARDS = [
    (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    (4, 2, [[0, 1], [2, 3]]),
    (2, 2, [[0], [1]]),
    (2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
    (1, 3, [[0]] * 3),
    (6, 4, None),
    (3, 2, None),
    (2, 0, None),
]

@pytest.mark.parametrize("heads, world_size, want", SHARDS)
def test_each_rank_gets_the_transforms_of_its_heads(heads, world_size, want):
    shape = (2, heads, 1, 4, 4)
    keys = Basis(normal(0, *shape).float(), normal(1, *shape).float())
    values = Basis(normal(2, *shape).float(), normal(3, *shape).float())
    T = Transforms(keys, values, REFINED)
    if want is None:
        with pytest.raises(ValueError):
            shard_transforms(T, 0, world_size)
        return
    for rank, own in enumerate(want):
        got = shard_transforms(T, rank, world_size)
        assert (got.refine, got.group) == (REFINED, None)
        for mine, whole in [(got.keys, keys), (got.values, values)]:
            assert torch.equal(mine.transform, whole.transform[:, own])
            assert torch.equal(mine.hessian, whole.hessian[:, own])
    for rank in (-1, world_size):
        with pytest.raises(ValueError, match="rank"):
            shard_transforms(T, rank, world_size)


TENSOR_PARALLEL = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM
from wush_kv import Windows, WushCache, load_transforms, shard_transforms
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, path, out = sys.argv[1:]
hf = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
hf.set_attn_implementation("wush")
T = shard_transforms(load_transforms(path), rank, size)
cache = WushCache(hf.config, T, 2, Windows(4, 24, 8))
ids = torch.arange(1, 61)[None]
options = {"past_key_values": cache, "do_sample": False, "eos_token_id": None}
tokens = hf.generate(ids, max_new_tokens=12, **options)
json.dump([tokens[0].tolist(), cache.nbytes], open(out + str(rank), "w"))
"""

@pytest.mark.skipif("SLOW" not in os.environ, reason="starts three processes: SLOW=1 pytest")
def test_tensor_parallel_model_gives_the_tokens_of_one_process_with_half_the_bytes_each(tmp_path):
    """Two processes by torchrun, the bundled model, gloo; each holds one of its two KV heads."""
    from transformers import AutoModelForCausalLM
    hf = AutoModelForCausalLM.from_pretrained(HERE / "tiny-qwen3", dtype=torch.float32)
    hf.set_attn_implementation("wush")
    T = calibrated(hf)
    checkpoints.save_transforms(str(tmp_path / "WUSH.pt"), T, {})
    cache = WushCache(hf.config, T, 2, WINDOWS)
    want = generated(hf, torch.arange(1, 61)[None], cache, steps=12)[0].tolist()

    (tmp_path / "run.py").write_text(TENSOR_PARALLEL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "run.py", HERE / "tiny-qwen3", "WUSH.pt", "rank"]
    on_cpu = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=tmp_path, env=os.environ | on_cpu, check=True, capture_output=True)
    for rank in ("0", "1"):
        ids, held = json.loads((tmp_path / f"rank{rank}").read_text())
        assert ids == want and held == cache.nbytes / 2


def test_model_that_accelerate_has_dispatched_is_calibrated_and_served(tmp_path):
    """Two places: the CPU, and the disk, from which accelerate's hooks bring the weights in time."""
    accelerate = pytest.importorskip("accelerate")
    hf, T = own_model()
    ids = tokens(1, 50)
    want = generated(hf, ids)
    before = calibrated(hf)
    on_cpu = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(on_cpu, "cpu") | {"model.layers.1": "disk"}
    hf = accelerate.dispatch_model(hf, places, main_device="cpu", offload_dir=tmp_path)
    assert hf.model.layers[1].self_attn.o_proj.weight.is_meta
    assert torch.equal(generated(hf, ids, WushCache(hf.config, T, 16, WINDOWS)), want)
    assert identical(calibrated(hf), before)
    with pytest.raises(ValueError, match="plain weights"), folded_values(hf, T):
        pass


def test_each_layer_lives_where_its_keys_are_and_moves_with_them():
    """A device that holds no numbers stands for a second one."""
    hf, T = their_model()

    def keys(device):
        return torch.zeros(1, 2, 30, 16, device=device).bfloat16()

    cache = WushCache(hf.config, T, windows=WINDOWS)
    cache.layers[0].lazy_initialization(keys("cpu"))
    cache.layers[1].lazy_initialization(keys("meta"))
    for layer, device in zip(cache.layers, ("cpu", "meta")):
        store = layer.window.keys
        tensors = [*store.buffers(), store.encoding.transform, store.consumer_transform, layer.T_V]
        assert {x.device.type for x in tensors} == {device} and store.recent.dtype == torch.bfloat16
    cache.layers[0].lazy_initialization(keys("meta"))
    assert cache.layers[0].window.keys.recent.is_meta


def test_default_device_is_not_asked():
    """Tokens and rows are read on the CPU, and the cache lives where its keys are, whatever the default device is."""
    hf, T = their_model()
    k = torch.ones(2, 2, 60, 16)
    indices = torch.tensor([1, 0])
    cache = WushCache(hf.config, T, 2, WINDOWS)
    with torch.device("meta"):
        pieces = transformers_cache.calibration_tokens(hf, Numbers(), NUMBERS, 200, 3)
        layer_call(hf, cache, k, k)
        cache.reorder_cache(indices)
        cache.batch_repeat_interleave(2)
    tensors = [*pieces, *cache.layers[0].window.keys.buffers()]
    assert {x.device.type for x in tensors} == {"cpu"}


# ---- What must not happen

CAUSAL = torch.ones(2, 1, 16, 16).tril().bool()
MASKS = [
    (torch.tensor([[1] * 15 + [0], [1] * 16]), "left only"),
    (CAUSAL | True, "left only"),
    (torch.tensor([[0, 0, 1, 1, 0] + [1] * 11] * 2), "left only"),
    (CAUSAL[..., :12], "left only"),
    (CAUSAL.expand(2, 8, 16, 16), "left only"),
    (-(~CAUSAL).float(), "left only"),
    (CAUSAL[:1], None),
    (-3e38 * (~CAUSAL).float(), None),
    (torch.tensor([[0] * 16, [0] * 7 + [1] * 9]), None),
    (None, None),
]

@pytest.mark.parametrize("mask, words", MASKS)
def test_mask_is_left_padding_and_causal_or_refused(mask, words):
    hf, T = their_model()
    cache = WushCache(hf.config, T, windows=WINDOWS)
    if words is None:
        assert through(hf, tokens(2, 16), cache, attention_mask=mask).isfinite().all()
        return
    with pytest.raises(ValueError, match=words):
        through(hf, tokens(2, 16), cache, attention_mask=mask)


def test_padding_that_the_cache_does_not_know_is_refused():
    hf, T = their_model()
    ids, mask = padded(20, 13)
    cache = WushCache(hf.config, T, windows=WINDOWS)
    through(hf, ids, cache, attention_mask=mask)
    for later in (None, torch.ones(2, 21, dtype=torch.long)):
        with pytest.raises(ValueError, match="hides other columns"):
            through(hf, ids[:, :1], copy.deepcopy(cache), attention_mask=later)
    with pytest.raises(ValueError, match="batch of 1"):
        through(hf, ids[:1], cache)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padding_under_another_attention_is_warned_of(attention):
    """By generate, which tells the positions; rows of equal length give only the other warning."""
    hf, T = their_model("qwen3", attention)
    ids, mask = padded(20, 13)
    for prompt_mask, expected in [(mask, True), (torch.ones_like(mask), False)]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generated(hf, ids, WushCache(hf.config, T), prompt_mask, steps=3)
        assert any("left padding" in str(w.message) for w in caught) == expected


def test_prompt_fed_in_calls_of_which_some_rows_see_only_padding_equals_rows_alone():
    hf, T = their_model()
    ids, mask = padded(60, 13, 31)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    positions = positions_of(mask)
    parts = []
    for i in range(0, 60, 20):
        part = slice(i, i + 20)
        options = {"attention_mask": mask[:, :i + 20], "position_ids": positions[:, part]}
        parts.append(through(hf, ids[:, part], cache, **options))
    got = torch.cat(parts, 1)
    assert got.isfinite().all()
    for i, n in enumerate((60, 13, 31)):
        assert distance(got[i, 60 - n:], reference(hf, ids[i:i + 1, 60 - n:])[0]) < 1e-4


UNKNOWN_OPTIONS = [
    ({"softcap": 30.0}, "softcap"),
    ({"s_aux": torch.zeros(8)}, "s_aux"),
    ({"dropout": 0.1}, "dropout"),
    ({"is_causal": False}, "is_causal"),
    ({"sliding_window": 9}, "sliding_window"),
]

@pytest.mark.parametrize("change, words", UNKNOWN_OPTIONS)
def test_attention_of_another_kind_is_refused(change, words):
    hf, T = their_model()
    k, v = WushCache(hf.config, T).update(*torch.randn(2, 1, 2, 5, 16), 0)
    module = hf.model.layers[0].self_attn
    with pytest.raises(ValueError, match=words):
        wush_attention(module, torch.randn(1, 8, 5, 16), k, v, None, 0.25, **change)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("filled", [0, 60])
@pytest.mark.parametrize("layers", [1, 2])
def test_cache_that_wush_attention_does_not_serve_is_refused_within_the_call(
        layers, attention, filled):
    """Its config says "wush", the model runs another attention. What it held it still holds."""
    hf, T = their_model("qwen3", attention, num_hidden_layers=layers)
    wush = their_model("qwen3", "wush", num_hidden_layers=layers)[0]
    cache = WushCache(wush.config, T, 16, WINDOWS)
    ids = tokens(1, 69)
    if filled:
        through(wush, ids[:, :filled], cache)
    with pytest.raises(ValueError, match="config"):
        through(hf, ids[:, filled:], cache)
    assert distance(through(wush, ids[:, filled:], cache), reference(hf, ids)[:, filled:]) < 1e-4


def test_keys_of_another_call_are_refused():
    hf, T = their_model()
    k, v = WushCache(hf.config, T).update(*torch.randn(2, 1, 2, 5, 16), 0)
    q = torch.randn(1, 8, 5, 16)
    wush_attention(hf.model.layers[0].self_attn, q, k, v, None)
    with pytest.raises(ValueError, match="another call"):
        wush_attention(hf.model.layers[0].self_attn, q, k, v, None)


WRONG_SHAPES = [
    ((2, 2, 5, 16), "batch of 2"),
    ((1, 1, 5, 16), "1 heads"),
    ((1, 2, 5, 8), "of 8 channels"),
    ((1, 4, 5, 16), "4 heads"),
]

@one_attention
@pytest.mark.parametrize("shape, words", WRONG_SHAPES)
def test_keys_that_would_broadcast_into_a_cache_are_refused(shape, words, attention):
    """A filled cache and an empty one: nothing is written."""
    hf, T = their_model("qwen3", attention)
    cache = WushCache(hf.config, T, 16, WINDOWS)
    through(hf, tokens(1, 60), cache)
    before = buffers(cache)
    with pytest.raises(ValueError, match=words):
        cache.update(torch.zeros(shape), torch.zeros(shape), 0)
    with pytest.raises(ValueError, match="one shape"):
        cache.update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 8), 0)
    assert identical(buffers(cache), before)
    if shape[0] == 1:
        with pytest.raises(ValueError, match="heads of"):
            WushCache(hf.config, T).update(torch.zeros(shape), torch.zeros(shape), 0)


def test_keys_of_another_dtype_than_the_cache_holds_are_refused():
    hf, T = their_model()
    half = tiny().requires_grad_(False).bfloat16()
    half.set_attn_implementation("wush")
    cache = WushCache(half.config, T)
    through(half, tokens(1, 20), cache)
    with pytest.raises(ValueError, match="float32 .*bfloat16"):
        through(hf, tokens(1, 1), cache)


def test_refusal_leaves_the_cache_fit_for_the_next_call():
    hf, T = own_model()
    cache = WushCache(hf.config, T, 16)
    ids = tokens(1, 9)
    layer = hf.model.layers[0].self_attn
    hf.train()
    layer.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        through(hf, ids, cache)
    hf.eval()
    layer.attention_dropout = 0.0
    assert distance(through(hf, ids, cache), reference(hf, ids)) < 1e-4


def test_copy_of_a_cache_goes_on_by_itself_and_sees_what_becomes_of_the_model():
    """A prompt's cache is copied for each question: its tokens, not the model's config nor the transforms."""
    hf, T = own_model()
    cache = WushCache(hf.config, T, 16, WINDOWS)
    ids = tokens(1, 100)
    want = reference(hf, ids)
    with folded_values(hf, T):
        through(hf, ids[:, :60], cache)
        copies = [copy.deepcopy(cache) for _ in range(2)]
        assert copies[0].transforms.keys.transform is T.keys.transform
        assert distance(through(hf, ids[:, 60:], copies[0], 1), want[:, 60:]) < 1e-4
    assert distance(through(hf, ids[:, 60:], cache, 1), want[:, 60:]) < 1e-4
    hf.set_attn_implementation("sdpa")
    assert distance(through(hf, ids[:, 60:], copies[1], 1), want[:, 60:]) < 1e-4


def broken(change):
    """Return transforms with one thing wrong."""
    T = their_model()[1]
    keys, values = T.keys.transform, T.values.transform
    with_feedback = {"keys": Basis(keys, keys), "values": Basis(values, values)}
    return {
        "layers": T._replace(keys=Basis(keys[:1])),
        "heads": {"k": keys.repeat(1, 2, 1, 1, 1), "v": values.repeat(1, 2, 1, 1, 1)},
        "unequal heads": {"k": keys[:, :1], "v": values},
        "head dim": {"k": keys[..., :8, :8], "v": values[..., :8, :8]},
        "the earlier layout": {"k": keys, "v": values, "k_feedback": keys, "v_feedback": values},
        "a misspelt name": {"k": keys, "v": values, "k_hess": keys, "v_hess": values},
        "no values": {"k": keys},
        "no keys": {"v": values},
        "a path": "WUSH.pt",
        "a list": {"k": keys.tolist(), "v": values},
        "integers": {"k": keys.int(), "v": values},
        "one layer": {"k": keys[0], "v": values[0]},
        "NaN": {"k": keys * math.nan, "v": values},
        "feedback unsaid": T._replace(**with_feedback),
        "no feedback": T._replace(refine=REFINED),
        "feedback of keys": {"k": keys, "v": values, "k_hessian": keys},
        "feedback's group": Transforms(**with_feedback, refine=REFINED, group=8),
    }[change]


WRONG_TRANSFORMS = [
    ("layers", "of 1 layers"),
    ("heads", "4 KV heads"),
    ("unequal heads", "same heads"),
    ("head dim", "head dim 8"),
    ("the earlier layout", "not k_feedback, v_feedback: calibrate anew"),
    ("a misspelt name", "not k_hess, v_hess: calibrate anew"),
    ("no values", "lack those of the values"),
    ("no keys", "lack those of the keys"),
    ("a path", "load_transforms"),
    ("a list", "floating-point tensor"),
    ("integers", "floating-point tensor"),
    ("one layer", "floating-point tensor"),
    ("NaN", "NaN"),
    ("feedback unsaid", "feedback"),
    ("no feedback", "feedback"),
    ("feedback of keys", "feedback"),
    ("feedback's group", "H' of shape .* does not fit"),
]

@pytest.mark.parametrize("change, words", WRONG_TRANSFORMS)
def test_transforms_that_fit_no_cache_are_refused_when_it_is_made(change, words):
    hf, _ = their_model()
    with pytest.raises(ValueError, match=words) as caught:
        WushCache(hf.config, broken(change))
    assert "\n" not in str(caught.value) and "[" not in str(caught.value)


WRONG_BITS = [5, 0, 2.0, True, "2", None, (2, 1), (0, 2), (2, 2, 2), ()]
WRONG_WINDOWS = [
    Windows(keep=-1), Windows(flush=0), Windows(sink=4.5), Windows(sink=-1), Windows(sink=True),
    Windows(keep=2 ** 40), Windows(flush=2 ** 40), (2 ** 20 + 1, 128, 16),
    (16, 128), 16, "abc", None]

@pytest.mark.parametrize("bits", WRONG_BITS)
def test_bits_that_there_are_not_are_refused_when_the_cache_is_made(bits):
    hf, T = their_model()
    with pytest.raises(ValueError, match="bits"):
        WushCache(hf.config, T, bits)


@pytest.mark.parametrize("windows", WRONG_WINDOWS)
def test_windows_that_are_no_lengths_are_refused_when_the_cache_is_made(windows):
    hf, T = their_model()
    with pytest.raises(ValueError, match="sink >= 0, keep >= 0 and flush >= 1"):
        WushCache(hf.config, T, windows=windows)


def test_file_that_is_not_this_models_cache_is_refused_in_one_sentence(tmp_path):
    hf, T = their_model()
    cache = WushCache(hf.config, T, windows=WINDOWS)
    through(hf, tokens(1, 60), cache)
    path = tmp_path / "cache.pt"
    cache.save(path)
    content = torch.load(path)

    (tmp_path / "text.pt").write_text("not a torch file")
    (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:2000])
    torch.save({"k": T.keys.transform, "v": T.values.transform}, tmp_path / "WUSH.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(content | {"format": "WushCache 1"}, tmp_path / "format.pt")
    torch.save(content | {"layers": 5}, tmp_path / "layers.pt")
    torch.save(content | {"bits": 8}, tmp_path / "bits.pt")
    torch.save({key: content[key] for key in ("format", "layers")}, tmp_path / "parts.pt")
    complaints = {
        "cannot be read": ["none.pt", "text.pt", "cut.pt"],
        "not a cache": ["WUSH.pt", "list.pt", "format.pt"],
        "damaged": ["layers.pt", "bits.pt", "parts.pt"],
    }
    for words, names in complaints.items():
        for name in names:
            with pytest.raises(ValueError, match=words) as caught:
                WushCache.load(tmp_path / name, hf.config)
            assert name in str(caught.value) and "\n" not in str(caught.value)

    for changes, words in [({"num_hidden_layers": 3}, "layers"), ({"head_dim": 32}, "head dim")]:
        with pytest.raises(ValueError, match=f"another model's.*{words}"):
            WushCache.load(path, tiny(**changes).config)
    with pytest.raises(ValueError, match="another model's.*KV heads"):
        WushCache.load(path, tiny(num_key_value_heads=1).config)


def test_cache_that_cannot_be_saved_says_so_in_one_sentence(tmp_path):
    """Onto a folder, into none, and below a file."""
    hf, T = their_model()
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none" / "cache.pt", tmp_path / "file" / "cache.pt"):
        with pytest.raises(ValueError, match=f"{path} cannot be written") as caught:
            WushCache(hf.config, T).save(path)
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_model_and_config_in_each_others_place_are_refused():
    hf, T = their_model()
    for wrong in (hf, hf.config.to_dict(), None):
        with pytest.raises(ValueError, match="not a config .* give model.config"):
            WushCache(wrong, T)
    for wrong in (hf.config, "Qwen/Qwen3-8B", None):
        with pytest.raises(ValueError, match="not a model of transformers"):
            calibrate(wrong, Numbers(), NUMBERS)


def test_interrupted_saving_leaves_the_old_file(tmp_path, monkeypatch):
    hf, T = their_model()
    cache = WushCache(hf.config, T, windows=WINDOWS)
    cache.save(tmp_path / "cache.pt")
    before = (tmp_path / "cache.pt").read_bytes()

    def interrupted(content, path):
        open(path, "w").write("half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save(tmp_path / "cache.pt")
    assert (tmp_path / "cache.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["cache.pt"]


def test_names_of_the_drawer_are_found_in_the_module():
    assert W.WushCache is WushCache and W.calibrate is calibrate
    with pytest.raises(AttributeError):
        W.NoSuchThing


def test_example_of_the_readme_runs_as_it_stands(capsys, monkeypatch):
    """It prints the text and the bytes of 6 layers: 160 tokens of bfloat16 windows, 64 packed."""
    monkeypatch.chdir(HERE)
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    example = readme.split("## Use from transformers")[1].split("```")[1]
    if Version(transformers.__version__) < Version("5.24"):
        example = example.replace("cache=cache", "past_key_values=cache")        # as the README says
    exec(example.removeprefix("python\n"), {})
    text, held = capsys.readouterr().out.rsplit(maxsplit=1)
    assert text.startswith("Tell me where is fancy bred,") and len(text) > 300
    assert int(held) == 4 * 2 * 2 * (160 * 64 * 2 + 64 * (16 + 4))


# ---- What a step costs

class Operators(TorchDispatchMode):
    """Count the operators that run under it and the elements of the largest tensor that one returns anew."""
    count = 0
    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **kwargs or {})
        if not operator.is_view:
            self.count += 1
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self.largest = max(self.largest, x.numel())
        return out


@torch.no_grad()
def decode_step(hf, n, bits):
    """Run one step on a cache of n tokens, none of which falls due, under `Operators`."""
    cache = WushCache(hf.config, random_transforms(hf), bits, WINDOWS)
    through(hf, tokens(1, n), cache)
    assert cache.layers[0].window.n_packed == [n - 28]
    with Operators() as operators:
        hf(tokens(1, 1), past_key_values=cache)
    return operators


def test_step_runs_as_many_operators_a_layer_whatever_the_context_and_copies_no_cache():
    """On a GPU they are launches; reading by sdpa, in contrast, makes copies of n·g·d elements."""
    hf = their_model()[0]
    deeper = their_model("qwen3", num_hidden_layers=3)[0]
    short = decode_step(hf, 100, 2)
    long = decode_step(hf, 908, 2)
    more = decode_step(deeper, 908, 2)
    assert short.count == long.count and more.count - long.count <= 120
    restored = decode_step(their_model("qwen3", "sdpa")[0], 908, 2)
    assert long.largest < 908 * 2 * 16 <= restored.largest


def test_bytes_are_those_of_the_windows_and_the_codes_and_generations_leave_none_behind():
    """2 layers, heads, sides: 4 + 24 tokens of 16 floats and room for 3, 64 of 4 + 4 bytes. No tensor outlives it."""
    hf, T = their_model()
    cache = WushCache(hf.config, T, windows=WINDOWS)
    generated(hf, tokens(1, 60), cache)
    assert cache.nbytes == 2 * 2 * 2 * ((4 + 24 + 3) * 16 * 4 + 64 * (4 + 4))
    del cache

    def alive():
        gc.collect()
        return sum(is_tensor(x) for x in gc.get_objects())

    counts = []
    for _ in range(4):
        generated(hf, tokens(2, 30), WushCache(hf.config, T, windows=WINDOWS), steps=4)
        counts.append(alive())
    assert counts[1] == counts[3]
