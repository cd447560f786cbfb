"""Tests of WushCache, calibration and folding in transformers, and of what users do to a cache."""
import copy
import functools
import gc
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wush_kv as W
from wush_tools import checkpoints, cli, evaluate
from wush_tools.testing import (TWO, WINDOWS, close, distance, moment, normal, reference, saved, tiny,
                                tokens, transforms)
from wush_tools.transformers_cache import wush_attention

ARCHITECTURES = {"llama": {}, "qwen2": {"head_dim": None, "num_attention_heads": 4}, "qwen3": {},
         "mistral": {"sliding_window": None}}


each_attention = lambda f: pytest.mark.filterwarnings("ignore")(
    pytest.mark.parametrize("attention", ["wush", "sdpa", "eager"])(f))


@functools.cache
def their_model(kind, attention="wush", **changes):
    """Make transformers' model of a kind, with an attention, and random transforms of condition 9."""
    W.WushCache                                          # the name registers attention "wush"
    hf = tiny(kind, **ARCHITECTURES[kind] | changes).requires_grad_(False)
    hf.set_attn_implementation(attention)
    return hf, {"k": transforms(hf, 9.0, 3), "v": transforms(hf, 9.0, 4)}


class Numbers:
    """A tokenizer of texts that are token ids."""
    def __call__(self, text, **how):
        return {"input_ids": [int(word) for word in text.split()]}


NUMBERS = " ".join(map(str, tokens(600, seed=8).tolist()))


def padded(*lengths):
    """Draw prompts of these lengths: their ids with padding 0 at the left, and the mask."""
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return mask * (1 + tokens(*mask.shape, seed=len(lengths))), mask


def generated(hf, ids, cache=None, mask=None, steps=36, **how):
    """Generate greedily, to no end token, with transformers' own cache if `cache` is None."""
    mask, how = torch.ones_like(ids) if mask is None else mask, dict(pad_token_id=0, eos_token_id=256) | how
    return hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps,
                       **how | ({"past_key_values": cache} if cache is not None else {}))


@torch.no_grad()
def through(hf, ids, cache, cuts=1000, **how):
    """Feed ids (b, t) in calls of `cuts` tokens through a cache: logits (b, t, v)."""
    return torch.cat([hf(part, past_key_values=cache, **how).logits for part in ids.split(cuts, 1)], 1)


@each_attention
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_generation_with_quantization_off_gives_the_tokens_of_transformers_own_cache(kind, attention):
    """P47, P27. Greedy, beams, left-padded, with guesses from the prompt and from another model."""
    (hf, T), plain = their_model(kind, attention), their_model(kind, "sdpa")[0]
    ids, mask = padded(50, 21, 37)
    cycle = torch.arange(1, 20).repeat(3)[None]          # guesses from it are sometimes right
    guess = tiny("llama", seed=1, num_hidden_layers=1).requires_grad_(False)
    for row, how in ((ids[:1], {}), (ids[:1], {"num_beams": 3, "num_return_sequences": 2}),
                     (ids, {"mask": mask}), (ids, {"mask": mask, "num_beams": 2}),
                     (cycle, {"prompt_lookup_num_tokens": 4}), (cycle, {"assistant_model": guess})):
        cache = W.WushCache(hf.config, T, bits=16, **WINDOWS)
        got = generated(hf, row, cache, **how)
        assert torch.equal(got, generated(plain, row, **how)), how
        assert type(cache.get_seq_length()) is int and cache.is_initialized
        assert max(cache.layers[1].window.n_packed) >= 3 * 8                   # the transforms were at work


