"""The command line: what the tasks compare, the tasks, the flags, and the way from flags to figures.

    flags -> Options -> recipes -> texts -> model -> moments -> schemes -> a task's figures -> --json

A new task is its function and one row of TASKS. A new transform or quantizer needs nothing here: its row in wush_kv.py
says where it appears.
"""
import argparse
import copy
import dataclasses
import json
import math
import os
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from wush_kv import (
    BITS, PAPER, QUANTIZERS, REFINED, TRANSFORMS, Model, Refine, Scheme, Transforms, Windows,
    collect_moments, decode, derive, feed, forward, is_average, logits, new_cache, sample,
    scheme_of, with_scheme)
from wush_tools.checkpoints import (
    check_memory, end_tokens, fetch, fingerprint, load_model, load_transforms, pick_device,
    prompt_tokens, read_about, read_config, read_tokenizer, read_tokens, save_transforms,
    stream_text, template_ends, write_whole)
from wush_tools.evaluate import (
    NAMES, STEPS, WORDS, cache_bytes, exact_attention, fact, haystack, mean_and_error, measure_harm,
    module_error, occurs, packed_bytes, perplexity, retrieval, shown, step_seconds)

BUNDLED = Path(__file__).resolve().parent.parent / "tiny-qwen3"

# ----------------------------------------------------------------------------------------------------------------
# Output
#
# Figures are printed for a reader and written to --json for a program. What a stream cannot encode is escaped, and
# when nobody reads it any more, the run goes on without it: the file that was asked for is written all the same.

def open_streams():
    """Give a process that was started without stdout or stderr somewhere to print to: libraries print, too."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")

def emit(stream, text):
    """Write text to stdout or stderr at once, as far as the stream can take it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        silence(stream)
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            note(f"the output is lost: {error}")

def silence(stream):
    """Lead a stream whose reader is gone to nowhere, or Python would complain again when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)

def say(text):
    emit(sys.stdout, text + "\n")

def note(text):
    """Print on stderr what explains a run but is not its result."""
    emit(sys.stderr, f"note: {text}\n")

def add_figure(figures, key, name, value):
    """Enter figures[key][name] = value; JSON knows neither NaN nor infinity, so these become None."""
    figures.setdefault(key, {})[name] = value if math.isfinite(value) else None

def add_scores(figures, scores):
    """Enter {name: {figure: (value, standard error)}} into the figures: by figure, then by name."""
    errors = figures.setdefault("standard_error", {})
    for name, row in scores.items():
        for key, (value, error) in row.items():
            add_figure(figures, key, name, value)
            add_figure(errors, key, name, error)

# ----------------------------------------------------------------------------------------------------------------
# Recipes
#
# A row of a table is a recipe: a transform, and the refinements on top of it. The flags choose one recipe, under
# the name "refined" if it is refined; the task compares it with others, of TRANSFORMS or with parts left out.

class Recipe(NamedTuple):
    transform: str
    refine: Refine = PAPER

def switched_on(refine):
    """List the fields in which `refine` is not as in the paper."""
    return [name for name in Refine._fields if getattr(refine, name) != getattr(PAPER, name)]

def spelled(refine):
    """Spell refinements as --refine takes them."""
    if refine in (REFINED, PAPER):
        return "all" if refine == REFINED else "off"
    return ",".join(switched_on(refine))

def chosen_recipe(o):
    """Return the name and the recipe that the flags choose; "all" refinements are all that apply."""
    if TRANSFORMS[o.transform].can_be_refined and o.refine != PAPER:
        return "refined", Recipe(o.transform, o.refine)
    return o.transform, Recipe(o.transform)

def no_recipes(o):
    return {}

def all_transforms(o):
    return {name: Recipe(name) for name in TRANSFORMS}

def compared_transforms(o):
    return {name: Recipe(name) for name, row in TRANSFORMS.items() if row.is_compared}

def ablations(o):
    """Name the paper's encoding, each refinement alone, and all but each."""
    parts = switched_on(o.refine)
    if not QUANTIZERS[o.quantizer].can_widen:
        parts = [part for part in parts if part != "widen"]
    recipes = {"paper": Recipe(o.transform)}
    for part in parts:
        alone = PAPER._replace(**{part: getattr(o.refine, part)})
        recipes[part] = Recipe(o.transform, alone)
    for part in parts:
        without = o.refine._replace(**{part: getattr(PAPER, part)})
        recipes[f"no {part}"] = Recipe(o.transform, without)
    return recipes

# ----------------------------------------------------------------------------------------------------------------
# Tasks
#
# A task gets a job, whose inputs are all checked, prints what it measures, and enters it into the figures as it
# goes, so that what is known is kept when somebody interrupts it.

class Job(NamedTuple):
    options: "Options"
    model: Model
    tokenizer: object
    schemes: dict[str, Scheme]     # by the names of the recipes; empty if nothing is quantized
    chosen: str                    # the scheme to generate with; "none" if nothing is quantized
    texts: list[Tensor]            # evaluation sequences (t,)
    haystacks: list                # of `haystack`, made of them
    prompt: list[int]
    eos: list[int]

def serve(job, name):
    """Return the model that a scheme needs, and a maker of its empty caches; "none" is unquantized."""
    if name == "none":
        return job.model, partial(new_cache, job.model)
    return with_scheme(job.model, job.schemes[name], job.options.windows)

