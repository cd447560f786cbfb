"""Reading checkpoints, texts and transforms files. What can be refused is refused early, in one sentence."""
import concurrent.futures.thread
import copy
import hashlib
import json
import math
import os
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from wush_kv import PAPER, REFINED, Basis, Model, Refine, Transforms


MODEL_TYPES = ("qwen3", "llama")
HEAD_DIMS = (8, 16, 32, 64, 128, 256, 512)      # powers of two, for the Hadamard matrix
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
ACTIVATIONS = ("silu", "swish")                 # transformers' two names of one function
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HUB_SECONDS = 60                                # a hub that is silent for so long has failed


# ----------------------------------------------------------------------------------------------------------------
# Files
#
# Files are UTF-8, whatever the locale says. What is written appears whole or not at all: it is written beside its
# place under another name, and renamed at the end.

@contextmanager
def explained(sentence):
    """Turn what a library raises, of whatever type, into a ValueError that a user understands."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{sentence} ({lines[-1].strip()})") from error

def read_json(path):
    """Read a JSON object. Raises ValueError for a file that is missing or something else."""
    with explained(f"{path} is missing or is not JSON"):
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content

def write_together(writers):
    """Write several files, all of them whole or none at all: `writers` maps a path to what writes to a path."""
    temporary = {}
    try:
        for path, write in writers.items():
            # A device such as /dev/stdout is written to; a link's target is replaced, not the link.
            target = Path(path).resolve()
            is_replaced = target.is_file() or not target.exists()
            place = target.with_name(f"{target.name}.{os.getpid()}.tmp") if is_replaced else target
            if is_replaced:
                temporary[target] = place
            write(place)
        for target, place in temporary.items():
            place.replace(target)
    finally:
        for place in temporary.values():
            place.unlink(missing_ok=True)

def write_whole(path, write):
    """Write a file whole or not at all: `write(path)` writes it, to the path that it gets."""
    write_together({path: write})

def write_text(text, path):
    Path(path).write_bytes(text.encode("utf-8"))


# ----------------------------------------------------------------------------------------------------------------
# The hub
#
# Models and two datasets come from Hugging Face's hub. Its libraries fail in many ways, and advise arguments of
# theirs that are no flags here; so a failure is said in our words, with the flag to give instead. What has been
# read once is read from the disk the next time, offline too.

# By a part of the name of an exception, the first that fits:
FAILURES = {
    "DatasetNotFound": "no such repo, or private",
    "DataFilesNotFound": "no such data, or private",
    "Timeout": "no answer in time",
    "Offline": "the environment asks to stay offline, and it is not on the disk",
    "Connect": "no connection",
    "RemoteProtocol": "the answer was cut short",
    "IncompleteRead": "the answer was cut short",
    "Arrow": "its data cannot be read",
    "Validation": "not a name that a repo can have",
}

def hub_failure(error):
    """Say in a few words why the hub failed: errors that caused this one may tell more than it does."""
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__

    # The hub answers 401 where there is no such repo, as long as nobody has logged in.
    names = " ".join(type(link).__name__ for link in chain)
    if "GatedRepo" in names:
        return "access to it is gated"
    for link in chain:
        status = getattr(getattr(link, "response", None), "status_code", 200)
        if status in (401, 404):
            return "no such repo, or private"
        if status >= 400:
            return f"it answered {status}"
    for part, failure in FAILURES.items():
        if part in names:
            return failure
    return getattr(chain[-1], "strerror", None) or type(chain[0]).__name__

def watched(work, progress, seconds):
    """Return work(), or raise TimeoutError once `progress()` has stood still for so many seconds.

    The libraries' own limits do not help: some of their requests wait forever, and others are tried again and again.
    """
    results = []
    errors = []

    def run():
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    # A daemon thread does not keep the program from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        before = progress()
        thread.join(seconds)
        if thread.is_alive() and progress() == before:
            # At its end Python would wait for the threads of the library's pool, for minutes. The pool is not
            # ours, and this table of all pools is what Python goes by: it is emptied, so that the program can end.
            concurrent.futures.thread._threads_queues.clear()
            raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]

def bytes_below(folder):
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):                  # files come and go while a download runs
            total += path.stat().st_size
    return total

def check_spelling(path):
    """Refuse a path that Python could not decode: the libraries that read models take Unicode only."""
    if any("\udc80" <= character <= "\udcff" for character in str(path)):
        raise ValueError(
            f"the path {path} is not text in this locale: run with PYTHONUTF8=1, or rename it")

def fetch(name, *patterns):
    """Return the local folder `name`, or the files that match `patterns` of the hub's model `name`."""
    if Path(name).is_dir():
        check_spelling(name)
        return Path(name)
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if Path(name).exists() or not is_hub_id:
        raise ValueError(f"{name!r} is neither a folder nor a hub id of the form owner/name")
    from huggingface_hub import constants, snapshot_download
    download = partial(snapshot_download, name, allow_patterns=list(patterns))
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"

    # Of large files the hub may send much before any of it reaches the disk.
    has_weights = any("safetensors" in pattern for pattern in patterns)
    seconds = 10 * HUB_SECONDS if has_weights else HUB_SECONDS
    try:
        return Path(watched(download, partial(bytes_below, folder), seconds))
    except Exception as error:
        # Whatever has failed, an earlier run may have left all that is needed on the disk.
        with suppress(Exception):
            return Path(download(local_files_only=True))
        raise ValueError(
            f"cannot get the model {name!r} from the hub ({hub_failure(error)}): "
            "give --model a local folder instead") from error