@each_attention
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_eight_bits_move_logits_by_less_than_a_hundredth(kind, attention):
    """P24: two bits move them by more. Weights as transformers draws them, T calibrated; one warning."""
    hf, ids = their_model(kind, attention, initializer_range=0.02)[0], tokens(2, 120)
    T = W.calibrate(hf, Numbers(), NUMBERS, length=200, refine=())
    run = lambda bits: through(hf, ids, W.WushCache(hf.config, T, bits, **WINDOWS), [80] + [1] * 40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        off = run(16)
    said = [str(w.message) for w in caught if w.category is UserWarning]
    assert ["set_attn_implementation('wush')" in text for text in said] == [True] * (attention != "wush")
    assert distance(off, reference(hf, ids)) < 1e-4 and off.std() > 0.1
    assert distance(run(8), off) < 1e-2 < distance(run(2), off)


@pytest.mark.parametrize("refine", [(), tuple(W.REFINEMENTS)])
def test_padded_rows_at_2_bits_get_the_tokens_they_get_alone_though_one_ends_early(refine):
    """P17, P19, P20. The unpadded row ends at its second token; the padding's id makes no difference."""
    hf, (ids, mask) = their_model("qwen3")[0], padded(60, 33, 48)
    T = W.calibrate(hf, Numbers(), NUMBERS, length=200, refine=refine)
    make = lambda: W.WushCache(hf.config, T, **WINDOWS)
    alone = [generated(hf, row[None, keep.bool()], make())[0, keep.sum():] for row, keep in zip(ids, mask)]
    cache, ends = make(), lambda ids, scores: torch.tensor([ids.shape[1] >= 62, False, False])
    batch = generated(hf, ids + 7 * (1 - mask), cache, mask, stopping_criteria=[ends], pad_token_id=9)[:, 60:]
    assert batch[0].tolist() == [*alone[0][:2], *[9] * 34]
    assert all(torch.equal(batch[i], alone[i]) for i in (1, 2))
    assert cache.layers[0].window.n == [95, 68, 83] and cache.get_seq_length() == 95
    off = generated(hf, ids, W.WushCache(hf.config, T, 16, **WINDOWS), mask)[:, 60:]
    assert not torch.equal(off[1:], batch[1:])


@each_attention
@pytest.mark.parametrize("transform", ["wush", "wush_a", "oscar"])
def test_calibrating_transformers_model_gives_what_calibrating_ours_gives(transform, attention):
    """Signs of eigenvectors are not in TᵀT; float32 noise grows by 1 + d/γ at most (P41). F is T's own."""
    hf = tiny(attention_bias=True).requires_grad_(False).train()
    W.WushCache                                          # registers "wush"
    hf.set_attn_implementation(attention)
    hf.model.layers[1].eval()
    state = lambda: [(m.training, sorted(m.__dict__)) for m in hf.modules()], hf.config._attn_implementation
    before, refine = (state[0](), state[1]), tuple(W.REFINEMENTS)
    texts = [NUMBERS[:500], NUMBERS[500:]]
    got = W.calibrate(hf, Numbers(), texts, length=150, sequences=3, transform=transform)
    assert (state[0](), hf.config._attn_implementation) == before
    with pytest.raises(IndexError):                      # a token beyond the vocabulary
        W.calibrate(hf, Numbers(), "1 2 999")
    assert (state[0](), hf.config._attn_implementation) == before
    ours = W.Model(hf.config, hf.state_dict(), *checkpoints.rope_frequencies(hf.config))
    ids = sum((Numbers()(text)["input_ids"] for text in texts), [])
    moments = W.collect_moments(ours, list(torch.tensor(ids[:450]).split(150)), transform == "wush_a")
    want = W.derive(moments, transform, None, refine if "wush" in transform else ())
    assert got.keys() == want.keys() and len(got) == (2 if transform == "oscar" else 4)
    for side, (_, hess) in zip("kv", W.TRANSFORMS[transform][1:]):
        assert close(moment(got[side].double()), moment(want[side].double()), 1e-4)
        if "k_feedback" in got:
            assert close(got[side + "_feedback"], W.feedback(got[side], moments[hess], True).float(), 1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["wush", "sdpa"])
@pytest.mark.parametrize("refine", [(), ("feedback", "step"), tuple(W.REFINEMENTS)])
def test_perplexity_through_transformers_equals_perplexity_of_our_loop(refine, attention, tmp_path):
    """P45: 300 tokens in calls of 16, to 1e-3 relative; and quantization moves it by more."""
    hf, model = saved(tmp_path)
    W.WushCache
    hf.set_attn_implementation(attention)
    T = W.calibrate(hf, Numbers(), NUMBERS, length=200, refine=refine)
    codec, ids = cli.codecs(cli.Options(bits=2), refine)[0], tokens(1, 300, seed=9)
    said = {} if len(refine) in (0, 4) else {"refine": refine}           # the cache finds out all or none
    want = evaluate.perplexity(model, [ids[0]], {"T": W.Scheme(codec, codec, T)}, **WINDOWS)
    scores = through(hf, ids, W.WushCache(hf.config, T, **WINDOWS, **said), 16)[0, :-1].log_softmax(-1)
    nll = -scores.gather(1, ids[0, 1:, None]).mean().item()
    assert math.exp(nll) == pytest.approx(want["T"]["perplexity"][0], rel=1e-3)
    assert abs(math.log(want["none"]["perplexity"][0]) - nll) > 1e-3


# --- What users do to a cache.

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["wush", "sdpa"])
@pytest.mark.parametrize("bits, question", [(16, 60), (2, 5)])
def test_second_question_over_a_cached_context_is_answered_as_by_a_fresh_cache(bits, question, attention):
    """P27. A long first answer packs some of the context, which only shows with quantization on."""
    hf, T = their_model("qwen3", attention)
    context, first, second = tokens(1, 71), tokens(1, question, seed=5), tokens(1, 9, seed=6)
    make = lambda: W.WushCache(hf.config, T, bits, sink=4, keep=16, flush=24)
    cache = make()
    prefix = through(hf, context, cache)
    generated(hf, torch.cat([context, first], 1), cache, steps=3)
    used = question + 2                                  # the last token of an answer is never fed back
    assert cache.get_seq_length() == 71 + used and cache.get_mask_sizes(5, 0) == (76 + used, 0)
    cache.crop(-used)
    assert cache.get_seq_length() == 71 and type(cache.get_seq_length()) is int
    both, fresh = torch.cat([context, second], 1), make()
    through(hf, context, fresh)
    again = generated(hf, both, cache, steps=20)
    assert torch.equal(again, generated(hf, both, fresh, steps=20))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert distance(through(hf, context, cache), prefix) == 0
    assert prefix.dtype == cache.layers[0].update(*torch.zeros(2, 1, 2, 1, 16).to(prefix.dtype))[0].dtype


