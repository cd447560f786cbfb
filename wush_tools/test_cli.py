"""Tests of the command line: flags, tasks and the figures of the report."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wush_kv as W
from wush_kv import Codec
from wush_tools import cli, evaluate
from wush_tools.testing import argv, edited, figures, refusal

WRONG = """\
--bits 2 --k-bits 4: --bits --k-bits; --bits 5: bits 5; --group 3: --group 3; --group 32: --group 32
--group 0: --group; --device nosuch: device nosuch; --device meta: device meta; --raw --prompt=: prompt empty
--prompt \udcff: prompt; --prompt LONG: 512; --max-new-tokens 600: 512; --eval-len 600: --eval-len 512
--eval-seqs 11: --eval-seqs 2200; --eval-skip 9999: --eval-skip; --calib-seqs 99: --calib-seqs
--eval-len 1: --eval-len; --eval-len 30: --eval-len; --eval TMP/none.txt: none.txt; --eval TMP: TMP
--eval TMP/binary: binary text; --calib TMP/binary: binary text
--eval TMP/empty: empty 0 tokens; --json TMP/none/x: TMP/none/x
--json TMP: TMP; --save TMP/none/x: TMP/none/x; --save TMP: TMP; --save TMP/x --json TMP/x: --json --save
--save TMP/x --json TMP/x.json: --json --save; --task calibrate: --save
--task calibrate --bits 16 --save TMP/x: --bits; --bits 16 --save TMP/x: --save
--transforms TMP/none.pt: none.pt; --temperature nan: --temperature; --top-p 2: --top-p; --yarn inf: --yarn
--refine 1: --refine feedback exponent offset step; --refine all,off: --refine
--refine=: --refine; --transform hadamard --refine 1: --refine; --save TMP/folder: TMP/folder.json
--temperature 1 --top-k 9999999999: --top-k
--seed 99999999999999999999: --seed; --model nosuch: nosuch; --model TMP/no/such: such
--model TMP/empty: empty; --model TMP: config.json"""

@pytest.mark.parametrize("row", WRONG.replace("\n", "; ").split("; "))
def test_wrong_flag_is_refused_before_weights(row, shelf, tmp_path, capsys, no_weights):
    flags, words = row.replace("LONG", "x" * 520).split(": ")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").touch()
    (tmp_path / "folder.json").mkdir()
    there = lambda text: text.replace("TMP", str(tmp_path))
    said = refusal(argv(shelf, *there(flags).split()), capsys)
    assert not [word for word in there(words).split() if word not in said]

def test_report_of_a_model_of_few_positions_needs_no_room_after_the_text(shelf, tmp_path):
    """Its decoding speed is measured after fewer tokens than the evaluated text has."""
    folder = edited(shelf, tmp_path, max_position_embeddings=52)
    flags = "--eval-len 52 --calib-len 40 --sink 2 --keep 8 --flush 4 --max-new-tokens 4 --raw --prompt x"
    out = figures(shelf, tmp_path, *flags.split(), "--model", folder)
    assert out["tokens_per_second"].keys() == {"none", "refined"}

def test_prompt_may_fill_the_positions_to_the_last(shelf, capsys):
    """P16: 500 + 12 tokens are 512 positions; 501 are refused."""
    cli.main(argv(shelf, "--task", "generate", "--raw", "--prompt", "x" * 500, "--max-new-tokens", 12))
    assert "positions" in refusal(argv(shelf, "--raw", "--prompt", "x" * 501, "--max-new-tokens", 12), capsys)

def test_program_ends_without_traceback(shelf, tmp_path):
    """P08 in a real process."""
    flags = argv(shelf, folder=edited(shelf, tmp_path, head_dim=24))
    run = subprocess.run([sys.executable, W.__file__, *flags], capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "head_dim 24" in run.stderr.splitlines()[-1]

def test_report_writes_its_figures(report, shelf):
    f, names = report.figures, {"none", "hadamard", "oscar", "wush", "refined"}
    assert set("model bits k_bits v_bits kv_bytes_per_token effective_bits module_error perplexity "
               "excess kl same_top1 tokens_per_second text seconds".split()) <= f.keys()
    assert (f["bits"], f["k_bits"], f["v_bits"], f["model"]) == (2, 2, 2, str(shelf.folder))
    assert all(f[key].keys() == names for key in ("module_error", "perplexity", "excess", "kl", "same_top1"))
    assert f["text"].keys() == f["tokens_per_second"].keys() == {"none", "refined"}
    assert min(*f["tokens_per_second"].values(), f["seconds"]) > 0
    assert f["effective_bits"] == pytest.approx(8 * f["kv_bytes_per_token"] / (2 * 2 * 2 * 16))
    scores = evaluate.perplexity(report.model, report.texts, report.schemes, 16, 16, 16)
    for name, row in scores.items():
        assert [row[key][0] for key in row] == pytest.approx([f[key][name] for key in row], rel=1e-5)
    for name, error in evaluate.module_error(report.model, report.texts, report.schemes, 0).items():
        assert error[0] == pytest.approx(f["module_error"][name], rel=1e-5)

def test_refine_off_is_the_papers_setting(report, shelf, tmp_path):
    """The file holds k and v alone, as wush gives them with 1/4, and so does one whose sidecar is lost."""
    file = tmp_path / "T.pt"
    cli.main(argv(shelf, "--task", "calibrate", "--refine", "off", "--save", file))
    T, paper = torch.load(file, weights_only=True), report.schemes["wush"].tensors
    assert T.keys() == {"k", "v"} and all(torch.equal(T[side], paper[side]) for side in "kv")
    want = figures(shelf, tmp_path, "--task", "generate", "--refine", "off")["text"]
    assert figures(shelf, tmp_path, "--task", "generate", "--transforms", file)["text"] == want
    Path(f"{file}.json").unlink()
    assert figures(shelf, tmp_path, "--task", "generate", "--transforms", file)["text"] == want
    refined = shutil.copy(report.file, tmp_path / "refined.pt")           # without a sidecar, its keys tell
    text = figures(shelf, tmp_path, "--task", "generate", "--transforms", refined)["text"]
    assert text.keys() == {"refined"}

@pytest.mark.parametrize("refine, rule, clip, feeds", [
    ("all", "centred", 1.3, True), ("feedback", "quest", 1.0, True), ("exponent", "quest", 1.0, False),
    ("offset", "centred", 1.0, False), ("step", "quest", 1.3, False), ("off", "quest", 1.0, False),
    ("all --quantizer affine", "affine", 0.96, True), ("all --transform oscar", "quest", 1.0, False)])
def test_refine_switches_each_part_alone(refine, rule, clip, feeds, shelf, tmp_path, caches):
    figures(shelf, tmp_path, "--task", "generate", "--refine", *refine.split())
    assert caches and all(c.k.codec == Codec(2, rule, clip) for c in caches)
    assert all((c.k.push is not None) == (c.v.push is not None) == feeds for c in caches)

def test_ablation_scores_the_paper_each_part_alone_and_all_but_each(shelf, tmp_path):
    kl = figures(shelf, tmp_path, "--task", "ablation", "--eval-seqs", 1)["kl"]
    parts = list(W.REFINEMENTS)
    assert list(kl) == ["none", "paper", *parts, *(f"no {part}" for part in parts), "refined"]
    assert len(set(kl.values())) == len(kl)

@pytest.mark.parametrize("flags, bits", [("", (2, 2)), ("--bits 3", (3, 3)), ("--k-bits 4", (4, 2)),
                                         ("--v-bits 8", (2, 8)), ("--k-bits 4 --v-bits 16", (4, 16)),
                                         ("--k-bits 16 --v-bits 2", (16, 2))])
def test_bits_flags_set_their_side_and_2_is_the_default(flags, bits, shelf, tmp_path, caches):
    """P50: in the figures and in the caches that decode."""
    f = figures(shelf, tmp_path, *flags.split(), "--task", "generate", "--transform", "hadamard")
    assert (f["k_bits"], f["v_bits"]) == bits
    assert {(c.k.codec.bits, c.v.codec.bits) for c in caches} == {bits}
    assert all((c.k.T is None) == (bits[0] == 16) for c in caches)         # off is off: no transform either

def test_refusal_leaves_no_file_behind_and_old_ones_as_they_were(shelf, tmp_path, capsys):
    (tmp_path / "old").write_text("old")
    for name in "old", "new":
        out = "--json", tmp_path / name, "--save", tmp_path / (name + ".pt")
        refusal(argv(shelf, *out, "--eval", tmp_path / "none"), capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"

def test_generate_does_not_mind_the_lengths_of_calibration_and_evaluation(shelf):
    """Their defaults, 1024 and 2048, are over this model's 512 positions; neither text is read."""
    flags = "--task generate --transform hadamard --max-new-tokens 2".split()
    cli.main(["--model", str(shelf.folder), *flags])

