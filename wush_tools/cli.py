"""The command line: options, tasks, the report. A default stands once, in Options; flags are made from it."""
import argparse
import dataclasses
import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Callable, Iterable, NamedTuple, get_args

import torch
from torch import Tensor

import wush_kv
from wush_kv import (BITS, QUANTIZERS, REFINEMENTS, TRANSFORMS, Codec, Model, Scheme, Side, WindowCache,
                     collect_moments, decode, derive, fold_values, known_parts, new_cache, refined_codec,
                     sample)
from wush_tools.checkpoints import (SIDECAR, end_tokens, fetch, fingerprint, load_model, load_transforms,
                                    pick_device, prompt_tokens, read_config, read_sidecar, read_tokenizer,
                                    read_tokens, refuse_if, save_transforms, stream_text)
from wush_tools.evaluate import STEPS, WARM_UP, cache_bytes, decode_speed, module_error, perplexity


BUNDLED = Path(__file__).parent.parent / "tiny-qwen3"
DATA_FREE = ["identity", "hadamard"]
COMPARED = dict(error=[*TRANSFORMS], ppl=["hadamard", "oscar", "wush"], report=["hadamard", "oscar", "wush"],
                ablation=[])

def option(default, help: str, choices=None, low=-math.inf, high=math.inf):
    return dataclasses.field(default=default, metadata={
        "help": help, "choices": choices and [*choices], "low": low, "high": high})

@dataclasses.dataclass(frozen=True)
class Options:
    model: str = option(str(BUNDLED), "folder or hub id of a Qwen3 or Llama checkpoint (the bundled one)")
    task: str = option("report", "what to do", choices=("calibrate", "generate", *COMPARED))
    bits: int | None = option(None, "bits of keys and values; 2 if no width is given, 16 is off", BITS)
    k_bits: int | None = option(None, "bits of the keys; 2 if only --v-bits is given", BITS)
    v_bits: int | None = option(None, "bits of the values; 2 if only --k-bits is given", BITS)
    group: int | None = option(None, "channels that share a scale and a transform block (a head)", low=4)
    transform: str = option("wush", "transform to generate with and to save", choices=TRANSFORMS)
    refine: str = option("all", "added to the paper's wush: all, off, or of " + ",".join(REFINEMENTS))
    quantizer: str = option("quest", "rule that places the levels", choices=QUANTIZERS)
    clip_k: float = option(0.96, "affine: share of a key group left unclipped", low=0, high=1)
    clip_v: float = option(0.92, "affine: share of a value group left unclipped", low=0, high=1)
    sink: int = option(16, "first tokens kept in model dtype", low=0, high=2 ** 20)
    keep: int = option(128, "last tokens kept in model dtype, at least", low=0, high=2 ** 20)
    flush: int = option(16, "tokens quantized together", low=1, high=2 ** 20)
    calib: str | None = option(None, "calibration text, a file or fineweb-edu (the model folder's calib.txt)")
    calib_seqs: int = option(16, "calibration sequences; the paper takes 128", low=1)
    calib_len: int = option(1024, "tokens of each; the paper takes 32768", low=2)
    eval: str | None = option(None, "evaluation text, a file or wikitext2 (the model folder's eval.txt)")
    eval_seqs: int = option(4, "evaluation sequences", low=1)
    eval_len: int = option(2048, "tokens of each", low=2)
    eval_skip: int = option(0, "tokens of the evaluation text to skip first", low=0)
    transforms: str | None = option(None, "file to read the transforms from instead of calibrating")
    save: str | None = option(None, "file to write the transforms to, for --transforms and for serving")
    prompt: str = option("Tell me where is fancy bred,", "prompt to continue")
    raw: bool = option(False, "take the prompt as it stands, without the chat template")
    thinking: bool = option(False, "let the chat template's thinking mode on")
    max_new_tokens: int = option(64, "tokens to generate at most", low=1)
    temperature: float = option(0.0, "sampling temperature; 0 takes the likeliest token", low=0)
    top_p: float = option(1.0, "sample from the likeliest tokens of this probability", low=0, high=1)
    top_k: int = option(0, "sample from this many likeliest tokens; 0 takes all", low=0, high=2 ** 31)
    seed: int = option(0, "seed of the sampling", low=0, high=2 ** 63)
    yarn: float | None = option(None, "extend the context by this factor with YaRN", low=1, high=1024)
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    dtype: str = option("auto", "of weights and windows; auto is float32 on a CPU, else bfloat16",
                        choices=("auto", "float32", "bfloat16", "float16"))
    json: str | None = option(None, "file to write the figures to as well")

