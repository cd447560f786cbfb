"""Reading checkpoints, texts and transforms files. What can be refused is refused early, in one sentence."""
import hashlib
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterable

import torch
from torch import Tensor

from wush_kv import Model, block_size


MODEL_TYPES = ("qwen3", "llama")
HEAD_DIMS = (8, 16, 32, 64, 128, 256, 512)      # powers of two, for the Hadamard matrix
ROPE_TYPES = ("default", "linear", "yarn", "llama3")

def refuse_if(wrong, sentence: str) -> None:
    if wrong:
        raise ValueError(sentence)

@contextmanager
def explained(sentence: str):
    """Turn what a library raises, of whatever type, into a ValueError that a user understands."""
    try:
        yield
    except Exception as e:
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise ValueError(f"{sentence} ({reason[-1].strip()})") from e

def check_head_dim(d: int | None) -> None:
    refuse_if(d not in HEAD_DIMS, f"head_dim {d} is not supported, only {HEAD_DIMS}")

def head_dim(config) -> int:
    """Return the head dim of a config; some of transformers' leave it out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

def hub(name: str, kind: str, *patterns: str) -> Path:
    """Download the files that match `patterns` of the hub's model or dataset `name`."""
    from huggingface_hub import snapshot_download
    with explained(f"cannot get the {kind} {name!r} from the hub: give a local one instead"):
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), etag_timeout=4))

def fetch(name: str, *patterns: str) -> Path:
    """Return the local folder `name`, or the files that match `patterns` of the hub's model `name`."""
    if Path(name).is_dir():
        return Path(name)
    refuse_if(Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")),
              f"{name!r} is neither a folder nor a hub id of the form owner/name")
    return hub(name, "model", *patterns)

def read_json(path: Path) -> dict:
    """Read a JSON object. Raises ValueError for a file that is missing or something else."""
    with explained(f"{path} is missing or is not JSON"):
        content = json.loads(path.read_text())
    refuse_if(not isinstance(content, dict), f"{path} does not hold a JSON object")
    return content

def rope_frequencies(config, device="cpu") -> tuple[Tensor, float]:
    """Return the RoPE frequencies (d/2,) and the factor on cos and sin; variants are transformers' own."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    if (kind := config.rope_parameters["rope_type"]) != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, device)
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0

def read_config(folder: Path, yarn: float | None = None):
    """Read config.json as transformers' config object, with `rope_parameters` complete and `yarn` applied.

    Raises ValueError, one sentence, for every kind of model that the loop above would run wrongly.
    """
    raw = read_json(folder / "config.json")
    with explained(f"{folder / 'config.json'} cannot be used"):
        refuse_if(raw.get("model_type") not in MODEL_TYPES,
                  f"model_type {raw.get('model_type')!r} is not supported, only {' and '.join(MODEL_TYPES)}")
        refuse_if(raw.get("quantization_config"), "the checkpoint is quantized: give one of plain weights")
        odd = [kind for kind in raw.get("layer_types") or [] if kind != "full_attention"]
        odd += ["a sliding window"] * bool(raw.get("use_sliding_window"))
        refuse_if(odd, f"only full attention is supported, not {odd[:1]}")
        rope = raw.get("rope_parameters")
        theta = (rope if isinstance(rope, dict) else raw).get("rope_theta")
        refuse_if(theta is None or theta <= 0, "it has no rope_theta, alone or in rope_parameters")
        from transformers import AutoConfig
        config = AutoConfig.from_pretrained(folder)
        rope = dict(config.rope_parameters, rope_theta=theta)
        if yarn is not None:     # Qwen3's 40960 positions are a context of 32768 and room for the answer
            below = 1 << config.max_position_embeddings.bit_length() - 1
            original = rope.get("original_max_position_embeddings") or below
            config.max_position_embeddings = int(original * yarn)
            rope = {"rope_type": "yarn", "factor": yarn, "rope_theta": theta,
                    "original_max_position_embeddings": original}
        config.rope_parameters = rope
        refuse_if(rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1,
                  f"its RoPE is {rope['rope_type']!r}, supported are {', '.join(ROPE_TYPES)} on whole heads")
        rope_frequencies(config)
        check_head_dim(config.head_dim)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        refuse_if(kv_heads < 1 or heads % kv_heads,
                  f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        refuse_if(config.num_hidden_layers < 1, "the model has no layer: num_hidden_layers is 0")
        refuse_if(config.hidden_act != "silu", f"hidden_act is {config.hidden_act!r}, supported is silu")
    return config

def weight_shapes(config) -> dict[str, tuple]:
    """List the tensors that a checkpoint of this config must hold, with their shapes."""
    c, D, I, d = config, config.hidden_size, config.intermediate_size, config.head_dim
    Q, K, qwen3 = c.num_attention_heads * d, c.num_key_value_heads * d, c.model_type == "qwen3"
    layer = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    for part, biased, shapes in (
            ("self_attn", c.attention_bias, {"q": (Q, D), "k": (K, D), "v": (K, D), "o": (D, Q)}),
            ("mlp", not qwen3 and c.mlp_bias, {"gate": (I, D), "up": (I, D), "down": (D, I)})):
        layer |= {f"{part}.{x}_proj.weight": shape for x, shape in shapes.items()}
        layer |= {f"{part}.{x}_proj.bias": shape[:1] for x, shape in shapes.items() if biased}
    layer |= {f"self_attn.{x}_norm.weight": (d,) for x in "qk" if qwen3}
    shapes = {"model.embed_tokens.weight": (c.vocab_size, D), "model.norm.weight": (D,)}
    shapes |= {} if c.tie_word_embeddings else {"lm_head.weight": (c.vocab_size, D)}
    layers = range(c.num_hidden_layers)
    return shapes | {f"model.layers.{l}.{name}": shape for l in layers for name, shape in layer.items()}

def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the safetensors file that holds it, sharded or not."""
    from safetensors import safe_open
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        with explained(f"{index} holds no weight_map of file names"):
            return {name: folder / shard for name, shard in read_json(index)["weight_map"].items()}
    with explained(f"{file} is missing or is not a whole safetensors file"), safe_open(file, "pt") as f:
        return dict.fromkeys(f.keys(), file)

