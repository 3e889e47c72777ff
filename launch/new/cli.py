"""Write a project of your own: a job, a test, and the files that a platform needs.

    python -m launch new FOLDER [--text] [--ddp] [--amp] [--exact] [--fsdp] [--copy]
    cd FOLDER && python -m pytest tests

    jobs/train.py       jobs/train_own.py of Bootfile: your data, model, loss and step are in its blocks.
                        --text: those of jobs/train_text.py, a language model.
                        --ddp adds the blocks for one process per GPU, --amp those for mixed precision,
                        --exact those for the same bits on 1 to 8 processes (guides/exact.md),
                        --fsdp those for a model that is sharded over the GPUs (guides/large_models.md)
    tests/              trains a few steps, kills, resumes, and compares samples and weights
    job.toml            for `python -m launch submit`
    requirements.txt    packages, which `pack` lists for the platform
    bootfile common datasets launch    links to this copy of Bootfile, or copies with --copy

`python -m launch simulate|pack|submit jobs/train.py` work in FOLDER. `pack` uploads the linked folders.

Exit codes: 0 written; 2 bad input, for example a folder that is not empty.
"""

import argparse
import ast
import re
import shlex
import shutil
from collections import Counter
from difflib import unified_diff
from pathlib import Path

from bootfile.ground.errors import BadInput
from common.console.arguments import Parser

# A block of a job opens with `### tag k/n, reason ###` and closes with the same line. It includes
# the blank line before it. A line `# - code` in a block is a line of the base that the block replaces; `# -`
# alone is a blank line of the base.
BLOCK = re.compile(r"(?:^\n)?^( *### .+ ###\n)(?:.*\n)*?\1", re.MULTILINE)
_NUMBER = re.compile(r"^( *### .+? )(\d+)/(\d+)(, .* ###)$", re.MULTILINE)
_HOME = Path(__file__).resolve().parents[2]  # links resolved
_FILES = {  # file of the template: its path in the project
    "test_train.py": "tests/test_train.py", "job.toml": "job.toml", "README.md": "README.md",
    "gitignore": ".gitignore",
}  # fmt: skip
_ONLY = re.compile(r"  # only with --(\w+)$")  # ends a line of the template
# Beginnings of lines for the data set of train.py, which the blocks of train_own.py replace.
_UNUSED = ("from datasets.loaders.engines.memory import ", "from datasets.memory import image_set")
_STEP = re.compile(r"(?<=in train_loader:\n).*?(?=^            scheduler\.step)", re.MULTILINE | re.DOTALL)
_FUSED_SGD = re.compile(r"^\n( *### .* fused SGD .*\n)(.*\n)+?\1", re.MULTILINE)  # train_text.py has AdamW
_DOCSTRING = '''"""Train your own model on your own data.

    python jobs/train.py --epochs {epochs} --batch_size 32 --lr {lr}{example}
    python -m pytest tests    trains a few steps, kills, resumes, compares

Change the blocks: they are those of Bootfile's jobs/{others}.
"""
'''
_RATES = {"train_own.py": {"epochs": "100", "lr": "0.01"}, "train_text.py": {"epochs": "5", "lr": "0.001"}}


def main(arguments: list[str]) -> int:
    """Write the project, print the next steps, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch new")
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="a new or an empty folder")
    add("--text", action="store_true", help="a language model: the blocks of jobs/train_text.py")
    add("--ddp", action="store_true", help="add the blocks of jobs/train_ddp.py")
    add("--amp", action="store_true", help="add the blocks of jobs/train_amp.py")
    add("--exact", action="store_true", help="add the blocks of train_ddp.py and train_exact.py")
    add("--fsdp", action="store_true", help="add the blocks of train_ddp.py and train_fsdp.py")
    add("--copy", action="store_true", help="copy bootfile, common, datasets and launch, do not link them")
    args = parser.parse_args(arguments)
    if [args.exact, args.amp, args.fsdp or args.text].count(True) > 1:
        raise BadInput(
            "--exact, --amp, and --text or --fsdp exclude each other: they replace lines of the same step "
            "(--precision bfloat16 needs no block)"
        )
    folder = Path(args.folder)
    try:
        # options that exclude each other are refused above, before there is a folder
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadInput(f"{folder} is not empty: name a new folder")
        _write_project(folder, args, args.ddp or args.exact or args.fsdp)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror}") from error
    return 0


def make_job(ddp: bool, amp: bool, exact: bool = False, fsdp: bool = False, text: bool = False) -> str:
    """Return the text of a project's jobs/train.py. Raises BadInput if a job of Bootfile is missing."""
    job_of_user = "train_text.py" if text else "train_own.py"
    names = [job_of_user, *(["train_ddp.py"] if ddp else []), *(["train_amp.py"] if amp else [])]
    base = _read("jobs/train.py")
    variants = [_read(f"jobs/{name}") for name in names]
    [step] = _STEP.findall(base)
    [step_of_user] = _STEP.findall(variants[0])
    if not text:
        variants[0] = variants[0].replace(step_of_user, step)  # another variant may have its own
    # as the variants of Bootfile are made: the base, and the blocks of each
    combined = combine(base, *variants)
    if exact or fsdp:  # its base is train_ddp.py
        names.append("train_exact.py" if exact else "train_fsdp.py")
        variant = _read(f"jobs/{names[-1]}")
        variant = _FUSED_SGD.sub("", variant) if text else variant
        combined = combine(variants[1], combined, variant, tag="新增")
    # the project has no base of whose lines the blocks could tell
    combined = "\n".join(line for line in combined.split("\n") if not replaced_lines(line))
    if not text:
        [step] = _STEP.findall(combined)
        # in a project the whole step is one block: it is what the user changes
        mark = step_of_user.split("\n")[0]
        code = [line for line in step.replace("logits", "outputs").split("\n") if line and "###" not in line]
        combined = combined.replace(step, "\n".join([mark, *code, mark, ""]), 1)
    lines = without_docstring(_renumber(combined)).split("\n")
    for beginning in _UNUSED:
        [unused_line] = [line for line in lines if line.startswith(beginning)]
        lines.remove(unused_line)
    job = "\n".join(lines).replace(" boolean,", "", 1)  # only --custom_data needs this import
    example = "\n    python jobs/train.py --processes_per_node 2    two processes on the CPU" if ddp else ""
    return _DOCSTRING.format(example=example, others=" and ".join(names), **_RATES[job_of_user]) + job


