"""What the tests share: tiny models, laws, closeness, and a folder on which the command line runs."""
import json
import math
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

import wush_kv as W
from wush_kv import Codec, Encoding, Windows
from wush_tools import checkpoints, cli

torch.set_num_threads(1)      # the tensors are small: threads would only wait for each other

HERE = Path(W.__file__).parent
OFF = Codec(16)
TWO = Codec(2)
WINDOWS = Windows(sink=4, keep=24, flush=8)
SHAPE = dict(
    hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
    vocab_size=256, intermediate_size=96, max_position_embeddings=1024, initializer_range=0.15,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6})
FAMILIES = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}


# ---- hypothesis, data, closeness

def law(*strategies, examples=20):
    """Check a test on so many drawn examples, the same ones at every run."""
    how = settings(max_examples=examples, deadline=None, derandomize=True, database=None)

    def decorate(test):
        return how(given(*strategies)(test))

    return decorate

def sizes(*choices):
    return st.sampled_from(choices)

seeds = st.integers(0, 2 ** 32 - 1)
powers = st.floats(-12, 12)

def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)

def tokens(*shape, seed=1):
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed))

def moment(x):
    return x.mT @ x

def close(a, b, tolerance):
    """Say whether the largest deviation is within `tolerance` of the largest entry."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())

def distance(a, b):
    return (a.double() - b.double()).abs().max().item()


# ---- tiny models

def tiny(kind="qwen3", seed=0, **changes):
    """Make a random transformers model: norms around 1 but none equal to 1, biases far from 0."""
    import transformers
    make_config = getattr(transformers, FAMILIES[kind] + "Config")
    make_model = getattr(transformers, FAMILIES[kind] + "ForCausalLM")
    shape = SHAPE | changes
    if shape["head_dim"] is None:      # some configs do not know it
        del shape["head_dim"]
    torch.manual_seed(seed)
    hf = make_model(make_config(**shape)).eval()

    for name, p in hf.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            p.data.normal_(std=0.3)
    return hf

def load(folder, dtype=torch.float32, yarn=None):
    config = checkpoints.read_config(Path(folder), yarn)
    return checkpoints.load_model(Path(folder), config, dtype, "cpu")

def saved(folder, *kind, dtype=torch.float32, **changes):
    """Save a tiny model and load it back: (transformers' model, ours)."""
    hf = tiny(*kind, **changes)
    hf.save_pretrained(folder)
    return hf, load(folder, dtype)

@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """One tiny Qwen3: transformers' model and ours."""
    return saved(tmp_path_factory.mktemp("qwen3"))

def transforms(model, condition=100.0, seed=2):
    """Draw T (l, g, 1, d, d) with singular values from condition^-½ to condition^½."""
    config = model.config
    d = checkpoints.head_dim(config)
    shape = (config.num_hidden_layers, config.num_key_value_heads, 1, d, d)
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    singular = torch.logspace(-0.5, 0.5, d, base=condition, dtype=torch.float64)
    return (U * singular @ V).float()

def scheme(T_K, key_codec, value_codec):
    """Make a cache's scheme of its key transforms; those of values are the model's matter."""
    return W.Scheme(Encoding(key_codec, T_K), Encoding(value_codec))

@torch.no_grad()
def reference(hf, ids):
    return hf(ids).logits

def fed(model, cache, ids, cuts):
    """Feed ids (b, t) in calls of `cuts` tokens and return all logits (b, t, v)."""
    parts = [W.feed(model, cache, part) for part in ids.split(cuts, 1)]
    return W.logits(model, torch.cat(parts, 1))

def softmax_attention(q, k, v, start):
    """Attend plainly, in float64, from q (g, r, t, d) at positions start, ... to k, v (g, s, d)."""
    scores = torch.einsum("grtd,gsd->grts", q.double(), k.double()) / math.sqrt(q.shape[-1])
    future = torch.arange(k.shape[1]) > start + torch.arange(q.shape[2])[:, None]
    p = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("grts,gsd->grtd", p, v.double())


# ---- the command line on a folder

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{{ '' if enable_thinking else '!' }}{% endif %}")

def byte_tokenizer():
    """Make a tokenizer whose tokens are the 256 bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = TEMPLATE
    return tokenizer

@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder with a model, a byte-level tokenizer with a chat template, and a text."""
    folder = tmp_path_factory.mktemp("model")
    tiny(max_position_embeddings=512).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)

    dice = random.Random(0)
    letters = [dice.choice("the cat sat on a mat.\n") for _ in range(2000)]
    (folder / "text.txt").write_text("".join(letters))
    return SimpleNamespace(folder=folder, text=str(folder / "text.txt"), tokenizer=tokenizer)