@pytest.mark.parametrize("length", [2, 4, 20, 52, 53, 60, 79, 0])
@pytest.mark.parametrize("old", [False, True])
def test_cropping_into_any_region_equals_never_having_fed_what_was_cropped(length, old):
    """80 tokens are 4 sinks, 48 packed and 28 recent. Both ways to name the length; -1 too much is all."""
    hf, T = their_model("qwen3")
    ids, more, cache = tokens(2, 80), tokens(2, 9, seed=4), W.WushCache(hf.config, T, 16, **WINDOWS)
    through(hf, ids, cache)
    assert [cache.layers[0].window.sizes(row) for row in (0, 1)] == [(4, 48, 28)] * 2
    cache.crop(length) if old and length else cache.crop(length - 80 - (length == 0))
    assert cache.get_seq_length() == length
    assert cache.layers[1].window.n_packed == [min(48, max(length - 4, 0))] * 2
    want = reference(hf, torch.cat([ids[:, :length], more], 1))[:, length:]
    assert distance(through(hf, more, cache, [5, 1, 3]), want) < 1e-4
    cache.crop(0)
    assert cache.get_seq_length() == length + 9


def test_rows_can_be_reordered_selected_and_repeated():
    hf, T = their_model("qwen3")
    (ids, mask), more = padded(60, 41, 53), tokens(6, 4, seed=4)
    cache = W.WushCache(hf.config, T, 16, **WINDOWS)
    with torch.no_grad():
        hf(ids, attention_mask=mask, past_key_values=cache, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(3)
    rows = [2] * 3 + [1] * 3
    assert cache.layers[0].window.n == [53] * 3 + [41] * 3 and cache.get_seq_length() == 60
    positions = mask[rows].sum(1, keepdim=True) + torch.arange(4)
    seen = torch.cat([mask[rows], torch.ones_like(more)], 1)
    got = through(hf, more, cache, attention_mask=seen, position_ids=positions)
    for i, row in enumerate(rows):
        alone = torch.cat([ids[row][mask[row].bool()], more[i]])[None]
        assert distance(got[i], reference(hf, alone)[0, -4:]) < 1e-4


@pytest.mark.parametrize("k_bits, v_bits", [(2, 2), (16, 3)])
def test_cache_read_back_from_disk_goes_on_bit_for_bit(k_bits, v_bits, tmp_path):
    """And a deep copy, which examples make of a prompt's cache; batches of other lengths too."""
    hf, (ids, mask) = their_model("qwen3")[0], padded(60, 47)
    T = W.calibrate(hf, Numbers(), NUMBERS, length=200)
    cache = W.WushCache(hf.config, T, k_bits=k_bits, v_bits=v_bits, **WINDOWS)
    through(hf, ids[:, :50], cache, attention_mask=mask[:, :50])
    cache.save(tmp_path / "cache.pt")
    back, copied = W.WushCache.load(tmp_path / "cache.pt", hf.config), copy.deepcopy(cache)
    assert back.get_seq_length() == 50 and back.layers[0].window.n == [50, 37]
    want = generated(hf, ids, cache, mask)
    assert torch.equal(generated(hf, ids, copied, mask), want)
    assert torch.equal(generated(hf, ids, back, mask), want)
    for ours, theirs in zip(cache.layers, back.layers):
        a, b = ours.window.state(), theirs.window.state()
        assert a["n"] == b["n"] and all(torch.equal(x, y) for key in ("sinks", "recent", "packed")
                                        for x, y in zip(a[key], b[key]))
    empty = W.WushCache(hf.config, T)
    empty.save(tmp_path / "cache.pt")
    assert not W.WushCache.load(tmp_path / "cache.pt", hf.config).is_initialized


def test_wush_attention_without_its_cache_is_sdpa():
    from transformers import DynamicCache
    hf, (ids, mask) = their_model("llama")[0], padded(40, 22)
    plain = their_model("llama", "sdpa")[0]
    for how in {"use_cache": False}, {"past_key_values": DynamicCache(config=hf.config)}:
        with torch.no_grad():
            a, b = (m(ids, attention_mask=mask, **copy.deepcopy(how)).logits for m in (hf, plain))
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")
@each_attention
def test_scores_are_scaled_as_the_model_says(attention):
    hf = tiny().requires_grad_(False)
    W.WushCache
    hf.set_attn_implementation("sdpa")
    for layer in hf.model.layers:
        layer.self_attn.scaling = 0.1
    ids = tokens(1, 80)
    want, T = reference(hf, ids), {"k": transforms(hf), "v": transforms(hf)}
    hf.set_attn_implementation(attention)
    got = through(hf, ids, W.WushCache(hf.config, T, 16, **WINDOWS), [60] + [1] * 20)
    assert distance(got, want) < 1e-4 < distance(want, reference(their_model("qwen3")[0], ids))


def refusing(hf, T):
    return lambda: W.calibrate(hf, Numbers(), NUMBERS), lambda: W.folded_values(hf, T["v"]).__enter__()


@pytest.mark.filterwarnings("ignore")
@each_attention
def test_gradients_are_refused_on_the_way_back_and_only_there(attention):
    hf, ids = tiny(), tokens(1, 60)
    W.WushCache
    hf.set_attn_implementation(attention)
    out = hf(ids, past_key_values=W.WushCache(hf.config, their_model("qwen3")[1], 16, **WINDOWS)).logits
    assert distance(out, reference(hf, ids)) < 1e-4
    with pytest.raises(ValueError, match="gradients"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore")
@each_attention
def test_logits_with_quantization_off_in_bfloat16_and_keys_and_values_are_transformers_own(attention):
    """P47, P16. 3e-2 of the largest, some of bfloat16's steps of 2^-8; in float32 1e-4, with blocks of T."""
    from transformers import DynamicCache
    ids, T = tokens(2, 120), {side: transforms(their_model("qwen3")[0], 4.0) for side in "kv"}
    hf = tiny().requires_grad_(False).bfloat16()
    want, cache = reference(hf, ids), W.WushCache(hf.config, T, 16, **WINDOWS)
    hf.set_attn_implementation(attention)
    got = through(hf, ids, cache, [60] + [1] * 60)
    assert got.dtype == torch.bfloat16 and distance(got, want) < 3e-2 * want.abs().max()
    hf, own = their_model("qwen3", attention)[0], DynamicCache()
    T = W.calibrate(hf, Numbers(), NUMBERS, length=200, group=8)
    cache = W.WushCache(hf.config, T, 16, **WINDOWS)
    through(hf, ids, own), through(hf, ids, cache, [60] + [1] * 60)
    for ours, theirs in zip(cache.layers, own.layers):
        assert ours.scheme.k_codec.group == 8 and ours.window.k.T.shape == (2, 2, 8, 8)
        assert distance(ours.keys, theirs.keys) < 1e-4 and distance(ours.values, theirs.values) < 1e-4


# --- Folding, sharding, devices, files for serving.

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["wush", "sdpa"])
def test_folding_values_changes_no_logits_and_is_undone_bit_for_bit(attention):
    """A cache notices a fold, in the middle of a text too; one of other transforms is refused."""
    hf, T = tiny(attention_bias=True).requires_grad_(False), their_model("qwen3")[1]
    hf.set_attn_implementation(attention)
    before, ids = {name: p.clone() for name, p in hf.named_parameters()}, tokens(1, 100)
    want, cache = reference(hf, ids), W.WushCache(hf.config, T, 16, **WINDOWS)
    got = [through(hf, ids[:, :40], cache)]
    with W.folded_values(hf, T["v"]):
        name = "model.layers.0.self_attn.v_proj.weight"
        assert distance(hf.get_parameter(name), before[name]) > 0.1
        got.append(through(hf, ids[:, 40:80], cache, 1))
        assert distance(reference(hf, ids), want) < 1e-4
        for refused in refusing(hf, T):
            with pytest.raises(ValueError, match="folded"):
                refused()
        other = W.WushCache(hf.config, T | {"v": T["k"]}, 16)
        with pytest.raises(ValueError, match="another T_V"):
            through(hf, ids, other)
    got.append(through(hf, ids[:, 80:], cache))
    assert distance(torch.cat(got, 1), want) < 1e-4
    with pytest.raises(ZeroDivisionError), W.folded_values(hf, T["v"]):
        1 / 0
    with pytest.raises(ValueError), W.folded_values(hf, T["v"][:1]):
        pass
    assert all(torch.equal(p, before[name]) for name, p in hf.named_parameters())
    assert torch.equal(reference(hf, ids), want)


@pytest.mark.parametrize("heads, world_size, want", [
    (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]), (4, 2, [[0, 1], [2, 3]]), (2, 2, [[0], [1]]),
    (2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]), (1, 3, [[0]] * 3),
    (6, 4, None), (3, 2, None), (2, 0, None)])
