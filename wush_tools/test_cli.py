"""Tests of the command line: flags, tasks, the figures of the report, and what happens when printing fails."""
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import wush_kv as W
from wush_kv import Codec, Refine
from wush_tools import cli, evaluate
from wush_tools.testing import argv, edited, figures, refusal

PARTS = Refine._fields

@pytest.fixture
def shown(capsys):
    """Run the command line and return what it printed on stdout and on stderr."""
    def run(arguments):
        capsys.readouterr()
        cli.main(arguments)
        return capsys.readouterr()

    return run


# ---- flags that are refused

WRONG = [
    # flags, the words that the refusal holds; TMP is a folder of odd files, LONG is 520 letters
    ("--bits 2 --k-bits 4", "--bits --k-bits"),
    ("--bits 5", "bits 5"),
    ("--bits 2,3,4", "bits 2,3,4"),
    ("--bits 2.0", "bits 2.0"),
    ("--bits=", "bits"),
    ("--bits 4.5", "bits 4.5"),
    ("--bits nan", "bits nan"),
    ("--bits 2.5,2", "bits 2.5,2"),
    ("--bits 2.5 --calib-len 40 --windows 16,16,16", "--calib-len 40 --bits 2.5"),
    ("--k-bits 0", "--k-bits 0"),
    ("--group 3", "--group 3"),
    ("--group 32", "--group 32"),
    ("--group 0", "--group"),
    ("--windows 16,128", "--windows 16,128"),
    ("--windows 4.5,16,16", "--windows 4.5"),
    ("--windows 16,16,0", "--windows 16,16,0 flush"),
    ("--windows=-1,16,16", "--windows -1,16,16 sink"),
    ("--windows 16,16,16 --keep 16", "--windows --keep"),
    ("--device nosuch", "device nosuch"),
    ("--device meta", "device meta"),
    ("--raw --prompt=", "prompt empty"),
    ("--raw --thinking", "--raw --thinking"),
    ("--template raw --thinking", "--template --thinking"),
    ("--prompt \udcff", "prompt"),
    ("--prompt LONG", "512"),
    ("--max-new-tokens 600", "512"),
    ("--eval-len 600", "--eval-len 512"),
    ("--eval-seqs 11", "--eval-seqs 2200"),
    ("--calib-seqs 99", "--calib-seqs"),
    ("--eval-len 1", "--eval-len"),
    ("--eval-len 30", "--eval-len"),
    ("--eval TMP/none.txt", "none.txt"),
    ("--eval TMP", "TMP"),
    ("--eval TMP/binary", "binary text"),
    ("--calib TMP/binary", "binary text"),
    ("--eval TMP/empty", "empty 0 tokens"),
    ("--json TMP/none/x", "TMP/none/x"),
    ("--json TMP", "TMP"),
    ("--save TMP/none/x", "TMP/none/x"),
    ("--save TMP", "TMP"),
    ("--save TMP/folder", "TMP/folder.json"),
    ("--save TMP/x --json TMP/x", "--json --save"),
    ("--save TMP/x --json TMP/x.json", "--json --save"),
    ("--save TMP/x --transforms TMP/y", "--save --transforms"),
    ("--task retrieval --eval-len 60", "--eval-len 60 room"),
    ("--task retrieval --windows 16,400,16", "--eval-len 200 room windows"),
    ("--task retrieval --bits 16 --eval-len 60", "--eval-len 60 room"),
    ("--task calibrate", "--save"),
    ("--task calibrate --bits 16 --save TMP/x", "--bits"),
    ("--bits 16 --save TMP/x", "--save"),
    ("--bits 16,16 --transforms TMP/x", "--bits --transforms"),
    ("--task ablation --transforms TMP/x", "--task ablation --transforms"),
    ("--task ablation --transform hadamard", "--task ablation --transform"),
    ("--task ablation --refine off", "--task ablation --refine"),
    ("--transforms TMP/none.pt", "none.pt"),
    ("--temperature nan", "--temperature"),
    ("--temperature 1 --top-p 2", "--top-p"),
    ("--top-p 0.5", "--top-p --temperature"),
    ("--seed 3", "--seed --temperature"),
    ("--temperature 1 --seed 99999999999999999999", "--seed"),
    ("--yarn inf", "--yarn"),
    ("--refine 1", "--refine feedback exponent offset widen"),
    ("--refine all,off", "--refine"),
    ("--refine=", "--refine"),
    ("--transform hadamard --refine 1", "--refine"),
    ("--transform oscar --refine feedback", "--refine feedback --transform oscar"),
    ("--quantizer affine --refine offset,step", "--refine widen --quantizer affine"),
    ("--model nosuch", "nosuch"),
    ("--model TMP/no/such", "such"),
    ("--model TMP/empty", "empty"),
    ("--model TMP", "config.json"),
    ("--transfor hadamard", "--transfor"),
]

