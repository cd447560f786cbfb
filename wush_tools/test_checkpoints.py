"""Tests of checkpoints, texts and transforms files: what is read right and what is refused."""
import hashlib
import http.server
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import load_file, save_file

import wush_kv as W
from wush_tools import checkpoints
from wush_tools.testing import (
    HERE,
    argv,
    close,
    distance,
    edited,
    fed,
    figures,
    load,
    normal,
    reference,
    refusal,
    saved,
    tiny,
    tokens,
)

# ---- configs

ORIGINAL = {"original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0} | ORIGINAL,
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
}

def rewrite(path, **changes):
    """Change entries of a JSON file; "drop" takes one out."""
    entries = json.loads(path.read_text()) | changes
    entries = {name: value for name, value in entries.items() if value != "drop"}
    path.write_text(json.dumps(entries))

def of_transformers(folder):
    """Load a checkpoint as transformers does."""
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

def logits(model, ids):
    return fed(model, W.new_cache(model), ids, [ids.shape[1]])

@pytest.mark.parametrize("old_style", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_variant_equals_transformers(kind, old_style, tmp_path):
    """In both places: rope_parameters (transformers 5) and rope_theta beside rope_scaling (before)."""
    rope = {"rope_type": kind, **ROPES[kind]}
    hf, model = saved(tmp_path, "llama", rope_parameters={"rope_theta": 1e4, **rope})
    if old_style:
        scaling = None if kind == "default" else rope
        rewrite(
            tmp_path / "config.json", rope_parameters="drop", rope_theta=1e4, rope_scaling=scaling
        )
        model = load(tmp_path)
    ids = tokens(1, 200)
    found = fed(model, W.new_cache(model), ids, [150, 50])
    assert distance(found, reference(hf, ids)) < 1e-4
    plain = tiny("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    assert (distance(found, reference(plain, ids)) > 1e-2) == (kind != "default")


@pytest.mark.parametrize("positions, original", [(40960, 32768), (1024, 1024)])
def test_yarn_flag_equals_transformers_yarn_from_the_power_of_two_below(
    positions, original, tmp_path
):
    tiny(max_position_embeddings=positions).save_pretrained(tmp_path)
    model = load(tmp_path, yarn=4.0)
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "rope_theta": 1e6,
    }
    assert model.config.rope_parameters == rope
    assert model.config.max_position_embeddings == 4 * original
    ids = tokens(1, 100)
    yarn = tiny(max_position_embeddings=4 * original, rope_parameters=rope)
    expected = reference(yarn, ids)
    assert distance(fed(model, W.new_cache(model), ids, [60, 40]), expected) < 1e-4
    assert distance(expected, reference(tiny(), ids)) > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": "drop"},
        {"rope_parameters": {}},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 1e6},
        {
            "rope_parameters": {"rope_theta": 500.0},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        {"rope_parameters": "drop", "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"hidden_act": "swish"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_config_entry_means_what_it_means_to_transformers(kind, changes, tmp_path):
    """Without any rope_theta, with two of them, or with another name of an activation."""
    tiny(kind).save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", **changes)
    ids = tokens(1, 60)
    assert distance(logits(load(tmp_path), ids), reference(of_transformers(tmp_path), ids)) < 1e-4

@pytest.mark.parametrize("kind, changes", [
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
], ids=str)
def test_weight_shapes_are_those_of_transformers(kind, changes, tmp_path):
    hf = tiny(kind, **changes)
    hf.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shapes = checkpoints.weight_shapes(checkpoints.read_config(tmp_path))
    assert shapes == {name: tuple(weight.shape) for name, weight in stored.items()}

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
THETA = {"rope_theta": 1e6}

def with_file(name, data):
    return {"files": {name: data}}

CONFIGS = [
    ({"head_dim": 24}, "head_dim 24 64 128"),
    ({"head_dim": 0}, "head_dim"),
    ({"head_dim": None}, "head_dim"),
    ({"model_type": "qwen2"}, "qwen2 qwen3 llama"),
    ({"model_type": "mistral"}, "mistral qwen3 llama"),
    ({"model_type": "qwen3_moe"}, "qwen3_moe qwen3"),
    ({"model_type": "drop"}, "model_type qwen3 llama"),
    ({"use_sliding_window": True}, "sliding"),
    ({"layer_types": [FULL, SLIDING]}, SLIDING),
    ({"layer_types": [LINEAR, FULL]}, LINEAR),
    ({"layer_types": [FULL]}, "layer"),
    ({"layer_types": 5}, "config.json"),
    ({"hidden_act": "gelu"}, "gelu silu"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    ({"rope_parameters": THETA | {"rope_theta": -1}}, "rope"),
    ({"rope_parameters": THETA | {"rope_theta": None}}, "rope"),
    ({"rope_parameters": THETA | {"rope_type": "yarn"}}, "factor"),
    ({"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_parameters": THETA | {"partial_rotary_factor": 0.5}},
     "RoPE turns a part of each head (partial_rotary_factor 0.5), supported are whole heads"),
    ({"rope_parameters": {FULL: THETA | {"rope_type": "default"}}}, "RoPE"),
    ({"rope_parameters": "yarn"}, "rope"),
    ({"num_hidden_layers": 0, "layer_types": "drop"}, "layer"),
    ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
]
FILES = [
    ("config.json", None, "config.json"),
    ("config.json", b"", "config.json"),
    ("config.json", b"{nope", "config.json"),
    ("config.json", b"[]", "config.json"),
    ("config.json", b"\xff\xfe", "config.json"),
    ("model.safetensors", None, "model.safetensors"),
    ("model.safetensors", b"", "model.safetensors"),
    ("model.safetensors", b"\xff" * 999, "model.safetensors"),
    ("adapter_config.json", b"{}", "adapter merge"),
    ("generation_config.json", b"[]", "generation_config.json"),
    ("generation_config.json", b'{"eos_token_id": [[1]]}', "eos_token_id"),
    ("generation_config.json", b'{"eos_token_id": true}', "eos_token_id"),
    ("chat_template.jinja", b"{% if %}", "template"),
    ("chat_template.jinja", b"{{ 1 / 0 }}", "template"),
    ("tokenizer.json", b"{", "tokenizer"),
]
UNFIT = CONFIGS + [(with_file(name, data), words) for name, data, words in FILES]
UNFIT.append(({"files": {"tokenizer.json": None, "tokenizer_config.json": None}}, "tokenizer"))
for data in (b"{", b"{}", b'{"weight_map": {"x": 1}}', b'{"weight_map": {"x": "no.safetensors"}}'):
    files = {"model.safetensors.index.json": data, "model.safetensors": None}
    UNFIT.append(({"files": files}, "safetensors"))

@pytest.mark.parametrize("change, words", UNFIT, ids=str)
def test_unfit_model_is_refused_before_weights(change, words, shelf, tmp_path, capsys, no_weights):
    """`words` are what the user needs to read."""
    folder = edited(shelf, tmp_path, **change)
    sentence = refusal(argv(shelf, "--task", "generate", folder=folder), capsys)
    assert not [word for word in words.split() if word not in sentence]


# ---- weights

@pytest.mark.parametrize("way", ["tied", "untied", "sharded"])
def test_checkpoint_equals_transformers_however_it_is_saved(way, tmp_path):
    """head_dim is the config's (hidden/heads is 8), lm_head by tie_word_embeddings."""
    hf = tiny(tie_word_embeddings=way == "tied")
    hf.save_pretrained(tmp_path, max_shard_size="40KB" if way == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors").exists() != (way == "sharded")
    ids = tokens(1, 40)
    assert distance(logits(load(tmp_path), ids), reference(hf, ids)) < 1e-4

EMBEDDING = "model.embed_tokens.weight"

def without_prefix(weights):
    return {name.removeprefix("model."): weight for name, weight in weights.items()}

def with_prefix_twice(weights):
    return {"model." + name: weight for name, weight in weights.items()}

def other_head(weights):
    return weights | {"lm_head.weight": normal(0, 256, 64).float()}

def equal_head(weights):
    return weights | {"lm_head.weight": weights[EMBEDDING].clone()}

def head_only(weights):
    embedding = weights[EMBEDDING]
    others = {name: weight for name, weight in weights.items() if name != EMBEDDING}
    return others | {"lm_head.weight": embedding}

STORED = [without_prefix, with_prefix_twice, other_head, equal_head, head_only]

@pytest.mark.parametrize("change", STORED, ids=[change.__name__ for change in STORED])
def test_tied_checkpoint_is_read_as_transformers_reads_it(change, tmp_path):
    """A head stored beside tied embeddings counts, unless it is the same; a prefix may be missing."""
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    ids = tokens(1, 40)
    hf = of_transformers(tmp_path)
    model = load(tmp_path)
    assert distance(logits(model, ids), reference(hf, ids)) < 1e-4
    assert ("lm_head.weight" in model.weights) == (change is other_head)

def test_name_stored_twice_is_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"norm.weight": weights["model.norm.weight"] + 1}, file)
    with pytest.raises(ValueError, match="twice"):
        load(tmp_path)

@pytest.mark.parametrize("first", ["single", "sharded"])
def test_of_two_sources_of_weights_the_one_of_transformers_is_read(first, tmp_path):
    """A file and an index of shards, of different weights, whichever was written first."""
    tiny(seed=1).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    tiny(seed=2).save_pretrained(tmp_path / "single")
    folder = tmp_path / "both"
    second = "single" if first == "sharded" else "sharded"
    shutil.copytree(tmp_path / first, folder)
    shutil.copytree(tmp_path / second, folder, dirs_exist_ok=True)
    ids = tokens(1, 40)
    assert distance(logits(load(folder), ids), reference(of_transformers(folder), ids)) < 1e-4
    assert checkpoints.fingerprint(folder) == checkpoints.fingerprint(tmp_path / "single")

def sharded(folder):
    """Split a checkpoint into a.safetensors and b.safetensors; return the index."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    shards = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(sorted(weights))}
    for shard in ("a.safetensors", "b.safetensors"):
        save_file(
            {name: weights[name] for name in weights if shards[name] == shard}, folder / shard
        )
    file.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    return index

def test_shards_say_which_tensors_they_hold_whatever_the_index_says(tmp_path):
    hf, model = saved(tmp_path)
    index = sharded(tmp_path)
    entries = json.loads(index.read_text())["weight_map"]
    swapped = {name: "ab"["a" in shard[:1]] + ".safetensors" for name, shard in entries.items()}
    index.write_text(json.dumps({"weight_map": swapped}))
    assert distance(logits(load(tmp_path), tokens(1, 40)), logits(model, tokens(1, 40))) == 0

def truncated(path):
    path.write_bytes(path.read_bytes()[:-500])

def damage_shard(folder, harm):
    sharded(folder)
    harm(folder / "b.safetensors")

def damage_index(folder):
    index = sharded(folder)
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))

def damage_tensor(folder, name, value):
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: value}, file)

def damage_number(folder, name, number):
    """Put one number into one place of a weight."""
    weight = load_file(folder / "model.safetensors")[name]
    weight.view(-1)[3] = number
    damage_tensor(folder, name, weight)

def damage_family(folder):
    """A graph without QK-norm would leave out what the checkpoint has."""
    rewrite(folder / "config.json", model_type="llama")

Q_NORM = "model.layers.0.self_attn.q_norm.weight"
DAMAGES = [
    ("truncated", lambda folder: truncated(folder / "model.safetensors"), "model.safetensors"),
    ("misshapen", partial(damage_tensor, name=Q_NORM, value=torch.ones(8)), "q_norm 8 16"),
    ("llama", damage_family, "layers.0 k_norm"),
    ("truncated shard", partial(damage_shard, harm=truncated), "b.safetensors"),
    ("missing shard", partial(damage_shard, harm=Path.unlink), "b.safetensors"),
    ("wrong index", damage_index, "safetensors"),
    ("NaN norm", partial(damage_number, name=Q_NORM, number=math.nan), "q_norm NaN"),
    ("NaN", partial(damage_number, name="lm_head.weight", number=math.nan), "lm_head NaN"),
    ("infinite", partial(damage_number, name=EMBEDDING, number=math.inf), "embed_tokens infinity"),
]


@pytest.mark.parametrize(
    "harm, words", [row[1:] for row in DAMAGES], ids=[row[0] for row in DAMAGES]
)
@pytest.mark.parametrize("flags", ["--bits 2", "--bits 16 --task generate"])
def test_damaged_weights_are_refused(flags, harm, words, shelf, tmp_path, capsys):
    """Also with 16 bits, where no calibration would notice."""
    folder = edited(shelf, tmp_path)
    harm(folder)
    sentence = refusal(argv(shelf, *flags.split(), folder=folder), capsys)
    assert not [word for word in words.split() if word not in sentence]

@pytest.mark.parametrize("projection", ["up_proj", "k_proj"])
def test_missing_tensor_is_refused(projection, shelf, tmp_path, capsys):
    folder = edited(shelf, tmp_path, drop=(projection + ".weight",))
    assert projection in refusal(argv(shelf, folder=folder), capsys)

def test_weights_beyond_float16_are_refused(shelf, tmp_path, capsys):
    """They are finite on disk and infinite as they would run."""
    folder = edited(shelf, tmp_path)
    damage_number(folder, EMBEDDING, 1e6)
    sentence = refusal(argv(shelf, "--dtype", "float16", folder=folder), capsys)
    assert "embed_tokens" in sentence
    assert "float16" in sentence

@pytest.mark.parametrize("free, words", [
    (0.6, "bfloat16 GB free"), (0.4, "smaller GB free"), (1.01, None), (None, None)], ids=str)
def test_weights_that_do_not_fit_are_refused_by_their_sum(free, words, pair, monkeypatch):
    """`free` is what is free, as a share of the float32 weights."""
    model = pair[1]
    held = sum(weight.nbytes for weight in model.weights.values())
    monkeypatch.setattr(checkpoints, "free_bytes", lambda device: free and free * held)
    if words is None:
        checkpoints.check_memory(model.config, torch.float32, "cpu")
        return
    with pytest.raises(ValueError) as refused:
        checkpoints.check_memory(model.config, torch.float32, "cpu")
    assert not [word for word in words.split() if word not in str(refused.value)]
    if free > 0.5:
        checkpoints.check_memory(model.config, torch.bfloat16, "cpu")

def test_memory_is_checked_before_weights_are_fetched(shelf, capsys, monkeypatch, no_weights):
    monkeypatch.setattr(checkpoints, "free_bytes", lambda device: 1)
    assert "free" in refusal(argv(shelf), capsys)

def test_free_memory_of_this_machine_is_less_than_all_of_it():
    free = checkpoints.free_bytes(torch.device("cpu"))
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free < everything


# ---- devices

@pytest.mark.parametrize("name", ["cpu", "cpu:0", "auto"])
def test_every_spelling_of_the_cpu_is_the_cpu(name, shelf):
    device, dtype = checkpoints.pick_device(name, "auto")
    if name != "auto" or not torch.cuda.is_available():
        assert dtype == torch.float32
        assert device.type == "cpu"
        config = checkpoints.read_config(shelf.folder)
        model = checkpoints.load_model(shelf.folder, config, dtype, name.replace("auto", "cpu"))
        assert torch.equal(model.weights[Q_NORM], load(shelf.folder).weights[Q_NORM])

@pytest.mark.parametrize("name", ["cuda:99", "meta", "gpu", "", "cpu:x"])
def test_device_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match="no device"):
        checkpoints.pick_device(name, "auto")

def test_device_without_float64_is_refused_early(monkeypatch):
    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch.Tensor, "double", double)
    with pytest.raises(ValueError, match="float64.*--device cpu"):
        checkpoints.pick_device("cpu", "auto")


# ---- files

def test_files_are_read_and_written_as_utf8_whatever_the_locale(shelf, tmp_path):
    """A run in the C locale, without Python's UTF-8 mode: config, text and sidecar have a ž."""
    folder = Path(shutil.copytree(shelf.folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"note": "žena"}
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    (folder / "text.txt").write_text("žena " * 20, encoding="utf-8")
    program = (
        "import sys; from pathlib import Path; from wush_tools import checkpoints as c\n"
        "folder = Path(sys.argv[1]); config = c.read_config(folder)\n"
        "tokenizer = c.read_tokenizer(folder, config)\n"
        "tokens = c.read_tokens(folder / 'text.txt', tokenizer, '--eval', 1, 100)\n"
        "c.write_whole(folder / 'out', lambda path: c.write_text('\\u017e', path))\n"
        "print(config.note == '\\u017eena', len(tokens[0]))")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, str(folder)]
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True)
    assert run.stdout.split() == [b"True", b"100"], run.stderr
    assert (folder / "out").read_bytes() == "ž".encode()

@pytest.mark.parametrize("name", ["\udcc5\udcbeena", "a\udcff", "\udc80/model"])
def test_model_folder_that_the_locale_cannot_spell_is_refused(name, shelf, tmp_path, capsys):
    """Such characters stand for bytes that Python could not decode; in the C locale, for all beyond ASCII."""
    folder = tmp_path / name
    shutil.copytree(shelf.folder, folder)
    sentence = refusal(argv(shelf, "--task", "generate", folder=folder), capsys)
    assert "is not text in this locale" in sentence and "PYTHONUTF8=1" in sentence

def test_written_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "figures"
    path.write_text("before")

    def fail(path):
        Path(path).write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError):
        checkpoints.write_whole(path, fail)
    assert path.read_text() == "before"
    checkpoints.write_whole(path, partial(checkpoints.write_text, "after"))
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]