def continuation(job, model, cache, prompt):
    """Yield the text that continues the prompt, piece by piece, without the token that ends it."""
    o = job.options
    generator = torch.Generator(model.inv_freq.device).manual_seed(o.seed)
    pick = partial(
        sample, temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, generator=generator)
    rows = decode(model, cache, [prompt], o.max_new_tokens, job.eos, pick)
    tokens = (token for [token] in rows if token not in job.eos)
    return stream_text(job.tokenizer, tokens)

def elements_per_token(config):
    """Count the numbers that all layers cache for one token, keys and values."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

def note_packed(job, name, cache, prompt):
    """Say how many of a cache's tokens are packed, and what it holds, after a prompt and what followed."""
    if name == "none":
        return
    windows = job.options.windows
    config = job.model.config
    n_tokens = cache[0].n_tokens[0]
    n_packed = cache[0].n_packed[0]
    if n_packed == 0:
        note(
            f"{name}: none of the {n_tokens} tokens is packed, all of them are in the windows "
            f"{windows.sink}/{windows.keep}/{windows.flush}")
        return
    decoded = n_tokens - len(prompt)
    held = cache_bytes(config, n_tokens, job.schemes[name], windows, steps=decoded)
    ratio = held / (2 * elements_per_token(config))
    note(
        f"{name}: {n_packed} of {n_tokens} tokens are packed, and the cache holds {ratio:.2f} "
        "of what 16 bits would")

def calibrate_task(job, figures):
    """Print nothing: the transforms are saved where they are made."""

def generate_task(job, figures):
    """Print the continuation of the prompt as it comes."""
    model, empty_cache = serve(job, job.chosen)
    cache = empty_cache()
    figures["text"] = {job.chosen: ""}
    for piece in continuation(job, model, cache, job.prompt):
        emit(sys.stdout, piece)
        figures["text"][job.chosen] += piece
    say("")
    note_packed(job, job.chosen, cache, job.prompt)

def measure_error(job, figures, sink):
    """Print the module error of every scheme, and enter it."""
    errors = {}
    if job.schemes:
        errors = module_error(job.model, job.texts, job.schemes, sink)
        say(f"module error, relative and squared, {sink} sink tokens exact, no recent window")
    else:
        say("module error: none, as nothing is quantized at 16 bits")
    for name, (value, error) in errors.items():
        say(f"    {name:12} {shown(value, error)}")
    errors = {"none": (0.0, 0.0), **errors}
    add_scores(figures, {name: {"module_error": figure} for name, figure in errors.items()})

def error_task(job, figures):
    measure_error(job, figures, job.options.windows.sink)

def ppl_task(job, figures):
    """Print perplexity and divergence of every scheme through the windows, and enter them."""
    windows = job.options.windows
    scores = perplexity(job.model, job.texts, job.schemes, windows)
    say(
        f"{len(job.texts)} sequences of {job.options.eval_len} tokens of the evaluation text, "
        f"through windows {windows.sink}/{windows.keep}/{windows.flush}:")
    say(f"    {'':12} {'KL, nats':19} {'same top-1':19} {'excess, nats':19} perplexity")
    for name, row in scores.items():
        cells = [f"{shown(value, error):19}" for value, error in row.values()]
        say(f"    {name:12} {' '.join(cells).rstrip()}")
    add_scores(figures, scores)

def retrieval_task(job, figures):
    """Print how many hidden numbers every scheme finds, and enter it. Returns `retrieval`'s answers."""
    windows = job.options.windows
    answers = retrieval(job.model, job.haystacks, job.schemes, windows)
    scores = {}
    for name, (found, _) in answers.items():
        scores[name] = {"retrieval": mean_and_error(found.mean(1))}
    add_scores(figures, scores)

    text, _ = job.haystacks[0]
    figures["retrieval_n"] = answers["none"][0].numel()
    say(
        f"retrieval: the share found of {figures['retrieval_n']} numbers in {len(job.haystacks)} "
        f"texts of {len(text)} tokens, all of them outside the windows "
        f"{windows.sink}/{windows.keep}/{windows.flush}:")
    for name, row in scores.items():
        say(f"    {name:12} {shown(*row['retrieval'])}")
    return answers

def report_answers(job, figures, answers):
    """Print how two answers go on after the same text, the first one of which 16 bits know two."""
    found, _ = answers["none"]
    knowing = (found.sum(1) >= 2).nonzero()[:, 0].tolist()
    if not knowing or not job.schemes:
        return
    text, questions = job.haystacks[knowing[0]]
    known = found[knowing[0]].nonzero()[:2, 0].tolist()
    names = [name for name in ("none", "hadamard", job.chosen) if name in answers]

    # A question comes after the text, not with it: it sees what is packed.
    figures["answers"] = []
    caches = {}
    for name in dict.fromkeys(names):
        model, empty_cache = serve(job, name)
        caches[name] = (model, empty_cache())
        feed(*caches[name], text[None].to(model.inv_freq.device))
    for question in (questions[i] for i in known):
        asked = question.tokens[:question.question_tokens].tolist()
        lines = {"question": job.tokenizer.decode(asked).strip()}
        say(f"after one of these texts, {lines['question']!r}, of which 16 bits know the end:")
        for name, (model, cache) in caches.items():
            pieces = continuation(job, model, copy.deepcopy(cache), asked)
            lines[name] = "".join(islice(pieces, ANSWER_TOKENS))
            say(f"    {name:12} {lines[name]!r}")
        figures["answers"].append(lines)