# ----------------------------------------------------------------------------------------------------------------
# Models
#
# Where a fact stands in two places, transformers decides: the config is its object, RoPE is its own, and tensors
# are found as it finds them. Everything that our model would run otherwise is refused.

def check_head_dim(d):
    if d not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"head_dim {d} is not supported, only {dims}")

def head_dim(config):
    """Return the head dim of a config; some of transformers' leave it out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

def rope_frequencies(config, device="cpu"):
    """Return the RoPE frequencies (d/2,) and the factor on cos and sin; variants are transformers' own."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, device)
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0

def extend_context(config, factor):
    """Set YaRN's `factor` in a config, in place of the RoPE variant that it has."""
    # Qwen3's 40960 positions are a context of 32768 and room for the answer.
    rope = config.rope_parameters
    power_below = 1 << config.max_position_embeddings.bit_length() - 1
    original = rope.get("original_max_position_embeddings") or power_below
    config.max_position_embeddings = int(original * factor)
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": factor,
        "rope_theta": rope["rope_theta"],
        "original_max_position_embeddings": original,
    }

def check_rope(config):
    """Refuse RoPE variants that our model does not have, and frequencies that are not positive."""
    rope = config.rope_parameters
    kind = rope.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(f"its RoPE is {kind!r}, supported are {', '.join(ROPE_TYPES)}")
    share = rope.get("partial_rotary_factor", 1)
    if share != 1:
        raise ValueError(
            f"its RoPE turns a part of each head (partial_rotary_factor {share}), supported are "
            "whole heads")
    theta = rope["rope_theta"]
    if not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"its rope_theta is {theta}, not a positive number")
    frequencies, scale = rope_frequencies(config)
    if not (frequencies.isfinite().all() and math.isfinite(scale)):
        raise ValueError("its RoPE frequencies are not finite")

def check_architecture(config):
    """Refuse every kind of model that ours would run otherwise than transformers."""
    if getattr(config, "quantization_config", None):
        raise ValueError("the checkpoint is quantized: give one of plain weights")
    if getattr(config, "transformers_weights", None):
        raise ValueError(
            "it names its weights in transformers_weights, supported is model.safetensors")
    for kind in getattr(config, "layer_types", None) or []:
        if kind != "full_attention":
            raise ValueError(f"only full attention is supported, not {kind}")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("only full attention is supported, not a sliding window")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if config.num_hidden_layers < 1:
        raise ValueError("the model has no layer: num_hidden_layers is 0")
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {config.hidden_act!r}, supported is silu")
    check_head_dim(config.head_dim)
    check_rope(config)

def read_config(folder, yarn=None):
    """Read config.json as transformers' config object, with YaRN's factor `yarn` applied.

    Raises ValueError, one sentence, for every kind of model that ours would run wrongly.
    """
    path = Path(folder) / "config.json"
    kind = read_json(path).get("model_type")
    with explained(f"{path} cannot be used"):
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"model_type {kind!r} is not supported, only {' and '.join(MODEL_TYPES)}")
        from transformers import AutoConfig
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if yarn is not None:
            extend_context(config, yarn)
        check_architecture(config)
    return config