def test_link_and_device_stay_what_they_are(tmp_path):
    """A temporary file in the place of /dev/null would be a file, and a link would be no link."""
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    checkpoints.write_whole(tmp_path / "link", partial(checkpoints.write_text, "after"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "after"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    checkpoints.write_whole(pipe, partial(checkpoints.write_text, "after"))
    assert os.read(reader, 99) == b"after"
    os.close(reader)
    assert pipe.is_fifo()


# ---- transforms files

@pytest.fixture(scope="module")
def made(shelf, tmp_path_factory):
    """Transforms files of a tiny model, by how they were made, and what they hold."""
    folder = tmp_path_factory.mktemp("transforms")
    model = load(shelf.folder)
    moments = W.collect_moments(model, [tokens(200)])
    transforms = {
        "refined": W.derive(moments),
        "paper": W.derive(moments, refine=W.PAPER),
        "group": W.derive(moments, group=8),
        "oscar": W.derive(moments, "oscar", group=8),
        "ablation": W.derive(moments, refine=W.REFINED._replace(exponent=0.3, widen=False)),
    }
    refined = transforms["refined"]
    transforms["harm"] = refined._replace(
        keys=refined.keys._replace(harm=torch.tensor([0.2, 0.1])),
        values=refined.values._replace(harm=torch.tensor([0.3, 0.4])))
    fingerprint = checkpoints.fingerprint(shelf.folder)
    about = {"model": str(shelf.folder), "fingerprint": fingerprint, "transform": "wush"}
    files = {}
    for name, derived in transforms.items():
        files[name] = folder / f"{name}.pt"
        checkpoints.save_transforms(files[name], derived, about)
    return SimpleNamespace(files=files, transforms=transforms, model=model, about=about)

def equal(a, b):
    """Whether two Transforms are the same, bit for bit."""
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values)):
        if (x is None) != (y is None) or (x is not None and not torch.equal(x, y)):
            return False
    return (a.refine, a.group) == (b.refine, b.group)