def report_model(job):
    """Print what the model is, and how it is quantized."""
    o = job.options
    config = job.model.config
    name = Path(o.model).resolve().name if Path(o.model).is_dir() else o.model
    key_bits, value_bits = [f"{bits:.4g}" for bits in average_widths(job)]
    say(
        f"{name}: {config.num_hidden_layers} layers, {config.num_attention_heads} query heads, "
        f"{config.num_key_value_heads} KV heads of {config.head_dim}; "
        f"{key_bits}-bit keys, {value_bits}-bit values")

def report_memory(job, figures):
    """Print what the cache of one evaluation sequence holds in bfloat16, its last tokens decoded one by one."""
    o = job.options
    config = job.model.config
    elements = elements_per_token(config)
    decoded = min(o.max_new_tokens, o.eval_len - 1)
    packed = held = 2 * elements
    if job.schemes:
        scheme = job.schemes[job.chosen]
        packed = packed_bytes(config, scheme)
        held = cache_bytes(config, o.eval_len, scheme, o.windows, steps=decoded)

    bits = 8 * held / elements
    say(
        f"KV cache, bytes per token: {2 * elements} in 16 bits; {packed:.0f} once packed, with "
        f"scales {8 * packed / elements:.2f} bits an element; {held:.0f} at {o.eval_len} tokens "
        f"with windows, the last {decoded} decoded: {bits:.2f}")
    figures["kv_bytes_per_token"] = held
    figures["effective_bits"] = bits
    figures["kv_bytes_per_token_none"] = 2 * elements

def report_decoding(job, figures):
    """Print the speed after a long context and how the text goes on from there, unquantized and quantized."""
    # As much of the first text as leaves positions for what follows it.
    following = max(len(job.prompt) + job.options.max_new_tokens, STEPS)
    length = max(job.model.config.max_position_embeddings - following, 1)
    context = job.texts[0][:length].to(job.model.inv_freq.device)
    prompt = context.tolist() + job.prompt

    # Speed: the caches take turns, so that a machine that slows down is unfair to none.
    names = dict.fromkeys(("none", job.chosen))
    runs = {name: serve(job, name) for name in names}
    timed = {name: (model, empty_cache()) for name, (model, empty_cache) in runs.items()}
    seconds = step_seconds(timed, context, STEPS)

    for name, (model, empty_cache) in runs.items():
        cache = empty_cache()
        text = "".join(continuation(job, model, cache, prompt))
        speed = 1 / seconds[name]
        add_figure(figures, "tokens_per_second", name, speed)
        figures.setdefault("text", {})[name] = text
        say(f"{name}: {speed:.1f} tokens/s after {len(context)} tokens; the text goes on {text!r}")
        note_packed(job, name, cache, prompt)

def report_task(job, figures):
    """Print the whole story, unquantized and quantized: memory, retrieval, divergence, error, speed and text."""
    report_model(job)
    report_memory(job, figures)
    answers = retrieval_task(job, figures) if job.haystacks else None
    ppl_task(job, figures)
    if answers:
        report_answers(job, figures, answers)
    measure_error(job, figures, sink=0)          # as the paper does
    report_decoding(job, figures)

class Task(NamedTuple):
    """A row of TASKS: a function, and what has to be there for it."""
    run: Callable                         # (job, figures) -> None
    recipes: Callable = no_recipes        # options -> what the chosen recipe is compared with
    reads_text: bool = False              # whether it needs the evaluation text
    fills_windows: bool = False           # whether that text must be longer than the windows
    haystack_tokens: int = 0              # of the texts made of it that hide numbers, at most
    continues: bool = False               # whether it continues a prompt, or its text
    uses_cache: bool = True               # whether anything is quantized at all

TASKS = {
    "report": Task(
        report_task,
        compared_transforms,
        reads_text=True,
        fills_windows=True,
        haystack_tokens=1024,
        continues=True),
    "calibrate": Task(calibrate_task, uses_cache=False),
    "generate": Task(generate_task, continues=True),
    "error": Task(error_task, all_transforms, reads_text=True),
    "ppl": Task(ppl_task, compared_transforms, reads_text=True, fills_windows=True),
    "retrieval": Task(
        retrieval_task, compared_transforms, reads_text=True, haystack_tokens=2 ** 30),
    "ablation": Task(ppl_task, ablations, reads_text=True, fills_windows=True),
}

# ----------------------------------------------------------------------------------------------------------------
# Flags
#
# Options is where a default stands; the flags are made of its fields. A choice is heard or refused: flags that
# contradict each other are refused, and those that the task does not read are named on stderr.

def listed(choices):
    return ", ".join(map(str, choices))

def parse_bits(text):
    """Read "2", or "3,2" for keys and values, or a fraction like "2.25", the average of all layers."""
    with suppress(ValueError):
        if is_average(float(text)):
            return float(text)
    widths = text.split(",")
    known = [str(bits) for bits in BITS]
    if len(widths) > 2 or not set(widths) <= set(known):
        raise argparse.ArgumentTypeError(
            f"bits {text} are not supported: give one of {listed(known)}, or two, as in 3,2, for "
            "keys and values, or an average over layers between 2 and 4, as 2.25")
    return int(widths[0]), int(widths[-1])

def average_widths(job):
    """Return the bits of keys and of values, on average over the layers: whole numbers, if all layers have the same."""
    averages = []
    for side in ("keys", "values"):
        widths = [16]
        if job.schemes:
            layers = range(job.model.config.num_hidden_layers)
            scheme = job.schemes[job.chosen]
            widths = [getattr(scheme.layer(l), side).codec.bits for l in layers]
        averages.append(widths[0] if len(set(widths)) == 1 else sum(widths) / len(widths))
    return averages

