"""Pack a job for upload: the code folder for a platform, with only what the job needs.

    python -m launch pack jobs/train_ddp.py --to packed          packed/train_ddp-<12 hex digits>/
    python -m launch pack jobs/train_ddp.py --to train_ddp.py    one file, a zip archive that Python starts

`pack` keeps bootfile/, common/, datasets/, jobs/, what else of the repository the job imports, and a
pip-requirements.txt. This list omits torch, torch_npu,
torchvision, torchaudio, triton and nvidia-*, which the platform's image has; packages that the job does not
import when it starts are comments with the option that needs them. For a script that does not import Bootfile
`pack` keeps the script's folder. It skips hidden files, caches, tests (but not the script), weights, folders
of data and results, and files that .jobignore names (in the code folder, in gitignore's syntax; `!pattern`
includes again). Skipped files are listed with their rule.

The digits are those of a digest of the content; manifest.json lists the files with sizes and SHA-256. The
same content has the same name, and packing it again changes nothing. If a text looks like a key, a token or a
password, an error names file and line. The platform's limits are checked: 1000 files and folders, 5 GB.

Exit codes: 0 packed, or unchanged; 2 bad input, and nothing was written.
"""

import os
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Sequence

from bootfile.ground import git
from bootfile.ground.errors import BadInput
from common.console.arguments import Parser
from launch import manifests, secret_scan
from launch.bundle import imports, outputs
from launch.bundle.code_folder import REQUIREMENTS, CodeFolder
from launch.explain import human_size


def main(arguments: list[str]) -> int:
    """Pack a job and return the exit code: `python -m launch pack` calls it. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch pack")
    add = parser.add_argument
    add("job", help="the script that is the boot file")
    add(
        "--to",
        required=True,
        metavar="FOLDER|FILE.py",
        help="folder for the snapshot; a name that ends in .py: one file",
    )
    add(
        "--allow_secret",
        action="append",
        default=[],
        metavar="PATH",
        help="file without secrets, as the error names it; repeatable",
    )
    add("--code_dir", metavar="FOLDER", help="pack this folder above the script (default: the script's own)")
    pack(**vars(parser.parse_args(arguments)))
    return 0


def pack(job: str, to: str, allow_secret: Sequence[str] = (), code_dir: str | None = None) -> str:
    """Make the snapshot of a job in the folder `to`, or as the file `to` if its name ends in .py, print the
    kept and the skipped files, and return its path. Raises BadInput; then nothing is written."""
    if not os.path.isfile(job) or not job.endswith(".py"):
        raise BadInput(f"{job}: expected a .py file as boot file")
    if zipfile.is_zipfile(job):
        raise BadInput(f"{job} was written by pack: it is the boot file as it is")
    code = CodeFolder(job, to, code_dir)
    code.check_modules_above()
    if os.path.realpath(to) == os.path.realpath(code.root):
        raise BadInput(f"--to {to} is the folder that is packed: name another one, in it or elsewhere")
    contents: dict[str, str | bytes] = {**code.files}
    listed = _find_list(code.root)
    of_script = _find_list(os.path.dirname(os.path.abspath(job)))
    if of_script and of_script != listed:
        print(f"not used: {of_script}; the list of packages is that of {code.root}")
    text = ""  # of the dependency list
    left_out: list[str] = []
    if listed:
        packages = imports.find_packages(code.root, code.job_path)
        text, left_out = imports.adapt_list(listed, packages)
    if text:
        contents[REQUIREMENTS[0]] = text.encode()
    _refuse_secrets(contents, allow_secret)
    # the name of the snapshot, before its digest: from the job's path, so jobs do not mix
    path = code.job_path.removeprefix("jobs/").removesuffix(".py")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path).strip("-.") or "job"  # for every shell, URL and store
    manifest = manifests.describe(name, contents, code.job_path, git.describe_tree(code.root))
    _print_files(manifest, code.skipped)
    if left_out:
        print(f"{REQUIREMENTS[0]} is without {', '.join(left_out)}")
    if to.endswith(".py"):
        target, made = to, outputs.write_file(to, manifest, contents, imports.list_names(text))
    else:
        target, made = outputs.write_folder(to, manifest, contents)
    git_tree = manifest["git"] or "none"
    print(
        f"{'packed' if made else 'unchanged'}={target} job={code.job_path} digest={manifest['digest']} "
        f"git={git_tree}"
    )
    return target


def _find_list(folder: str) -> str | None:
    """Return the path of the dependency list in a folder; None if it has none."""
    return next(filter(os.path.isfile, [os.path.join(folder, name) for name in REQUIREMENTS]), None)


def _refuse_secrets(contents: dict[str, str | bytes], allowed: Sequence[str]) -> None:
    """Raise BadInput if a file looks like a secret, before anything is written. allowed: --allow_secret."""
    unknown = {*allowed} - contents.keys()
    if unknown:
        raise BadInput(f"--allow_secret {unknown.pop()}: no file of this path is packed")
    scanned = {path: secret_scan.scan(path, contents[path]) for path in contents if path not in allowed}
    refused = [secret_scan.describe(path, findings) for path, findings in scanned.items() if findings]
    if not refused:
        return
    what = refused[0]
    if len(refused) > 1:  # the error is one line: the files have theirs above it
        what = f"{len(refused)} files, one in each line above"
        print(*(f"refused  {line}" for line in refused), sep="\n", file=sys.stderr)
    raise BadInput(
        f"suspected secrets would be uploaded: {what}; remove it, name the file in .jobignore, or, if it is "
        "not a secret, pass --allow_secret PATH"
    )


def _print_files(manifest: dict, skipped: dict[str, str]) -> None:
    """Print one line for each kept file or folder at the top, and for each rule that skips files."""
    kept = defaultdict(list)  # name -> sizes
    rules = defaultdict(list)  # rule -> paths
    for file in manifest["files"]:
        top, slash, _ = file["path"].partition("/")
        name = file["path"] if file["path"] == manifest["job"] else top + slash  # the job has its own line
        kept[name].append(file["size"])
    for path, rule in skipped.items():
        rules[rule].append(path)
    for name, sizes in kept.items():
        print(f"kept     {name} files={len(sizes)} size={human_size(sum(sizes))}")
    # all of them: a file that is missing on the platform is looked for here
    for rule, paths in rules.items():
        print(f"skipped  {' '.join(paths)}: {rule}")