def codecs(o: Options, refine: Iterable[str] = ()) -> list[Codec]:
    """Make the codecs of keys and of values."""
    clips = (o.clip_k, o.clip_v) if o.quantizer == "affine" else (1.0, 1.0)
    return [refined_codec(bits or o.bits or 2, refine, o.group, o.quantizer, clip)
            for bits, clip in zip((o.k_bits, o.v_bits), clips)]

def refinement(o: Options) -> list[str]:
    """List the parts of --refine that apply: to wush and wush_a, and to the affine rule its first two."""
    parts = [part for part in known_parts(o.refine)
             if o.quantizer != "affine" or part in ("feedback", "exponent")]
    return parts if o.transform in ("wush", "wush_a") else []

def wanted(o: Options) -> tuple[dict[str, tuple], str]:
    """Name the schemes that the task needs, with transform and refinements, and the one to generate with."""
    parts = refinement(o)
    served = "refined" if parts else o.transform
    schemes = {name: (name, []) for name in COMPARED.get(o.task, [])}
    if o.task == "ablation":
        schemes = {"paper": []} | {part: [part] for part in parts}
        schemes |= {f"no {part}": [p for p in parts if p != part] for part in parts}
        schemes = {name: (o.transform, chosen) for name, chosen in schemes.items()}
    return schemes | {served: (o.transform, parts)}, served

def check(o: Options) -> None:
    """Refuse what the flags alone show to be wrong."""
    for f in dataclasses.fields(o):
        value, low, high = getattr(o, f.name), f.metadata["low"], f.metadata["high"]
        refuse_if(isinstance(value, int | float) and not low <= value <= high,
                  f"--{f.name.replace('_', '-')} {value} is not between {low} and {high}")
    refinement(o)
    refuse_if(o.bits is not None and (o.k_bits is not None or o.v_bits is not None),
              "--bits sets both sides: give it, or --k-bits and --v-bits")
    refuse_if(o.save and all(codec.bits == 16 for codec in codecs(o)),
              "--save has nothing to write where --bits is 16")
    refuse_if(o.json and o.save and o.json in (o.save, o.save + ".json"),
              "--json and --save, which also writes a .json file, would overwrite each other")
    refuse_if(o.task == "calibrate" and (not o.save or o.transforms),
              "--task calibrate makes transforms: it needs --save FILE and takes no --transforms")
    for path in filter(None, (o.json, o.save, o.save and o.save + ".json")):    # now, not in an hour
        place = Path(path) if Path(path).exists() else Path(path).absolute().parent
        refuse_if(Path(path).is_dir() or not os.access(place, os.W_OK), f"{path} cannot be written")

def parse(argv: list[str] | None) -> Options:
    """Make the flags from Options, and parse them."""
    parser = argparse.ArgumentParser(description=wush_kv.__doc__.splitlines()[0])
    for f in dataclasses.fields(Options):
        kind, choices = (get_args(f.type) or (f.type,))[0], f.metadata["choices"]       # of int | None: int
        how = {"action": "store_true"} if kind is bool else {"type": kind, "choices": choices}
        shown = "" if f.default in (None, False, str(BUNDLED)) else f" (default: {f.default})"
        name, help = "--" + f.name.replace("_", "-"), f.metadata["help"] + shown
        parser.add_argument(name, default=f.default, help=help, **how)
    return Options(**vars(parser.parse_args(argv)))

class Job(NamedTuple):
    """What a task works on, all of it checked."""
    options: Options
    model: Model
    tokenizer: object
    schemes: dict[str, Scheme]                 # by name; none at 16 bits
    served: str                                # the scheme to generate with, or "none"
    texts: list[Tensor]                        # evaluation sequences
    prompt: list[int]
    eos: list[int]