@pytest.mark.parametrize("name", ["refined", "paper", "group", "oscar", "ablation", "harm"])
def test_transforms_file_holds_what_was_derived_and_how(name, made, capsys):
    loaded = W.load_transforms(made.files[name], made.model.config)
    assert equal(loaded, made.transforms[name])
    assert checkpoints.read_about(made.files[name]).items() >= made.about.items()
    assert capsys.readouterr().err == ""

@pytest.mark.parametrize("name", ["refined", "paper", "group"])
def test_transforms_file_without_sidecar_is_taken_as_the_tensors_tell(name, made, tmp_path, capsys):
    path = shutil.copy(made.files[name], tmp_path / "T.pt")
    assert equal(W.load_transforms(path), made.transforms[name])
    assert "T.pt.json" in capsys.readouterr().err
    assert checkpoints.read_about(path) == {}

def test_calibrated_file_continues_as_calibrating_does(shelf, tmp_path):
    path = tmp_path / "WUSH.pt"
    calibrated = figures(shelf, tmp_path, "--task", "generate", "--save", path)["text"]
    assert (
        figures(shelf, tmp_path, "--task", "generate", "--transforms", path)["text"] == calibrated
    )
    assert checkpoints.read_about(path)["calibration_tokens"] == 128

def test_transforms_and_sidecar_appear_together_or_not_at_all(made, tmp_path, monkeypatch):
    path = tmp_path / "T.pt"
    checkpoints.save_transforms(path, made.transforms["refined"], made.about)
    before = [path.read_bytes(), Path(f"{path}.json").read_bytes()]

    def fail(text, path):
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoints, "write_text", fail)
    with pytest.raises(OSError):
        checkpoints.save_transforms(path, made.transforms["paper"], {})
    assert [path.read_bytes(), Path(f"{path}.json").read_bytes()] == before
    assert len(list(tmp_path.iterdir())) == 2