def read_tensors(files: dict[str, Path], names: Iterable[str], dtype=None, device="cpu") -> dict[str, Tensor]:
    """Read the named tensors straight to device and dtype. Raises ValueError for a file that is not whole."""
    from safetensors import safe_open
    tensors, names = {}, [*names]
    for file in sorted({files[name] for name in names}):
        with explained(f"cannot read {file}"), safe_open(file, framework="pt", device=str(device)) as f:
            tensors |= {name: f.get_tensor(name).to(dtype) for name in names if files[name] == file}
    return tensors

def load_model(folder: Path, config, dtype=torch.float32, device="cpu") -> Model:
    """Load the checkpoint straight to device and dtype. Raises ValueError if a tensor is missing or odd."""
    files, shapes = checkpoint_files(folder), weight_shapes(config)
    missing = sorted(shapes.keys() - files.keys())
    refuse_if(missing, f"the checkpoint lacks {len(missing)} tensors, {missing[:1]} among them")
    extra = [name for name in files.keys() - shapes.keys() if "_proj." in name or "_norm." in name]
    refuse_if(extra, f"the checkpoint holds {min(extra, default='')}, of which config.json knows nothing")
    weights = read_tensors(files, shapes, dtype, device)
    for name, shape in shapes.items():
        found = tuple(weights[name].shape)
        refuse_if(found != shape, f"{name} has shape {found} where config.json says {shape}")
    return Model(config, weights, *rope_frequencies(config, device))

def pick_device(name: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Resolve --device and --dtype. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"there is no device {name!r} here"):
        torch.zeros(1, device=name).item()
    if dtype == "auto":
        dtype = "float32" if name.startswith("cpu") else "bfloat16"
    return torch.device(name), getattr(torch, dtype)


# ------------------------------------------------------------------------------------------------------------
# Transforms files.

def digest(*tensors: Tensor) -> str:
    """Hash tensors by their bytes."""
    data = [t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
    return hashlib.sha256(b"".join(data)).hexdigest()[:16]

def fingerprint(folder: Path) -> str:
    """Hash attention weights of two layers as they lie on disk: the same for every dtype and sharding."""
    files, some = checkpoint_files(folder), []
    for projection in "qkvo":
        names = sorted(name for name in files if name.endswith(f"self_attn.{projection}_proj.weight"))
        some += read_tensors(files, names[:1] + names[-1:]).values()
    return digest(*some)

SIDECAR = ("transform", "group", "refine")      # flags that a transforms file was made with

def save_transforms(path: str, T: dict[str, Tensor], about: dict) -> None:
    """Write `derive`'s {"k": T_K, "v": T_V, ...}, as serving reads it, and PATH.json: of what it was made."""
    torch.save({key: tensor.cpu() for key, tensor in T.items()}, path)
    Path(path + ".json").write_text(json.dumps(about, indent=2) + "\n")

def read_sidecar(path: str, T: dict[str, Tensor]) -> dict:
    """Read what a transforms file was made from; without a sidecar, what T tells, and a note on stderr."""
    if not Path(path + ".json").exists():
        print(f"note: without {path}.json nothing says which model {path} was made for", file=sys.stderr)
        return {"group": block_size(T)} | ({} if "k_feedback" in T else {"refine": "off"})
    made = {"refine": "off"} | read_json(Path(path + ".json"))
    lacks = {"model", "fingerprint", *SIDECAR} - made.keys()
    refuse_if(lacks, f"{path}.json does not say its {', '.join(sorted(lacks))}")
    fits = block_size(T) == made["group"] or block_size(T) is None and "k_feedback" not in T     # OSCAR's
    fits &= isinstance(made["group"], int | None) and isinstance(made["refine"], str)
    refuse_if(not fits, f"{path}.json says refine {made['refine']!r} and group {made['group']!r}, which does "
                        f"not fit {path}")
    return made

def load_transforms(path: str, config=None, device="cpu") -> dict[str, Tensor]:
    """Read a transforms file. Raises ValueError if it is broken or of another shape than the model's."""
    with explained(f"{path} cannot be read as a transforms file"):
        T = torch.load(path, weights_only=True, map_location=device)
        keys = "k", "v", *T.keys() & {"k_feedback", "v_feedback"}
        T = {key: T[key].to_dense() for key in keys}
    want = config and (config.num_hidden_layers, config.num_key_value_heads, head_dim(config))
    for key, t in T.items():
        l, g, n, m, columns = t.shape if t.dim() == 5 else (0,) * 5
        want = want or (l, g, n * m)                             # without a config: what the keys' T says
        refuse_if((l, g, n * m) != want or 0 in want or m != columns,
                  f"{path} holds transforms of shape {tuple(t.shape)}, not of the model's {want[0]} layers, "
                  f"{want[1]} KV heads and head_dim {want[2]}")
        refuse_if(t.shape != T[key[0]].shape, f"{path} holds a {key} of other blocks than {key[0]}")
        finite = t.is_floating_point() and t.isfinite().all()
        refuse_if(not finite, f"{path} holds numbers that are not finite or not floating point")
        T[key] = t = t.float()
        singular = key in "kv" and (torch.linalg.matrix_rank(t) < t.shape[-1]).any()
        refuse_if(singular, f"{path} holds transforms that do not invert")
    return T


# ------------------------------------------------------------------------------------------------------------
# Texts and tokens.

def stream_text(tokenizer, tokens: Iterable[int]) -> Iterable[str]:
    """Yield text as tokens come, never half a character: the pieces add up to tokenizer.decode(tokens)."""
    ids, start, shown = [], 0, 0          # ids[:shown] are out, ids[start:shown] the next one's left context
    for token in tokens:
        ids.append(token)
        before, now = tokenizer.decode(ids[start:shown]), tokenizer.decode(ids[start:])
        if not now.endswith("\ufffd"):    # an unfinished character: wait for its other bytes
            yield now[len(before):]
            start, shown = shown, len(ids)
    if shown < len(ids):
        yield tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])):]