def prepare(o: Options) -> Job:
    """Check everything, the cheap before the slow, then load the model and read or derive the transforms."""
    check(o)
    device, dtype = pick_device(o.device, o.dtype)
    small_files = "*.json", "*.txt", "*.model", "*.jinja"
    folder = fetch(o.model, *small_files)
    config = read_config(folder, o.yarn)
    given = load_transforms(o.transforms, config, device) if o.transforms else {}
    made = read_sidecar(o.transforms, given) if given else {}
    o = dataclasses.replace(o, **{key: made[key] for key in made.keys() & SIDECAR})
    refuse_if(o.group and config.head_dim % o.group,
              f"--group {o.group} does not divide the head_dim {config.head_dim}")
    schemes, served = wanted(o)
    if all(codec.bits == 16 for codec in codecs(o)):
        schemes, served = {}, "none"
    elif given:                                # without a calibration only these can be compared with it
        schemes = {name: how for name, how in schemes.items() if name in (*DATA_FREE, served)}
    tokenizer, eos = read_tokenizer(folder, config), end_tokens(folder)
    calibrates = not given and any(transform not in DATA_FREE for transform, _ in schemes.values())
    prompt, texts, calib, source = read_inputs(o, folder, config, tokenizer, bool(schemes), calibrates)
    folder = fetch(o.model, *small_files, "*.safetensors")
    about = {"model": o.model, "fingerprint": fingerprint(folder), "transform": o.transform, "group": o.group,
             "refine": o.refine, "calibration_text": source, "calibration_tokens": sum(map(len, calib))}
    refuse_if(made.get("fingerprint", about["fingerprint"]) != about["fingerprint"],
              f"{o.transforms} was made for {made.get('model')}, other weights than those of {o.model}")
    model = load_model(folder, config, dtype, device)
    derived = [transform for name, (transform, _) in schemes.items() if not given or name != served]
    moments = collect_moments(model, calib, "wush_a" in derived) if derived else {}
    for name, (transform, parts) in schemes.items():
        tensors = given if given and name == served else derive(moments, transform, o.group, parts)
        if o.save and name == served:
            save_transforms(o.save, tensors, about)
        sides = dict(zip("kv", codecs(o, parts)))             # a side of 16 bits needs no transform
        tensors = {key: t for key, t in tensors.items() if sides[key[0]].bits < 16}
        schemes[name] = Scheme(*sides.values(), tensors)
    return Job(o, model, tokenizer, schemes, served, texts, prompt, eos)

def read_inputs(o: Options, folder: Path, config, tokenizer, quantizes: bool, calibrates: bool) -> tuple:
    """Tokenize what the task reads: prompt, evaluation and calibration sequences, their source last."""
    own = lambda file, dataset: str(folder / file) if (folder / file).is_file() else dataset
    most, prompt, texts, calib = config.max_position_embeddings, [], [], []
    fits = lambda what, n: refuse_if(n > most, f"{what}: {n} tokens are over the model's {most} positions")
    source = o.calib or own("calib.txt", "fineweb-edu")
    if o.task in ("report", "generate"):
        prompt = prompt_tokens(tokenizer, o.prompt, o.raw, o.thinking)
        fits("prompt and --max-new-tokens", len(prompt) + o.max_new_tokens)
    if o.task in COMPARED:
        fits("--eval-len", o.eval_len)
        refuse_if(quantizes and o.task != "error" and o.eval_len <= o.sink + o.keep + o.flush,
                  f"--eval-len {o.eval_len} fits into the windows: nothing would be quantized")
        text = o.eval or own("eval.txt", "wikitext2")
        texts = read_tokens(text, tokenizer, "--eval", o.eval_seqs, o.eval_len, o.eval_skip)
    if calibrates:
        fits("--calib-len", o.calib_len)
        calib = read_tokens(source, tokenizer, "--calib", o.calib_seqs, o.calib_len)
    return prompt, texts, calib, source

def serve(job: Job, name: str) -> tuple[Model, Callable]:
    """Return the model, values folded if the scheme quantizes them, and what makes an empty cache for it."""
    o, model, scheme = job.options, job.model, job.schemes.get(name)
    if scheme and "v" in scheme.tensors:
        model = fold_values(model, scheme.tensors["v"])
    return model, partial(new_cache, model, 1, scheme, o.sink, o.keep, o.flush)

def continuation(job: Job, model: Model, cache: list[WindowCache]) -> Iterable[str]:
    """Yield the text that continues the prompt, piece by piece."""
    o, generator = job.options, torch.Generator(model.inv_freq.device).manual_seed(job.options.seed)
    pick = lambda scores: sample(scores, o.temperature, o.top_p, o.top_k, generator)
    tokens = (row[0] for row in decode(model, cache, [job.prompt], o.max_new_tokens, job.eos, pick))
    return stream_text(job.tokenizer, (token for token in tokens if token not in job.eos))

def generate_task(job: Job) -> dict:
    """Print the continuation as it comes."""
    pieces, (model, empty_cache) = [], serve(job, job.served)
    for piece in continuation(job, model, empty_cache()):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return {"text": {job.served: "".join(pieces)}}

def by_figure(scores: dict[str, dict[str, tuple]]) -> dict:
    """Turn {name: {figure: (value, error)}} into {figure: {name: value}, "standard_error": {...}}."""
    value, error = ({figure: {name: None if math.isnan(row[figure][i]) else row[figure][i]
                              for name, row in scores.items()} for figure in scores["none"]} for i in (0, 1))
    return value | {"standard_error": error}

