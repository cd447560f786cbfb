"""Tests of the project's text: how much a line asks of its reader, the README's examples and figures, the tutorial."""
import ast
import functools
import inspect
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tokenize

import pytest
import torch

import wush_kv as W
from wush_kv import kernels
from wush_tools import checkpoints, cli, evaluate
from wush_tools.testing import HERE

FILES = sorted([*HERE.glob("*.py"), *HERE.glob("wush_tools/[a-z]*.py")])
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE,
    tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


# ---- what a line asks of its reader

def docstring_lines(tree):
    """The numbers of all lines that belong to docstrings."""
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            continue
        if ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines

parsed = functools.cache(ast.parse)

@functools.cache
def code_lines(text):
    """The numbers of all lines that hold code, and no docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(parsed(text))

def test_measure_counts_nodes_of_code_only():
    text = '"""Docstring."""\n# comment\n\nx = 1\n'
    assert code_lines(text) == {4}
    assert len(list(ast.walk(ast.parse("x = 1")))) == 5      # Module, Assign, Name, Store, Constant

@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_line_asks_little_of_its_reader(file):
    """At most 13 syntax nodes per line of code on average, 15 in kernels and tests; at most 30 start on a line."""
    text = file.read_text(encoding="utf-8")
    nodes = list(ast.walk(parsed(text)))
    code = code_lines(text)
    is_dense = file.name == "kernels.py" or file.name.startswith("test")
    assert len(nodes) <= (15 if is_dense else 13) * len(code)

    starts = {}
    for node in nodes:
        line = getattr(node, "lineno", None)
        starts[line] = starts.get(line, 0) + 1
    heavy = {line: count for line, count in starts.items() if line in code and count > 30}
    assert not heavy

@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_functions_are_short_and_code_is_narrow(file):
    """At most 60 lines of code in a function, 100 columns."""
    text = file.read_text(encoding="utf-8")
    code = code_lines(text)
    lines = text.splitlines()
    wide = {line for line in code if len(lines[line - 1].split("  # ")[0].rstrip()) > 100}
    assert not wide
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef):
            own = code & set(range(node.lineno, node.end_lineno + 1))
            assert len(own) <= 60, node.name

def test_imports_at_load_time_form_no_circle():
    """kernels <- wush_kv <- checkpoints <- {evaluate, transformers_cache} <- cli: no import looks upwards."""
    order = ["kernels", "wush_kv", "checkpoints", "evaluate", "transformers_cache", "cli"]
    for level, name in enumerate(order):
        file = HERE / f"{name}.py" if level < 2 else HERE / "wush_tools" / f"{name}.py"
        tree = parsed(file.read_text(encoding="utf-8"))
        imported = set()
        for node in tree.body:                               # at load time only
            if isinstance(node, ast.ImportFrom):
                imported |= {node.module.split(".")[-1], *(alias.name for alias in node.names)}
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[-1] for alias in node.names}
        assert not imported & set(order[level:]), name


# ---- another package of the name `kernels`

def test_package_of_the_name_kernels_is_found_beside_ours(tmp_path):
    """Hugging Face's, which transformers imports: whoever asks for it gets it, and the cache its own file.

    Whichever is imported first, in a process that has imported neither.
    """
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("from .layer import LayerRepository\n")
    (package / "layer.py").write_text("class LayerRepository:\n    pass\n")
    program = "\n".join([
        "import os, torch",                                      # once for both orders
        "if os.fork():",
        "    os.wait()",
        "    import wush_kv, kernels",
        "else:",
        "    import kernels, wush_kv",
        "print(hasattr(kernels, 'LayerRepository'), hasattr(wush_kv.kernels, 'pack'))",
    ])
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.stdout.split() == ["True"] * 4, run.stderr


# ---- the README and the tutorial

def readme():
    return (HERE / "README.md").read_text(encoding="utf-8")

def table(text, header):
    """The rows of the README's table whose first column is called `header`, as lists of cells."""
    rows = text.split(f"\n| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]

EXAMPLES = {
    "wush": "assert wush(torch.eye(8)[None], torch.eye(8)[None]).shape == (1, 1, 8, 8)",
    "error_hessian": (
        "H = error_hessian(torch.eye(8)[None, None], torch.eye(8)[None] + 1)\n"
        "assert feedback_matrix(H).shape == H.shape == (1, 1, 8, 8)"),
    "apply": "assert apply(torch.ones(2, 1, 8, 8), torch.ones(1, 2, 5, 8)).shape == (1, 2, 5, 8)",
    "quantize": (
        "x = torch.randn(1, 2, 3, 64)\n"
        "H = torch.eye(64).expand(2, 1, 64, 64)\n"
        "F = torch.ones(2, 1, 64, 64).triu(1)\n"
        "for codes in (quantize(x, Codec(2)), quantize_refined(x, Codec(2), H, F, True, 0.5)):\n"
        "    assert dequantize(*codes).shape == x.shape"),
    "pack": (
        "x = torch.zeros(3, 64, dtype=torch.uint8)\n"
        "assert unpack(pack(x, 3), 3).equal(x)"),
    "sample": "assert sample(torch.tensor([[0.0, 1.0]])) == 1",
}

def definitions(source, names):
    """The text of the top-level definitions of these names."""
    lines = source.splitlines()
    found = []
    for node in ast.parse(source).body:
        targets = [
            target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)
        ]
        if {getattr(node, "name", None), *targets} & set(names):
            first = min(x.lineno for x in [*getattr(node, "decorator_list", []), node])
            found.append("\n".join(lines[first - 1:node.end_lineno]))
    return found