def test_shard_is_saved_without_the_whole(made, tmp_path):
    """A view would drag its whole storage into the file."""
    whole = made.transforms["paper"]
    keys = W.Basis(whole.keys.transform[:1])
    half = whole._replace(keys=keys, values=W.Basis(whole.values.transform[:1]))
    checkpoints.save_transforms(tmp_path / "T.pt", half, {})
    assert (tmp_path / "T.pt").stat().st_size < 0.7 * made.files["paper"].stat().st_size

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_transforms_of_any_floating_dtype_load_as_float32(dtype, made, tmp_path):
    tensors = {name: tensor.to(dtype) for name, tensor in torch.load(made.files["paper"]).items()}
    torch.save(tensors, tmp_path / "T.pt")
    loaded = W.load_transforms(tmp_path / "T.pt")
    assert loaded.keys.transform.dtype == torch.float32
    assert torch.equal(loaded.keys.transform, tensors["k"].float())

def everywhere(change, tensors):
    return {name: change(tensor) for name, tensor in tensors.items()}

SPOILT = [
    (lambda T: [1], ""),
    (lambda T: {"k": T["k"], "values": T["v"]}, "v"),
    (lambda T: {"k": T["k"], "v": T["v"], "k_hessian": T["k_hessian"]}, "v_hessian"),
    (lambda T: T | {"k": T["k"] * math.nan}, "finite"),
    (lambda T: T | {"v": T["v"] * 0}, "invert"),
    (lambda T: T | {"v": T["v"][:1]}, "v 1 layers 2"),
    (lambda T: T | {"k_hessian": T["v_hessian"][:, :, [0, 0], :8, :8]}, "blocks"),
    (lambda T: T | {"k_harm": torch.ones(2)}, "v_harm"),
    (lambda T: T | {"k_harm": torch.ones(2), "v_harm": torch.ones(3)}, "v_harm 2 layers"),
    (lambda T: T | {"k_harm": torch.ones(2) * math.nan, "v_harm": torch.ones(2)}, "k_harm finite"),
    (partial(everywhere, lambda t: t[:1]), "1 layers 2"),
    (partial(everywhere, lambda t: t[:, :1]), "1 KV heads 2"),
    (partial(everywhere, lambda t: t[..., :8, :8]), "8 head_dim 16"),
    (partial(everywhere, lambda t: t[0]), "shape"),
    (partial(everywhere, lambda t: t[..., :8]), "shape"),
    (partial(everywhere, torch.Tensor.int), "floating"),
    (b"", "transforms file"),
    (b"hello", "transforms file"),
    (2000, "transforms file"),
]

