"""Every variant of a job is its base plus blocks. The mutants show that the check can fail."""

import re
import subprocess

import pytest

from tests.support.marks import (
    DISTRIBUTED,
    NEW,
    ROOT,
    MarksError,
    base_of,
    check,
    find_marks,
    strip,
    tag_of,
    without_block,
)  # fmt: skip

PAIRS = [(path, base) for path in sorted((ROOT / "jobs").glob("*.py")) if (base := base_of(path))]


def test_there_is_something_to_compare():
    variants = {path.stem for path, _ in PAIRS}
    assert variants >= {"train_dp", "train_ddp", "train_amp", "train_exact", "loader_dali"}


@pytest.mark.parametrize("path, base", PAIRS, ids=lambda path: path.name)
def test_variant_without_blocks_is_its_base(path, base):
    check(path.read_text(encoding="utf-8"), base.read_text(encoding="utf-8"), tag_of(path))


@pytest.mark.parametrize("path, base", PAIRS, ids=lambda path: path.name)
def test_command_in_the_readme_shows_only_the_docstring(path, base):
    readme = (ROOT / "jobs" / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^sed .*\| diff .*$", readme, re.MULTILINE).group()
    command = command.replace("jobs/train_ddp.py", f"jobs/{path.name}").replace(
        "jobs/train.py", f"jobs/{base.name}"
    )
    if base.stem.endswith("_ddp"):  # its own blocks stay
        command = command.replace("### .*", f"### {NEW.split()[0]} .*")
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    first_statement = _line(base.read_text(encoding="utf-8"), "import ")
    changed = [int(number) for number in re.findall(r"^(\d+)", result.stdout, re.MULTILINE)]
    assert changed and max(changed) <= first_statement, result.stdout + result.stderr


def test_train_exact_without_any_block_is_train():
    """Some of its blocks are inside those of train_ddp.py."""
    text, base = (
        (ROOT / "jobs" / name).read_text(encoding="utf-8") for name in ("train_exact.py", "train.py")
    )
    check(strip(text, NEW), base, DISTRIBUTED)


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_length(path):
    limit = {"train.py": 115}.get(path.name, 300)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def _drop(text, number):
    lines = text.split("\n")
    return "\n".join(lines[:number] + lines[number + 1 :])


def _insert(text, number, line):
    lines = text.split("\n")
    return "\n".join([*lines[:number], line, *lines[number:]])


def _replace(text, number, old, new):
    lines = text.split("\n")
    assert old in lines[number]
    lines[number] = lines[number].replace(old, new)
    return "\n".join(lines)


def _line(text, start):
    return next(number for number, line in enumerate(text.split("\n")) if line.lstrip().startswith(start))


MUTANTS = {
    "opening mark dropped": lambda text: _drop(text, find_marks(text)[0]),
    "closing mark dropped": lambda text: _drop(text, find_marks(text)[1]),
    "closing mark edited": lambda text: _replace(text, find_marks(text)[1], " ###", "! ###"),
    "wrong tag": lambda text: text.replace("distributed", "dist").replace("(new)", "(newer)"),
    "wrong total": lambda text: re.sub(r"(### \S+ \S+ \d+)/\d+", r"\1/99", text),
    "no blank line before": lambda text: _drop(text, find_marks(text)[0] - 1),
    "shared line edited": lambda text: text.replace("Run(args)", "Run(arg)"),
    "unmarked line": lambda text: _insert(text, _line(text, "device = run.device"), "    args = args"),
    "shared line moved into a block": lambda text: _insert(
        _drop(text, find_marks(text)[1]), find_marks(text)[1] + 1, text.split("\n")[find_marks(text)[1]]
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("path, base", PAIRS, ids=lambda path: path.name)
def test_mutant_is_refused(path, base, mutant):
    text = path.read_text(encoding="utf-8")
    changed = MUTANTS[mutant](text)
    assert changed != text
    with pytest.raises(MarksError):
        check(changed, base.read_text(encoding="utf-8"), tag_of(path))


@pytest.mark.parametrize("path, base", PAIRS, ids=lambda path: path.name)
def test_without_one_block_after_the_other_nothing_is_left(path, base):
    """tests/benchmarks/blocks.py measures the gain of a block on such texts."""
    text = path.read_text(encoding="utf-8")
    blocks = len(find_marks(text)) // 2
    for block in range(blocks, 0, -1):
        shorter = without_block(text, block)
        assert len(shorter) < len(text)
        text = shorter
    assert text == strip(path.read_text(encoding="utf-8"), tag_of(path))
    left = len(find_marks(text)) // 2  # blocks of the base
    with pytest.raises(MarksError, match=f"there are {left} blocks, no block {left + 1}"):
        without_block(text, left + 1)
