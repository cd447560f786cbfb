"""Tests of checkpoints, texts and transforms files: what is read right and what is refused."""
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

import wush_kv as W
from wush_tools import checkpoints, cli
from wush_tools.testing import (argv, close, distance, edited, fed, figures, load, normal, reference,
                                refusal, saved, tiny, tokens)

ORIGINAL = {"original_max_position_embeddings": 64}
ROPES = {"default": {}, "linear": {"factor": 4.0}, "yarn": {"factor": 4.0} | ORIGINAL,
         "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL}

@pytest.mark.parametrize("old_style", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_variant_equals_transformers(kind, old_style, tmp_path):
    """In both places: rope_parameters (transformers 5) and rope_theta beside rope_scaling (before)."""
    rope = {"rope_type": kind, **ROPES[kind]}
    hf, model = saved(tmp_path, "llama", rope_parameters={"rope_theta": 1e4, **rope})
    if old_style:
        raw = json.loads((tmp_path / "config.json").read_text())
        del raw["rope_parameters"]
        raw |= {"rope_theta": 1e4, "rope_scaling": None if kind == "default" else rope}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = load(tmp_path)
    ids = tokens(1, 200)
    got = fed(model, W.new_cache(model), ids, [150, 50])
    assert distance(got, reference(hf, ids)) < 1e-4
    plain = tiny("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    assert (distance(got, reference(plain, ids)) > 1e-2) == (kind != "default")

@pytest.mark.parametrize("positions, original", [(40960, 32768), (1024, 1024)])
def test_yarn_flag_equals_transformers_yarn_from_the_power_of_two_below(positions, original, tmp_path):
    tiny(max_position_embeddings=positions).save_pretrained(tmp_path)
    model = load(tmp_path, yarn=4.0)
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=original, rope_theta=1e6)
    assert model.config.rope_parameters == rope and model.config.max_position_embeddings == 4 * original
    ids = tokens(1, 100)
    want = reference(tiny(max_position_embeddings=4 * original, rope_parameters=rope), ids)
    assert distance(fed(model, W.new_cache(model), ids, [60, 40]), want) < 1e-4
    assert distance(want, reference(tiny(), ids)) > 1e-2

@pytest.mark.parametrize("way", ["tied", "tied with an lm_head beside", "untied", "sharded"])
def test_checkpoint_equals_transformers_however_it_is_saved(way, tmp_path):
    """P10: head_dim is the config's (hidden/heads is 8), lm_head by tie_word_embeddings."""
    hf = tiny(tie_word_embeddings=way.startswith("tied"))
    hf.save_pretrained(tmp_path, max_shard_size="40KB" if way == "sharded" else "1GB")
    file = tmp_path / "model.safetensors"
    if "beside" in way:
        save_file(load_file(file) | {"lm_head.weight": torch.randn(256, 64)}, file)
    assert file.exists() != (way == "sharded")
    ids, model = tokens(1, 40), load(tmp_path)
    assert distance(fed(model, W.new_cache(model), ids, [40]), reference(hf, ids)) < 1e-4

@pytest.mark.parametrize("generation, config, want", [
    ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, [7, 9]), ({"eos_token_id": 9}, {}, [9]), (None, {}, []),
    ({}, {"eos_token_id": 9}, [9]), (None, {"eos_token_id": [9, 3]}, [9, 3]),
    (None, {"eos_token_id": 0}, [0])])
def test_generation_stops_at_every_end_token(generation, config, want, pair, tmp_path):
    """P13."""
    for name, content in ("generation_config", generation), ("config", config):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert checkpoints.end_tokens(tmp_path) == want
    forced = iter([4, 5, want[-1] if want else 6] + [4] * 9)
    pick = lambda scores: torch.tensor([next(forced)])
    steps = list(W.decode(pair[1], W.new_cache(pair[1]), [[1, 2]], 6, want, pick))
    assert len(steps) == (3 if want else 6)

ROPE, FULL, SLIDING, LINEAR = {"rope_theta": 1e6}, "full_attention", "sliding_attention", "linear_attention"
with_file = lambda name, data: {"files": {name: data}}

@pytest.mark.parametrize("change, words", [
    (dict(head_dim=24), "head_dim 24 64 128"), *((dict(head_dim=d), "head_dim") for d in (0, None)),
    (dict(model_type="qwen2"), "qwen2 qwen3 llama"), (dict(model_type="mistral"), "mistral qwen3 llama"),
    (dict(model_type="qwen3_moe"), "qwen3_moe qwen3"), (dict(model_type="drop"), "model_type qwen3 llama"),
    (dict(use_sliding_window=True), "sliding"), (dict(layer_types=[FULL, SLIDING]), SLIDING),
    (dict(layer_types=[LINEAR, FULL]), LINEAR), (dict(layer_types=[FULL]), "layer"),
    (dict(hidden_act="gelu"), "gelu silu"), (dict(quantization_config={"quant_method": "fp8"}), "quantized"),
    (dict(rope_parameters="drop"), "rope_theta"), (dict(rope_parameters=ROPE | {"rope_theta": -1}), "rope"),
    (dict(layer_types=5), "config.json"),
    (dict(rope_parameters=ROPE | {"rope_type": "yarn"}), "factor"),
    (dict(rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    (dict(rope_parameters="yarn"), "rope"), (dict(num_hidden_layers=0, layer_types="drop"), "layer"),
    *((dict(num_key_value_heads=n), "num_key_value_heads") for n in (0, 3)),
    *((with_file("config.json", data), "config.json") for data in (None, b"", b"{nope", b"[]", b"\xff\xfe")),
    *((with_file("model.safetensors", data), "model.safetensors") for data in (None, b"", b"\xff" * 999)),
    *((with_file("model.safetensors.index.json", data), "index")
      for data in (b"{", b"{}", b'{"weight_map": {"x": 1}}')),
    (with_file("generation_config.json", b"[]"), "generation_config.json"),
    (with_file("generation_config.json", b'{"eos_token_id": [[1]]}'), "eos_token_id"),
    *((with_file("chat_template.jinja", data), "template") for data in (b"{% if %}", b"{{ 1 / 0 }}")),
    (with_file("tokenizer.json", b"{"), "tokenizer"),
    ({"files": {"tokenizer.json": None, "tokenizer_config.json": None}}, "tokenizer")], ids=str)
def test_unfit_model_is_refused_before_weights(change, words, shelf, tmp_path, capsys, no_weights):
    """P08, P12, P31 and their kinds. `words` are what the user needs to read."""
    said = refusal(argv(shelf, folder=edited(shelf, tmp_path, **change)), capsys)
    assert not [word for word in words.split() if word not in said]

@pytest.mark.parametrize("damage, words", [
    ("truncated", "model.safetensors"), ("no up_proj", "up_proj"), ("no k_proj", "k_proj"),
    ("misshapen", "q_norm 8 16"), ("llama", "layers.0 k_norm"),
    ("truncated shard", "b.safetensors"), ("missing shard", "b.safetensors"),
    ("wrong index", "safetensors")])
def test_damaged_weights_are_refused(damage, words, shelf, tmp_path, capsys):
    folder = edited(shelf, tmp_path, drop=(damage[3:] + ".weight",) if damage.startswith("no ") else ())
    file = folder / "model.safetensors"
    if damage == "llama":      # a graph without QK-norm would leave out what the checkpoint has
        raw = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
        (folder / "config.json").write_text(json.dumps(raw))
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-500])
    if damage == "misshapen":
        save_file(load_file(file) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
    if "shard" in damage or "index" in damage:
        weights = load_file(file)
        where = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(sorted(weights))}
        for shard in set(where.values()):
            save_file({n: w for n, w in weights.items() if where[n] == shard}, folder / shard)
        file.unlink()
        where = dict.fromkeys(where, "a.safetensors") if "index" in damage else where
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        cut = (folder / "b.safetensors").read_bytes()[:-500]
        (folder / "b.safetensors").unlink() if "missing" in damage else None
        (folder / "b.safetensors").write_bytes(cut) if "truncated" in damage else None
    said = refusal(argv(shelf, folder=folder), capsys)
    assert not [word for word in words.split() if word not in said]

def test_hub_id_without_network_is_refused_in_one_sentence(shelf, capsys, monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise ConnectionError("no\nnetwork")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert "owner/name" in refusal(argv(shelf, "--model", "owner/name"), capsys)
    assert "wikitext" in refusal(argv(shelf, "--eval", "wikitext2"), capsys)

def test_transforms_file_is_what_calibrating_gave_bit_for_bit(report, shelf, tmp_path):
    """P43. `k` and `v` as serving reads them; what the refined encoder needs beside them are further keys."""
    T = torch.load(report.file, weights_only=True)
    again = W.load_transforms(str(report.file), report.model.config)
    want = report.schemes["refined"].tensors
    assert T.keys() == again.keys() == want.keys() == {"k", "v", "k_feedback", "v_feedback"}
    assert all(torch.equal(T[key], want[key]) and torch.equal(T[key], again[key]) for key in T)
    text = figures(shelf, tmp_path, "--bits", 2, "--task", "generate", "--transforms", report.file)["text"]
    assert text["refined"] == report.figures["text"]["refined"]
    assert json.loads(Path(f"{report.file}.json").read_text())["calibration_tokens"] == 128

@pytest.mark.parametrize("spoil, words", [
    (lambda T: [1], "k"), (lambda T: {"k": T["k"], "values": T["v"]}, "v"),
    (lambda T: T | {"k": T["k"] * math.nan}, "finite"), (lambda T: T | {"v": T["v"] * 0}, "invert"),
    *((lambda T, cut=cut: {side: cut(t) for side, t in T.items()}, words) for cut, words in (
        (lambda t: t[:1], "layers"), (lambda t: t[:, :1], "heads"), (lambda t: t[..., :8, :8], "head_dim"),
        (lambda t: t[0], "shape"), (torch.Tensor.int, ""))),
    (lambda T: T | {"k_feedback": T["v_feedback"][:, :, [0, 0], :8, :8]}, "blocks"),
    (b"", "transforms file"), (b"hello", "transforms file"), (2000, "transforms file")], ids=range(13))
def test_wrong_transforms_file_is_refused(spoil, words, report, shelf, tmp_path, capsys, no_weights):
    path = tmp_path / "T.pt"
    whole = report.file.read_bytes()
    if callable(spoil):
        torch.save(spoil(torch.load(report.file)), path)
    else:
        path.write_bytes(whole[:spoil] if isinstance(spoil, int) else spoil)
    said = refusal(argv(shelf, "--task", "generate", "--transforms", path), capsys)
    assert "T.pt" in said and words in said

@pytest.mark.parametrize("sidecar", [b"{", b"[]", b"{}", b'{"fingerprint": "0"}', *(
    {key: value} for key, value in (("group", 8), ("group", "8"), ("refine", 5), ("refine", None)))], ids=str)
def test_spoiled_sidecar_is_refused(sidecar, report, shelf, tmp_path, capsys, no_weights):
    path = shutil.copy(report.file, tmp_path / "T.pt")
    if isinstance(sidecar, dict):
        sidecar = json.dumps(json.loads(Path(f"{report.file}.json").read_text()) | sidecar).encode()
    Path(f"{path}.json").write_bytes(sidecar)
    assert "T.pt" in refusal(argv(shelf, "--task", "generate", "--transforms", path), capsys)

@pytest.mark.parametrize("made_with", ["--transform oscar", "--group 8"])
def test_transforms_file_is_used_as_what_it_was_made_as_or_refused(made_with, shelf, tmp_path, caches):
    """P43: its sidecar says which transform and group; calling it wush, or one group a head, misreads it."""
    cli.main(argv(shelf, "--task", "calibrate", *made_with.split(), "--save", tmp_path / "T.pt"))
    try:
        text = figures(shelf, tmp_path, "--task", "generate", "--transforms", tmp_path / "T.pt")["text"]
    except SystemExit:
        return
    assert list(text) == ["oscar" if "oscar" in made_with else "refined"]
    assert {c.k.codec.group for c in caches} == {8 if "8" in made_with else None}
    Path(tmp_path / "T.pt.json").unlink()                       # without it, the shape of the blocks tells
    if "8" in made_with:
        again = figures(shelf, tmp_path, "--task", "generate", "--transforms", tmp_path / "T.pt")["text"]
        assert again == text

@pytest.mark.parametrize("which", ["", "k_proj", "v_proj", "o_proj"])
def test_transforms_of_other_weights_are_refused_and_both_named(which, report, shelf, tmp_path, capsys):
    """P43: same shapes, other weights; or only one kind of projection differs, as after merging a LoRA."""
    folder = edited(shelf, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({n: w * 1.1 if which in n else w for n, w in weights.items()}, folder / "model.safetensors")
    said = refusal(argv(shelf, "--transforms", report.file, folder=folder), capsys)
    assert str(folder) in said and str(shelf.folder) in said

@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=12), more=st.binary(max_size=6))
def test_streamed_pieces_add_up_and_never_cut_a_character(shelf, text, more):
    """P15, characters of up to four bytes, each byte a token; then bytes that are no text at all."""
    tok = shelf.tokenizer
    for text in "ok 🔥 ďábel 你好", text:
        ids = tok(text)["input_ids"]
        pieces = list(checkpoints.stream_text(tok, iter(ids)))
        assert "".join(pieces) == tok.decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    ids += [int(b) for b in more]
    assert "".join(checkpoints.stream_text(tok, iter(ids))) == tok.decode(ids)


def test_saved_transforms_are_what_serving_reads(pair, tmp_path):
    """Rules of spec.md, 7: the four products of row vectors leave the scores and the outputs as they were."""
    model, path = pair[1], str(tmp_path / "WUSH.pt")
    T = W.derive(W.collect_moments(model, [tokens(200)]), "wush")
    checkpoints.save_transforms(path, T, {})
    served = torch.load(path, weights_only=True)
    assert served.keys() == {"k", "v"} and len({t.dtype for t in served.values()}) == 1
    for t in served.values():
        assert t.shape == (2, 2, 1, 16, 16) and t.is_floating_point() and t.isfinite().all()
        assert torch.linalg.cond(t.double()).max() < 1e3 and t.device.type == "cpu"
    q, (k, v) = normal(0, 2, 2, 3, 7, 16), normal(1, 2, 2, 2, 1, 9, 16)      # (l, g, r, t, d)
    O, (T_K, T_V) = normal(3, 2, 2, 3, 16, 64), (served[side].double() for side in "kv")
    inverse = torch.linalg.inv
    assert close((q @ inverse(T_K)) @ (k @ T_K.mT).mT, q @ k.mT, 1e-9)
    p = (q @ k.mT).softmax(-1)
    assert close(p @ (v @ T_V.mT) @ (inverse(T_V).mT @ O), p @ v @ O, 1e-9)
    assert not close(p @ (v @ T_V.mT) @ (inverse(T_V) @ O), p @ v @ O, 1e-1)
    loaded = W.load_transforms(path)
    assert all(torch.equal(loaded[side], T[side]) for side in "kv")
    torch.save({"k": T["k"], "v": T["v"][:, :1]}, path)
    with pytest.raises(ValueError, match="of shape"):
        W.load_transforms(path)