def test_each_rank_gets_the_transforms_of_its_heads(heads, world_size, want):
    T = {"k": normal(0, 2, heads, 1, 4, 4), "k_feedback": normal(1, 2, heads, 1, 4, 4)}
    if want is None:
        with pytest.raises(ValueError):
            W.shard_transforms(T, 0, world_size)
        return
    for rank, own in enumerate(want):
        got = W.shard_transforms(T, rank, world_size)
        assert all(torch.equal(x, T[key][:, own]) for key, x in got.items())
    for rank in (-1, world_size):
        with pytest.raises(ValueError, match="rank"):
            W.shard_transforms(T, rank, world_size)


def test_model_that_accelerate_has_dispatched_is_calibrated_and_served(tmp_path):
    """Two places: the CPU, and the disk, from which accelerate's hooks bring the weights in time."""
    accelerate = pytest.importorskip("accelerate")
    hf, T = tiny().requires_grad_(False), their_model("qwen3")[1]
    W.WushCache
    hf.set_attn_implementation("wush")
    ids, text = tokens(1, 50), NUMBERS[:800]
    want, tensors = generated(hf, ids), W.calibrate(hf, Numbers(), text)
    on_cpu = "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"
    places = dict.fromkeys(on_cpu, "cpu") | {"model.layers.1": "disk"}
    hf = accelerate.dispatch_model(hf, places, main_device="cpu", offload_dir=tmp_path)
    assert hf.model.layers[1].self_attn.o_proj.weight.is_meta
    assert torch.equal(generated(hf, ids, W.WushCache(hf.config, T, 16, **WINDOWS)), want)
    assert all(torch.equal(x, tensors[key]) for key, x in W.calibrate(hf, Numbers(), text).items())
    with pytest.raises(ValueError, match="plain weights"), W.folded_values(hf, T["v"]):
        pass


