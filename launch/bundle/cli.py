"""Pack a job for upload: the code folder for a platform, with only what the job needs.

    python -m launch pack jobs/train_ddp.py --to packed                  packed/train_ddp-<12 hex digits>/
    python -m launch pack jobs/train_ddp.py --to packed --single_file    packed/train_ddp-<12 hex digits>.py

`pack` keeps common/, datasets/, jobs/, and a pip-requirements.txt. This list omits torch, torchvision,
torchaudio, triton and nvidia-*, which the platform's image has. For a script outside a Bootfile repository
`pack` keeps the script's folder. It skips hidden files, caches, tests, weights, folders of data and results,
and files that .jobignore names (in the code folder, in gitignore's syntax; `!pattern` includes again).
Skipped files are listed with their rule.

The digits are those of a digest of the content; manifest.json lists the files with sizes and SHA-256. The
same content has the same name, and packing it again changes nothing. If a text looks like a key, a token or a
password, an error names file and line. The platform's limits are checked: 1000 files and folders, 5 GB, 32
levels.

A single file unpacks itself into a private temporary folder and removes it at the end; name a folder for its
results. A process that is killed leaves its folder (about 1 MB).

Exit codes: 0 packed, or unchanged; 2 bad input, and nothing was written.
"""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from common.console.arguments import Parser
from common.ground.exits import BadInput
from launch import secret_scan
from launch.bundle import requirements, single_file, snapshot
from launch.bundle.code_folder import REQUIREMENTS, CodeFolder, Skipped
from launch.bundle.snapshot import Content
from launch.explain import human_size

_SHOWN = 5  # findings in an error, skipped files of one rule


class Packed(NamedTuple):
    """A snapshot. path: its folder or file. made: False if it existed. manifest: the content of
    manifest.json."""

    path: str
    made: bool
    manifest: dict


def main(argv: list[str]) -> int:
    """Pack a job, list the kept and skipped files, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch pack"
    add = parser.add_argument
    add("job", help="the script that is the boot file")
    add("--to", required=True, metavar="FOLDER", help="folder for the snapshot")
    add("--single_file", action="store_true", help="make one .py, for consoles that accept one script")
    add(
        "--allow_secret", action="append", default=[], metavar="PATH",
        help="file without secrets, as the error names it; repeatable",
    )  # fmt: skip
    add("--code_dir", metavar="FOLDER", help="pack this folder above the script (default: the script's own)")
    add("--keep_torch", action="store_true", help="keep torch and nvidia-* in pip-requirements.txt")
    args = parser.parse_args(argv)
    packed = pack(
        args.job, args.to, args.single_file, args.allow_secret, args.keep_torch, True, args.code_dir
    )  # fmt: skip
    git = packed.manifest["git"] or {"commit": None, "dirty": None}
    print(
        f"{'packed' if packed.made else 'unchanged'}={packed.path} job={packed.manifest['job']} "
        f"digest={packed.manifest['digest']} commit={git['commit']} dirty={git['dirty']}"
    )
    return 0


def pack(
    job: str,
    to: str,
    one_file: bool = False,
    allowed: Sequence[str] = (),
    keep_torch: bool = False,
    verbose: bool = False,
    code_dir: str | None = None,
) -> Packed:
    """Make the snapshot of a job in the folder `to`. The arguments are those of the command.

    verbose: print the kept and skipped files. Raises BadInput; then nothing is written.
    """
    if not os.path.isfile(job) or not job.endswith(".py"):
        raise BadInput(f"{job}: expected a .py file as boot file")
    code = CodeFolder(job, to, code_dir)
    if os.path.realpath(to) == os.path.realpath(code.root):
        raise BadInput(f"--to {to} is the folder that is packed: name another one, in it or elsewhere")
    contents = [Content(file.path, file.source) for file in code.files]
    listed, left_out, sources = requirements.find(code.root), [], [file.path for file in code.files]
    if listed:
        text, left_out = requirements.adapt(listed, keep_torch)
        sources.append(os.path.relpath(listed, code.root))
        contents += [Content(REQUIREMENTS[0], text.encode())] if text else []
    _refuse_secrets(contents, allowed)
    git = snapshot.read_git_state(code.root, sources)
    path = code.job_path.removeprefix("jobs/").removesuffix(".py")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path).strip("-.") or "job"  # for every shell, URL and store
    manifest = snapshot.describe(name, contents, code.job_path, git)
    if verbose:
        _print_files(manifest, code.skipped)
        if left_out:
            print(f"{REQUIREMENTS[0]} is without {', '.join(left_out)}")
    if one_file:
        return Packed(single_file.write(to, manifest, contents), True, manifest)
    return Packed(*snapshot.write(to, manifest, contents), manifest)


def _refuse_secrets(contents: list[Content], allowed: Sequence[str]) -> None:
    unknown = {*allowed} - {content.path for content in contents}
    if unknown:
        raise BadInput(f"--allow_secret {unknown.pop()}: no file of this path is packed")
    findings = [
        finding
        for path, source in contents
        if path not in allowed
        for finding in secret_scan.scan(path, source)
    ]
    if findings:
        more = f" and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
        raise BadInput(
            f"suspected secrets would be uploaded: {', '.join(findings[:_SHOWN])}{more}; "
            "remove it, name the file in .jobignore, or, if it is not a secret, pass --allow_secret PATH"
        )


def _print_files(manifest: dict, skipped: list[Skipped]) -> None:
    """Print one line for each kept file or folder at the top, and for each rule that skips files."""
    kept, rules = defaultdict(list), defaultdict(list)
    for file in manifest["files"]:
        top, slash, _ = file["path"].partition("/")
        kept[file["path"] if file["path"] == manifest["job"] else top + slash].append(file["size"])
    for item in skipped:
        rules[item.rule].append(item.path)
    for name, sizes in kept.items():
        print(f"kept     {name} files={len(sizes)} size={human_size(sum(sizes))}")
    for rule, paths in rules.items():
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        print(f"skipped  {' '.join(paths[:_SHOWN])}{more}: {rule}")