def parse_windows(text):
    """Read "16,128,16"; whether the numbers are sensible is `check_ranges`' to say."""
    try:
        sink, keep, flush = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} are not three whole numbers: sink,keep,flush") from None
    return Windows(sink, keep, flush)

def parse_refine(text):
    """Read "all", "off", or a list of Refine's fields."""
    if text in ("all", "off"):
        return REFINED if text == "all" else PAPER
    parts = text.replace("step", "widen").split(",")
    if not set(parts) <= set(Refine._fields):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither all, nor off, nor a list of {listed(Refine._fields)}")
    return PAPER._replace(**{part: getattr(REFINED, part) for part in parts})

def option(default, help, kind=None, choices=None, low=-math.inf, high=math.inf, reads=()):
    """Describe a flag. It is heard where the run reads all of `reads`: see `inputs_read`."""
    return dataclasses.field(default=default, metadata={
        "help": help,
        "kind": kind or type(default),
        "choices": choices,
        "low": low,
        "high": high,
        "reads": set(reads),
    })

@dataclasses.dataclass(frozen=True)
class Options:
    model: str = option(
        str(BUNDLED), "folder or hub id of a Qwen3 or Llama checkpoint (the bundled one)")
    task: str = option("report", "what to do", choices=TASKS)
    bits: tuple[int, int] | float = option(
        (2, 2), f"{listed(BITS)}; or of keys and values, as in 3,2; or an average over layers, as "
        "2.25, which need not be equal; 16 is off (default: 2)", parse_bits, reads=["bits"])
    group: int | None = option(
        None, "channels that share a scale and a transform block (a head)", int, low=4,
        reads=["transform"])
    transform: str = option(
        "wush", "transform to generate with and to save", choices=TRANSFORMS, reads=["transform"])
    refine: Refine = option(
        REFINED, f"on top of the paper's wush: all, off, or of {listed(Refine._fields)} "
        "(default: all)", parse_refine, reads=["transform"])
    quantizer: str = option(
        "quest", "rule that places the levels", choices=QUANTIZERS, reads=["cache", "transform"])
    windows: Windows = option(
        Windows(), "tokens kept in model dtype, the first and at least the last, and tokens "
        "quantized together (default: 16,128,16)", parse_windows, reads=["bits"])
    calib: str | None = option(
        None, "calibration text, a file or fineweb-edu (the model folder's calib.txt)", str,
        reads=["calib"])
    calib_seqs: int = option(
        16, "calibration sequences; the paper takes 128", low=1, reads=["calib"])
    calib_len: int = option(
        1024, "tokens of each; the paper takes 32768", low=2, reads=["calib"])
    eval: str | None = option(
        None, "evaluation text, a file or wikitext2 (the model folder's eval.txt)", str,
        reads=["text"])
    eval_seqs: int = option(4, "evaluation sequences", low=1, reads=["text"])
    eval_len: int = option(2048, "tokens of each", low=2, reads=["text"])
    transforms: str | None = option(
        None, "file to read the transforms from; beside it only --calib calibrates the rows that "
        "it is compared with", str)
    save: str | None = option(
        None, "file to write the transforms to, for --transforms and for serving", str)
    prompt: str = option(
        "Tell me where is fancy bred,", "prompt to continue; a report needs none", reads=["prompt"])
    template: str = option(
        "chat", "how the prompt is put: by the chat template, with its thinking mode, or raw",
        choices=("chat", "thinking", "raw"), reads=["template"])
    max_new_tokens: int = option(
        64, "tokens to generate at most", low=1, reads=["continuation"])
    temperature: float = option(
        0.0, "sampling temperature; 0 takes the likeliest token", low=0,
        reads=["continuation"])
    top_p: float = option(
        1.0, "sample from the likeliest tokens of this probability", low=0, high=1,
        reads=["continuation"])
    top_k: int = option(
        0, "sample from this many likeliest tokens; 0 takes all", low=0, high=2 ** 31,
        reads=["continuation"])
    seed: int = option(0, "seed of the sampling", low=0, high=2 ** 63, reads=["continuation"])
    yarn: float | None = option(
        None, "extend the context by this factor with YaRN", float, low=1, high=1024)
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    dtype: str = option(
        "auto", "of weights and windows; auto is float32 on a CPU, else bfloat16",
        choices=("auto", "float32", "bfloat16", "float16"))
    json: str | None = option(None, "file to write the figures to as well", str)
    explicit: tuple[str, ...] = ()   # no flag: the names of those that were given

FLAGS = [field for field in dataclasses.fields(Options) if field.metadata]

# Flags of former versions: each is one number of a flag of today.
OLD_SPELLINGS = {
    "k_bits": ("bits", 0),
    "v_bits": ("bits", 1),
    "sink": ("windows", 0),
    "keep": ("windows", 1),
    "flush": ("windows", 2),
}

REFUSED = 2      # the exit status where a flag is refused, as argparse has it

def flag(name):
    return "--" + name.replace("_", "-")