def weight_shapes(config):
    """Return the tensors that a checkpoint of this config must hold: their shapes, by name."""
    D = config.hidden_size
    hidden = config.intermediate_size
    d = config.head_dim
    queries = config.num_attention_heads * d
    keys = config.num_key_value_heads * d
    layer = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (queries, D),
        "self_attn.k_proj.weight": (keys, D),
        "self_attn.v_proj.weight": (keys, D),
        "self_attn.o_proj.weight": (D, queries),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (hidden, D),
        "mlp.up_proj.weight": (hidden, D),
        "mlp.down_proj.weight": (D, hidden),
    }
    if config.model_type == "qwen3":
        layer["self_attn.q_norm.weight"] = (d,)
        layer["self_attn.k_norm.weight"] = (d,)
    if config.attention_bias:
        layer["self_attn.q_proj.bias"] = (queries,)
        layer["self_attn.k_proj.bias"] = (keys,)
        layer["self_attn.v_proj.bias"] = (keys,)
        layer["self_attn.o_proj.bias"] = (D,)
    if config.model_type == "llama" and config.mlp_bias:
        layer["mlp.gate_proj.bias"] = (hidden,)
        layer["mlp.up_proj.bias"] = (hidden,)
        layer["mlp.down_proj.bias"] = (D,)

    shapes = {EMBEDDING: (config.vocab_size, D), "model.norm.weight": (D,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, D)
    for l in range(config.num_hidden_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{l}.{name}"] = shape
    return shapes

def checkpoint_files(folder):
    """Map each stored tensor's name to its safetensors file: model.safetensors, else the shards of the index."""
    from safetensors import safe_open
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter, which would be left out: merge it into the weights")
    shards = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not shards[0].is_file():
        with explained(f"{index} holds no weight_map of file names"):
            names = set(read_json(index)["weight_map"].values())
            shards = [folder / name for name in sorted(names)]

    # The shards themselves say which tensors they hold, as in transformers, not the index.
    files = {}
    for shard in shards:
        with explained(f"{shard} is missing or is not a whole safetensors file"):
            with safe_open(shard, "pt") as file:
                files |= dict.fromkeys(file.keys(), shard)
    return files

def stored_names(files, shapes):
    """Map the model's tensor names to the stored ones, which may lack the prefix `model.` or have it twice."""
    names = {}
    for stored in files:
        name = stored
        if stored.removeprefix("model.") in shapes:
            name = stored.removeprefix("model.")
        elif "model." + stored in shapes:
            name = "model." + stored
        if name in names:
            raise ValueError(f"the checkpoint holds {name} twice, as {names[name]} and as {stored}")
        names[name] = stored
    return names

def check_names(names, shapes):
    """Refuse a checkpoint that lacks tensors, or that holds some which our model would leave out."""
    missing = sorted(shapes.keys() - names.keys())
    if missing:
        raise ValueError(
            f"the safetensors files lack {len(missing)} tensors, {missing[0]} among them")
    for name in sorted(names.keys() - shapes.keys()):
        if "_proj." in name or "_norm." in name:
            raise ValueError(f"the checkpoint holds {name}, of which config.json knows nothing")

def read_tensors(files, names, dtype=None, device="cpu"):
    """Yield each of the stored `names` with its tensor, on the device and in the dtype, file by file."""
    from safetensors import safe_open
    by_file = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, stored in sorted(by_file.items()):
        with explained(f"cannot read {path}"):
            with safe_open(path, "pt") as file:
                for name in stored:
                    yield name, file.get_tensor(name).to(device, dtype)

def check_weight(name, weight, shape):
    """Refuse a weight of another shape than config.json says, and one that is not finite."""
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)} where config.json says {shape}")
    low, high = weight.aminmax()                 # NaN goes through both
    if not (low.isfinite() and high.isfinite()):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{name} holds NaN or infinity in {dtype}")

def load_model(folder, config, dtype=torch.float32, device="cpu"):
    """Load the checkpoint straight to device and dtype.

    Raises ValueError if the weights do not fit into memory, if a tensor is missing, misshapen or not finite, or if
    there is one too many.
    """
    check_memory(config, dtype, device)
    files = checkpoint_files(Path(folder))
    shapes = weight_shapes(config)
    shapes_with_head = shapes | {HEAD: shapes[EMBEDDING]}
    names = stored_names(files, shapes_with_head)

    # If embedding and head are tied, they may be stored under either name, or under both.
    if config.tie_word_embeddings and HEAD in names:
        if EMBEDDING in names:
            shapes = shapes_with_head
        else:
            names[EMBEDDING] = names[HEAD]
    check_names(names, shapes)

    weights = {}
    model_names = {names[name]: name for name in shapes}
    for stored, weight in read_tensors(files, model_names, dtype, device):
        name = model_names[stored]
        check_weight(name, weight, shapes[name])
        weights[name] = weight

    # If both are stored and differ, they are not tied, whatever the config says: so does transformers.
    if config.tie_word_embeddings and HEAD in weights:
        if torch.equal(weights[HEAD], weights[EMBEDDING]):
            del weights[HEAD]
        else:
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
    return Model(config, weights, *rope_frequencies(config, device))