def argv(shelf, *flags, folder=None):
    """Arguments for a run of seconds; later flags win."""
    small = "--calib-seqs 2 --calib-len 64 --eval-seqs 2 --eval-len 200 --max-new-tokens 6"
    files = ["--model", str(folder or shelf.folder), "--calib", shelf.text, "--eval", shelf.text]
    return [*files, *small.split(), "--windows", "16,16,16", *map(str, flags)]

def figures(shelf, tmp_path, *flags):
    """Run the command line and return what --json wrote."""
    cli.main(argv(shelf, *flags, "--json", tmp_path / "figures"))
    return json.loads((tmp_path / "figures").read_text())

@pytest.fixture
def caches(monkeypatch):
    """All window caches that are constructed during a test."""
    constructed = []
    construct = W.WindowCache.__init__

    def construct_and_note(self, *arguments, **keywords):
        construct(self, *arguments, **keywords)
        constructed.append(self)

    monkeypatch.setattr(W.WindowCache, "__init__", construct_and_note)
    return constructed

def edited(shelf, tmp_path, files=None, drop=(), **config):
    """Copy the model's folder with files replaced, tensors dropped or keys of config.json changed."""
    folder = Path(shutil.copytree(shelf.folder, tmp_path / "edited"))
    entries = json.loads((folder / "config.json").read_text()) | config
    entries = {key: value for key, value in entries.items() if value != "drop"}
    (folder / "config.json").write_text(json.dumps(entries))

    for name, content in (files or {}).items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    if drop:
        weights = load_file(folder / "model.safetensors")
        weights = {name: x for name, x in weights.items() if not name.endswith(drop)}
        save_file(weights, folder / "model.safetensors")
    return folder

def refusal(args, capsys):
    """Run the command line and return its one line of complaint; any other exception is a traceback."""
    start = time.perf_counter()
    with pytest.raises(SystemExit) as exit:
        cli.main(args)
    sentence = exit.value.code
    if not isinstance(sentence, str):
        sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code not in (0, None)
    assert "\n" not in sentence.strip()
    assert time.perf_counter() - start < 5
    return sentence

@pytest.fixture
def no_weights(monkeypatch):
    """Fail if weights are loaded or moments collected: a refusal must come before."""
    def refuse(*_):
        pytest.fail("weights were read before the refusal")

    monkeypatch.setattr(cli, "load_model", refuse)
    monkeypatch.setattr(cli, "collect_moments", refuse)

@pytest.fixture(scope="session")
def report(shelf, tmp_path_factory):
    """The whole report at 2 bits, and what it calibrated, computed here."""
    out = tmp_path_factory.mktemp("out")
    model = load(shelf.folder)
    ids = torch.tensor(shelf.tokenizer(Path(shelf.text).read_text())["input_ids"])
    moments = W.collect_moments(model, list(ids[:128].split(64)))
    schemes = {
        "wush": W.make_scheme(moments, refine=W.PAPER),
        "refined": W.make_scheme(moments),
    }
    return SimpleNamespace(
        figures=figures(shelf, out, "--bits", 2, "--save", out / "WUSH.pt"),
        file=out / "WUSH.pt",
        model=model,
        schemes=schemes,
        texts=list(ids[:400].split(200)))