class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, without the usage of all flags."""

    def error(self, message):
        self.exit(REFUSED, f"wush_kv: {message}\n")

def make_parser():
    """Make the flags of Options, and hidden ones of former versions. What is not given is left out."""
    parser = Parser(
        description="WUSH-KV: a key-value cache in 2 bits, on Qwen3 and Llama models.",
        argument_default=argparse.SUPPRESS, allow_abbrev=False)
    template = parser.add_mutually_exclusive_group()
    for field in FLAGS:
        help = field.metadata["help"]
        if not help.endswith(")"):               # the default is not told already
            help += f" (default: {field.default})"
        place = template if field.name == "template" else parser
        place.add_argument(
            flag(field.name),
            type=field.metadata["kind"],
            choices=field.metadata["choices"],
            help=help)

    for name in OLD_SPELLINGS:
        choices = BITS if name.endswith("bits") else None
        parser.add_argument(flag(name), type=int, choices=choices, help=argparse.SUPPRESS)
    for name in ("raw", "thinking"):
        template.add_argument(
            flag(name), dest="template", action="store_const", const=name, help=argparse.SUPPRESS)
    return parser

def parse(argv=None):
    """Parse flags into Options. Raises ValueError for flags that contradict each other, or are out of range."""
    values = vars(make_parser().parse_args(argv))

    # An old spelling replaces one number of its flag's default.
    defaults = {field.name: field.default for field in FLAGS}
    numbers = {}
    for old, (new, place) in OLD_SPELLINGS.items():
        if old in values:
            if new in values:
                raise ValueError(f"{flag(new)} says what {flag(old)} says: give one of them")
            numbers.setdefault(new, list(defaults[new]))[place] = values.pop(old)
    if "bits" in numbers:
        values["bits"] = tuple(numbers["bits"])
    if "windows" in numbers:
        values["windows"] = Windows(*numbers["windows"])
    o = Options(**values, explicit=tuple(values))
    check_ranges(o)
    check_choices(o)
    return o

def check_ranges(o):
    """Refuse numbers that are out of range."""
    for field in FLAGS:
        value = getattr(o, field.name)
        low = field.metadata["low"]
        high = field.metadata["high"]
        if isinstance(value, (int, float)) and not low <= value <= high:
            raise ValueError(f"{flag(field.name)} {value} is not between {low} and {high}")
    sink, keep, flush = o.windows
    if min(sink, keep, flush - 1) < 0 or max(o.windows) > 2 ** 20:
        raise ValueError(
            f"--windows {sink},{keep},{flush}: sink and keep are at least 0, flush is at least 1, "
            "all are at most 2^20")

def check_choices(o):
    """Refuse flags that contradict each other."""
    # Files that are written or read.
    if o.task == "calibrate" and (not o.save or o.transforms):
        raise ValueError(
            "--task calibrate makes transforms: it needs --save FILE and takes no --transforms")
    if o.save and o.transforms:
        raise ValueError(
            "--save writes what is calibrated now, --transforms reads what was: give one of them")
    if o.bits == (16, 16) and (o.save or o.transforms):
        raise ValueError(
            "--bits 16 quantizes nothing: there is no use for --save or --transforms")
    if is_average(o.bits) and not o.transforms and o.calib_len <= sum(o.windows):
        raise ValueError(
            f"--calib-len {o.calib_len} fits into the windows: it does not show which layers need "
            f"more than --bits {o.bits}")
    if o.task == "ablation" and o.transforms:
        raise ValueError("--task ablation makes all transforms itself: it takes no --transforms")

    # The likeliest token needs no dice.
    if o.temperature == 0 and {"top_p", "top_k", "seed"} & set(o.explicit):
        raise ValueError(
            "--temperature 0 takes the likeliest token: "
            "--top-p, --top-k and --seed need another one"
        )

    # Refinements that are asked for by name must be able to act; "all" stands for all that can.
    can_be_refined = TRANSFORMS[o.transform].can_be_refined
    by_name = o.refine not in (REFINED, PAPER)
    if by_name and not can_be_refined and not o.transforms:
        raise ValueError(f"--refine {spelled(o.refine)} does nothing to --transform {o.transform}")
    if by_name and o.refine.widen and not QUANTIZERS[o.quantizer].can_widen:
        raise ValueError(f"--refine widen does nothing to --quantizer {o.quantizer}")
    if o.task == "ablation" and (not can_be_refined or o.refine == PAPER):
        raise ValueError(
            "--task ablation leaves refinements out: give a --transform and a --refine with some")

def check_files(o):
    """Refuse files that cannot be written: now, and not in an hour."""
    if o.json and o.save and o.json in (o.save, o.save + ".json"):
        raise ValueError(
            "--json and --save, which also writes a .json file, would overwrite each other")
    files = [o.json] if o.json else []
    if o.save:
        files += [o.save, o.save + ".json"]
    for file in files:
        path = Path(file)
        place = path if path.exists() else path.absolute().parent
        if path.is_dir() or not os.access(place, os.W_OK):
            raise ValueError(f"{file} cannot be written")

def has_prompt(o):
    """Say whether there is a prompt: a report goes on with its text, unless a prompt is asked for."""
    task = TASKS[o.task]
    return task.continues and (not task.reads_text or "prompt" in o.explicit)

def inputs_read(o, calibrates):
    """Name what the run reads, in the words of the options' `reads`."""
    task = TASKS[o.task]
    reads = {
        "bits": task.uses_cache or is_average(o.bits),
        "cache": task.uses_cache,
        "transform": o.bits != (16, 16),
        "calib": calibrates,
        "text": task.reads_text,
        "template": has_prompt(o) or task.haystack_tokens > 0,
        "prompt": has_prompt(o),
        "continuation": task.continues,
    }
    return {name for name, is_read in reads.items() if is_read}