def free_bytes(device):
    """Return how much memory is free on a GPU, or on the machine; None if this cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and Path("/proc/meminfo").is_file():
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None

def check_memory(config, dtype, device):
    """Refuse weights that do not fit into free memory: to be asked before they are downloaded."""
    device = torch.device(device)
    free = free_bytes(device)
    numbers = sum(math.prod(shape) for shape in weight_shapes(config).values())
    need = numbers * dtype.itemsize
    if free is None or need <= free:
        return
    name = str(dtype).removeprefix("torch.")
    advice = "give a smaller model"
    if 2 * numbers <= free and dtype.itemsize > 2:
        advice = "give --dtype bfloat16, in which they fit"
    raise ValueError(
        f"the weights need {need / 1e9:.2f} GB in {name}, and {free / 1e9:.2f} GB are free "
        f"on {device}: {advice}")

def pick_device(name, dtype):
    """Resolve --device and --dtype. Raises ValueError for a device that is not there, or has no float64."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"there is no device {name!r} here"):
        probe = torch.zeros(1, device=name)
        probe.item()
    with explained(f"device {name} has no float64, which the transforms need: give --device cpu"):
        probe.double().sum().item()
    if dtype == "auto":
        dtype = "float32" if probe.device.type == "cpu" else "bfloat16"
    return probe.device, getattr(torch, dtype)

def digest(*tensors):
    """Hash tensors by their bytes."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        data = tensor.cpu().contiguous().flatten().view(torch.uint8)
        hasher.update(data.numpy().tobytes())
    return hasher.hexdigest()[:16]

def fingerprint(folder):
    """Hash attention weights of two layers as they lie on disk: the same for every dtype and sharding."""
    files = checkpoint_files(Path(folder))
    tensors = []
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        names = sorted(name for name in files if name.endswith(f"self_attn.{projection}.weight"))
        found = dict(read_tensors(files, dict.fromkeys(names[:1] + names[-1:])))
        tensors += [found[name] for name in sorted(found)]
    return digest(*tensors)


# ----------------------------------------------------------------------------------------------------------------
# Transforms files
#
# The file holds what serving reads, {"k": T_K, "v": T_V}, k_hessian and v_hessian, H', if there is feedback, and
# k_harm and v_harm, if they were measured. Beside it PATH.json says what it was made from and how: model, text,
# refinements, group.

FILE_NAMES = {"transform": "", "hessian": "_hessian", "harm": "_harm"}      # of Basis' fields, after k or v

def save_transforms(path, transforms, about):
    """Write the transforms to `path` and, with all that `about` says, how they were made to PATH.json."""
    tensors = {}
    for field, ending in FILE_NAMES.items():
        tensors["k" + ending] = getattr(transforms.keys, field)
        tensors["v" + ending] = getattr(transforms.values, field)
    tensors = {
        name: tensor.detach().cpu().clone()
        for name, tensor in tensors.items() if tensor is not None}

    about = {**about, "refine": transforms.refine._asdict(), "group": transforms.group}
    text = json.dumps(about, indent=2) + "\n"
    write_together({
        path: partial(torch.save, tensors),
        f"{path}.json": partial(write_text, text),
    })

def read_about(path):
    """Read what PATH.json says about a transforms file; {} if there is no such file."""
    sidecar = Path(f"{path}.json")
    return read_json(sidecar) if sidecar.exists() else {}

def check_layout(stored):
    """Refuse transforms of the earlier layout, which held F in the place of H', and names that have no meaning."""
    known = [side + ending for ending in FILE_NAMES.values() for side in ("k", "v")]
    unknown = sorted(set(stored) - set(known))
    if unknown:
        names = ", ".join(map(str, unknown))
        raise ValueError(f"transforms are {', '.join(known)}, not {names}: calibrate anew")

def read_stored_transforms(path, device):
    """Read the tensors of a transforms file, by their names in the file."""
    with explained(f"{path} cannot be read as a transforms file"):
        stored = torch.load(path, weights_only=True, map_location=device)
        check_layout(stored)
        tensors = {}
        for ending in FILE_NAMES.values():
            if not ending or "k" + ending in stored or "v" + ending in stored:
                tensors["k" + ending] = stored["k" + ending].to_dense()
                tensors["v" + ending] = stored["v" + ending].to_dense()
    return tensors

