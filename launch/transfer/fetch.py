"""Fetch the outputs of a job, or any folder, from an object store.

    python -m launch fetch s3://bucket/outputs | obs://... | RECORD --to FOLDER [--yes]

RECORD: the record of a job that `submit` created; its output train_url is fetched.
Writes are atomic, and every file is compared with the sha256 that was stored with it, or with the list that
`upload` or the job wrote if the store keeps none. Files that are already in FOLDER are not fetched again. Run
an interrupted fetch again to continue it. Nothing in FOLDER is removed. Files in FOLDER with other content
are listed, and replaced if you agree; without a terminal, only with --yes. Files that would be hidden in the
home folder, such as ~/.bashrc, are refused.

Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or
boto3's usual files. Address: AWS_ENDPOINT_URL_S3 or OBS_REGION.

Exit codes: 0 all files are fetched, 1 the answer was no, 2 bad input or the store refused, 130 interrupted.
"""

import contextlib
import filecmp
import hashlib
import os
import tempfile
import time

from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import sweep
from common.checkpoint import output_list
from common.console.arguments import Parser
from common.ground.files import has_digest
from common.object_store import sync
from common.object_store.errors import of_the_disk
from common.object_store.location import check_keys, make_path
from common.object_store.store import Object, ObjectStore
from launch import explain, manifests, records
from launch.transfer import describe, show_progress


def main(arguments: list[str]) -> int:
    """Fetch a folder, print a summary, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch fetch")
    parser.add_argument("url", metavar="URL", help="s3://bucket/prefix, obs://bucket/prefix, or RECORD")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="folder for the files")
    parser.add_argument("--yes", action="store_true", help="replace files with other content without asking")
    args = parser.parse_args(arguments)
    url = args.url if "://" in args.url else _output_of(args.url)
    return _fetch(url, args.to, args.yes)


def _fetch(url: str, to: str, yes: bool) -> int:
    """Fetch what is below a URL into a folder, print a summary, and return the exit code. yes: replace files
    without asking. Raises BadInput."""
    begin = time.monotonic()
    with ObjectStore(url) as store:
        # the lists and leases with which a job coordinates its uploads are useful in the store only
        wanted = [entry for entry in store.list() if not os.path.basename(entry.key).startswith(".bootfile-")]
        if not wanted:
            raise BadInput(f"no files below {url}: is the URL right, and has the job saved results yet?")
        # Before anything is written: a key such as ../x would leave the folder.
        check_keys((entry.key for entry in wanted), url)
        paths = {entry.key: make_path(to, entry.key) for entry in wanted}
        home = os.path.realpath(os.path.expanduser("~"))
        is_visible = _first_below(home, to) in (".", "..")  # else the user has named a folder in it
        for path in paths.values():
            first = _first_below(home, path)
            if is_visible and first.startswith(".") and first != "..":
                raise BadInput(f"{url} has {path}, a setting of this user: pass --to a folder of its own")
        listed = _read_lists(store, wanted)

        def is_here(entry: Object) -> bool:
            """Return whether a file needs no fetch: sync.compare() calls it in its threads."""
            return _is_here(store, paths[entry.key], entry, listed)

        missing, unchanged = sync.compare(store, wanted, is_here)
        # The files of the user that would be lost are shown before the question.
        others = sorted(filter(os.path.isfile, (paths[entry.key] for entry in missing)))
        for path in others:
            print(f"replace {printable(path)}")
        question = f"replace {len(others)} files in {to} with other content"
        if others and not explain.ask(question, yes):
            print("nothing was fetched")
            return 1
        for folder in set(map(os.path.dirname, paths.values())):
            sweep(folder)  # what an interrupted fetch has left
        unverified: list[str] = []

        def verify(entry: Object, has_digest_of_store: bool) -> None:
            """Compare a file of a store that keeps no digest with the lists of its writers, in a thread."""
            if has_digest_of_store:
                return
            if entry.key not in listed:
                unverified.append(entry.key)
                return
            with open(paths[entry.key], "rb") as file:
                if not has_digest(file, listed[entry.key]):
                    place = store.location.url(entry.key)
                    raise BadInput(f"{place} is not the file that the list at the URL names")

        with show_progress("fetching", missing) as bar:
            sync.fetch(store, to, missing, bar, after=verify)
    seconds = time.monotonic() - begin
    print(f"fetched {describe(missing)} in {seconds:.1f} s to {to}")
    if unverified:
        print(
            f"the store keeps no digest of {len(unverified)} of these files: only their sizes were compared, "
            f"first: {printable(min(unverified))}"
        )
    print(f"unchanged {describe(unchanged)}")
    return 0


def _first_below(folder: str, path: str) -> str:
    """Return the first component of a path, relative to a folder, links resolved."""
    return os.path.relpath(os.path.realpath(path), folder).split(os.sep)[0]


def _output_of(text: str) -> str:
    """Return the URL of a recorded job's output. Raises BadInput."""
    record = records.find(text)
    if not record:
        raise BadInput(
            f"{text} is not s3://bucket/prefix or obs://bucket/prefix, and not the id or the record of a job "
            f"that was submitted from here ({records.FOLDER})"
        )
    if "train_url" not in record["outputs"]:
        raise BadInput(f"{text}: that job has no output train_url (outputs: {', '.join(record['outputs'])})")
    return record["outputs"]["train_url"]


def _read_lists(store: ObjectStore, entries: list[Object]) -> dict[str, str]:
    """Return the sha256 of the files that `upload` or a job has listed, for a store that keeps no digest."""
    sizes = {entry.key: entry.size for entry in entries}
    listed = {}
    # The list of the job comes last: it may have written files again that `upload` had listed.
    for name in (manifests.NAME, output_list.NAME):
        content, _ = store.read_version(name)
        with contextlib.suppress(ValueError):
            files = output_list.parse(content).items()
            # an object of another size was replaced since
            listed |= {path: file.sha256 for path, file in files if file.size == sizes.get(path)}
            listed[name] = hashlib.sha256(content).hexdigest()
    return listed


def _is_here(store: ObjectStore, path: str, entry: Object, listed: dict[str, str]) -> bool:
    """Return whether the local file equals the object: by a digest, or by its content if there is none."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) != entry.size:
            return False
        stored = store.head(entry.key)
        digest = (stored and stored.digest) or listed.get(entry.key)
        # the only proof is the content itself: slow, but nothing is replaced in vain
        if stored and not digest:
            with tempfile.TemporaryDirectory() as folder:
                copy = os.path.join(folder, "copy")
                store.fetch(entry.key, copy, entry.size)
                return filecmp.cmp(path, copy, shallow=False)
        with open(path, "rb") as file:
            return digest is not None and has_digest(file, digest)
    except OSError as error:
        raise of_the_disk(error, path) from error
