"""The one-file receipt that users copy does what the package does: the same records, the same verdicts."""

import importlib.util
import subprocess
import sys
import time

import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.ground.files import sha256_file
from bootfile.receipt import cli, loop_receipt
from tests.conftest import run

DATA = torch.arange(72.0).view(24, 3) / 7
SHA256 = {  # digests of the files of the run "whole", as version 0.31 has written them
    "receipt-0.bin": "0d2e55ac7ea701c82c0b96c7519ee6b24d52094c80062afc2b140f7866a47ced",
    "samples-0.bin": "417e282d9f3e75641fd6bf676423e6b597a7a3a2766b6c6addef2d7f12302386",
}


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    """Return the module of the file that `launch new --receipt` writes."""
    folder = tmp_path_factory.mktemp("project")
    run("-m", "launch", "new", "--receipt", folder)
    spec = importlib.util.spec_from_file_location("receipt_in_one_file", folder / "receipt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def order(epoch):
    """Return all ids, in another order for each epoch."""
    return [number * (5, 7, 11, 13)[epoch] % len(DATA) for number in range(len(DATA))]


def share(rank):
    """Return the ids of one of two ranks: a half of each batch of 4."""
    return [number for place, number in enumerate(order(0)) if place % 4 // 2 == rank]


def record(module, folder, epochs, **options):
    """Record a start of a program that reads these epochs: lists of ids, in batches of 4."""
    receipt = module.Receipt(str(folder), ids="id", **options)
    for ids in epochs:
        chosen = torch.tensor(ids)
        size = 4 // options.get("world_size", 1)
        batches = [{"id": part, "x": DATA[part]} for part in chosen.split(size)]
        assert len(list(receipt.watch(batches))) == len(batches)


RUNS = {  # name: the starts of a run: (its epochs, options of the receipt)
    "whole": [([order(0), order(1), order(2)], {})],
    "exact": [([order(0), order(1)[:12]], {"first_step": 0}), ([order(1)[8:], order(2)], {"first_step": 8})],
    "again": [([order(0), order(1)[:12]], {}), ([order(1), order(2)], {})],
    "reordered": [([order(0)], {"first_step": 0}), ([order(1)[::-1], order(2)], {"first_step": 6})],
    "gap": [([order(0)], {"first_step": 0}), ([order(1)[12:], order(2)], {"first_step": 9})],
    "same order": [([order(0), order(0)], {})],
    "twice": [([order(0)[:12] * 2, order(1)], {})],
    "seed 1": [([order(3)], {"seed": 1})],
    "two ranks": [([share(rank)], {"rank": rank, "world_size": 2}) for rank in range(2)],
}


@pytest.fixture(scope="module")
def recorded(one_file, tmp_path_factory):
    """Return the folder of RUNS, after both writers have written the same bytes."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for writer, module in (("package", loop_receipt), ("file", one_file)):
            for name, starts in RUNS.items():
                for number, (epochs, options) in enumerate(starts):
                    patch.setattr(time, "time_ns", lambda number=number: 10**18 + number)
                    record(module, folder / writer / name, epochs, **options)
    written = sorted(path for path in (folder / "package").rglob("*.bin"))
    assert len(written) == 2 * (len(RUNS) + 1)  # one run has two ranks
    for path in written:
        assert path.read_bytes() == (folder / "file" / path.relative_to(folder / "package")).read_bytes()
    assert {name: sha256_file(str(folder / "package" / "whole" / name)) for name in SHA256} == SHA256
    return folder / "package"


def verdict(main, words, capsys):
    """Return (exit code, lines) of a program, or (2, the error)."""
    try:
        code = main(words)
    except BadInput as error:
        return 2, f"error: {error}\n"
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", RUNS)
def test_the_verdicts_are_the_same(name, one_file, recorded, capsys, monkeypatch):
    monkeypatch.chdir(recorded)
    commands = [[name], *([name, option] for option in ("--repeats", "--same_order", "--augmented"))]
    commands += [[name, other] for other in RUNS]
    codes = set()
    for words in commands:
        expected = verdict(cli.main, words, capsys)
        assert verdict(one_file.main, words, capsys) == expected
        codes.add(expected[0])
    assert len(codes) > 1


def test_errors_are_the_same(one_file, recorded, capsys, monkeypatch):
    monkeypatch.chdir(recorded)
    for words in ([], ["a", "b", "c"], ["whole", "--nope"], ["whole", "whole", "--repeats"]):
        expected = verdict(cli.main, words, capsys)
        assert expected[0] == 2 and expected[1].count("\n") == 1
        assert verdict(one_file.main, words, capsys) == expected


@pytest.mark.thorough
def test_it_needs_only_torch_and_numpy(one_file):
    """Also if it is not next to Bootfile."""
    code = "import runpy, sys; before = set(sys.modules); runpy.run_path(sys.argv[1]); print(*sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code, one_file.__file__], text=True, cwd="/")
    packages = {name.partition(".")[0] for name in printed.split()}
    assert {"torch", "numpy"} <= packages and not packages & {"bootfile", "common", "datasets", "launch"}