def test_each_layer_lives_where_its_keys_are_and_moves_with_them():
    """A device that holds no numbers stands for a second one."""
    hf, T = their_model("qwen3")
    keys = lambda device: torch.zeros(1, 2, 30, 16, device=device).bfloat16()
    cache = W.WushCache(hf.config, T, **WINDOWS)
    cache.layers[0].lazy_initialization(keys("cpu"))
    cache.layers[1].lazy_initialization(keys("meta"))
    for layer, device in zip(cache.layers, ("cpu", "meta")):
        tensors = *layer.window.sinks, layer.window.k.T, layer.window.T_query, layer.window.v.codes, layer.T_V
        assert {x.device.type for x in tensors} == {device} and layer.window.recent[0].dtype == torch.bfloat16
    cache.layers[0].lazy_initialization(keys("meta"))
    assert cache.layers[0].window.recent[0].is_meta


# --- What must not happen.

@pytest.mark.parametrize("kind, changes, words", [
    ("mistral", {"sliding_window": 16}, "full attention"), ("qwen2", {"head_dim": 24}, "head_dim 24"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "full attention"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "full attention")])
def test_model_that_a_window_cache_would_serve_wrongly_is_refused(kind, changes, words):
    """P08, P31."""
    hf, T = tiny(kind, **changes), their_model("qwen3")[1]
    for refused in (*refusing(hf, T), lambda: W.WushCache(hf.config, T)):
        with pytest.raises(ValueError, match=words) as caught:
            refused()
        assert str(caught.value).count(".") < 2 and len(str(caught.value)) < 120


