"""Train the bundled model: a small Qwen3 whose answers depend on tokens far above.

    python tiny-qwen3/train.py tinyshakespeare.txt

It reads Shakespeare (public domain) and documents that this script makes up by seed: notes of which name or word goes
with which number or word, asked for again much later; lists, continued in order; verses, quoted from far above;
sentences that hide a number each.

    Note: Barcius 47, Zanquil 12, Dunzo 80.        (passages, lists, other notes)        Recall: Dunzo 80, Barcius 47.

Such recall is done by induction heads: one attention head stores with each token the ones before it, a later head
searches for the token that once followed what stands here (Olsson et al. 2022, arXiv 2209.11895). They form
suddenly, after a plateau, and soonest on short sequences over few tokens (compare arXiv 2312.03002 on such plateaus,
2312.04927 on associative recall). So the first stage repeats short lists of 24 words; the alphabet, then the kinds of
documents, then the length grow from stage to stage.

The last tenth of the Shakespeare, a fifth of the names and the seeds of the evaluation's documents are held out.
A step's data depend on the seed and the step alone: a stopped run goes on from its last checkpoint as if it had not
stopped. The model is that of the last step: none is selected.
"""
import argparse
import json
import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 1024
CONTEXT = 2048
EOS = "<|endoftext|>"
SEED = 20260938
EVERY = 100                # steps from one line of the log to the next
FAR = 1400                 # tokens between fact and question, in the figure that training.json gives
UNPREDICTABLE = 0.1        # loss weight of tokens that nothing above determines

# ----------------------------------------------------------------------------------------------------------------
# Names, words and the tokenizer
#
# A name is two syllables, each a token: 1,024 names, of which a fifth are only seen in evaluation. Words are those
# of Shakespeare that the tokenizer keeps whole.

STARTS = (
    "Al Bar Cor Dun El Fal Gar Hel In Jor Kel Lor Mar Nor Or Per Quin Ros Sal Tor Ul Val War Yor Zan Bel Cal "
    "Dor Fen Gil Hor Lan").split()
ENDS = (
    "ard bert cius dric en fred gar hild ion jan kin lius mond nor ous pin quil rick sand tius und vio win xes yth "
    "zo beth dor fin glas ham lene").split()
NUMBERS = [str(number) for number in range(10, 100)]

def split_names():
    """Return the names for training and the held-out ones; every syllable occurs in both."""
    training = []
    held_out = []
    for i, start in enumerate(STARTS):
        for j, end in enumerate(ENDS):
            part = training if (7 * i + 3 * j) % 5 else held_out
            part.append(start + end)
    return training, held_out

def example_notes():
    """Write so many notes that the tokenizer makes a token of each syllable and each number."""
    rng = np.random.default_rng(0)
    training, held_out = split_names()
    names = training + held_out
    notes = []
    for _ in range(4000):
        facts = []
        for _ in range(4):
            name = rng.choice(names)
            number = rng.choice(NUMBERS)
            facts.append(f" {name} {number}")
        notes.append("\nNote:" + ",".join(facts) + ".\nRecall:")
    return notes + [" " + start for start in STARTS] * 300

def train_tokenizer(text):
    """Train byte-level BPE on the text and on notes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text, *example_notes()], trainer)
    return tokenizer

def whole_words(tokenizer, text):
    """List the frequent words of three lower-case letters or more that are one token, in an order drawn by seed.

    A word is the list of its one token, as a name is the list of its two.
    """
    frequency = Counter(re.findall(r"[\w']+", text))
    spellings = []
    for token in tokenizer.get_vocab():
        word = token[1:]
        is_word = token[0] == "Ġ" and len(word) >= 3 and word.islower()
        if is_word and frequency[word] >= 50:
            spellings.append(token)

    # Not every token that looks so is what the word is split into.
    words = []
    for token in sorted(spellings):
        ids = tokenizer.encode(" " + token[1:]).ids
        if len(ids) == 1:
            words.append(ids)
    order = np.random.default_rng(1).permutation(len(words))
    return [words[i] for i in order]

def encode_lines(tokenizer, text):
    """Return a text's tokens and where its lines start."""
    lines = tokenizer.encode_batch(text.splitlines(keepends=True))
    lengths = [len(line.ids) for line in lines]
    ids = np.concatenate([line.ids for line in lines])
    return ids, np.cumsum([0, *lengths[:-1]])