@pytest.mark.parametrize("spoil, words", SPOILT, ids=range(len(SPOILT)))
def test_wrong_transforms_file_is_refused(spoil, words, made, shelf, tmp_path, capsys, no_weights):
    path = tmp_path / "T.pt"
    whole = made.files["refined"].read_bytes()
    if callable(spoil):
        torch.save(spoil(torch.load(made.files["refined"])), path)
    else:
        path.write_bytes(whole[:spoil] if isinstance(spoil, int) else spoil)
    sentence = refusal(argv(shelf, "--task", "generate", "--transforms", path), capsys)
    assert not [word for word in ["T.pt", *words.split()] if word not in sentence]

REFINE = W.REFINED._asdict()
SIDECARS = [
    b"{", b"[]", b"{}", b'{"fingerprint": "0"}', b"\xff\xfe",
    {"group": 8}, {"group": "8"}, {"group": True}, {"group": "drop"},
    {"refine": 5}, {"refine": None}, {"refine": "all"}, {"refine": {}},
    {"refine": REFINE | {"feedback": False}},
    {"refine": REFINE | {"widen": "yes"}},
    {"refine": REFINE | {"more": 1}},
]

@pytest.mark.parametrize("sidecar", SIDECARS, ids=str)
def test_spoilt_sidecar_is_refused(sidecar, made, shelf, tmp_path, capsys, no_weights):
    path = shutil.copy(made.files["refined"], tmp_path / "T.pt")
    copy = Path(shutil.copy(f"{made.files['refined']}.json", f"{path}.json"))
    if isinstance(sidecar, dict):
        rewrite(copy, **sidecar)
    else:
        copy.write_bytes(sidecar)
    assert "T.pt" in refusal(argv(shelf, "--task", "generate", "--transforms", path), capsys)