def prompt_tokens(tokenizer, prompt: str, raw: bool = False, thinking: bool = False) -> list[int]:
    """Tokenize a prompt through the model's chat template, or as it stands if `raw` or if there is none."""
    message, how = {"role": "user", "content": prompt}, dict(add_generation_prompt=True, return_dict=False)
    with explained("the prompt is not UTF-8, or not one for the model's chat template"):
        ids = (tokenizer(prompt)["input_ids"] if raw or not tokenizer.chat_template else
               tokenizer.apply_chat_template([message], enable_thinking=thinking, **how))
    refuse_if(not ids, "the prompt is empty")
    return ids

def end_tokens(folder: Path) -> list[int]:
    """Return all end-of-sequence ids, one or a list: generation_config.json's, else config.json's."""
    for path in folder / "generation_config.json", folder / "config.json":
        if path.is_file() and (eos := read_json(path).get("eos_token_id")) is not None:
            eos = eos if isinstance(eos, list) else [eos]
            refuse_if(not all(isinstance(token, int) for token in eos), f"{path}: eos_token_id is {eos}")
            return eos
    return []

DATASETS = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
            "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")}

def read_text(source: str, tokens: int) -> str:
    """Read a text file, or of a dataset about as much as `tokens` tokens need, rows joined by blank lines."""
    if source not in DATASETS:
        with explained(f"{source} is missing or is not a text file"):
            return Path(source).read_text(encoding="utf-8")
    repo, name, split = DATASETS[source]
    hub(repo, "dataset", "README.md")          # without a network this fails at once, `datasets` after 25 s
    from datasets import load_dataset
    rows, length = [], 0
    for row in load_dataset(repo, name, split=split, streaming=True):
        rows.append(row["text"])
        length += len(row["text"])
        if length > 6 * tokens:                # a token of English is four or five characters
            break
    return "\n\n".join(rows)

def read_tokens(source: str, tokenizer, flag: str, count: int, length: int, skip: int = 0) -> list[Tensor]:
    """Cut `count` sequences of `length` tokens from a text, past `skip` tokens, adding no special tokens."""
    need = skip + count * length
    ids = tokenizer(read_text(source, need), add_special_tokens=False, verbose=False)["input_ids"]
    refuse_if(len(ids) < need, f"{source} has {len(ids)} tokens; {flag}-seqs {count} of {flag}-len {length}"
              + f" after {flag}-skip {skip}" * bool(skip) + f" need {need}")
    return list(torch.tensor(ids[skip:need]).split(length))

def read_tokenizer(folder: Path, config):
    """Load the tokenizer. Raises ValueError if there is none or if it is another model's."""
    files = "tokenizer.json", "tokenizer.model", "vocab.json"
    refuse_if(not any((folder / file).is_file() for file in files), f"{folder} holds no tokenizer.json")
    from transformers import AutoTokenizer
    with explained(f"{folder} holds no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    refuse_if(len(tokenizer) > config.vocab_size,
              f"{folder} has a tokenizer of {len(tokenizer)} entries and a model of {config.vocab_size}")
    return tokenizer
