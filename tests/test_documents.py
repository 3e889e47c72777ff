"""The commands of the documents run, their links and files exist, and their figures have a source.

A command is a line of a ```bash block, or of README.md's table of tasks, that starts with python, torchrun
or make. It runs as it stands, shortened to one step; words in capitals stand for paths. Commands that need an
account, a second machine or a server are in indented lines or ```text blocks.
"""

import re
import shlex
import shutil
import unicodedata
from pathlib import Path

import pytest

from bootfile import __version__
from datasets.folders import random_folder
from tests.conftest import ROOT, cases, free_port, run
from tests.support import pictures
from tests.support.marks import diff

ROOMS = ("bootfile", "jobs", "common", "datasets", "launch", "tests", "guides")
FILES = [*ROOT.glob("*.md"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.md"))]
TEXT = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(FILES)
    if "template" not in path.parts  # of launch new: its words are filled in
}
READMES = ("README.md", "README.zh-CN.md")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_START = re.compile(r"(?:\.venv/bin/)?(?:python|torchrun|make) ")
_NEW = {"tests/test_train.py"}  # what `launch new` writes
_ELSEWHERE = {"upload", "fetch"}  # verbs that need an account or a store


def read_blocks(text: str, language: str) -> list[str]:
    return [body for name, body in _FENCE.findall(text) if name == language]


def read_prose(text: str) -> str:
    """Return the text without its blocks."""
    return _FENCE.sub("", text)


def find_commands(name: str) -> set[str]:
    """Return the commands of a document, without comments. IMAGENET is a FOLDER."""
    lines = "\n".join(read_blocks(TEXT[name], "bash")).replace("\\\n", " ").splitlines()
    if name in READMES:
        lines += re.findall(r"^\|[^|]*\| `([^`]+)`", TEXT[name], re.MULTILINE)
    found = {re.sub(r"\s+#.*$", "", " ".join(line.split())).replace("IMAGENET", "FOLDER") for line in lines}
    return {line for line in found if _START.match(line) and "..." not in line and "RECORD" not in line}


_TESTED = {  # by other tests, which need seconds for it
    "python jobs/train.py --dataset digits --epochs 12",  # tests/test_dockerfile.py
    "python jobs/train_ddp.py --dataset digits --processes_per_node 2",  # tests/jobs/test_start.py
    "python jobs/train_ray.py --dataset digits --distribute_mode true",  # tests/jobs/test_train_ray.py
    "python -m launch bench loaders --data_url FOLDER",  # tests/launch/test_bench.py
    "python -m launch simulate --nodes 2 --processes 2 --platform modelarts jobs/train_ddp.py "
    "-- --dataset digits --max_steps 40",  # tests/launch/simulate/test_simulate.py
}
COMMANDS = sorted({command for name in TEXT for command in find_commands(name)} - _TESTED)
_LONG = r"imagenet\.py|train_(text|fsdp|exact)|launch (audit|pack|predict)"
LONG = [command for command in COMMANDS if re.search(_LONG, command)]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return the path that each word in capitals stands for. RUN is a run of train.py on digits."""
    folder = tmp_path_factory.mktemp("places")
    for split, images in (("train", 8), ("test", 2)):  # DATA: CIFAR-10 as a folder
        for label in range(10):
            pictures.write(folder / "data" / split / f"class{label}", images, (32, 32), "png")
    trained = folder / "output_dir" / "latest"
    run("jobs/train.py", "--dataset=digits", "--max_steps=1", "--batch_size=16", f"--output_dir={trained}")
    (folder / "main.py").write_text("print('a script of your own')\n")
    images = random_folder.make(str(folder / "images"))
    return {
        "DATA": folder / "data",
        "FOLDER": images,
        "PAIRS": random_folder.make_pairs(str(folder / "pairs")),
        "SCRIPT": folder / "main.py",
        **dict.fromkeys(("RUN", "RUN_A", "output_dir/latest"), trained),
        "RUN_B": shutil.copytree(trained, folder / "copy"),
        "OUT/best.pth": trained / "best.pth",
    }


def fill_in(word: str, places: dict, tmp_path: Path) -> str:
    """Return a word of a command with the path that it stands for; results are written to tmp_path."""
    option, equals, value = word.rpartition("=")
    for name in (value, value.rstrip("/")):
        if name in places:
            return f"{option}{equals}{places[name]}"
    if value.split("/")[0] in ("OUT", "PROJECT", "packed", "PLACE") or value == "/cache/imagenet":
        return f"{option}{equals}{tmp_path / value.strip('/')}"
    return word


def shorten(words: list[str], tmp_path: Path) -> list[str]:
    """Return the arguments of Python that do the same as the words in one step."""
    job = ["--max_steps=1", "--batch_size=16"]
    if words[0] == "-m" and words[1] == "launch":
        verb, rest = words[2], words[3:]
        assert verb not in _ELSEWHERE, f"`launch {verb}` needs an account or a store: indent the line"
        if verb == "submit":
            assert "--dry_run" in rest, "without --dry_run it needs an account: indent the line"
        return [*words[:3], "--help"] if verb == "prove" else words  # it takes minutes
    if words[0] == "-m" and words[1] == "pytest":
        return [*words, "--collect-only", "-q"]
    if words[0] == "-m" and re.match(r"tests\.(benchmarks|gpu|demo|real\.report|support\.options)", words[1]):
        return [*words, "--help"]  # they take minutes, or write files here
    if words[0] == "-m" and words[1].startswith("torch.distributed"):
        words = [*words[:2], f"--master-port={free_port()}", *words[2:]]
        words = [re.sub(r"(nproc.per.node)=\d+", r"\1=2", word) for word in words]
    if any("jobs/" in word for word in words):
        if "jobs/imagenet.py" in words and not any("image_size" in word for word in words):
            job += ["--image_size=32"]
        if "jobs/imagenet.py" in words and not any("arch" in word for word in words):
            job += ["--arch=shufflenet_v2_x0_5"]
        if any(re.search("jobs/train(?!_own)", word) for word in words) and "--weights" not in words:
            job += ["--width=8"]
        trains = not any("loader" in word for word in words)  # a loader has epochs, and no steps
        return [*words, *job[not trains :], "--output_dir", str(tmp_path / "output")]
    return words


@pytest.mark.parametrize("command", cases(COMMANDS, *LONG))
def test_command_runs(command, places, tmp_path):
    if command.startswith("make "):
        target = re.search(r"make (?:\w+=\S+ )*([\w-]+)", command)[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    program, *words = shlex.split(command)
    for number, word in enumerate(words[:-1]):  # what a command writes
        if word in ("--to", "--json", "--plot", "--preview"):
            words[number + 1] = str(tmp_path / words[number + 1])
    words = [fill_in(word, places, tmp_path) for word in words]
    if program == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    missing = words[1:3] == ["launch", "check"]  # this machine may not have what it asks for
    result = run(*shorten(words, tmp_path), code=None if missing else 0, timeout=300)
    if words[0].startswith("jobs/") or words[1].startswith("torch.distributed"):
        pattern = r"^(val_loss|total_seconds)=|(test_\w+)=.* receipt=| val_loss="
        assert re.search(pattern, result.stdout, re.MULTILINE), result.stdout
    assert result.stdout


@pytest.mark.parametrize("name", TEXT)
def test_scripts(name, places):
    """Each script compiles, and each script that reads a run works."""
    for script in read_blocks(TEXT[name], "python"):
        compile(script, name, "exec")
        if "OUT/" in script and "import " in script:
            printed = run("-c", script.replace("OUT/", f"{places['RUN']}/")).stdout
            assert bool(re.search(r"\d", printed)) == ("print(" in script), "a class, or figures"


# Links, files and blocks


def find_anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", read_prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().replace(" ", "-")
        kept = "".join(c for c in plain if c in "-_" or unicodedata.category(c)[0] in "LN")
        number = sum(1 for each in found if re.fullmatch(rf"{re.escape(kept)}(-\d+)?", each))
        found.add(f"{kept}-{number}" if number else kept)
    return found


@pytest.mark.parametrize("name", TEXT)
def test_links(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", read_prose(TEXT[name])):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in find_anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", TEXT)
def test_files_that_it_names(name):
    """Files of a tree and each `folder/file.py` in the text exist. Words in capitals are the reader's own."""
    near = (ROOT, (ROOT / name).parent)
    for tree in read_blocks(TEXT[name], ""):
        folder = ""
        for line in tree.splitlines():
            words = re.match(r"( *)((?:[\w./-]+[/.][\w./-]* )*[\w-]+(?:/[\w./-]*|\.\w+))(?= {2,}|$)", line)
            if not words:
                continue
            if not words[1]:
                folder = words[2] if words[2].endswith("/") else ""
            for word in words[2].split():
                places = [each / folder / word for each in near if words[1]] + [each / word for each in near]
                assert any(place.exists() for place in places), f"{line}: {word}"
    for path in re.findall(r"`([a-z_]+/[\w./-]*\.(?:py|md|toml|txt))`", read_prose(TEXT[name])):
        assert path in _NEW or any((each / path).exists() for each in near), path


def test_the_diff_of_a_job():
    variant, base = (
        (ROOT / "jobs" / job).read_text(encoding="utf-8") for job in ("train_ddp.py", "train.py")
    )
    [shown] = read_blocks(TEXT["jobs/README.md"], "diff")
    assert shown in diff(variant, base)


@pytest.mark.parametrize("name", READMES)
def test_the_diff_of_the_readme_gives_the_loop_of_the_package(name):
    [shown] = read_blocks(TEXT[name], "diff")
    [loop, *_] = read_blocks(TEXT["bootfile/README.md"], "python")
    kept = [line[2:] for line in shown.splitlines() if line[0] in "+ " and line.strip() != "..."]
    assert len(kept) > 7 and not set(kept) - set(loop.splitlines())


def find_uneven_rows(text: str) -> list[str]:
    """Return the rows of tables with another number of cells than the row before. `\\|` is no border."""
    rows = []
    before = 0
    for line in read_prose(text).splitlines():
        count = 0
        if line.startswith("|"):
            count = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        if count and before and count != before:
            rows.append(line)
        before = count
    return rows


@pytest.mark.parametrize("name", TEXT)
def test_rows_of_a_table_have_as_many_cells(name):
    assert not find_uneven_rows(TEXT[name])


# Figures, lengths, sentences


def find_measured(text: str) -> list[str]:
    """Return the sections, with their subsections, that have a table of measured figures."""
    parts = re.split(r"^(?=##? )", text, flags=re.MULTILINE)
    row = re.compile(r"^\|.*(?:\d\.\d+x|\| 0\.\d{4}\b).*\|$", re.MULTILINE)
    return [part for part in parts if row.search(part)]


@pytest.mark.parametrize("name", TEXT)
def test_measured_figures_have_a_date_and_a_command(name):
    for section in find_measured(TEXT[name]):
        title = section.splitlines()[0]
        assert re.search(r"20\d\d-\d\d-\d\d", section), f"{title}: no date"
        assert re.search(r"(?:python |make |\.py |--)", section), f"{title}: no command"


@pytest.mark.parametrize("name", [name for name in TEXT if not name.endswith(("CHANGELOG.md", "options.md"))])
def test_length(name):
    limit = 200 if name in READMES else 170 if name.startswith("guides") else 250
    assert TEXT[name].count("\n") <= limit


_DIALECT = re.compile(
    r"(?<!there )\b(is|are) no [a-z]|\b(go|goes|gone|going) on\b|\bbeside\b|\b(what|who|whoever) is there\b|"
    r"\bstand(s|ing)? (in|beside)\b|\b(nobody|somebody|whoever)\b|\b(let|lets) go\b|\btake(s|n)? away\b|"
    r"\bso many\b|\bsign of life\b|\banew\b|\bis said\b|\bof before\b|(?<=[.:] )(?-i:Where)\b",
    re.IGNORECASE,
)


def test_sentences_are_plain():
    found = {name: [match.group() for match in _DIALECT.finditer(read_prose(TEXT[name]))] for name in TEXT}
    assert sum(map(len, found.values())) < 5, {name: words for name, words in found.items() if words}


@pytest.mark.thorough
def test_code_is_plain():
    """So are docstrings, comments, help texts, messages and names."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path != Path(__file__)]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    found = {name: [match.group() for match in _DIALECT.finditer(text)] for name, text in texts.items()}
    assert sum(map(len, found.values())) < 5, {name: words for name, words in found.items() if words}


def test_the_changelog_begins_with_this_version():
    assert re.search(r"^## (\S+)", TEXT["CHANGELOG.md"], re.MULTILINE)[1] == __version__
    assert run("-m", "launch", "--version", fresh=True).stdout == f"bootfile {__version__}\n"
    assert all(re.search(rf"\b{re.escape(__version__)}\b", TEXT[name]) for name in READMES)


@pytest.mark.parametrize("name", TEXT)
def test_a_merge_has_left_no_marks(name):
    assert not re.search(r"^(<{7}|>{7}) ", TEXT[name], re.MULTILINE)


# The checks themselves


def test_the_checks_can_fail():
    assert find_anchors("# A `b.py` c\n## Two, [x](y)\n## Two, x\n") == {"a-bpy-c", "two-x", "two-x-1"}
    assert find_anchors("## 退出码 (exit codes)\n") == {"退出码-exit-codes"}
    assert find_uneven_rows("| a | b |\n|---|---|\n| 1 | `x | y` |\n| 2 |\n") == ["| 2 |"]
    assert find_measured("# a\n| 1.50x (1-2) |\n# b\n| 12 |\n") == ["# a\n| 1.50x (1-2) |\n"]
    assert _DIALECT.search("it goes on") and not _DIALECT.search("it continues")
    assert read_prose("a\n```bash\nmake b\n```\nc\n") == "a\n\nc\n"
    assert len(COMMANDS) > 20