def test_transforms_file_of_the_earlier_layout_is_refused(
        made, shelf, tmp_path, capsys, no_weights):
    """It held F of keys and values, not H', from which alone codes cannot be searched."""
    tensors = torch.load(made.files["refined"])
    for side in ("k", "v"):
        tensors[f"{side}_feedback"] = W.feedback_matrix(tensors.pop(f"{side}_hessian")).float()
    path = tmp_path / "T.pt"
    torch.save(tensors, path)
    arguments = argv(shelf, "--task", "generate", "--transforms", path)
    without_sidecar = refusal(arguments, capsys)
    shutil.copy(f"{made.files['refined']}.json", f"{path}.json")
    for sentence in (without_sidecar, refusal(arguments, capsys)):
        assert "T.pt" in sentence and "feedback" in sentence and "calibrate anew" in sentence


@pytest.mark.parametrize("which", ["", "k_proj", "v_proj", "o_proj"])
def test_transforms_of_other_weights_are_refused_and_both_named(
    which, made, shelf, tmp_path, capsys
):
    """Same shapes, other weights; or only one kind of projection differs, as after merging a LoRA."""
    folder = edited(shelf, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight * 1.1 if which in name else weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")
    sentence = refusal(argv(shelf, "--transforms", made.files["refined"], folder=folder), capsys)
    assert str(folder) in sentence
    assert str(shelf.folder) in sentence


def test_saved_transforms_are_what_serving_reads(made, tmp_path):
    """Rules of serving: the four products of row vectors leave the scores and the outputs as they were."""
    served = torch.load(made.files["paper"], weights_only=True)
    assert served.keys() == {"k", "v"}
    assert len({tensor.dtype for tensor in served.values()}) == 1
    for tensor in served.values():
        assert tensor.shape == (2, 2, 1, 16, 16)
        assert tensor.is_floating_point() and tensor.isfinite().all()
        assert torch.linalg.cond(tensor.double()).max() < 1e3
        assert tensor.device.type == "cpu"
    q = normal(0, 2, 2, 3, 7, 16)                # (l, g, r, t, d)
    k = normal(1, 2, 2, 1, 9, 16)
    v = normal(2, 2, 2, 1, 9, 16)
    O = normal(3, 2, 2, 3, 16, 64)
    T_K = served["k"].double()
    T_V = served["v"].double()
    inverse = torch.linalg.inv
    assert close((q @ inverse(T_K)) @ (k @ T_K.mT).mT, q @ k.mT, 1e-9)
    p = (q @ k.mT).softmax(-1)
    assert close(p @ (v @ T_V.mT) @ (inverse(T_V).mT @ O), p @ v @ O, 1e-9)
    assert not close(p @ (v @ T_V.mT) @ (inverse(T_V) @ O), p @ v @ O, 1e-1)


# ---- texts and tokens

@pytest.mark.parametrize("generation, config, expected", [
    ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, [7, 9]),
    ({"eos_token_id": 9}, {}, [9]),
    (None, {}, []),
    ({}, {"eos_token_id": 9}, [9]),
    (None, {"eos_token_id": [9, 3]}, [9, 3]),
    (None, {"eos_token_id": 0}, [0]),
])
def test_generation_stops_at_every_end_token(generation, config, expected, pair, tmp_path):
    for name, content in (("generation_config", generation), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert checkpoints.end_tokens(tmp_path) == expected
    forced = iter([4, 5, expected[-1] if expected else 6] + [4] * 9)

    def pick(scores):
        return torch.tensor([next(forced)])

    steps = list(W.decode(pair[1], W.new_cache(pair[1]), [[1, 2]], 6, expected, pick))
    assert len(steps) == (3 if expected else 6)


@pytest.mark.parametrize("ids, is_refused", [
    ([], False), ([255], False), ([256], True), ([9000], True), ([3, 300], True)], ids=str)
def test_tokenizer_is_refused_by_its_largest_id_not_by_its_entries(
    ids, is_refused, shelf, tmp_path
):
    """200 entries fit into 256 rows, unless one of them is token 9000."""
    vocabulary = {f"<{i}>": i for i in range(100)} | {f"<{i}>": i for i in ids}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"},
            }
        )
    )
    shutil.copy(shelf.folder / "config.json", tmp_path)
    config = checkpoints.read_config(tmp_path)
    if not is_refused:
        checkpoints.read_tokenizer(tmp_path, config)
        return
    with pytest.raises(ValueError, match=f"{max(ids)}.*256"):
        checkpoints.read_tokenizer(tmp_path, config)


