"""Fill, check, list and empty caches of samples: packs in a folder of this node, or a Redis or Valkey server.

    python -m launch cache preload --data_url DIR --to PLACE    store all samples permanently
    python -m launch cache check --data_url DIR --to PLACE      compare all stored samples with the files
    python -m launch cache ls --to SERVER                       list data sets, users, free space
    python -m launch cache rm --to SERVER DATASET | --all       delete data sets

DIR: as for jobs/imagenet.py. PLACE: a folder of packs (in /dev/shm or /cache), as for its --pack; or
SERVER, redis://[user@]host[:port] or rediss://, as for its --cache. The password is in the variable
BOOTFILE_CACHE_PASSWORD, or in the file that BOOTFILE_CACHE_PASSWORD_FILE names, never in an argument. An
interrupted preload continues where it stopped. Its samples stay until rm. Each pack is a folder: list and
delete packs with ls and rm -r.

Exit codes: 0 done (check: all samples are stored and equal), 1 incomplete (preload: the server is full or
lost its data; check: a sample is missing or differs), 2 bad input, or the server does not answer.
"""

import argparse
import contextlib
import functools
import os
import re
import sys
from typing import Any

from tqdm import tqdm

from bootfile.ground.errors import BadInput
from bootfile.machine.cores import available_cores
from common.console import arguments
from datasets.folders import image_folder, listing
from datasets.folders.walk import progress
from datasets.stores import connection, forms, redis_store
from datasets.stores.connection import Unavailable
from launch.cache import places
from launch.cache.places import Packs, Shared


def main(argv: list[str]) -> int:
    """Run a verb and return the exit code: `python -m launch cache` calls it. Raises BadInput."""
    verb, *rest = argv or [""]
    if verb in ("-h", "--help"):
        print(__doc__)
        return 0
    if verb not in VERBS:
        raise BadInput(f"unknown verb {verb!r}, expected one of {', '.join(VERBS)}")
    args = _parse_args(verb, rest)
    try:
        with contextlib.closing(_open(args.to, verb)) as place:
            return VERBS[verb](place, args)
    except Unavailable as error:
        raise BadInput(f"cannot reach the cache: {error}") from error


def preload(place: Packs | Shared, args: argparse.Namespace) -> int:
    """Store all samples of the splits in the place. Return 1 if some are not stored."""
    form = _form(place, args)
    code = 0
    for index in _load_indexes(args):
        print(f"{index.split}: {len(index)} samples", flush=True)
        stored = place.preload(index, form, args.workers)
        missing = len(index) - stored
        note = f", {missing} are not: the server is full, or lost its data" if missing else ""
        print(f"{index.split}: {stored} of {len(index)} samples are stored{note}", flush=True)
        code = code or int(missing > 0)
    return code


def check(place: Packs | Shared, args: argparse.Namespace) -> int:
    """Compare all samples of the splits in the place with the files. Return 1 if some are wrong."""
    form = _form(place, args)
    wrong = 0
    for index in _load_indexes(args):
        with place.reader(index, form) as read:
            wrong += places.check(read, index, form, args.workers)
    return int(wrong > 0)


def ls(place: Shared, args: argparse.Namespace) -> int:
    """Print what a server holds."""
    print(place.describe())
    return 0


def rm(place: Shared, args: argparse.Namespace) -> int:
    """Delete data sets of a server: either all that are named, or none if one of them is in use."""
    if args.all == bool(args.dataset):
        raise BadInput("rm: name a data set, as ls shows it, or pass --all")
    unwanted = place.find(args.dataset or "")
    for data_set in unwanted:
        # all are checked before the first one is deleted
        if data_set.users and not args.force:
            users = ", ".join(data_set.users)
            raise BadInput(f"{data_set.name} is in use: {users}; --force deletes it anyway")
    for data_set in unwanted:
        with progress(data_set.samples, f"removing {data_set.name}") as bar:
            redis_store.remove(place.server, data_set.name, bar.update)
        print(f"removed {data_set.name}  {data_set.title}", flush=True)
    return 0


VERBS = {"preload": preload, "check": check, "ls": ls, "rm": rm}


def _parse_args(verb: str, argv: list[str]) -> argparse.Namespace:
    """Return the options of a verb. Raises BadInput for unknown ones."""
    parser = arguments.Parser(__doc__, f"python -m launch cache {verb}")
    add = parser.add_argument
    number = arguments.positive_int
    add("--to", required=True, metavar="PLACE", help="redis://[user@]host[:port], or a folder")
    if verb in ("preload", "check"):
        add("--data_url", required=True, metavar="DIR", help="folder with train/<class>/*")
        add("--split", choices=("train", "val"), help="default: both")
        add("--cache_dir", default="output_dir/index", help="folder for the index (default: %(default)s)")
        add("--max_bad_images", type=listing.fraction, default=0.0, help="default: 0")
        add("--val_share", type=listing.val_share, default=listing.VAL_SHARE, help="as the job has it")
        add("--splits", type=listing.two_names, metavar="TRAIN,VAL", help="as the job has them")
        add("--form", choices=forms.FORMS, help="form of the samples (default: that of the URL, or decoded)")
        add("--workers", type=number, default=2 * available_cores(), help="threads (default: two per core)")
    if verb == "rm":
        add("dataset", nargs="?", metavar="DATASET", help="name as ls shows it, or its beginning")
        add("--all", action="store_true", help="all data sets")
        add("--force", action="store_true", help="delete them even if a job uses them")
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # names only (see Parser): a value may be a password
        text = " ".join(unknown)
        hint = f"; set the password in {connection.PASSWORD} or {connection.PASSWORD_FILE}"
        raise BadInput(f"{verb}: unknown arguments: {text}{hint if 'pass' in text else ''}")
    return args


def _open(to: str, verb: str) -> Any:
    """Return the place for a verb. Text that may be a URL is never treated as a folder: errors show the name
    of a folder, but no password."""
    is_url = "://" in to or re.match(r"rediss?:", to)
    # a user without the scheme: user:password@host
    may_have_password = "@" in to and not to.startswith(("/", ".", "~")) and not os.path.exists(to)
    if is_url or may_have_password:
        return Shared(to, _log)
    if verb in ("ls", "rm"):
        raise BadInput(f"{verb}: --to {to} is a folder: list and delete its packs with ls and rm -r")
    return Packs(to, _log)


def _log(text: str) -> None:
    """Print a line without breaking a progress bar."""
    tqdm.write(text, file=sys.stderr)


def _load_indexes(args: argparse.Namespace) -> list[image_folder.ImageFolderIndex]:
    """Return the indexes of --split. "val" has the class numbers of "train", as in a job."""
    load = functools.partial(
        image_folder.load,
        args.data_url,
        cache=args.cache_dir,
        max_bad=args.max_bad_images,
        log=_log,
        val_share=args.val_share,
        splits=args.splits,
    )
    # the training set is always indexed: its classes number those of the other split
    train = load("train")
    indexes = [train] if args.split != "val" else []
    return indexes if args.split == "train" else [*indexes, load("val", classes=train.classes)]


def _form(place: Packs | Shared, args: argparse.Namespace) -> str:
    """Return --form or the default of the place. Raises BadInput if the place cannot hold that form."""
    form = args.form or place.form
    if form not in place.forms:
        raise BadInput(f"--form {form} is for folders of packs; expected {' or '.join(place.forms)} here")
    return form