def test_whatever_the_readme_says_to_copy_runs_in_a_file_of_its_own(tmp_path, monkeypatch):
    """The definitions of a row, and nothing but what it imports, work; ours are not there to import."""
    for module in ("wush_kv", "kernels", "wush_tools"):
        monkeypatch.setitem(sys.modules, module, None)
    copied = set()
    for names, files, imports, *_ in table(readme(), "copy"):
        names = re.findall(r"`(\w+)`", names)
        files = re.findall(r"`(.+?)`", files)
        source = "\n".join((HERE / file).read_text(encoding="utf-8") for file in files)
        parts = definitions(source, names)
        assert len(parts) == len(names)
        program = "\n".join([imports.strip("`"), *parts, EXAMPLES[names[0]]])
        (tmp_path / "copied.py").write_text(program, encoding="utf-8")
        runpy.run_path(str(tmp_path / "copied.py"))
        copied.add(names[0])
    assert copied == EXAMPLES.keys()

@pytest.mark.parametrize("file", ["README.md", "assets/results.md"])
def test_every_table_of_figures_names_its_command(file):
    """A table with a decimal fraction is of a section that shows the command that it comes from."""
    if not (HERE / file).exists():
        pytest.skip(f"there is no {file}")
    sections = (HERE / file).read_text(encoding="utf-8").split("\n## ")
    figures = [part for part in sections if re.search(r"^\|.*\d\.\d", part, re.M)]
    assert figures
    commands = r"python wush_kv\.py|pytest|python kernels\.py|python -m wush_tools\.measure"
    assert all(re.search(commands, part) for part in figures)

def test_the_readmes_report_is_what_the_command_prints():
    """The cheapest figures again: two module errors of the bundled model, digit by digit."""
    config = checkpoints.read_config(cli.BUNDLED)
    model = checkpoints.load_model(cli.BUNDLED, config, torch.float32, "cpu")
    tokenizer = checkpoints.read_tokenizer(cli.BUNDLED, config)

    def read(file, count, length):
        return checkpoints.read_tokens(str(cli.BUNDLED / file), tokenizer, file, count, length)

    moments = W.collect_moments(model, read("calib.txt", 16, 1024))
    schemes = {
        "hadamard": W.make_scheme(moments, "hadamard"),
        "refined": W.make_scheme(moments),
    }
    errors = evaluate.module_error(model, read("eval.txt", 4, 2048), schemes)
    results = (HERE / "assets" / "results.md").read_text(encoding="utf-8")
    _, table = results.split("module error, relative and squared")
    for name, figures in errors.items():
        printed = re.search(rf"^ +{name} +(0\.\d+) ± (0\.\d+)$", table, re.M)
        assert [float(figure) for figure in printed.groups()] == pytest.approx(figures, abs=2e-4)

def test_tutorial_shows_functions_as_they_are():
    """Its outputs are committed: a source that it printed must not be another one by now."""
    cells = json.loads((HERE / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    count = 0
    for cell in cells:
        source = "".join(cell["source"])
        for module, name in re.findall(r"^show\((W|kernels)\.([\w.]+)\)$", source, re.M):
            shown = {"W": W, "kernels": kernels}[module]
            for part in name.split("."):
                shown = getattr(shown, part)
            printed = "".join("".join(out.get("text", "")) for out in cell["outputs"])
            assert inspect.getsource(shown) in printed
            count += 1
    assert count >= 6

def test_tutorial_cells_are_short_and_its_pictures_have_alternative_text():
    """At most 12 lines a cell, not counting a picture's text; every picture is described, for who cannot see it."""
    cells = json.loads((HERE / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).split("\npicture(fig")[0].splitlines()
        assert len(lines) <= 12, lines[0]
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                assert len(output["metadata"]["image/png"]["alt"]) > 40
                count += 1
    assert count >= 15