def test_model_without_the_usual_projections_is_refused():
    hf, T = tiny(), their_model("qwen3")[1]
    hf.model.layers[1].self_attn.dense = hf.model.layers[1].self_attn.o_proj
    del hf.model.layers[1].self_attn.o_proj
    for refused in refusing(hf, T):
        with pytest.raises(ValueError, match="o_proj"):
            refused()


CAUSAL = torch.ones(2, 1, 16, 16).tril().bool()


@pytest.mark.parametrize("mask, words", [
    (torch.tensor([[1] * 15 + [0], [1] * 16]), "left only"), (CAUSAL | True, "left only"),
    (torch.tensor([[0, 0, 1, 1, 0] + [1] * 11] * 2), "left only"), (CAUSAL[..., :12], "left only"),
    (CAUSAL.expand(2, 8, 16, 16), "left only"), (-(~CAUSAL).float(), "left only"), (CAUSAL[:1], None),
    (-3e38 * (~CAUSAL).float(), None), (torch.tensor([[0] * 16, [0] * 7 + [1] * 9]), None), (None, None)])
def test_mask_is_left_padding_and_causal_or_refused(mask, words):
    hf, T = their_model("qwen3")
    run = lambda: through(hf, tokens(2, 16), W.WushCache(hf.config, T, **WINDOWS), attention_mask=mask)
    if words is None:
        assert run().isfinite().all()
        return
    with pytest.raises(ValueError, match=words):
        run()


def test_padding_that_the_cache_does_not_know_is_refused():
    hf, T = their_model("qwen3")
    (ids, mask), cache = padded(20, 13), W.WushCache(hf.config, T, **WINDOWS)
    through(hf, ids, cache, attention_mask=mask)
    for later in (None, torch.ones(2, 21, dtype=torch.long)):
        with pytest.raises(ValueError, match="hides other columns"):
            through(hf, ids[:, :1], copy.deepcopy(cache), attention_mask=later)
    with pytest.raises(ValueError, match="batch of 1"):
        through(hf, ids[:1], cache)


def test_prompt_fed_in_calls_of_which_some_rows_see_only_padding_equals_rows_alone():
    hf, T = their_model("qwen3")
    (ids, mask), cache = padded(60, 13, 31), W.WushCache(hf.config, T, 16, **WINDOWS)
    positions, got = (mask.cumsum(1) - 1).clamp(min=0), []
    for i in range(0, 60, 20):
        with torch.no_grad():
            got.append(hf(ids[:, i:i + 20], attention_mask=mask[:, :i + 20], past_key_values=cache,
                          position_ids=positions[:, i:i + 20]).logits)
    got = torch.cat(got, 1)
    assert got.isfinite().all()
    for i, n in enumerate((60, 13, 31)):
        assert distance(got[i, 60 - n:], reference(hf, ids[i:i + 1, 60 - n:])[0]) < 1e-4


@pytest.mark.parametrize("change, words", [
    (dict(softcap=30.0), "softcap"), (dict(s_aux=torch.zeros(8)), "s_aux"), (dict(dropout=0.1), "dropout"),
    (dict(is_causal=False), "is_causal"), (dict(sliding_window=9), "sliding_window")])
def test_attention_of_another_kind_is_refused(change, words):
    hf, T = their_model("qwen3")
    k, v = W.WushCache(hf.config, T).update(*torch.randn(2, 1, 2, 5, 16), 0)
    with pytest.raises(ValueError, match=words):
        wush_attention(hf.model.layers[0].self_attn, torch.randn(1, 8, 5, 16), k, v, None, 0.25, **change)