def shown(value: float, error: float) -> str:
    return f"{value:.4f}" if math.isnan(error) else f"{value:.4f} ± {error:.4f}"

def error_task(job: Job, sink: int | None = None) -> dict:
    """Measure and print the module error of every transform."""
    sink = job.options.sink if sink is None else sink
    errors = module_error(job.model, job.texts, job.schemes, sink)
    print(f"module error, relative and squared, {sink} sink tokens exact, no recent window")
    for name, figure in errors.items():
        print(f"    {name:12} {shown(*figure)}")
    return by_figure({name: {"module_error": e} for name, e in ({"none": (0.0, 0.0)} | errors).items()})

def ppl_task(job: Job) -> dict:
    """Measure and print perplexity and divergence of every transform through the windows."""
    o = job.options
    scores = perplexity(job.model, job.texts, job.schemes, o.sink, o.keep, o.flush)
    print(f"through windows {o.sink}/{o.keep}/{o.flush}:")
    print(f"    {'':12} {'perplexity':19} {'excess, nats':19} {'KL, nats':19} same top-1")
    for name, row in scores.items():
        print(f"    {name:12} " + " ".join(f"{shown(*figure):19}" for figure in row.values()).rstrip())
    return by_figure(scores)

def memory_task(job: Job) -> dict:
    """Measure and print what the bfloat16 cache of one evaluation sequence holds."""
    o, c, (k_codec, v_codec) = job.options, job.model.config, codecs(job.options)
    elements = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim          # of a token
    sides = {"k": Side(codec=k_codec), "v": Side(codec=v_codec)}
    keep = o.keep if job.schemes else None
    held = cache_bytes(c, o.eval_len, sink=o.sink, keep=keep, flush=o.flush, **sides)
    short, long = (cache_bytes(c, n, sink=0, keep=0, flush=1, **sides) for n in (4096, 8192))
    packed = 2 * long - short                            # bytes of each further token: the windows drop out
    bits, packed_bits = 8 * held / elements, 8 * packed / elements
    print(f"KV cache, bytes per token: {2 * elements} in 16 bits; {packed:.0f} once packed, with scales "
          f"{packed_bits:.2f} bits an element; {held:.0f} at {o.eval_len} tokens with windows, {bits:.2f}")
    return {"kv_bytes_per_token": held, "effective_bits": bits, "kv_bytes_per_token_none": 2 * elements}

def report_task(job: Job) -> dict:
    """Print the whole story, unquantized and quantized: memory, error, perplexity, speed and text."""
    o, c, (k_codec, v_codec) = job.options, job.model.config, codecs(job.options)
    heads = f"{c.num_attention_heads} query heads, {c.num_key_value_heads} KV heads of {c.head_dim}"
    widths = f"{k_codec.bits}-bit keys, {v_codec.bits}-bit values"
    name = Path(o.model).resolve().name if Path(o.model).is_dir() else o.model
    print(f"{name}: {c.num_hidden_layers} layers, {heads}; {widths}")
    figures, error, ppl = memory_task(job), error_task(job, sink=0), ppl_task(job)      # 0: the paper's
    figures |= error | ppl | {"standard_error": error["standard_error"] | ppl["standard_error"]}
    figures |= {"tokens_per_second": {}, "text": {}}
    context = job.texts[0][:max(c.max_position_embeddings - WARM_UP - STEPS, 1)]
    context = context.to(job.model.inv_freq.device)
    for name in dict.fromkeys(("none", job.served)):
        model, empty_cache = serve(job, name)
        figures["tokens_per_second"][name] = speed = decode_speed(model, empty_cache(), context)
        figures["text"][name] = text = "".join(continuation(job, model, empty_cache()))
        print(f"{name}: {speed:.1f} tokens/s after {len(context)} tokens; the prompt goes on {text!r}")
    return figures

TASKS = {"report": report_task, "calibrate": lambda job: {}, "generate": generate_task, "error": error_task,
         "ppl": ppl_task, "ablation": ppl_task}

def main(argv: list[str] | None = None) -> None:
    start, o = time.perf_counter(), parse(argv)
    try:
        job = prepare(o)
    except (ValueError, OSError) as e:
        sys.exit(f"wush_kv: {e}")
    o = job.options
    figures = {"model": o.model, "bits": o.bits, "k_bits": codecs(o)[0].bits, "v_bits": codecs(o)[1].bits}
    figures |= TASKS[o.task](job)
    figures["seconds"] = time.perf_counter() - start
    if o.json:
        Path(o.json).write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{figures['seconds']:.0f} seconds", file=sys.stderr)