# ----------------------------------------------------------------------------------------------------------------
# Documents
#
# Tokens with a loss weight each: 1 where the text above determines a token, or where it is Shakespeare; little
# where it was drawn at random. Each answer is noted with its distance from where its fact last stood.

class Stage(NamedTuple):
    until: int               # tokens of training at which the stage ends
    length: int              # tokens of a row
    rows: int                # rows of a step
    words: int               # size of the alphabet
    repeated: float          # share of rows that repeat one short list
    verse: float             # share of rows that are Shakespeare only; the rest are documents
    passages: float = 0.25   # share of blocks of a document that are Shakespeare
    longest: int = 40        # words of a repeated list, at most
    values: int = 1          # words or numbers of a fact's value, at most
    sentences: float = 0.0   # share of documents whose facts are whole sentences

class Answer(NamedTuple):
    position: int            # of the answer's first token in its row
    tokens: int
    distance: int            # tokens since the fact last stood, be it in a note or in an answer

class Fact:
    """What was stated, and where it last stood; `start` are the tokens after which its value follows."""

    def __init__(self, start, value, place):
        self.start = start
        self.value = value
        self.place = place

class Row:
    """A row of tokens that grows block by block."""

    def __init__(self):
        self.ids = []
        self.weights = []
        self.answers = []
        self.facts = []

    def put(self, ids, weight):
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))

    def state(self, start, value):
        """State a fact."""
        self.put(start, UNPREDICTABLE)
        self.facts.append(Fact(start, value, len(self.ids)))
        self.put(value, UNPREDICTABLE)

    def ask(self, fact):
        """Ask for a fact: its start again, and its value, which is the answer."""
        self.put(fact.start, UNPREDICTABLE)
        place = len(self.ids)
        self.answers.append(Answer(place, len(fact.value), place - fact.place))
        self.put(fact.value, 1.0)
        fact.place = place