def test_cache_that_wush_attention_does_not_serve_is_refused_at_the_second_call():
    """Its config says "wush", the model's sdpa: one call's tokens come back, at first all there are."""
    hf, T = their_model("qwen3", "sdpa")
    config = copy.deepcopy(hf.config)
    config._attn_implementation = "wush"
    cache, ids = W.WushCache(config, T), tokens(1, 9)
    assert distance(through(hf, ids, cache), reference(hf, ids)) < 1e-4
    with pytest.raises(ValueError, match="config"):
        through(hf, ids, cache)
    other = W.WushCache(their_model("qwen3")[0].config, T)
    k, v = other.update(*torch.randn(2, 1, 2, 5, 16), 0)
    attend = lambda: wush_attention(hf.model.layers[0].self_attn, torch.randn(1, 8, 5, 16), k, v, None)
    attend()
    with pytest.raises(ValueError, match="another layer"):
        attend()


@pytest.mark.filterwarnings("ignore")
def test_refusal_leaves_the_cache_fit_for_the_next_call():
    hf, T = their_model("qwen3")
    cache, ids, layer = W.WushCache(hf.config, T, 16), tokens(1, 9), hf.model.layers[0].self_attn
    hf.train()
    layer.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        through(hf, ids, cache)
    hf.eval()
    layer.attention_dropout = 0.0
    assert distance(through(hf, ids, cache), reference(hf, ids)) < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["wush", "sdpa"])
def test_cache_begun_in_inference_mode_goes_on_outside_of_it(attention):
    hf, T = their_model("qwen3", attention)
    cache, ids = W.WushCache(hf.config, T, 16, **WINDOWS), tokens(1, 90)
    with torch.inference_mode():
        through(hf, ids[:, :80], cache, 40)
    assert distance(through(hf, ids[:, 80:], cache, 1), reference(hf, ids)[:, 80:]) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_copy_of_a_cache_goes_on_by_itself_and_sees_what_becomes_of_the_model():
    """A prompt's cache is copied for each question: its tokens, not the model's config nor the transforms."""
    hf, T = tiny().requires_grad_(False), their_model("qwen3")[1]
    W.WushCache
    hf.set_attn_implementation("wush")
    cache, ids = W.WushCache(hf.config, T, 16, **WINDOWS), tokens(1, 100)
    want = reference(hf, ids)
    with W.folded_values(hf, T["v"]):
        through(hf, ids[:, :60], cache)
        copies = [copy.deepcopy(cache) for _ in range(2)]
        assert copies[0].layers[0].scheme.tensors["k"] is T["k"]
        assert distance(through(hf, ids[:, 60:], copies[0], 1), want[:, 60:]) < 1e-4
    assert distance(through(hf, ids[:, 60:], cache, 1), want[:, 60:]) < 1e-4
    hf.set_attn_implementation("sdpa")
    assert distance(through(hf, ids[:, 60:], copies[1], 1), want[:, 60:]) < 1e-4


def test_values_are_not_folded_into_weights_with_something_beside_them():
    """LoRA's matrices act beside the weight: folding the weight alone would be silently wrong."""
    class Beside(torch.nn.Linear):
        def __init__(self, linear):
            super().__init__(linear.in_features, linear.out_features, bias=False)
            self.lora_A = torch.nn.Parameter(torch.ones(2, linear.in_features))

    hf, T = tiny().requires_grad_(False), their_model("qwen3")[1]
    for name in "v_proj", "o_proj":
        attention = hf.model.layers[1].self_attn
        plain = getattr(attention, name)
        setattr(attention, name, Beside(plain))
        with pytest.raises(ValueError, match="LoRA"), W.folded_values(hf, T["v"]):
            pass
        setattr(attention, name, plain)


def test_parts_of_the_refinement_are_named_in_any_form_or_refused():
    hf, T = their_model("qwen3")
    codecs = lambda refine: W.WushCache(hf.config, T, refine=refine).layers[0].scheme[:2]
    refined = W.refined_codec(2, W.REFINEMENTS)
    for every in "all", W.REFINEMENTS, W.REFINEMENTS.keys(), iter(W.REFINEMENTS), ",".join(W.REFINEMENTS):
        assert codecs(every) == (refined, refined)
    assert codecs("off") == codecs(()) == codecs(None) == (TWO, TWO)
    for wrong in "feedbck", ["feedback", "x"], "all,off", "":
        with pytest.raises(ValueError, match="offset"):
            codecs(wrong)
        with pytest.raises(ValueError, match="offset"):
            W.calibrate(hf, Numbers(), NUMBERS, refine=wrong)


@pytest.mark.parametrize("how, words", [
    (dict(transform="nosuch"), "nosuch"), (dict(sequences=0), "no text"), (dict(text=""), "no text")])