def _write_project(folder: Path, args: argparse.Namespace, ddp: bool) -> None:
    """Write the files of a project into an empty folder. ddp: whether an option needs the blocks of DDP."""
    # first: it is what may fail, and the folder is still empty
    job = make_job(ddp, args.amp, args.exact, args.fsdp, args.text)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name)[:64]
    options = {"ddp": ddp, "text": args.text}  # for which lines of the template are kept: see _ONLY
    values = {"name": name, **_RATES["train_text.py" if args.text else "train_own.py"]}
    for part in ("jobs", "tests"):
        (folder / part).mkdir()
    (folder / "jobs/train.py").write_text(job, encoding="utf-8")
    shutil.copyfile(_HOME / "requirements.txt", folder / "requirements.txt")
    for source, target in _FILES.items():
        text = _fill_template(_read(f"launch/new/template/{source}"), values, options)
        (folder / target).write_text(text, encoding="utf-8")
    for room in ("bootfile", "common", "datasets", "launch"):
        if args.copy:
            shutil.copytree(_HOME / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / room).symlink_to(_HOME / room, target_is_directory=True)
    print(f"wrote {folder}: jobs/train.py, tests/test_train.py, job.toml, requirements.txt, README.md")
    print(f"next: cd {shlex.quote(str(folder))}; python -m pytest tests; then change the blocks of the job")


def _fill_template(template: str, values: dict[str, str], options: dict[str, bool]) -> str:
    """Return the text of a file of the project. values: replace @name@, @epochs@ and @lr@."""
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    lines = [(line, _ONLY.search(line)) for line in template.split("\n")]
    return "\n".join(_ONLY.sub("", line) for line, only in lines if not only or options[only[1]])


def _read(path: str) -> str:
    """Return a text of this copy of Bootfile. Raises BadInput if it is missing, as in a project."""
    try:
        return (_HOME / path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadInput(f"{_HOME / path} does not exist: `new` needs a whole copy of Bootfile") from error


class MarksError(Exception):
    """A malformed block. The message names the line."""


def replaced_lines(line: str) -> list[str]:
    """Return the line of the base that a line `# - code` of a block replaces; [] for other lines."""
    match = re.fullmatch(r"(\s*)# -(?: (.*)|\s*)", line)
    return [match[1] + match[2] if match[2] else ""] if match else []


def without_docstring(text: str) -> str:
    """Return the text after its module docstring. Raises MarksError."""
    try:
        docstring = ast.parse(text).body[0]
    except SyntaxError as error:
        raise MarksError(f"line {error.lineno}: {error.msg}") from error
    if not (isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)):
        raise MarksError("no module docstring")
    return "\n".join(text.split("\n")[docstring.end_lineno :])


def combine(base: str, *variants: str, tag: str = "") -> str:
    """Return the base with the blocks of several variants, each at its place, in the order of the variants.
    tag: only blocks with this tag count; the base may have others. Raises MarksError."""
    of_tag = re.compile(BLOCK.pattern.replace("### ", f"### {tag}", 1), re.MULTILINE)
    body = without_docstring(base)
    docstring = base.removesuffix(body)
    lines = body.splitlines(True)
    inserted: dict[int, str] = {}  # the number of lines of the base before it -> blocks
    dropped: set[int] = set()  # lines of the base that blocks replace
    for variant in variants:
        text = without_docstring(variant)
        end = 0  # of the block before
        kept: list[str] = []  # the lines of the base, as the variant has them
        for block in of_tag.finditer(text):
            kept += text[end : block.start()].splitlines(True)
            inserted[len(kept)] = inserted.get(len(kept), "") + block[0]
            # a block may replace lines of the base: they are comments in it
            for line in block[0].split("\n"):
                for replaced in replaced_lines(line):
                    if len(kept) in dropped:
                        raise MarksError(f"two variants replace this line: {replaced}")
                    dropped.add(len(kept))
                    kept.append(f"{replaced}\n")
            end = block.end()
        kept += text[end:].splitlines(True)
        # what is not in a block must be the base: each variant stands for it without its blocks
        if kept != lines:
            raise MarksError(f"not the lines of the base: {[*unified_diff(lines, kept, n=0)][3]!r}")
    parts = [docstring]
    for place, line in enumerate([*lines, ""]):  # "": blocks may follow the last line
        parts.append(inserted.get(place, ""))
        if place not in dropped:
            parts.append(line)
    return "".join(parts)


def _renumber(text: str) -> str:
    """Return the text with the blocks of each tag numbered from 1, in the order of the lines."""
    totals = Counter(match[1].strip() for match in _NUMBER.finditer(text))  # tag -> marks
    seen = Counter[str]()

    def number(match: re.Match) -> str:
        """Return a mark with its number: re.sub() calls it for each mark, in the order of the lines."""
        tag = match[1].strip()
        seen[tag] += 1  # each block has two marks
        return f"{match[1]}{(seen[tag] + 1) // 2}/{totals[tag] // 2}{match[4]}"

    return _NUMBER.sub(number, text)