@pytest.mark.parametrize("flags, words", WRONG)
def test_wrong_flag_is_refused_before_weights(flags, words, shelf, tmp_path, capsys, no_weights):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").touch()
    (tmp_path / "folder.json").mkdir()
    flags = flags.replace("LONG", "x" * 520).replace("TMP", str(tmp_path))
    arguments = argv(shelf, *flags.split())
    if "--windows" not in flags:                 # argv's own would contradict the old spellings
        place = arguments.index("--windows")
        arguments[place:place + 2] = ["--keep", "16"]

    sentence = refusal(arguments, capsys)
    for word in words.replace("TMP", str(tmp_path)).split():
        assert word in sentence

@pytest.mark.parametrize("flags", [
    "--bits 5", "--bits 16,5", "--k-bits 0", "--windows 1,2", "--windows 16,16,0", "--refine 1",
    "--task nosuch", "--eval-len x", "--eval-len 1", "--top-p 0.5", "--bits 2 --k-bits 4",
    "--raw --thinking", "--nosuch 1", "--task ablation --refine off"])
def test_refused_flag_gets_one_sentence_without_usage_and_status_2(flags, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(flags.split())
    assert exit.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("wush_kv: ")
    assert flags.split()[-2] in line or flags.split()[-1] in line

def test_flags_are_at_most_27_and_each_says_what_it_is_for(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    usage, _, help = capsys.readouterr().out.partition("options:")
    assert len(cli.FLAGS) <= 27
    for field in cli.FLAGS:
        assert cli.flag(field.name) in usage
        assert field.metadata["help"].split()[0] in help
    for old in cli.OLD_SPELLINGS:
        assert cli.flag(old) not in usage + help

def test_refusal_leaves_no_file_behind_and_old_ones_as_they_were(shelf, tmp_path, capsys):
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        files = ["--json", tmp_path / name, "--save", tmp_path / (name + ".pt")]
        refusal(argv(shelf, *files, "--eval", tmp_path / "none"), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


# ---- flags that are heard

@pytest.mark.parametrize("flags, bits", [
    ("", (2, 2)),
    ("--bits 3", (3, 3)),
    ("--bits 3,2", (3, 2)),
    ("--bits 16,2", (16, 2)),
    ("--k-bits 4", (4, 2)),
    ("--v-bits 8", (2, 8)),
    ("--k-bits 4 --v-bits 16", (4, 16)),
    ("--k-bits 16 --v-bits 2", (16, 2)),
])
def test_bits_flags_set_their_side_and_2_is_the_default(flags, bits, shelf, tmp_path, caches):
    """In the figures and in the caches that decode."""
    key_bits, value_bits = bits
    flags = [*flags.split(), "--task", "generate", "--transform", "hadamard"]
    found = figures(shelf, tmp_path, *flags)
    assert (found["k_bits"], found["v_bits"]) == bits
    assert found["bits"] == (key_bits if key_bits == value_bits else None)
    assert caches
    for cache in caches:
        assert (cache.keys.bits, cache.values.bits) == bits
        assert (cache.keys.encoding.transform is None) == (key_bits == 16)     # off is off

def test_average_bits_go_to_the_same_layers_from_a_file(report, shelf, tmp_path, caches, capsys):
    """What calibrating measures, the file says; one without it is refused. All rows have the same widths."""
    path = tmp_path / "T.pt"
    cli.main(argv(shelf, "--task", "calibrate", "--bits", 2.25, "--save", path))
    notes = capsys.readouterr().err
    assert "--bits" not in notes
    assert "--windows" not in notes
    harms = [W.load_transforms(path).keys.harm, W.load_transforms(path).values.harm]
    widths = W.allot_bits(*harms, 2.5)

    flags = ["--task", "ppl", "--bits", 2.5]
    for how in (["--transforms", path], ["--save", tmp_path / "other.pt"]):
        caches.clear()
        found = figures(shelf, tmp_path, *flags, *how)
        assert found["bits"] == 2.5
        assert [found["k_bits"], found["v_bits"]] == [sum(of_side) / 2 for of_side in widths]
        text = figures(shelf, tmp_path, "--task", "generate", "--bits", 2.5, *how)["text"]
        assert list(zip(*widths)) == [(cache.keys.bits, cache.values.bits) for cache in caches]
        assert len(text["refined"]) > 0
    lines = refusal(argv(shelf, *flags, "--transforms", report.file), capsys)
    assert "--bits 2.5 is an average" in lines

@pytest.mark.parametrize("flags, windows", [
    ("--windows 0,32,4", (0, 32, 4)),
    ("--sink 1 --keep 2 --flush 3", (1, 2, 3)),
    ("--keep 20", (16, 20, 16)),
    ("", (16, 128, 16)),
])
def test_windows_flags_set_the_cache(flags, windows, shelf, caches):
    generate = "--task generate --transform hadamard --max-new-tokens 2"
    cli.main(["--model", str(shelf.folder), *generate.split(), *flags.split()])
    assert {cache.windows for cache in caches} == {windows}

@pytest.mark.parametrize("refine, clip, centred, feeds", [
    ("all", 1.3, True, True),
    ("feedback", 1.0, False, True),
    ("exponent", 1.0, False, False),
    ("offset", 1.0, True, False),
    ("step", 1.3, False, False),
    ("widen", 1.3, False, False),
    ("off", 1.0, False, False),
    ("all --quantizer affine", 0.96, True, True),
    ("all --transform oscar", 1.0, False, False),
])
def test_refine_switches_each_part_alone(refine, clip, centred, feeds, shelf, tmp_path, caches):
    """The affine rule, too, is refined by all that applies to it."""
    figures(shelf, tmp_path, "--task", "generate", "--refine", *refine.split())
    quantizer = "affine" if "affine" in refine else "quest"
    assert caches
    for cache in caches:
        keys = cache.keys.encoding
        values = cache.values.encoding
        assert keys.codec == Codec(2, quantizer, clip)
        assert keys.centred == values.centred == centred
        assert (keys.feedback is not None) == (values.feedback is not None) == feeds

def test_quantizer_is_heard_by_every_row(shelf, tmp_path):
    flags = ["--task", "ppl", "--eval-seqs", 1]
    quest = figures(shelf, tmp_path, *flags)["kl"]
    affine = figures(shelf, tmp_path, *flags, "--quantizer", "affine")["kl"]
    assert quest.keys() == affine.keys()
    assert all(quest[name] != affine[name] for name in quest if name != "none")

def test_flags_that_a_run_does_not_read_are_named(shelf, shown):
    generate = "--task generate --transform hadamard --max-new-tokens 2"
    flags = ["--model", str(shelf.folder), *generate.split()]
    assert "does not read" not in shown(flags).err
    said = shown([*flags, "--eval-len", "7", "--calib-len", "8"])
    assert "does not read --calib-len, --eval-len" in said.err
    assert "does not read --transform\n" in shown([*flags, "--bits", "16"]).err

def test_generate_does_not_mind_the_lengths_of_calibration_and_evaluation(shelf):
    """Their defaults, 1024 and 2048, are over this model's 512 positions; neither text is read."""
    flags = "--task generate --transform hadamard --max-new-tokens 2".split()
    cli.main(["--model", str(shelf.folder), *flags])

@pytest.mark.parametrize("flags, thinking", [
    ([], False),
    (["--thinking"], True),
    (["--template", "thinking"], True),
    (["--raw"], None),
    (["--template", "raw"], None),
])
def test_prompt_goes_through_the_chat_template_unless_raw(
        flags, thinking, shelf, monkeypatch, report):
    prompts = []

    def decode(model, cache, rows, *_):
        prompts.extend(rows)
        cache[0].n_tokens = [len(rows[0])]
        return iter([])

    monkeypatch.setattr(cli, "decode", decode)
    flags = ["--task", "generate", "--transforms", report.file, "--prompt", "Why?", *flags]
    cli.main(argv(shelf, *flags))
    text = "Why?"
    if thinking is not None:
        text = "<user>Why?<bot>" if thinking else "<user>Why?<bot>!"
    assert prompts == [shelf.tokenizer(text)["input_ids"]]

def test_template_that_the_model_lacks_is_refused(capsys):
    """The bundled model, for instance."""
    sentence = refusal(["--task", "generate", "--thinking"], capsys)
    assert "--template thinking" in sentence and "no chat template" in sentence

def test_prompt_may_fill_the_positions_to_the_last(shelf, capsys):
    """500 + 12 tokens are 512 positions; 501 are refused."""
    flags = ["--task", "generate", "--raw", "--max-new-tokens", 12, "--prompt"]
    cli.main(argv(shelf, *flags, "x" * 500))
    assert "positions" in refusal(argv(shelf, *flags, "x" * 501), capsys)

def test_same_seed_gives_the_same_text(shelf, shown, report):
    texts = []
    for seed in (1, 1, 2):
        flags = ["--transforms", report.file, "--temperature", 1.5, "--seed", seed]
        texts.append(shown(argv(shelf, "--task", "generate", *flags)).out)
    assert texts[0] == texts[1] != texts[2]


# ---- models that give no numbers, machines that lack memory

@pytest.mark.parametrize("flags", [
    "--task generate --bits 16", "--task generate --transform hadamard", "--task generate",
    "--task generate --bits 16 --temperature 1", "--task ppl --bits 16",
    "--task error --transform hadamard", "--bits 16"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_model_whose_logits_are_nan_is_refused(name, flags, shelf, tmp_path, capsys):
    """NaN among its weights is refused as they are read; these are numbers, but products with them are none."""
    weights = load_file(shelf.folder / "model.safetensors")
    weights[name] = 3e38 * weights[name].sign()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    damaged = (tmp_path / "model.safetensors").read_bytes()
    folder = edited(shelf, tmp_path, {"model.safetensors": damaged})
    sentence = refusal(argv(shelf, *flags.split(), folder=folder), capsys)
    assert "logits" in sentence and "NaN" in sentence and str(folder) in sentence

def lack(kind):
    """Raise what torch raises on a CPU, what it raises on a GPU, or what Python raises."""
    if kind == "cpu":
        torch.empty(2 ** 56, dtype=torch.uint8)
    raise {"gpu": torch.OutOfMemoryError("CUDA out of memory."), "python": MemoryError()}[kind]

@pytest.mark.parametrize("kind", ["cpu", "gpu", "python"])
def test_lack_of_memory_is_one_sentence_and_leaves_the_figures_so_far(
        kind, shelf, tmp_path, capsys, monkeypatch):
    """It names what can be made smaller. In the midst of a report, and before it, where nothing is known yet."""
    monkeypatch.setattr(cli, "measure_error", lambda *_, **__: lack(kind))
    out = tmp_path / "figures"
    arguments = argv(shelf, "--transform", "hadamard", "--json", out)
    sentence = refusal(arguments, capsys)
    for words in ("out of memory", "--eval-len than 200", "--max-new-tokens", "--dtype bfloat16"):
        assert words in sentence
    assert "--calib-len" not in sentence and "--prompt" not in sentence
    found = json.loads(out.read_text())
    assert found["kl"] and "module_error" not in found and found["error"] in sentence

    out.unlink()
    monkeypatch.setattr(cli, "collect_moments", lambda *_: lack(kind))
    sentence = refusal(arguments, capsys)
    assert "out of memory" in sentence and "--calib-len than 64" in sentence
    assert "--eval-len" not in sentence and not out.exists()

def test_error_of_another_kind_is_not_called_a_lack_of_memory(shelf, monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(cli, "ppl_task", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main(argv(shelf, "--transform", "hadamard"))


# ---- transforms files

def test_refine_off_is_the_papers_setting(report, shelf, tmp_path):
    """The file holds k and v alone, as wush gives them with 1/4, and so does one whose sidecar is lost."""
    file = tmp_path / "T.pt"
    cli.main(argv(shelf, "--task", "calibrate", "--refine", "off", "--save", file))
    T = torch.load(file, weights_only=True)
    paper = report.schemes["wush"]
    assert T.keys() == {"k", "v"}
    assert torch.equal(T["k"], paper.keys.transform)
    assert torch.equal(T["v"], paper.values.transform)

    generate = ["--task", "generate"]
    text = figures(shelf, tmp_path, *generate, "--refine", "off")["text"]
    assert figures(shelf, tmp_path, *generate, "--transforms", file)["text"] == text
    Path(f"{file}.json").unlink()
    assert figures(shelf, tmp_path, *generate, "--transforms", file)["text"] == text

    # Without a sidecar, the feedback in the file tells.
    refined = shutil.copy(report.file, tmp_path / "refined.pt")
    text = figures(shelf, tmp_path, *generate, "--transforms", refined)["text"]
    assert text.keys() == {"refined"}

@pytest.mark.parametrize("flags", [
    "--refine off", "--refine feedback", "--transform hadamard", "--transform wush_a", "--group 8"])
def test_flags_that_contradict_a_transforms_file_are_refused(
        flags, report, shelf, capsys, no_weights):
    sentence = refusal(argv(shelf, "--transforms", report.file, *flags.split()), capsys)
    name, value = flags.split()
    assert name in sentence and value in sentence and str(report.file) in sentence

def test_what_a_transforms_file_decides_is_printed(report, shelf, tmp_path, shown):
    flags = ["--task", "generate", "--transforms", report.file]
    agreeing = ["--transform", "wush", "--refine", "all", "--group", 16]
    for more in ([], agreeing):
        said = shown(argv(shelf, *flags, *more)).err
        assert f"{report.file} decides: --transform wush --refine all --group 16" in said

    file = tmp_path / "T.pt"
    calibrate = ["--task", "calibrate", "--transform", "oscar", "--group", 8]
    cli.main(argv(shelf, *calibrate, "--save", file))
    flags = ["--task", "generate", "--transforms", file, "--refine", "all"]
    assert "decides: --transform oscar --refine off --group 8" in shown(argv(shelf, *flags)).err

@pytest.mark.parametrize("name", ["nosuch", ["wush"], None])
def test_transforms_file_of_an_unknown_transform_is_refused(name, report, shelf, tmp_path, capsys):
    file = Path(shutil.copy(report.file, tmp_path / "T.pt"))
    about = json.loads(Path(f"{report.file}.json").read_text()) | {"transform": name}
    Path(f"{file}.json").write_text(json.dumps(about))
    assert "T.pt.json names the transform" in refusal(argv(shelf, "--transforms", file), capsys)

def test_rows_beside_a_transforms_file_are_calibrated_or_named(report, shelf, tmp_path, shown):
    """Without --calib only what needs no calibration is compared, and stderr says so."""
    out = tmp_path / "figures"
    flags = argv(shelf, "--task", "ppl", "--transforms", report.file, "--json", out)
    shown(flags)
    assert json.loads(out.read_text())["kl"] == pytest.approx(report.figures["kl"], rel=1e-5)

    place = flags.index("--calib")
    del flags[place:place + 2]
    said = shown(flags).err
    assert json.loads(out.read_text())["kl"].keys() == {"none", "hadamard", "refined"}
    assert "no rows for oscar, wush" in said and "--calib" in said


# ---- tasks and figures

def test_report_writes_its_figures(report, shelf):
    found = report.figures
    names = {"none", "hadamard", "oscar", "wush", "refined"}
    scores = ["perplexity", "excess", "kl", "same_top1"]
    assert (found["bits"], found["k_bits"], found["v_bits"]) == (2, 2, 2)
    assert found["model"] == str(shelf.folder)
    for key in ["module_error", *scores]:
        assert found[key].keys() == found["standard_error"][key].keys() == names
    assert found["text"].keys() == found["tokens_per_second"].keys() == {"none", "refined"}
    assert min(*found["tokens_per_second"].values(), found["seconds"]) > 0
    elements = 2 * 2 * 2 * 16                    # keys and values, layers, KV heads, channels
    assert found["effective_bits"] == pytest.approx(8 * found["kv_bytes_per_token"] / elements)
    assert found["kv_bytes_per_token_none"] == 2 * elements

    windows = W.Windows(16, 16, 16)
    expected = evaluate.perplexity(report.model, report.texts, report.schemes, windows)
    for name, row in expected.items():
        for key in scores:
            assert found[key][name] == pytest.approx(row[key][0], rel=1e-5)
    errors = evaluate.module_error(report.model, report.texts, report.schemes, 0)
    for name, (error, _) in errors.items():
        assert found["module_error"][name] == pytest.approx(error, rel=1e-5)

def test_retrieval_asks_through_the_template_or_raw(shelf, tmp_path, shown, monkeypatch):
    """Four numbers in each text of 512 bytes; the text is the user's message, and what is asked begins the answer."""
    asked = []
    retrieval = cli.retrieval

    def retrieve_and_note(model, haystacks, *arguments):
        asked.extend(haystacks)
        return retrieval(model, haystacks, *arguments)

    monkeypatch.setattr(cli, "retrieval", retrieve_and_note)
    flags = ["--task", "retrieval", "--eval-len", 512, "--windows", "2,8,4"]
    decode = shelf.tokenizer.decode
    for more, start, end, lead in (([], "<user>", "<bot>!", "The"), (["--raw"], "", "", "\nThe")):
        asked.clear()
        found = figures(shelf, tmp_path, *flags, *more)
        names = {"none", "hadamard", "oscar", "wush", "refined"}
        assert found["retrieval"].keys() == found["standard_error"]["retrieval"].keys() == names
        assert found["retrieval_n"] == sum(len(questions) for _, questions in asked) == 8
        for text, questions in asked:
            assert decode(text).startswith(start) and decode(text).endswith(end)
            for tokens, count, place in questions:
                assert len(text) + len(tokens) <= 512
                assert decode(tokens).startswith(lead + " special magic number for ")
                assert torch.equal(text[place:place + len(tokens) - count], tokens[count:])

def test_retrieval_of_16_bits_has_one_row(shelf, tmp_path):
    flags = ["--task", "retrieval", "--eval-len", 512, "--bits", 16]
    assert figures(shelf, tmp_path, *flags)["retrieval"].keys() == {"none"}

def test_a_tokenizer_without_digits_cannot_be_asked_for_numbers(
        shelf, tmp_path, capsys, no_weights):
    """Retrieval refuses it in a sentence; a report goes on, and says that it measures no retrieval."""
    core = json.loads((shelf.folder / "tokenizer.json").read_text())
    for digit in "0123456789":
        del core["model"]["vocab"][digit]
    tokenizer = json.dumps(core).encode()
    folder = edited(shelf, tmp_path, {"tokenizer.json": tokenizer})
    flags = ["--task", "retrieval", "--eval-len", 512]
    assert "no tokens for numbers" in refusal(argv(shelf, *flags, folder=folder), capsys)

def test_report_without_room_for_numbers_goes_on(shelf, tmp_path):
    """Texts of 200 bytes have none outside of windows of 182."""
    found = figures(shelf, tmp_path, "--windows", "16,150,16")
    assert found["kl"] and "retrieval" not in found and "answers" not in found

def test_report_prints_how_two_answers_go_on(shelf, tmp_path, monkeypatch, shown):
    """If 16 bits know them, here by decree: after the same text, by 16 bits, hadamard and the chosen scheme."""
    retrieval = cli.retrieval

    def know_all(*arguments):
        answers = retrieval(*arguments)
        answers["none"][0].fill_(1)
        return answers

    monkeypatch.setattr(cli, "retrieval", know_all)
    flags = ["--eval-len", 512, "--eval-seqs", 1, "--json", tmp_path / "x"]
    said = shown(argv(shelf, *flags)).out
    found = json.loads((tmp_path / "x").read_text())
    assert len(found["answers"]) == 2
    for lines in found["answers"]:
        assert lines.keys() == {"question", "none", "hadamard", "refined"}
        assert f"{lines['none']!r}" in said and lines["question"] in said
    places = [said.index(words) for words in ("KV cache", "retrieval", "KL", "module")]
    assert places == sorted(places)

def test_memory_of_the_report_is_that_after_decoding(report):
    """200 tokens, of which the last 6 came one by one."""
    config = report.model.config
    windows = W.Windows(16, 16, 16)
    decoded = evaluate.cache_bytes(config, 200, report.schemes["refined"], windows, steps=6)
    assert report.figures["kv_bytes_per_token"] == pytest.approx(decoded)

def test_report_goes_on_after_its_text_from_a_packed_cache(shelf, shown, tmp_path, caches):
    """As a model does that gets the text as a prompt; stderr says what is packed."""
    flags = ["--eval-seqs", 1, "--eval-len", 300, "--transform", "hadamard"]
    said = shown(argv(shelf, *flags, "--json", tmp_path / "x"))
    text = Path(shelf.text).read_text()[:300]
    assert "hadamard: 272 of 305 tokens are packed, and the cache holds 0." in said.err
    assert any(cache.n_tokens == [305] and cache.n_packed == [272] for cache in caches)

    found = json.loads((tmp_path / "x").read_text())["text"]
    generate = ["--task", "generate", "--transform", "hadamard", "--raw", "--prompt", text]
    for bits, name in ((2, "hadamard"), (16, "none")):
        assert figures(shelf, tmp_path, *generate, "--bits", bits)["text"] == {name: found[name]}

def test_prompt_of_a_report_follows_its_text(shelf, tmp_path):
    flags = ["--eval-seqs", 1, "--raw", "--prompt", "Why?", "--transform", "hadamard"]
    found = figures(shelf, tmp_path, *flags)["text"]
    prompt = Path(shelf.text).read_text()[:200] + "Why?"
    flags = ["--task", "generate", "--raw", "--prompt", prompt, "--bits", 16]
    assert figures(shelf, tmp_path, *flags)["text"] == {"none": found["none"]}

def test_generate_says_whether_anything_got_packed(shelf, shown):
    flags = argv(shelf, "--task", "generate", "--transform", "hadamard", "--raw", "--prompt")
    short = shown([*flags, "x" * 20]).err
    long = shown([*flags, "x" * 200]).err
    assert "hadamard: none of the 25 tokens is packed" in short and "16/16/16" in short
    assert "hadamard: 160 of 205 tokens are packed" in long

def test_ablation_scores_the_paper_each_part_alone_and_all_but_each(shelf, tmp_path):
    kl = figures(shelf, tmp_path, "--task", "ablation", "--eval-seqs", 1)["kl"]
    assert list(kl) == ["none", "paper", *PARTS, *(f"no {part}" for part in PARTS), "refined"]
    assert len(set(kl.values())) == len(kl)

def test_ablation_leaves_out_what_the_quantizer_cannot_do():
    o = cli.parse(["--task", "ablation", "--quantizer", "affine"])
    assert list(cli.ablations(o)) == [
        "paper", "feedback", "exponent", "offset", "no feedback", "no exponent", "no offset"]

def test_16_bits_is_off(report, shelf, tmp_path):
    off = figures(shelf, tmp_path, "--bits", 16)
    for key in ("perplexity", "text", "module_error", "kl"):
        assert off[key] == {"none": report.figures[key]["none"]}
    assert off["effective_bits"] == 16

@pytest.mark.parametrize("flags", ["--task error", "--task error --transform oscar", ""])
def test_no_table_of_16_bits_is_without_rows(flags, shelf, shown):
    """Instead of a heading alone, the task says that there is no error."""
    lines = shown(argv(shelf, "--bits", 16, *flags.split())).out.splitlines()
    place = lines.index("module error: none, as nothing is quantized at 16 bits")
    assert flags == "" or lines[place:] == lines
    for line, following in zip(lines, [*lines[1:], ""]):
        assert not line.endswith(("window", ":")) or following.startswith("    ")

def test_report_is_strict_json(shelf, tmp_path):
    """One sequence has no standard error; NaN is no JSON."""
    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    cli.main(argv(shelf, "--eval-seqs", 1, "--task", "ppl", "--json", tmp_path / "x"))
    json.loads((tmp_path / "x").read_text(), parse_constant=refuse)

def test_report_of_a_model_of_few_positions_needs_no_room_after_the_text(shelf, tmp_path):
    """Its decoding speed is measured after fewer tokens than the evaluated text has."""
    folder = edited(shelf, tmp_path, max_position_embeddings=52)
    flags = "--eval-len 52 --calib-len 40 --windows 2,8,4 --max-new-tokens 4 --raw --prompt x"
    found = figures(shelf, tmp_path, *flags.split(), "--model", folder)
    assert found["tokens_per_second"].keys() == {"none", "refined"}

def test_new_transform_and_quantizer_are_one_row_each(shelf, tmp_path, monkeypatch):
    """They appear in report, error and perplexity, and can be chosen, without a change here."""
    def pca(gram, hess, m=None):
        """Rotate every block onto the principal axes of what is stored, then spread."""
        U = torch.linalg.eigh(W.diagonal_blocks(gram, m)).eigenvectors
        return W.hadamard(U.shape[-1]).to(U) @ U.mT

    def around_zero(x, bits, clip=1.0):
        """Place the levels evenly on ±max|x|."""
        largest = clip * x.abs().amax(-1)
        return largest * 2 / (2 ** bits - 1), -largest

    monkeypatch.setitem(W.TRANSFORMS, "pca", W.TransformRow(pca, is_compared=True))
    monkeypatch.setitem(W.QUANTIZERS, "around_zero", W.QuantizerRow(around_zero))
    flags = ["--quantizer", "around_zero", "--eval-seqs", 1]
    found = figures(shelf, tmp_path, *flags)
    assert "pca" in found["module_error"] and "pca" in found["kl"]
    assert "pca" in figures(shelf, tmp_path, "--task", "error", *flags)["module_error"]
    assert "pca" in figures(shelf, tmp_path, "--task", "ppl", "--transform", "pca", *flags)["kl"]


# ---- printing that fails, and processes

def test_stdout_that_cannot_encode_gets_escapes(shelf, tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    cli.main(argv(shelf, "--task", "error", "--transform", "hadamard", "--json", tmp_path / "x"))
    cli.emit(stream, "naïve 你 \udcff\n")
    printed = stream.buffer.getvalue().decode("ascii")
    assert r" \xb1 0." in printed and r"na\xefve \u4f60 \udcff" in printed
    assert json.loads((tmp_path / "x").read_text())["module_error"]

def test_stdout_on_a_full_disk_is_said_and_the_json_written(shelf, tmp_path, monkeypatch, capfd):
    """/dev/full fails as a full disk does, after its first bytes."""
    full = open("/dev/full", "w")
    monkeypatch.setattr(sys, "stdout", full)
    flags = ["--task", "generate", "--transform", "hadamard"]
    assert figures(shelf, tmp_path, *flags)["text"]["hadamard"]
    assert capfd.readouterr().err.count("the output is lost") == 1

def test_closed_pipe_leaves_the_json_and_no_traceback(shelf, tmp_path, monkeypatch, capfd):
    """Nor does the stream complain when it is closed, as it is when Python exits."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    flags = ["--task", "generate", "--transform", "hadamard"]
    text = figures(shelf, tmp_path, *flags)["text"]["hadamard"]
    stream.write("more")
    stream.close()
    assert text
    assert "output is lost" not in capfd.readouterr().err

def test_no_stdout_is_no_reason_to_fail(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    flags = ["--task", "generate", "--transform", "hadamard"]
    assert figures(shelf, tmp_path, *flags)["text"]["hadamard"]

def test_interrupt_keeps_the_figures_so_far(shelf, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "measure_error", interrupted)
    with pytest.raises(SystemExit) as exit:
        figures(shelf, tmp_path, "--transform", "hadamard")
    found = json.loads((tmp_path / "figures").read_text())
    assert exit.value.code == cli.INTERRUPTED
    assert found["interrupted"] and found["kl"] and "module_error" not in found

    # Before the task there is nothing to keep.
    (tmp_path / "figures").unlink()
    monkeypatch.setattr(cli, "load_model", interrupted)
    with pytest.raises(SystemExit) as exit:
        figures(shelf, tmp_path)
    assert exit.value.code == cli.INTERRUPTED
    assert not (tmp_path / "figures").exists()

def start(*arguments, script=W.__file__, python=()):
    """Start the program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *python, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def test_program_ends_without_traceback(shelf, tmp_path):
    flags = argv(shelf, folder=edited(shelf, tmp_path, head_dim=24))
    process = start(*flags)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "head_dim 24" in said.splitlines()[-1]

def test_interrupt_of_a_process_leaves_the_json_and_no_traceback(shelf, tmp_path):
    """The text so far is in it. There are too many tokens to come for the signal to be late."""
    folder = edited(shelf, tmp_path, max_position_embeddings=2 ** 20)
    flags = ["--task", "generate", "--transform", "hadamard", "--max-new-tokens", 2 ** 19]
    process = start("--model", folder, *flags, "--json", tmp_path / "x")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()         # not `communicate`, which would lose what the first read left over
    said = process.stderr.read()
    assert process.wait() == cli.INTERRUPTED, said
    assert "Traceback" not in said
    found = json.loads((tmp_path / "x").read_text())
    assert found["interrupted"]
    assert (first + rest).startswith(found["text"]["hadamard"])

@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("delay", [0, 0.3, 0.6])
def test_interrupt_while_torch_is_imported_ends_the_program_without_a_word(delay):
    """As soon as its first library is mapped, and a little later."""
    process = start("--task", "generate", "--bits", 16)
    maps = Path(f"/proc/{process.pid}/maps")
    while "torch" not in maps.read_text():
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate()
    assert (process.returncode, printed, said) == (cli.INTERRUPTED, "", "")

def test_program_runs_isolated_without_docstrings_and_through_a_link(tmp_path):
    """-I and -P leave the script's folder out of the path, -OO takes the docstrings away."""
    link = tmp_path / "a link.py"
    link.symlink_to(Path(W.__file__).resolve())
    flags = ["--task", "generate", "--bits", 16, "--max-new-tokens", 2]
    process = start(*flags, script=link, python=["-I", "-OO"])
    text, said = process.communicate()
    assert process.returncode == 0, said
    assert text.strip()
