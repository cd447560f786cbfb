"""Tests of the bundled model: how it was trained, and that on it the transforms come in the order that WUSH claims."""
import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import wush_kv as W
from wush_tools import checkpoints, cli, evaluate
from wush_tools.measure import clearly_less
from wush_tools.testing import HERE, load


# ---- the order

@pytest.fixture(scope="module")
def order():
    """What the report measures, of eight texts: recall and divergence by name, (texts,) each."""
    flags = "--task retrieval --eval-len 1024 --eval-seqs 8"
    job = cli.prepare(cli.parse(flags.split()))
    schemes = {name: job.schemes[name] for name in ("hadamard", "wush", "refined")}
    windows = job.options.windows
    answers = evaluate.retrieval(job.model, job.haystacks, schemes, windows)
    found = {name: is_right.mean(1) for name, (is_right, _) in answers.items()}

    kl = {name: [] for name in schemes}
    for ids in job.texts:
        scores = evaluate.perplexity(job.model, [ids], schemes, windows)
        for name in schemes:
            kl[name].append(scores[name]["kl"][0])
    return SimpleNamespace(
        job=job, found=found, kl={name: torch.tensor(x) for name, x in kl.items()})

def test_recall_is_lost_by_hadamard_and_kept_by_refined(order):
    """Of 80 numbers hidden in texts of 984 tokens, none of them in a window."""
    share = {}
    error = {}
    for name, found in order.found.items():
        share[name], error[name] = evaluate.mean_and_error(found)
    assert share["none"] >= 0.95
    assert share["hadamard"] <= share["none"] - 0.15
    assert share["refined"] >= share["none"] - 0.03
    assert share["hadamard"] - error["hadamard"] <= share["wush"] <= share["refined"]

def test_divergence_falls_from_hadamard_over_wush_to_refined(order):
    """By over two standard errors of the difference on the same texts."""
    assert clearly_less(order.kl["wush"], order.kl["hadamard"])
    assert clearly_less(order.kl["refined"], order.kl["wush"])
    assert order.kl["refined"].mean() <= 0.5 * order.kl["wush"].mean()

def test_a_quarter_of_a_bit_where_it_matters_takes_half_of_the_divergence_away(order):
    """Chosen on calibration text. A bit more everywhere leaves about a quarter, a quarter of it 0.7."""
    job = order.job
    [calib] = checkpoints.read_tokens(
        str(cli.BUNDLED / "calib.txt"), job.tokenizer, "--calib", 1, 1024)
    moments = W.collect_moments(job.model, [calib])
    derived = evaluate.measure_harm(job.model, calib, W.derive(moments))
    schemes = {bits: W.scheme_of(derived, bits) for bits in (2, 2.25)}
    kl = {bits: [] for bits in schemes}
    for ids in job.texts[:4]:
        scores = evaluate.perplexity(job.model, [ids], schemes, job.options.windows)
        for bits in schemes:
            kl[bits].append(scores[bits]["kl"][0])
    assert sum(kl[2.25]) <= 0.5 * sum(kl[2])


# ---- its training

@pytest.fixture(scope="module")
def trainer():
    spec = importlib.util.spec_from_file_location("trainer", HERE / "tiny-qwen3" / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

@pytest.fixture(scope="module")
def writers(trainer):
    """Writers of training and held-out rows; the verse is that of the bundled texts."""
    tokenizer = cli.read_tokenizer(cli.BUNDLED, cli.read_config(cli.BUNDLED))
    core = tokenizer.backend_tokenizer
    verse = (cli.BUNDLED / "eval.txt").read_text(encoding="utf-8")[-60_000:]
    words = trainer.whole_words(core, verse * 20)
    training, held_out = trainer.split_names()
    return SimpleNamespace(
        training=trainer.Writer(core, verse, training, words),
        held_out=trainer.Writer(core, verse, held_out, words))

def test_rows_depend_on_the_step_alone(trainer, writers):
    for stage in trainer.STAGES:
        rows = trainer.make_step(writers.training, stage, 7)
        again = trainer.make_step(writers.training, stage, 7)
        other = trainer.make_step(writers.training, stage, 8)
        assert [row.ids for row in rows] == [row.ids for row in again]
        assert [list(row.ids) for row in rows] != [list(row.ids) for row in other]
        assert all(len(row.ids) == len(row.weights) > stage.length for row in rows)

def test_an_answer_repeats_what_followed_the_same_start_last(trainer, writers):
    """Its distance is that to the nearest place where its fact stood, be it note or answer."""
    stage = trainer.STAGES[-1]
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(6):
        row = writers.training.document(rng, stage)
        for position, tokens, distance in row.answers:
            stated = position - distance
            answer = row.ids[position:position + tokens]
            assert row.ids[stated:stated + tokens] == answer
            assert row.weights[position:position + tokens] == [1.0] * tokens
            nearer = range(stated + 1, position)
            key = row.ids[stated - 2:stated + tokens]
            assert not any(row.ids[i - 2:i + tokens] == key for i in nearer)
            count += 1
    assert count > 100

def test_what_retrieval_asks_for_was_never_a_key_in_training(trainer, writers):
    training, held_out = trainer.split_names()
    assert not set(training) & set(held_out)
    assert set(evaluate.NAMES) <= set(held_out)
    keys = writers.training.names + writers.training.words
    for word in evaluate.WORDS + evaluate.NAMES:
        assert writers.training.encode(" " + word) not in keys

def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(trainer, tmp_path, monkeypatch):
    """Four steps, and two and two: the same weights, bit by bit, and a folder that loads."""
    monkeypatch.setattr(trainer, "EVERY", 2)
    monkeypatch.setattr(trainer, "CONTEXT", 96)
    stages = [
        trainer.Stage(128, 32, 2, 24, 1.0, 0.0, longest=8),
        trainer.Stage(512, 96, 2, 1024, 0.1, 0.4, values=3, sentences=0.5),
    ]
    verse = (cli.BUNDLED / "eval.txt").read_text(encoding="utf-8")[-20_000:]
    (tmp_path / "text.txt").write_text(verse * 3)      # so that some words are frequent
    weights = []
    for name, stops in (("whole", [4]), ("stopped", [2, 4])):
        out = tmp_path / name
        shape = "--width 64 --layers 1 --threads 1 --out".split()
        for steps in stops:
            flags = [str(tmp_path / "text.txt"), *shape, str(out), "--steps", str(steps)]
            trainer.main(flags, stages)
        weights.append(load(out).weights)
        log = json.loads((out / "training.json").read_text())["log"]
        assert [line["step"] for line in log] == [2, 4]
        assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    whole, stopped = weights
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)

def test_texts_to_calibrate_and_to_evaluate_on_are_of_the_same_kinds_and_share_no_name(trainer):
    """But for Marcius, of whom Shakespeare speaks too."""
    training, held_out = trainer.split_names()
    held_out.remove("Marcius")
    for file, other_names in (("calib.txt", held_out), ("eval.txt", training)):
        text = (cli.BUNDLED / file).read_text(encoding="utf-8")
        for start in ("\nNote:", "\nRecall:", "\nList:", "\nThe special magic number for"):
            assert text.count(start) > 20
        assert not any(f" {name} " in text for name in other_names)