def test_16_bits_is_off(report, shelf, tmp_path):
    off = figures(shelf, tmp_path, "--bits", 16)
    for key in "perplexity", "text", "module_error", "kl":
        assert off[key] == {"none": report.figures[key]["none"]}
    assert off["effective_bits"] == 16

def test_report_is_strict_json(shelf, tmp_path):
    """One sequence has no standard error; NaN is no JSON."""
    cli.main(argv(shelf, "--eval-seqs", 1, "--task", "ppl", "--json", tmp_path / "x"))
    json.loads((tmp_path / "x").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

def test_same_seed_gives_the_same_text(shelf, capsys, report):
    texts = []
    for seed in 1, 1, 2:
        capsys.readouterr()
        flags = "--transforms", report.file, "--temperature", 1.5, "--seed", seed
        cli.main(argv(shelf, "--task", "generate", *flags))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]

@pytest.mark.parametrize("flags, thinking", [([], False), (["--thinking"], True), (["--raw"], None)])
def test_prompt_goes_through_the_chat_template_unless_raw(flags, thinking, shelf, monkeypatch, report):
    """P14."""
    given_, tok = [], shelf.tokenizer
    monkeypatch.setattr(cli, "decode", lambda model, cache, prompts, *_: given_.extend(prompts) or iter([]))
    cli.main(argv(shelf, "--task", "generate", "--transforms", report.file, "--prompt", "Why?", *flags))
    text = "Why?" if thinking is None else "<user>Why?<bot>" + "!" * (not thinking)
    assert given_ == [tok(text)["input_ids"]]