class CountingTokenizer:
    """A tokenizer of words that notes how many characters it was given."""
    characters = 0

    def __call__(self, text, **_):
        self.characters += len(text)
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.mark.parametrize(
    "word", ["a", "letters", "a-word-of-many-letters-for-which-the-guess-is-short"]
)
def test_text_is_tokenized_as_far_as_needed_and_as_if_it_were_whole(word, tmp_path):
    path = tmp_path / "text"
    words = [word + "x" * (i % 5) for i in range(200_000)]
    path.write_text(" ".join(words))
    tokenizer = CountingTokenizer()
    sequences = checkpoints.read_tokens(path, tokenizer, "--eval", 2, 100, skip=50)
    assert torch.cat(sequences).tolist() == [len(x) for x in words[50:250]]
    if len(word) < 8:
        assert tokenizer.characters < 10_000

def test_text_that_is_too_short_is_refused_with_its_count(tmp_path):
    path = tmp_path / "text"
    path.write_text("one two three")
    sentence = "has 3 tokens; --eval-seqs 2 of --eval-len 5 after --eval-skip 1 need 11"
    with pytest.raises(ValueError, match=sentence):
        checkpoints.read_tokens(path, CountingTokenizer(), "--eval", 2, 5, skip=1)

@settings(max_examples=40, deadline=None)
@example(text="ok 🔥 ďábel 你好", more=b"")
@given(text=st.text(max_size=12), more=st.binary(max_size=6))
def test_streamed_pieces_add_up_and_never_cut_a_character(shelf, text, more):
    """Characters of up to four bytes, each byte a token; then bytes that are no text at all."""
    tokenizer = shelf.tokenizer
    ids = tokenizer(text)["input_ids"]
    pieces = list(checkpoints.stream_text(tokenizer, iter(ids)))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    ids += [int(byte) for byte in more]
    assert "".join(checkpoints.stream_text(tokenizer, iter(ids))) == tokenizer.decode(ids)


# ---- the hub
#
# A stand-in on the loopback interface. A repo's name says what fails: owner/api-503 answers 503 to whoever asks what
# it holds, owner/file-cut sends half of every file, owner/good-1 works.

COMMIT = "0123456789abcdef0123456789abcdef01234567"