def note_unread(o, calibrates):
    """Say which flags were given in vain."""
    read = inputs_read(o, calibrates)
    explicit = [field for field in FLAGS if field.name in o.explicit]
    unread = [flag(field.name) for field in explicit if not field.metadata["reads"] <= read]
    if unread:
        note(f"this run does not read {listed(unread)}")

# ----------------------------------------------------------------------------------------------------------------
# Preparing
#
# From options to a job. What is cheap to check is checked first: flags, the transforms file, texts and prompt; only
# then are weights loaded and moments collected.

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")

def decided_by_file(o, transforms, about, d):
    """Take over what a transforms file decides. Raises ValueError for flags that ask for something else."""
    # The flags that were given must say what the file says.
    name = about.get("transform", o.transform)
    if name not in list(TRANSFORMS):             # it may be anything that JSON can hold
        raise ValueError(
            f"{o.transforms}.json names the transform {name!r}, not one of {listed(TRANSFORMS)}")
    if "transform" in o.explicit and o.transform != name:
        raise ValueError(f"{o.transforms} was made with --transform {name}, not {o.transform}")
    if "group" in o.explicit and o.group != (transforms.group or d):
        raise ValueError(
            f"{o.transforms} was made with --group {transforms.group or d}, not {o.group}")

    # All refinements that apply to hadamard, for instance, are none.
    _, asked = chosen_recipe(dataclasses.replace(o, transform=name))
    if "refine" in o.explicit and asked.refine != transforms.refine:
        raise ValueError(
            f"{o.transforms} was made with --refine {spelled(transforms.refine)}, "
            f"not {spelled(o.refine)}")

    # Those that were not are taken from it.
    note(
        f"{o.transforms} decides: --transform {name} --refine {spelled(transforms.refine)} "
        f"--group {transforms.group or d}")
    return dataclasses.replace(
        o, transform=name, refine=transforms.refine, group=transforms.group)

def recipes_to_make(o):
    """Return the recipes of the task by name, and the name of the chosen one."""
    if o.bits == (16, 16):
        return {}, "none"
    chosen, recipe = chosen_recipe(o)
    recipes = TASKS[o.task].recipes(o) | {chosen: recipe}

    # Beside a transforms file, only a calibration that is asked for makes the rows that need one.
    if o.transforms and "calib" not in o.explicit:
        left_out = [
            name for name, recipe in recipes.items()
            if name != chosen and TRANSFORMS[recipe.transform].needs_calibration]
        if left_out:
            note(f"no rows for {listed(left_out)}: beside --transforms they need --calib")
        recipes = {name: recipe for name, recipe in recipes.items() if name not in left_out}
    return recipes, chosen

def rows_to_derive(o, recipes, chosen):
    """Return the rows of TRANSFORMS that must be derived here, and not read from a file."""
    names = [name for name in recipes if name != chosen or not o.transforms]
    return [TRANSFORMS[recipes[name].transform] for name in names]

def check_length(what, tokens, config):
    most = config.max_position_embeddings
    if tokens > most:
        raise ValueError(f"{what}: {tokens} tokens are over the model's {most} positions")

def check_template(o, tokenizer):
    if "template" in o.explicit and o.template != "raw" and not tokenizer.chat_template:
        raise ValueError(f"--template {o.template}: {o.model} has no chat template")

def read_prompt(o, tokenizer, config):
    """Tokenize the prompt, if there is one, and check that what follows it fits into the model's positions."""
    task = TASKS[o.task]
    prompt = []
    if has_prompt(o):
        check_template(o, tokenizer)
        prompt = prompt_tokens(tokenizer, o.prompt, o.template == "raw", o.template == "thinking")
    if task.continues:
        text_tokens = 1 if task.reads_text else 0                # at least, before the prompt
        needed = text_tokens + len(prompt) + o.max_new_tokens
        check_length("prompt and --max-new-tokens", needed, config)
    return prompt

def source_of(text, folder, file, dataset):
    """Return where a text comes from: the flag, else the model folder's file, else the hub's dataset."""
    if text is not None:
        return text
    return str(folder / file) if (folder / file).is_file() else dataset

def read_texts(o, folder, tokenizer, config):
    """Read the evaluation sequences, where the task needs any."""
    task = TASKS[o.task]
    if not task.reads_text:
        return []
    check_length("--eval-len", o.eval_len, config)
    if o.bits != (16, 16) and task.fills_windows and o.eval_len <= sum(o.windows):
        raise ValueError(
            f"--eval-len {o.eval_len} fits into the windows: nothing would be quantized")
    source = source_of(o.eval, folder, "eval.txt", "wikitext2")
    return read_tokens(source, tokenizer, "--eval", o.eval_seqs, o.eval_len)

FACTS = 10             # numbers in a text, at most: as many as leave half of it to the filler
DIGITS = 2             # of a number
ANSWER_TOKENS = 24     # of an answer that the report prints

def sentence_length(encode):
    """Count the tokens of the longest sentence that hides a number."""
    largest = 10 ** DIGITS - 1
    return max(len(encode(f"\n{fact(word)} {largest}.\n")) for word in WORDS + NAMES)