class Writer:
    """Makes rows out of one part of the text and one part of the names."""

    def __init__(self, tokenizer, text, names, words):
        self.tokenizer = tokenizer
        self.text, self.lines = encode_lines(tokenizer, text)
        self.words = words
        self.names = [self.encode(" " + name) for name in names]
        self.numbers = [self.encode(" " + number) for number in NUMBERS]
        self.note = self.encode("\nNote:")
        self.recall = self.encode("\nRecall:")
        self.listing = self.encode("\nList:")
        self.comma = self.encode(",")
        self.stop = self.encode(".")
        self.special = self.encode("\nThe special magic number for")
        self.is_number = self.encode(" is")

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def repeated(self, rng, stage):
        """Repeat one list of random words until the row is full."""
        row = Row()
        alphabet = min(stage.words, len(self.words))
        longest = min(stage.longest, stage.length // 2)
        period = int(rng.integers(8, longest + 1))
        words = [self.words[i][0] for i in rng.integers(0, alphabet, period)]
        row.put(words, UNPREDICTABLE)
        while len(row.ids) <= stage.length:
            row.put(words, 1.0)
        return row

    def verse(self, rng, stage):
        """Copy a stretch of Shakespeare."""
        row = Row()
        start = int(rng.integers(len(self.text) - stage.length - 1))
        row.put(self.text[start:start + stage.length + 1], 1.0)
        return row

    def document(self, rng, stage):
        """Make a document; its facts are of one of five kinds, so that no key means two things."""
        if stage.sentences and rng.random() < stage.sentences:
            return self.sentences(rng, stage)
        words = self.words[:stage.words]
        keys = words if rng.random() < 0.5 else self.names[:stage.words]
        values = words if rng.random() < 0.5 else self.numbers[:stage.words]
        return self.notes(rng, stage, words, keys, values)

    def notes(self, rng, stage, words, keys, values):
        """Alternate notes, questions about all notes so far, lists, lists continued, passages, quotations."""
        row = Row()
        lists = []
        quotable = []
        unused = [keys[i] for i in rng.permutation(len(keys))]
        until_lists = stage.passages + 0.15 * (1 - stage.passages)

        # Each turn of the loop adds one block.
        while len(row.ids) <= stage.length:
            draw = rng.random()
            count = int(rng.integers(4, 13))
            if draw < stage.passages:
                self.add_passage(rng, row, quotable)
            elif draw < until_lists:
                self.add_list(rng, row, lists, words, 3 * count)
            elif (not row.facts or rng.random() < 0.4) and len(unused) > count:
                chosen = [unused.pop() for _ in range(count)]
                self.add_note(rng, row, chosen, values, stage.values)
            else:
                order = rng.permutation(len(row.facts))
                self.add_questions(row, [row.facts[i] for i in order[:count]])
        return row

    def add_passage(self, rng, row, quotable):
        """Add lines of Shakespeare, or quote from above a passage that was added earlier."""
        if quotable and rng.random() < 0.3:
            start, count = quotable[int(rng.integers(len(quotable)))]
        else:
            last = np.searchsorted(self.lines, len(self.text) - 200)
            start = int(self.lines[int(rng.integers(last))])
            count = int(rng.integers(24, 129))
            quotable.append((start, count))
        row.put(self.text[start:start + count], 1.0)

    def add_list(self, rng, row, lists, words, count):
        """Add a list of words, or go on with one from above, from one of its words to its end."""
        row.put(self.listing, UNPREDICTABLE)
        if lists and rng.random() < 0.6:
            items = lists[int(rng.integers(len(lists)))]
            first = int(rng.integers(0, len(items) - 2))
            row.put(items[first:first + 1], UNPREDICTABLE)
            row.put(items[first + 1:] + self.stop, 1.0)
        else:
            order = rng.permutation(len(words))
            items = [words[i][0] for i in order[:count]]
            row.put(items + self.stop, UNPREDICTABLE)
            lists.append(items)

    def add_note(self, rng, row, keys, values, longest):
        """State facts: each key with random words or numbers."""
        row.put(self.note, UNPREDICTABLE)
        for key in keys:
            value = []
            for _ in range(int(rng.integers(1, longest + 1))):
                value = value + values[int(rng.integers(len(values)))]
            row.state(key, value)
            row.put(self.stop if key is keys[-1] else self.comma, UNPREDICTABLE)

    def add_questions(self, row, facts):
        """Ask for facts stated above."""
        row.put(self.recall, UNPREDICTABLE)
        for fact in facts:
            row.ask(fact)
            row.put(self.stop if fact is facts[-1] else self.comma, UNPREDICTABLE)

    def sentences(self, rng, stage):
        """Hide sentences about numbers in verse, and ask for those above by the same sentence."""
        row = Row()
        quotable = []
        keys = self.words + self.names
        unused = [keys[i] for i in rng.permutation(len(keys))]
        while len(row.ids) <= stage.length:
            if rng.random() < 0.5:
                self.add_passage(rng, row, quotable)
            elif not row.facts or rng.random() < 0.4:
                key = unused.pop()
                digits = self.encode(f" {rng.integers(10 ** 4, 10 ** 5)}")
                row.state(self.special + key + self.is_number, digits)
                row.put(self.stop, UNPREDICTABLE)
            else:
                order = rng.permutation(len(row.facts))
                for j in order[:int(rng.integers(1, 5))]:
                    row.ask(row.facts[j])
                    row.put(self.stop, UNPREDICTABLE)
        return row

def make_step(writer, stage, step):
    """Make the rows of a step: they depend on the seed and the step alone."""
    rng = np.random.default_rng((SEED, step))
    rows = []
    for _ in range(stage.rows):
        draw = rng.random()
        if draw < stage.repeated:
            rows.append(writer.repeated(rng, stage))
        elif draw < stage.repeated + stage.verse:
            rows.append(writer.verse(rng, stage))
        else:
            rows.append(writer.document(rng, stage))
    return rows

# ----------------------------------------------------------------------------------------------------------------
# Training
#
# AdamW, through stages of growing difficulty. Every EVERY steps a line of the log and a checkpoint.

STAGES = [               # until, length, rows, words, repeated, verse
    Stage(300_000, 64, 16, 24, 1.0, 0.0, longest=16),
    Stage(900_000, 64, 16, 48, 1.0, 0.0, longest=24),
    Stage(2_000_000, 256, 6, 1024, 0.1, 0.4),
    Stage(2_800_000, 1024, 2, 1024, 0.05, 0.4),
    Stage(5_000_000, 2048, 1, 1024, 0.0, 0.4),
    Stage(6_200_000, 2048, 1, 1024, 0.0, 0.3, values=3, sentences=0.4),
]

class Cycle(NamedTuple):
    begin: int               # tokens of training
    end: int
    share: float             # of --lr, at its peak

CYCLES = [
    Cycle(0, 5_000_000, 1.0),
    Cycle(5_000_000, 6_200_000, 0.4),
]

def stage_of(tokens, stages):
    for stage in stages:
        if tokens < stage.until:
            return stage
    return stages[-1]

def learning_rate(tokens, peak):
    """In each cycle warm up for 100,000 tokens, stay, and go down to a fiftieth over its last 40 %."""
    cycle = CYCLES[-1]
    for cycle in CYCLES:
        if tokens < cycle.end:
            break
    left = (cycle.end - tokens) / (0.4 * (cycle.end - cycle.begin))
    risen = (tokens - cycle.begin + 1024) / 102_400
    return peak * cycle.share * min(risen, 1, max(left, 0.02))

def make_model(vocab_size, args):
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=args.kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_theta=args.rope_theta,
        initializer_range=args.init,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0))