class StandIn(http.server.BaseHTTPRequestHandler):
    """The hub's answers to HEAD, GET and POST, for repos that all hold the same `server.files`."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        headers.setdefault("Content-Length", len(body))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, content):
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.server.is_gone:                  # a connection that was kept open
            self.close_connection = True
            return
        path = self.path.split("?")[0]
        is_file = "/resolve/" in path
        repo = re.match(r"/(?:api/)?(?:models/|datasets/)?[\w-]+/([\w-]+)", path)
        stage, _, fault = repo[1].partition("-") if repo else ("good", "", "")
        if stage == ("file" if is_file else "api") and self.fail(fault):
            return
        if is_file:
            self.answer_file(path.split("/resolve/")[1].split("/", 1)[1], stage, fault)
        elif "/tree/" in path:
            self.answer_tree(path.split("/tree/")[1].partition("/")[2])
        else:
            siblings = [{"rfilename": name} for name in self.server.files]
            self.answer_json(
                {"id": f"owner/{repo[1]}", "sha": COMMIT, "tags": [], "siblings": siblings}
            )

    def fail(self, fault):
        """Fail as the repo's name says, if this request is of the kind that does."""
        codes = {"404": "RepoNotFound", "403": "GatedRepo"}
        if fault == "silent":
            self.server.is_closing.wait(60)
        if fault in ("silent", "gone"):
            self.close_connection = True
        elif fault.isdigit():
            self.answer(int(fault), b"{}", X_Error_Code=codes.get(fault, ""))
        return fault not in ("cut", "broken")

    def answer_file(self, name, stage, fault):
        content = self.server.files.get(name)
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        if fault == "broken" and name.endswith("parquet"):
            content = b"\xff" * len(content)
        etag = hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}

        first, last = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-")).groups()
        body = content[int(first):int(last or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(content)}"
        headers["Content-Length"] = len(body)
        if fault == "cut":
            body = body[:len(body) // 2]
            self.close_connection = True
        self.answer(206 if "Range" in self.headers else 200, body, **headers)

    def answer_tree(self, under):
        entries = []
        folders = set()
        for name, content in self.server.files.items():
            rest = name.removeprefix(under).strip("/") if name.startswith(under) else None
            is_shown = "recursive=true" in self.path.lower() or (rest and "/" not in rest)
            if rest and is_shown:
                oid = hashlib.sha1(content).hexdigest()
                entries.append({"type": "file", "path": name, "size": len(content), "oid": oid})
            elif rest:
                folders.add(name.rsplit("/", 1)[0])
        entries += [{"type": "directory", "path": folder, "oid": "0"} for folder in folders]
        self.answer_json(entries)

README = b"""---
configs:
- config_name: plain
  data_files:
  - split: train
    path: data/*
---
"""

# Reads lines of jobs such as "model owner/good", runs each job in a thread, and prints a line of JSON per job.
HUB_PROGRAM = """
import json, sys, threading, time
pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.05))
from wush_tools import checkpoints
checkpoints.HUB_SECONDS = 3
def run(kind, repo):
    start = time.time()
    source = repo.replace("/", "-")
    checkpoints.DATASETS[source] = (repo, "plain", "train")
    try:
        if kind == "model":
            result = (checkpoints.fetch(repo, "*.json") / "config.json").read_text()
        else:
            result = checkpoints.read_dataset(source, 3000, "--eval")
    except ValueError as error:
        result = str(error)
    print(json.dumps([kind, repo, time.time() - start, result]) + "\\n", end="", flush=True)
for line in sys.stdin:
    for job in line.split(";"):
        threading.Thread(target=run, args=job.split()).start()
"""

def answers(program, jobs):
    """Run jobs, and return (seconds, what was read or said) by (kind, repo)."""
    program.stdin.write(";".join(jobs) + "\n")
    program.stdin.flush()
    lines = [json.loads(program.stdout.readline()) for _ in jobs]
    return {(kind, repo): (seconds, result) for kind, repo, seconds, result in lines}

FAULTS = ["401", "403", "404", "429", "500", "503", "gone", "silent"]
REPOS = [f"owner/{stage}-{fault}" for stage in ("api", "file") for fault in FAULTS] + [
    "owner/file-cut"
]
GOOD = ["model owner/good-1", "dataset owner/good-1"]

@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """What fetching from every kind of repo gave, and then the same with the hub gone."""
    import pyarrow
    import pyarrow.parquet
    rows = [f"row {i} has some words, one of them žena " * 5 for i in range(300)]
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), parquet)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.daemon_threads = True
    server.files = {"config.json": b"{}", "README.md": README, "data/0.parquet": parquet.getvalue()}
    server.is_closing = threading.Event()
    server.is_gone = False
    threading.Thread(target=server.serve_forever, daemon=True).start()

    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    environment["HF_HOME"] = str(tmp_path_factory.mktemp("hub"))
    program = subprocess.Popen(
        [sys.executable, "-c", HUB_PROGRAM], cwd=HERE, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    killer = threading.Timer(90, program.kill)
    killer.start()

    jobs = [f"{kind} {repo}" for repo in REPOS for kind in ("model", "dataset")]
    try:
        online = answers(program, [*GOOD, *jobs, "dataset owner/file-broken"])
        server.is_gone = True
        server.shutdown()
        server.server_close()
        offline = answers(program, [*GOOD, "model owner/new", "dataset owner/new"])
        program.stdin.close()
        status = program.wait(10)                # no request that still waits keeps the program from ending
    finally:
        killer.cancel()
        program.kill()
        server.is_closing.set()
    return SimpleNamespace(rows=rows, online=online, offline=offline, status=status)

def test_hub_serves_a_model_and_the_beginning_of_a_dataset(hub):
    assert hub.status == 0
    assert hub.online["model", "owner/good-1"][1] == "{}"
    text = hub.online["dataset", "owner/good-1"][1]
    assert "\n\n".join(hub.rows).startswith(text)
    assert 3000 < len(text) < 4000

def test_run_that_succeeded_online_can_be_repeated_offline(hub):
    for kind in ("model", "dataset"):
        assert hub.offline[kind, "owner/good-1"][1] == hub.online[kind, "owner/good-1"][1]
        assert re.search("no connection|cut short", hub.offline[kind, "owner/new"][1])

@pytest.mark.parametrize("repo", [*REPOS, "owner/file-broken"])
@pytest.mark.parametrize("kind, flag", [("model", "--model"), ("dataset", "--eval")])
def test_failing_hub_is_one_sentence_with_the_flag_to_give(kind, flag, repo, hub):
    if (kind, repo) not in hub.online:
        return                                   # a broken parquet file is no matter of models
    seconds, sentence = hub.online[kind, repo]
    assert "\n" not in sentence and sentence.startswith("cannot") and f"give {flag} " in sentence
    assert not re.findall("=|pass |environment variable|local_files_only|token", sentence)
    assert seconds < 30

@pytest.mark.parametrize("repo", ["owner/api-401", "owner/api-404"])
def test_mistyped_hub_id_is_no_such_repo_or_private(repo, hub):
    assert "no such repo, or private" in hub.online["model", repo][1]


@pytest.mark.parametrize("name", ["./owner", "a/b/c", "nothing", "~/model", "/no/such/folder"])
def test_name_that_is_neither_folder_nor_hub_id_is_refused_without_asking(
    name, shelf, capsys, no_weights
):
    assert "neither a folder nor a hub id" in refusal(argv(shelf, "--model", name), capsys)