def numbers_with_room(o, tokens, sentence_tokens, other_tokens):
    """Say how many numbers a text of `tokens` tokens can hide, each outside the windows, with as much filler again.

    Raises ValueError if there is no room for a single one.
    """
    fixed = other_tokens + sum(o.windows)
    count = (tokens - fixed) // (2 * sentence_tokens)
    if count < 1:
        raise ValueError(
            f"--eval-len {tokens} has no room for a number outside the windows and its question: "
            f"{fixed + 2 * sentence_tokens} tokens would have")
    return min(FACTS, count)

def check_numbers(o, tokenizer, questions):
    """Refuse a tokenizer that does not give back the numbers that are asked for."""
    for question in questions:
        answer = tokenizer.decode(question.tokens[question.question_tokens:])
        if not answer.strip().isdecimal():
            raise ValueError(f"the tokenizer of {o.model} has no tokens for numbers")

def hide_numbers(o, tokenizer, texts):
    """Make a haystack of each piece of the texts, at most as long as the task's are, together with a question.

    Through the chat template the text is the user's message, and the answer begins with the start of a sentence.
    """
    def encode(text):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    check_template(o, tokenizer)
    before = after = torch.tensor([], dtype=torch.long)
    lead = "\n"
    if tokenizer.chat_template and o.template != "raw":
        before, after = template_ends(tokenizer, o.template == "thinking")
        lead = ""

    # A piece holds the template, the filler, the sentences, and one more of them, which asks.
    length = min(o.eval_len, TASKS[o.task].haystack_tokens)
    sentence_tokens = sentence_length(encode)
    other_tokens = len(before) + len(after) + sentence_tokens
    count = numbers_with_room(o, length, sentence_tokens, other_tokens)
    filler_tokens = length - other_tokens - count * sentence_tokens

    # Numbers are named after what the filler does not speak of.
    haystacks = []
    pieces = [piece for ids in texts for piece in ids.split(length)]
    for seed, piece in enumerate(pieces):
        if len(piece) < length:
            continue
        filler = piece[:filler_tokens]
        free = [word for word in WORDS + NAMES if not occurs(encode(" " + word), filler)]
        text, questions = haystack(encode, filler, seed, free, count, DIGITS, o.windows, lead)
        check_numbers(o, tokenizer, questions)
        placed = [question._replace(place=len(before) + question.place) for question in questions]
        haystacks.append((torch.cat([before, text, after]), placed))
    return haystacks

def read_haystacks(o, tokenizer, texts):
    """Hide numbers in the evaluation texts, where the task asks for any; a report goes on without."""
    if not TASKS[o.task].haystack_tokens:
        return []
    try:
        return hide_numbers(o, tokenizer, texts)
    except ValueError as error:
        if o.task == "retrieval":
            raise
        note(f"no retrieval: {error}")
        return []

def read_calibration(o, folder, tokenizer, config):
    """Read the calibration sequences. Returns where they come from, too."""
    check_length("--calib-len", o.calib_len, config)
    source = source_of(o.calib, folder, "calib.txt", "fineweb-edu")
    return read_tokens(source, tokenizer, "--calib", o.calib_seqs, o.calib_len), source

def load_weights(o, config, about, device, dtype):
    """Load the model, if it fits, and if it is the one that a transforms file was made for. Returns its fingerprint."""
    check_memory(config, dtype, device)
    folder = fetch(o.model, *SMALL_FILES, "*.safetensors")
    found = fingerprint(folder)
    if about.get("fingerprint", found) != found:
        raise ValueError(
            f"{o.transforms} was made for {about.get('model')}, other weights than those of "
            f"{o.model}")
    return load_model(folder, config, dtype, device), found

def check_logits(o, model, ids):
    """Refuse a model whose logits after a few tokens, ids (t,), are no numbers, before anything slow is done."""
    ids = ids.to(model.inv_freq.device)
    hidden = forward(model, ids[None], exact_attention)
    if not logits(model, hidden).isfinite().all():
        dtype = str(hidden.dtype).removeprefix("torch.")
        raise ValueError(
            f"the logits of {o.model} hold NaN or infinity: its weights are damaged, or too large "
            f"for {dtype}")

def make_transforms(o, model, recipes, chosen, from_file, sequences):
    """Return the transforms of all recipes by name: the chosen one's from a file, if there is one, the others derived."""
    rows = rows_to_derive(o, recipes, chosen)
    moments = {}
    if rows:
        attention_aware = any(row.is_attention_aware for row in rows)
        moments = collect_moments(model, sequences, attention_aware)

    transforms = {}
    for name, recipe in recipes.items():
        if name == chosen and from_file is not None:
            transforms[name] = from_file
        else:
            transforms[name] = derive(moments, recipe.transform, recipe.refine, o.group)
    return transforms

def with_harm(o, model, transforms, chosen, sequences):
    """Return the transforms with the harm of the chosen ones, so that a layer has the same bits in every row."""
    if transforms[chosen].keys.harm is None:
        transforms[chosen] = measure_harm(
            model, sequences[0], transforms[chosen], o.quantizer, o.windows)
    of_keys = transforms[chosen].keys.harm
    of_values = transforms[chosen].values.harm
    for name, (keys, values, *how) in transforms.items():
        keys = keys._replace(harm=of_keys)
        values = values._replace(harm=of_values)
        transforms[name] = Transforms(keys, values, *how)
    return transforms

