"""The public names of the package: which there are, what their docstrings say, and what an import takes."""

import inspect
import re

import bootfile
from tests.conftest import ROOT, environment, run

NAMES = [
    "BadInput", "BatchSampler", "Diverged", "Due", "Exact", "Interval", "Job", "Loader", "Plugin",
    "Preemption", "Processes", "Receipt", "SequentialBatchSampler", "TrainingLoader", "WholeBatchSampler",
    "map_style_loader", "torch_loader", "usual",
]  # fmt: skip
PAGE = (ROOT / "bootfile" / "README.md").read_text(encoding="utf-8")


def test_the_names_are_these():
    assert bootfile.__all__ == NAMES
    assert set(NAMES) <= set(dir(bootfile))


def test_the_table_has_first_sentences_of_docstrings_and_the_page_all_names():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", PAGE, re.MULTILINE))
    listed = re.search(r"Also public are (.*?)\.", PAGE)[1]
    assert sorted([*rows, *re.findall(r"`(\w+)`", listed)]) == NAMES
    for name, text in rows.items():
        docstring = inspect.getdoc(getattr(bootfile, name))
        first = " ".join(docstring.partition("\n\n")[0].split())
        assert first.startswith(text), f"{name}: {first}"


def test_the_table_of_arguments_has_their_defaults():
    """A number or a text of the table is the default; words such as "the model" stand for None."""
    parameters = inspect.signature(bootfile.Exact).parameters
    section = PAGE.partition("## The arguments of `Exact`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert rows
    for names, defaults in rows:
        for name, default in zip(names.split(", "), defaults.split(", "), strict=True):
            actual = parameters[name.strip("`")].default
            words = default.strip("`").strip('"')
            if actual is None or name == "`save_every`":  # in words
                continue
            text = f"{actual:g}" if isinstance(actual, float) else str(actual)
            assert words == text, name


def test_the_example_of_the_page_runs(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "loop.py").write_text(example)
    variables = environment(PYTHONPATH=str(ROOT))
    run("loop.py", cwd=tmp_path, env=variables)
    assert list((tmp_path / "OUT" / "checkpoints").glob("step_*.pt"))
    again = run("loop.py", cwd=tmp_path, env=variables)
    assert f"resumed from {tmp_path}/OUT/checkpoints/step_189.pt" in again.stdout


def test_an_import_takes_neither_torch_nor_numpy():
    code = "import sys, bootfile; print({'torch', 'numpy'} & set(sys.modules), len(bootfile.__all__))"
    assert run("-c", code, fresh=True).stdout == f"set() {len(NAMES)}\n"


def test_an_unknown_name_is_an_attribute_error():
    code = "import bootfile; bootfile.nothing"
    assert "module 'bootfile' has no attribute 'nothing'" in run("-c", code, fresh=True, code=1).stderr