def check_harm(path, name, harm, layers):
    """Refuse what is no harm (l,) of all layers."""
    is_number = harm.is_floating_point() and harm.isfinite().all()
    if harm.shape != (layers,) or not is_number:
        raise ValueError(f"{path}: {name} is not one finite number for each of {layers} layers")

def check_transform(path, name, tensor, config=None):
    """Refuse a tensor of a transforms file that is none of (layers, KV heads, blocks, m, m), or not the model's."""
    shape = tuple(tensor.shape)
    if len(shape) != 5 or shape[3] != shape[4] or 0 in shape:
        raise ValueError(f"{path}: {name} has shape {shape}, not (layers, KV heads, blocks, m, m)")
    if not tensor.is_floating_point() or not tensor.isfinite().all():
        raise ValueError(f"{path}: {name} holds numbers that are not finite or not floating point")
    if config is None:
        return
    sizes = {
        "layers": (shape[0], config.num_hidden_layers),
        "KV heads": (shape[1], config.num_key_value_heads),
        "channels (head_dim)": (shape[2] * shape[3], head_dim(config)),
    }
    for what, (found, wanted) in sizes.items():
        if found != wanted:
            raise ValueError(f"{path}: {name} is for {found} {what}, the model has {wanted}")

def how_made(path, basis):
    """Return the refinements and the group of a transforms file, by its sidecar if there is one."""
    n, m = basis.transform.shape[2:4]
    has_hessian = basis.hessian is not None
    if not Path(f"{path}.json").exists():
        refine = REFINED if has_hessian else PAPER
        name = "refined" if has_hessian else "as in the paper"
        print(
            f"note: there is no {path}.json, so nothing says which model {path} was made for; "
            f"it is taken as {name}", file=sys.stderr)
        return refine, None if n == 1 else m

    # A dictionary of other fields, or of other types, is not what `save_transforms` wrote.
    about = read_about(path)
    refine = about.get("refine")
    group = about.get("group")
    types = {name: type(default) for name, default in REFINED._asdict().items()}
    is_refine = isinstance(refine, dict) and {name: type(x) for name, x in refine.items()} == types
    is_group = "group" in about and type(group) in (int, type(None))
    if not is_refine or not is_group:
        raise ValueError(f"{path}.json does not say by which refinements and group {path} was made")

    # OSCAR's transform is one block of all channels, whatever the group.
    fits = n == 1 if group is None else group == m
    if not fits and (n > 1 or has_hessian or m % (group or m)):
        raise ValueError(
            f"{path}.json says group {group}, but {path} holds {n} blocks of {m} channels")
    if refine["feedback"] != has_hessian:
        raise ValueError(
            f"{path}.json and {path} do not agree on whether there is feedback: calibrate anew")
    return Refine(**refine), group

def load_transforms(path, config=None, device="cpu"):
    """Read a transforms file. Raises ValueError if it is broken, or made for another shape than the model's."""
    tensors = read_stored_transforms(path, device)
    for name, tensor in tensors.items():
        if name.endswith("harm"):
            check_harm(path, name, tensor, len(tensors["k"]))
            continue
        check_transform(path, name, tensor, config)
        if tensor.shape != tensors["k"].shape:
            raise ValueError(
                f"{path}: {name} is of shape {tuple(tensor.shape)}, with other layers, heads or "
                f"blocks than k, {tuple(tensors['k'].shape)}")
        tensors[name] = tensor.float()
    for name in ("k", "v"):
        if (torch.linalg.matrix_rank(tensors[name]) < tensors[name].shape[-1]).any():
            raise ValueError(f"{path}: {name} holds transforms that do not invert")
    keys = Basis(tensors["k"], tensors.get("k_hessian"), tensors.get("k_harm"))
    values = Basis(tensors["v"], tensors.get("v_hessian"), tensors.get("v_harm"))
    return Transforms(keys, values, *how_made(path, keys))


# ----------------------------------------------------------------------------------------------------------------
# Texts and tokens
#
# A text is tokenized as far as it is needed. Tokens are printed as text that never ends inside a character.

