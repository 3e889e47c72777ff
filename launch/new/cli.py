"""Write a project of your own: a job, a test, and the files that a platform needs.

    python -m launch new FOLDER [--ddp] [--amp] [--exact] [--copy]
    cd FOLDER && python -m pytest tests
    python -m launch new --receipt FOLDER       only receipt.py, for a loop of your own (guides/receipts.md)

    jobs/train.py       jobs/train_own.py of Bootfile: your data, model and loss are in its blocks.
                        --ddp adds the blocks for one process per GPU, --amp those for mixed precision,
                        --exact those for the same bits on 1, 2, 4 or 8 processes (guides/exact.md)
    tests/              trains a few steps, kills, resumes, and compares samples and weights
    job.toml            for `python -m launch submit`
    requirements.txt    packages, which `pack` lists for the platform
    common datasets launch    links to this copy of Bootfile, or copies with --copy

`python -m launch simulate|pack|submit jobs/train.py` work in FOLDER. `pack` uploads the linked folders.

Exit codes: 0 written; 2 bad input, for example a folder that is not empty.
"""

import argparse
import os
import re
import shlex
import shutil

from common.console.arguments import Parser
from common.ground.exits import BadInput
from launch.new import blocks

_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # links resolved
_TEMPLATE = os.path.join(_HOME, "launch", "new", "template")
_ROOMS = ("common", "datasets", "launch")
_FILES = {  # file of the template: its path in the project
    "test_train.py": "tests/test_train.py", "job.toml": "job.toml", "README.md": "README.md",
    "gitignore": ".gitignore",
}  # fmt: skip
_ONLY_DDP = "  # only with --ddp"  # ends a line of the template
# Beginnings of lines for the data set of train.py, which the blocks of train_own.py replace.
_UNUSED = (
    "from datasets.loaders.engines.memory import ",
    "from datasets.memory import image_set",
    '    data.add_argument("--dataset", ',
    '    data.add_argument("--custom_data", ',
)
_DOCSTRING = '''"""Train your own model on your own data.

    python jobs/train.py --epochs 100 --batch_size 32 --lr 0.01{example}
    python -m pytest tests    trains a few steps, kills, resumes, compares

Change the blocks "your data", "your model" and "your loss". The blocks are those of Bootfile's
jobs/train_own.py{others}.
"""
'''


def main(arguments: list[str]) -> int:
    """Write the project, print the next steps, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch new"
    parser.add_argument("folder", metavar="FOLDER", help="a new or an empty folder")
    parser.add_argument(
        "--receipt", action="store_true", help="write only receipt.py, into a new folder or one of yours"
    )
    parser.add_argument("--ddp", action="store_true", help="add the blocks of jobs/train_ddp.py")
    parser.add_argument("--amp", action="store_true", help="add the blocks of jobs/train_amp.py")
    parser.add_argument("--exact", action="store_true", help="add the blocks of train_ddp.py, train_exact.py")
    parser.add_argument(
        "--copy", action="store_true", help="copy common, datasets and launch, do not link them"
    )
    args = parser.parse_args(arguments)
    if args.receipt:
        return _write_receipt(args.folder)
    if args.exact and args.amp:
        raise BadInput("--exact and --amp exclude each other: both replace the line of the evaluation")
    args.ddp |= args.exact
    job = make_job(ddp=args.ddp, amp=args.amp, exact=args.exact)
    try:
        os.makedirs(args.folder, exist_ok=True)
        if os.listdir(args.folder):
            raise BadInput(f"{args.folder} is not empty: name a new folder")
        _write(args, job)
    except OSError as error:
        raise BadInput(f"{args.folder}: {error.strerror}") from error
    print(f"wrote {args.folder}: jobs/train.py, tests/test_train.py, job.toml, requirements.txt, README.md")
    print(
        f"next: cd {shlex.quote(args.folder)}; python -m pytest tests; then change the blocks "
        "`your data`, `your model` and `your loss` of jobs/train.py"
    )
    return 0


def _write_receipt(folder: str) -> int:
    path = os.path.join(folder, "receipt.py")
    text = _read(os.path.join(_HOME, "datasets", "sampling", "loop_receipt.py"))
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(path) and _read(path) != text:
            raise BadInput(f"{path} exists, and is another version: move it away")
        _save(path, text)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    print(f"wrote {path}\nnext: from receipt import Receipt; its first lines show how a loop uses it")
    return 0


def make_job(ddp: bool, amp: bool, exact: bool = False) -> str:
    """Return the text of a project's jobs/train.py. Raises BadInput if a job of Bootfile is missing."""
    names = ["train_own.py", *["train_ddp.py"] * ddp, *["train_amp.py"] * amp]
    base, *variants = (_read(os.path.join(_HOME, "jobs", name)) for name in ("train.py", *names))
    combined = blocks.combine(base, *variants)
    if exact:  # its base is train_ddp.py
        names.append("train_exact.py")
        variant = _read(os.path.join(_HOME, "jobs", names[-1]))
        combined = blocks.combine(variants[1], combined, variant, tag="新增")
    lines = blocks.without_docstring(blocks.renumber(blocks.without_replaced(combined))).split("\n")
    for start in _UNUSED:
        lines.remove(next(line for line in lines if line.startswith(start)))
    example = "\n    python jobs/train.py --processes_per_node 2    two processes on the CPU" if ddp else ""
    others = "".join(f" and {name}" for name in names[1:])
    return _DOCSTRING.format(example=example, others=others) + "\n".join(lines)


def _write(args: argparse.Namespace, job: str) -> None:
    folder = args.folder
    for name in ("jobs", "tests"):
        os.mkdir(os.path.join(folder, name))
    _save(os.path.join(folder, "jobs", "train.py"), job)
    shutil.copyfile(os.path.join(_HOME, "requirements.txt"), os.path.join(folder, "requirements.txt"))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.basename(os.path.abspath(folder)))[:64]
    for source, target in _FILES.items():
        text = _read(os.path.join(_TEMPLATE, source)).replace("@name@", name)
        kept = [line for line in text.split("\n") if args.ddp or not line.endswith(_ONLY_DDP)]
        _save(os.path.join(folder, target), "\n".join(kept).replace(_ONLY_DDP, ""))
    for room in _ROOMS:
        source, target = os.path.join(_HOME, room), os.path.join(folder, room)
        if args.copy:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            os.symlink(source, target, target_is_directory=True)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist: `new` needs a whole copy of Bootfile") from error


def _save(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