def prepare(o):
    """Check everything, the cheap before the slow, then load the model and read or derive the transforms."""
    check_files(o)
    device, dtype = pick_device(o.device, o.dtype)
    folder = fetch(o.model, *SMALL_FILES)
    config = read_config(folder, o.yarn)
    if o.group and config.head_dim % o.group:
        raise ValueError(f"--group {o.group} does not divide the head_dim {config.head_dim}")

    # A transforms file decides what it was made with.
    from_file = None
    about = {}
    if o.transforms:
        from_file = load_transforms(o.transforms, config, device)
        if is_average(o.bits) and from_file.keys.harm is None:
            raise ValueError(
                f"--bits {o.bits} is an average over layers, and {o.transforms} does not say which "
                "need more: it must be saved with such --bits")
        about = read_about(o.transforms)
        o = decided_by_file(o, from_file, about, config.head_dim)

    # What is to be made tells which texts are read.
    recipes, chosen = recipes_to_make(o)
    calibrates = any(row.needs_calibration for row in rows_to_derive(o, recipes, chosen))
    calibrates = calibrates or (is_average(o.bits) and not o.transforms)
    note_unread(o, calibrates)
    tokenizer = read_tokenizer(folder, config)
    eos = end_tokens(folder)
    prompt = read_prompt(o, tokenizer, config)
    texts = read_texts(o, folder, tokenizer, config)
    haystacks = read_haystacks(o, tokenizer, texts)
    sequences = []
    source = None
    if calibrates:
        sequences, source = read_calibration(o, folder, tokenizer, config)

    # All is well: load, calibrate, save.
    model, found = load_weights(o, config, about, device, dtype)
    beginnings = [texts[0][:16] if texts else torch.tensor(prompt[:16], dtype=torch.long)]
    beginnings += [ids[:16] for ids in sequences[:1]]
    if sum(map(len, beginnings)) > 0:
        check_logits(o, model, torch.cat(beginnings))
    transforms = make_transforms(o, model, recipes, chosen, from_file, sequences)
    if is_average(o.bits):
        transforms = with_harm(o, model, transforms, chosen, sequences)
    if o.save:
        save_transforms(o.save, transforms[chosen], {
            "model": o.model,
            "fingerprint": found,
            "transform": o.transform,
            "calibration_text": source,
            "calibration_tokens": sum(map(len, sequences)),
        })
    schemes = {}
    for name in recipes:
        schemes[name] = scheme_of(transforms[name], o.bits, o.quantizer)
    return Job(o, model, tokenizer, schemes, chosen, texts, haystacks, prompt, eos)

# ----------------------------------------------------------------------------------------------------------------
# Running

INTERRUPTED = 130      # the exit status of a program that Ctrl-C ended

def write_figures(path, figures):
    """Write the figures as JSON, whole or not at all."""
    text = json.dumps(figures, indent=2) + "\n"
    write_whole(path, partial(Path.write_text, data=text, encoding="utf-8"))

def lacks_memory(error):
    """Say whether an error is a lack of memory: Python's, a GPU's, or that of torch's allocator on a CPU."""
    phrases = ("enough memory", "allocate memory", "out of memory")
    is_said = any(phrase in str(error) for phrase in phrases)
    return is_said or isinstance(error, (MemoryError, torch.OutOfMemoryError))

def memory_sentence(o, is_prepared):
    """Name the flags that make a run smaller which lacked memory while it was prepared, or in its task."""
    task = TASKS[o.task]
    calibrates = o.bits != (16, 16) and (not o.transforms or "calib" in o.explicit)
    smaller = {
        "calib_len": calibrates and not is_prepared,
        "eval_len": task.reads_text and is_prepared,
        "max_new_tokens": task.continues and is_prepared,
    }
    names = [name for name, is_read in smaller.items() if is_read]
    advice = [f"a smaller {flag(name)} than {getattr(o, name)}" for name in names]
    if has_prompt(o) and is_prepared:
        advice.append("a shorter --prompt")
    if o.dtype == "float32" or (o.dtype == "auto" and not torch.cuda.is_available()):
        advice.append("--dtype bfloat16")
    return f"out of memory: give {listed([*advice, 'or a smaller --model'])}"

def start_job(argv):
    """Parse flags and prepare their job. What cannot be is refused in one sentence."""
    try:
        o = parse(argv)
    except ValueError as error:
        make_parser().error(str(error))
    try:
        return prepare(o)
    except (ValueError, OSError) as error:
        sys.exit(f"wush_kv: {error}")
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        sys.exit(f"wush_kv: {memory_sentence(o, is_prepared=False)}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

def main(argv=None):
    """Run the command line. A task that is interrupted, or lacks memory, leaves the figures that it has."""
    start = time.perf_counter()
    open_streams()
    job = start_job(argv)

    # The task's figures come in as it goes.
    o = job.options
    key_bits, value_bits = average_widths(job)
    same_bits = key_bits if key_bits == value_bits else None
    if is_average(o.bits):
        same_bits = o.bits
    figures = {"model": o.model, "bits": same_bits, "k_bits": key_bits, "v_bits": value_bits}
    try:
        TASKS[o.task].run(job, figures)
    except KeyboardInterrupt:
        figures["interrupted"] = True
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        figures["error"] = memory_sentence(o, is_prepared=True)

    figures["seconds"] = time.perf_counter() - start
    if o.json:
        try:
            write_figures(o.json, figures)
        except OSError as error:
            sys.exit(f"wush_kv: {o.json} cannot be written: {error}")
    if "interrupted" in figures:
        sys.exit(INTERRUPTED)
    if "error" in figures:
        sys.exit(f"wush_kv: {figures['error']}")
    emit(sys.stderr, f"{figures['seconds']:.0f} seconds\n")
