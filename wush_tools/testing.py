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
from wush_kv import Codec
from wush_tools import checkpoints, cli

HERE = Path(W.__file__).parent
torch.set_num_threads(1)      # the tensors are small: threads would only wait for each other
OFF, TWO = Codec(16), Codec(2)
SHAPE = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
             vocab_size=256, intermediate_size=96, max_position_embeddings=1024, initializer_range=0.15,
             tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
             rope_parameters={"rope_type": "default", "rope_theta": 1e6})
WINDOWS = dict(sink=4, keep=24, flush=8)

def tiny(kind="qwen3", seed=0, **changes):
    """Make a random transformers model: norms around 1 but none equal to 1, biases far from 0."""
    import transformers
    name = dict(qwen3="Qwen3", llama="Llama", qwen2="Qwen2", mistral="Mistral")[kind]
    make, config = (getattr(transformers, name + part) for part in ("ForCausalLM", "Config"))
    torch.manual_seed(seed)
    shape = {key: x for key, x in (SHAPE | changes).items() if (key, x) != ("head_dim", None)}
    hf = make(config(**shape)).eval()
    for name, p in hf.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            p.data.normal_(std=0.3)
    return hf


def law(*strategies):
    how = settings(max_examples=20, deadline=None, derandomize=True, database=None)
    return lambda f: how(given(*strategies)(f))


def sizes(*choices):
    return st.sampled_from(choices)


seeds, powers = st.integers(0, 2 ** 32 - 1), st.floats(-12, 12)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment(x):
    return x.mT @ x


def close(a, b, tolerance):
    """The largest deviation is within `tolerance` of the largest entry."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())


def load(folder, dtype=torch.float32, yarn=None):
    return checkpoints.load_model(Path(folder), checkpoints.read_config(Path(folder), yarn), dtype)

def saved(folder, *kind, dtype=torch.float32, **changes):
    """Save a tiny model and load it back: (transformers' model, ours)."""
    hf = tiny(*kind, **changes)
    hf.save_pretrained(folder)
    return hf, load(folder, dtype)

def tokens(*shape, seed=1):
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed))

def transforms(model, condition=100.0, seed=2):
    """Draw T (l, g, 1, d, d) with singular values from condition^-½ to condition^½."""
    c, draw = model.config, torch.Generator().manual_seed(seed)
    d = checkpoints.head_dim(c)
    shape = c.num_hidden_layers, c.num_key_value_heads, 1, d, d
    U, V = (torch.linalg.qr(torch.randn(shape, generator=draw, dtype=torch.float64)).Q for _ in range(2))
    return (U * torch.logspace(-0.5, 0.5, d, base=condition, dtype=torch.float64) @ V).float()

def scheme(T_K, k_codec, v_codec):
    """Make a cache's scheme of its key transforms; those of values are the model's matter."""
    return W.Scheme(k_codec, v_codec, {"k": T_K})

@torch.no_grad()
def reference(hf, ids):
    return hf(ids).logits

def fed(model, cache, ids, cuts):
    """Feed ids (b, t) in calls of `cuts` tokens and return all logits (b, t, v)."""
    return torch.cat([W.logits(model, W.feed(model, cache, part)) for part in ids.split(cuts, 1)], 1)

def distance(a, b):
    return (a.double() - b.double()).abs().max().item()

@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """One tiny Qwen3: transformers' model and ours."""
    return saved(tmp_path_factory.mktemp("qwen3"))

def softmax_attention(q, k, v, start):
    """Attend plainly, in float64, from q (g, r, t, d) at positions start, ... to k, v (g, s, d)."""
    z = torch.einsum("grtd,gsd->grts", q.double(), k.double()) / math.sqrt(q.shape[-1])
    hidden = torch.arange(k.shape[1]) > start + torch.arange(q.shape[2])[:, None]
    return torch.einsum("grts,gsd->grtd", z.masked_fill(hidden, -math.inf).softmax(-1), v.double())


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder with a model, a byte-level tokenizer with a chat template, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("model")
    tiny(max_position_embeddings=512).save_pretrained(folder)
    bytes_ = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{{ '' if enable_thinking else '!' }}{% endif %}")
    tokenizer.save_pretrained(folder)
    dice = random.Random(0)
    (folder / "text.txt").write_text("".join(dice.choice("the cat sat on a mat.\n") for _ in range(2000)))
    return SimpleNamespace(folder=folder, text=str(folder / "text.txt"), tokenizer=tokenizer)

def argv(shelf, *flags, folder=None):
    small = "--calib-seqs 2 --calib-len 64 --eval-seqs 2 --eval-len 200 --max-new-tokens 6 --keep 16".split()
    files = ["--model", str(folder or shelf.folder), "--calib", shelf.text, "--eval", shelf.text]
    return [*files, *small, *map(str, flags)]

def figures(shelf, tmp_path, *flags):
    """Run the command line and return what --json wrote."""
    cli.main(argv(shelf, *flags, "--json", tmp_path / "figures"))
    return json.loads((tmp_path / "figures").read_text())

@pytest.fixture
def caches(monkeypatch):
    """All window caches that get made."""
    made, init = [], W.WindowCache.__init__
    monkeypatch.setattr(W.WindowCache, "__init__", lambda *a, **k: init(*a, **k) or made.append(a[0]))
    return made

def edited(shelf, tmp_path, files=None, drop=(), **config):
    """Copy the model's folder with files replaced, tensors dropped or keys of config.json changed."""
    folder = Path(shutil.copytree(shelf.folder, tmp_path / "edited"))
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "drop"}))
    for name, content in (files or {}).items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    if drop:
        weights = load_file(folder / "model.safetensors")
        save_file({n: w for n, w in weights.items() if not n.endswith(drop)}, folder / "model.safetensors")
    return folder

def refusal(args, capsys):
    """Run the command line and return its one line of complaint; any other exception is a traceback."""
    start = time.perf_counter()
    with pytest.raises(SystemExit) as e:
        cli.main(args)
    said = e.value.code if isinstance(e.value.code, str) else capsys.readouterr().err.strip().splitlines()[-1]
    assert e.value.code not in (0, None) and "\n" not in said.strip() and time.perf_counter() - start < 5
    return said

@pytest.fixture
def no_weights(monkeypatch):
    for name in "load_model", "collect_moments":
        monkeypatch.setattr(cli, name, lambda *_: pytest.fail("weights were read before the refusal"))

@pytest.fixture(scope="session")
def report(shelf, tmp_path_factory):
    """The whole report at 2 bits, and what it calibrated, computed here."""
    out, model = tmp_path_factory.mktemp("out"), load(shelf.folder)
    ids = torch.tensor(shelf.tokenizer(Path(shelf.text).read_text())["input_ids"])
    moments = W.collect_moments(model, list(ids[:128].split(64)))
    codec, tensors = Codec(2, "centred", 1.3), W.derive(moments, "wush", refine=W.REFINEMENTS)
    schemes = {"wush": W.Scheme(TWO, TWO, W.derive(moments, "wush")),
               "refined": W.Scheme(codec, codec, tensors)}
    found = figures(shelf, out, "--bits", 2, "--save", out / "WUSH.pt")
    texts = list(ids[:400].split(200))
    return SimpleNamespace(figures=found, file=out / "WUSH.pt", model=model, schemes=schemes,
                           texts=texts)