def read_tokenizer(folder, config):
    """Load the tokenizer. Raises ValueError if there is none or if it is another model's."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((Path(folder) / file).is_file() for file in files):
        raise ValueError(f"{folder} holds no tokenizer.json")
    from transformers import AutoTokenizer
    with explained(f"{folder} holds no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        largest = max(tokenizer.get_vocab().values())

    # Ids may have gaps: the largest must have a row in the embedding, however many there are.
    if largest >= config.vocab_size:
        raise ValueError(
            f"{folder} has a tokenizer with token id {largest}, "
            f"and a model of {config.vocab_size} tokens")
    return tokenizer

def end_tokens(folder):
    """Return all end-of-sequence ids, one or a list: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            eos = eos if isinstance(eos, list) else [eos]
            if not all(type(token) is int for token in eos):
                raise ValueError(f"{path}: eos_token_id is {eos}")
            return eos
    return []

def prompt_tokens(tokenizer, prompt, raw=False, thinking=False):
    """Tokenize a prompt through the model's chat template, or as it stands if `raw` or if there is none."""
    with explained("the prompt is not UTF-8, or not one for the model's chat template"):
        if raw or not tokenizer.chat_template:
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                enable_thinking=thinking,
                return_dict=False)
    if not ids:
        raise ValueError("the prompt is empty")
    return ids

def template_ends(tokenizer, thinking=False):
    """Return the tokens that the chat template puts before a user's message, and between it and the answer."""
    message = "MESSAGE"
    with explained("the chat template does not take a message"):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            add_generation_prompt=True,
            enable_thinking=thinking,
            tokenize=False)
        before, after = text.split(message)
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return [torch.tensor(ids, dtype=torch.long) for ids in parts]

def stream_text(tokenizer, tokens):
    """Yield text as tokens come, never half a character: the pieces add up to tokenizer.decode(tokens)."""
    # ids[:end] are printed, and ids[start:end] are the left context of what comes next.
    ids = []
    start = 0
    end = 0
    for token in tokens:
        ids.append(token)
        context = tokenizer.decode(ids[start:end])
        text = tokenizer.decode(ids[start:])
        if not text.endswith("\ufffd"):         # an unfinished character waits for its other bytes
            yield text[len(context):]
            start = end
            end = len(ids)
    if end < len(ids):
        context = tokenizer.decode(ids[start:end])
        yield tokenizer.decode(ids[start:])[len(context):]

DATASETS = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
}

def stream_rows(dataset, characters):
    """Read the first rows of a dataset on the hub, until they have more than `characters` characters."""
    import datasets

    # datasets would try again for up to twenty minutes, on top of the hub's own library, which tries five times.
    # These are its module's constants, and there is no other way to set them.
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0

    rows = []

    def read():
        length = 0
        repo, name, split = dataset
        for row in datasets.load_dataset(repo, name, split=split, streaming=True):
            rows.append(row["text"])
            length += len(row["text"])
            if length > characters:
                return

    watched(read, rows.__len__, HUB_SECONDS)
    return rows

def read_dataset(source, characters, flag):
    """Return the beginning of a dataset, rows joined by blank lines; from the disk where it was read before."""
    from huggingface_hub import constants
    kept = Path(constants.HF_HOME) / "wush_kv" / f"{source}-{characters}.txt"
    if kept.is_file():
        return kept.read_bytes().decode("utf-8")
    try:
        rows = stream_rows(DATASETS[source], characters)
    except Exception as error:
        raise ValueError(
            f"cannot read {source} from the hub ({hub_failure(error)}): "
            f"give {flag} a text file instead") from error
    text = "\n\n".join(rows)
    with suppress(OSError):                      # a disk that is full is no reason to stop
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, partial(write_text, text))
    return text

def read_tokens(source, tokenizer, flag, count, length, skip=0):
    """Cut `count` sequences of `length` tokens from a text, past `skip` tokens, adding no special tokens.

    `source` is a text file or a name of DATASETS, `flag` the one that named it.
    """
    # A token of English is four or five characters.
    need = skip + count * length
    if source in DATASETS:
        text = read_dataset(source, 6 * need, flag)
    else:
        with explained(f"{source} is missing or is not a text file"):
            text = Path(source).read_text(encoding="utf-8")
    beginning = text[:8 * need + 4096]

    # The last tokens before a cut may be other ones than without it, so some more have to follow.
    ids = tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < need + 256 and len(beginning) < len(text):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < need:
        skipped = f" after {flag}-skip {skip}" if skip else ""
        raise ValueError(
            f"{source} has {len(ids)} tokens; "
            f"{flag}-seqs {count} of {flag}-len {length}{skipped} need {need}")
    ids = torch.tensor(ids[skip:need], device="cpu")
    return list(ids.split(length))