def test_calibration_is_refused_before_it_runs(how, words, monkeypatch):
    hf, how = tiny(), dict(text=NUMBERS) | how
    monkeypatch.setattr(hf.base_model, "forward", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=words):
        W.calibrate(hf, Numbers(), **how)


@pytest.mark.parametrize("how, words", [
    (dict(bits=5), "bits"), (dict(k_bits=1), "bits"), (dict(keep=-1), "keep"), (dict(flush=0), "flush"),
    (dict(transforms="layers"), "1 layers"), (dict(transforms="heads"), "heads of"),
    (dict(transforms="values"), "values"), (dict(transforms="keys"), "keys"),
    (dict(transforms="feedback", group=8), "feedback")])
def test_wrong_use_is_refused_in_one_sentence(how, words):
    hf, T = their_model("qwen3")
    cut = dict(layers=lambda t: t[:1], heads=lambda t: t[:, :1]).get(how.pop("transforms", ""), lambda t: t)
    T = {key: cut(t) for key, t in T.items() if words not in (key + "alues", key + "eys")}
    T |= {"k_feedback": T["k"].triu(1)} if words == "feedback" else {}
    with pytest.raises(ValueError, match=words):
        W.WushCache(hf.config, T, **how).update(*torch.randn(2, 1, 2, 5, 16), 0)
    with pytest.raises(AttributeError):
        W.NoSuchThing


@pytest.mark.filterwarnings("ignore")
def test_example_of_the_readme_runs_as_it_stands(capsys, monkeypatch):
    """P30. It prints the text and the bytes of 6 layers: 160 tokens of bfloat16 windows, 64 packed."""
    folder = Path(W.__file__).parent
    monkeypatch.chdir(folder)
    example = (folder / "README.md").read_text().split("## Use from transformers")[1].split("```")[1]
    exec(example.removeprefix("python\n"), {})
    text, held = capsys.readouterr().out.rsplit(maxsplit=1)
    assert text.startswith("Tell me where is fancy bred,") and len(text) > 300
    assert int(held) == 6 * 2 * 2 * (160 * 64 * 2 + 64 * (16 + 4))


class Operators(TorchDispatchMode):
    """Count the operators that run under it and the elements of the largest tensor that one returns anew."""
    count, largest = 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **kwargs or {})
        if not operator.is_view:
            self.count += 1
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.largest = max(self.largest, *sizes, 0)
        return out


@torch.no_grad()
def decode_step(hf, n, bits):
    """Run one step on a cache of n tokens, none of which falls due, under `Operators`."""
    cache = W.WushCache(hf.config, their_model("qwen3")[1] if len(hf.model.layers) == 2 else {
        side: transforms(hf, 9.0) for side in "kv"}, bits, **WINDOWS)
    through(hf, tokens(1, n), cache)
    assert cache.layers[0].window.n_packed == [n - 28]
    with Operators() as seen:
        hf(tokens(1, 1), past_key_values=cache)
    return seen


@pytest.mark.filterwarnings("ignore")
def test_step_runs_as_many_operators_a_layer_whatever_the_context_and_copies_no_cache():
    """P35, P33. On a GPU they are launches; reading by sdpa, in contrast, makes copies of n·g·d elements."""
    hf, deeper = their_model("qwen3")[0], their_model("qwen3", num_hidden_layers=3)[0]
    short, long = decode_step(hf, 100, 2), decode_step(hf, 908, 2)
    more = decode_step(deeper, 908, 2)
    assert short.count == long.count and more.count - long.count <= 120
    assert long.largest < 908 * 2 * 16 <= decode_step(their_model("qwen3", "sdpa")[0], 908, 2).largest


@pytest.mark.filterwarnings("ignore")
def test_bytes_are_those_of_the_windows_and_the_codes_and_generations_leave_none_behind():
    """2 layers, heads, sides: 4 + 32 tokens of 16 floats, 64 of 4 + 4 bytes. No tensor outlives its cache."""
    hf, T = their_model("qwen3")
    cache = W.WushCache(hf.config, T, **WINDOWS)
    generated(hf, tokens(1, 60), cache)
    assert cache.nbytes == 2 * 2 * 2 * ((4 + 32) * 16 * 4 + 64 * (4 + 4))
    del cache
    alive = lambda: gc.collect() and sum(isinstance(x, torch.Tensor) for x in gc.get_objects())
    counts = []
    for _ in range(4):
        generated(hf, tokens(2, 30), W.WushCache(hf.config, T, **WINDOWS), steps=4)
        counts.append(alive())
    assert counts[1] == counts[3]