def make_optimizer(model, args):
    """AdamW; norms and embeddings are not decayed."""
    decayed = []
    others = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed" not in name
        part = decayed if is_matrix else others
        part.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))

def weighted_loss(model, rows, length):
    ids = torch.tensor(np.array([row.ids[:length + 1] for row in rows]))
    weights = torch.tensor([row.weights[1:length + 1] for row in rows])
    scores = model(ids[:, :-1]).logits
    targets = ids[:, 1:].flatten()
    losses = cross_entropy(scores.flatten(0, 1), targets, reduction="none")
    return (losses.view_as(weights) * weights).sum() / weights.sum()

@torch.no_grad()
def recall(model, writer, stage, documents, seed, least=0):
    """Return the share of answers at least `least` tokens from their fact that come out right, and their number."""
    rng = np.random.default_rng((SEED + 1, seed))
    is_right = []
    for _ in range(documents):
        row = writer.document(rng, stage)
        ids = torch.tensor(row.ids[:stage.length])
        likeliest = model(ids[None]).logits[0].argmax(-1)
        for position, tokens, distance in row.answers:
            end = position + tokens
            if end <= stage.length and distance >= least:
                answer = likeliest[position - 1:end - 1]         # a token is predicted one earlier
                is_right.append(answer.equal(ids[position:end]))
    count = len(is_right)
    return (sum(is_right) / count if count else math.nan), count

@torch.no_grad()
def bits_per_byte(model, ids, n_bytes, length=CONTEXT):
    """Code length of `ids` in windows of `length` tokens that start afresh, in bits per byte of text."""
    nats = 0.0
    ids = torch.tensor(ids)
    for start in range(0, len(ids) - 1, length):
        window = ids[start:start + length + 1]
        scores = model(window[None, :-1]).logits[0]
        nats += cross_entropy(scores, window[1:], reduction="sum").item()
    return nats / math.log(2) / n_bytes

class Run:
    """The state of a training: what a checkpoint holds."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.log = []

    def save(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "log": self.log,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.tokens = state["tokens"]
        self.seconds = state["seconds"]
        self.log = state["log"]

def rounded(x):
    """Round to four digits; NaN, which JSON does not know, becomes None."""
    return None if math.isnan(x) else round(x, 4)

def take_step(run, writer, stage, args):
    """Train on one step's rows and return their loss."""
    rate = learning_rate(run.tokens, args.lr)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.param_groups[0]["weight_decay"] = args.weight_decay
    loss = weighted_loss(run.model, make_step(writer, stage, run.step), stage.length)
    run.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.step += 1
    run.tokens += stage.rows * stage.length
    return loss.item()

def log_line(run, held_out, sample, stage, losses):
    """Measure recall on held-out names, at the length of the stage, and the bits of held-out verse."""
    ids, n_bytes = sample
    documents = max(2, 2048 // stage.length)
    share, count = recall(run.model, held_out, stage, documents, run.step)
    return {
        "step": run.step,
        "tokens": run.tokens,
        "length": stage.length,
        "loss": rounded(sum(losses) / len(losses)),
        "recall": rounded(share),
        "n": count,
        "bits_per_byte": rounded(bits_per_byte(run.model, ids, n_bytes, 512)),
        "seconds": round(run.seconds),
    }

def train(run, writer, held_out, stages, args):
    """Train to the end of the last stage, or `args.steps` steps, with a checkpoint at every line of the log."""
    ids = held_out.text[:4097]
    sample = (ids, len(held_out.tokenizer.decode(ids.tolist()).encode()))
    start = time.time() - run.seconds
    losses = []
    while run.tokens < stages[-1].until and run.step != args.steps:
        stage = stage_of(run.tokens, stages)
        losses.append(take_step(run, writer, stage, args))
        if run.step % EVERY == 0 or run.tokens >= stages[-1].until:
            run.seconds = time.time() - start
            line = log_line(run, held_out, sample, stage, losses)
            print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            run.log.append(line)
            run.save(args.checkpoint)
            losses = []

# ----------------------------------------------------------------------------------------------------------------
# The folder
#
# Weights, tokenizer, texts to calibrate and to evaluate on, and how the training went.

def make_documents(writer, stage, count, seed):
    """Write `count` documents, each of which the tokenizer reads back as exactly CONTEXT tokens."""
    rng = np.random.default_rng((SEED + 2, seed))
    tokenizer = writer.tokenizer
    texts = []
    while len(texts) < count:
        # What a passage cut inside a word leaves may be read as other tokens, so the length is cut again.
        row = writer.document(rng, stage._replace(length=CONTEXT + 64))
        ids = writer.encode("\n" + tokenizer.decode(row.ids))[:CONTEXT]
        text = tokenizer.decode(ids)
        if writer.encode(text) == ids:
            texts.append(text)
    return "".join(texts)

def figures_of(run, held_out, verse, stages, args):
    """Measure what training.json tells: the weights as they were written, in 16 bits."""
    share, count = recall(run.model, held_out, stages[-1], 96, 0, FAR)
    error = math.sqrt(share * (1 - share) / count) if count else math.nan
    n_bytes = len(verse.encode())
    return {
        "seed": SEED,
        "steps": run.step,
        "tokens": run.tokens,
        "seconds": round(run.seconds),
        "parameters": run.model.num_parameters(),
        "held_out_bits_per_byte": rounded(bits_per_byte(run.model, held_out.text, n_bytes)),
        "recall_distance": FAR,
        "recall": rounded(share),
        "recall_n": count,
        "recall_standard_error": rounded(error),
        "stages": [stage._asdict() for stage in stages],
        "width": args.width,
        "layers": args.layers,
        "kv_heads": args.kv_heads,
        "rope_theta": args.rope_theta,
        "init": args.init,
        "lr": args.lr,
        "weight_decay": args.weight_decay,
    }

def write_training(path, figures, log):
    """Write figures and log as JSON, a line each."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items()]
    log_lines = ",\n  ".join(json.dumps(line) for line in log)
    lines.append(f'"log": [\n  {log_lines}]')
    path.write_text("{" + ",\n ".join(lines) + "}\n")

def write_folder(run, training, held_out, verse, stages, args):
    run.model.to(torch.bfloat16)
    run.model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=training.tokenizer,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False)
    tokenizer.save_pretrained(args.out)

    documents = make_documents(training, stages[-1], 48, 0)
    (args.out / "calib.txt").write_text(documents)
    documents = make_documents(held_out, stages[-1], 24, 1)
    (args.out / "eval.txt").write_text(documents + "\n\n" + verse)

    run.model.float()
    figures = figures_of(run, held_out, verse, stages, args)
    write_training(args.out / "training.json", figures, run.log)

def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument(
        "--checkpoint", type=Path, help="go on from this file if it exists (OUT/checkpoint.pt)")
    parser.add_argument("--steps", type=int, help="stop after so many steps (the last stage's end)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument(
        "--init", type=float, default=0.04, help="standard deviation of the first weights")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    args = parser.parse_args(argv)
    args.checkpoint = args.checkpoint or args.out / "checkpoint.pt"
    return args

def main(argv=None, stages=STAGES):
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)

    # The last tenth of the text is held out, of the tokenizer too.
    text = args.text.read_text()
    cut = text.rindex("\n\n", 0, int(0.9 * len(text))) + 2
    tokenizer = train_tokenizer(text[:cut])
    words = whole_words(tokenizer, text[:cut])
    training_names, held_out_names = split_names()
    training = Writer(tokenizer, text[:cut], training_names, words)
    held_out = Writer(tokenizer, text[cut:], held_out_names, words)

    # A stopped run goes on.
    model = make_model(tokenizer.get_vocab_size(), args)
    run = Run(model, make_optimizer(model, args))
    if args.checkpoint.exists():
        run.load(args.checkpoint)
    train(run, training, held_out, stages, args)
    write_folder(run, training, held_out, text[cut:], stages, args)

if __name__ == "__main__":
    main()
