"""Hugging Face's `datasets` can be used next to our package of the same name."""

import importlib.util
import re
from importlib import metadata

import pytest

from bootfile.receipt import receipt
from tests.conftest import ROOT, environment, refused, run
from tests.jobs.test_train_own import OPTIONS, write_job

try:
    SITE = metadata.distribution("datasets").locate_file("")
except metadata.PackageNotFoundError:
    SITE = None
installed = pytest.mark.skipif(
    SITE is None, reason="Hugging Face's package is not installed: pip install datasets"
)
ENVIRONMENT = environment(PYTHONPATH=str(SITE), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
OURS = {
    path.stem
    for path in (ROOT / "datasets").iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
}


@installed
def test_the_two_packages_have_no_name_in_common():
    theirs = {path.stem for path in (SITE / "datasets").iterdir()}
    assert OURS & theirs == {"__init__"}
    code = (
        "import datasets; before = set(dir(datasets)); datasets.Dataset; print(*set(dir(datasets)) - before)"
    )
    names = set(run("-c", code, env=ENVIRONMENT, fresh=True).stdout.split())
    assert "load_dataset" in names and OURS & names <= {"run_installed"}


@pytest.mark.thorough
@installed
@pytest.mark.parametrize("first", [
    "from datasets import load_dataset",
    "import datasets.table",
    "from datasets.utils import logging",
    "import datasets; datasets.__version__",
])  # fmt: skip
def test_any_first_use_imports_each_module_once(first):
    code = (
        f"import sys, bootfile.sampling.philox\n{first}\n"
        "import datasets, datasets.arrow_dataset, datasets.table\n"
        "assert datasets.Dataset is datasets.arrow_dataset.Dataset\n"
        "assert datasets.table.Table is sys.modules['datasets.arrow_dataset'].Table\n"
        "assert datasets.table.__spec__.loader.get_filename() == datasets.table.__file__\n"
        "print(bootfile.sampling.philox.__file__, datasets.__version__, hasattr(datasets, 'nonsense'))"
    )
    file, version, has_nonsense = run("-c", code, env=ENVIRONMENT, fresh=True).stdout.split()
    assert file == str(ROOT / "bootfile/sampling/philox.py")
    assert version == metadata.version("datasets") and has_nonsense == "False"


@pytest.mark.thorough
@installed
def test_a_failed_import_gives_its_reason_each_time():
    code = """
import sys, datasets
sys.modules["pyarrow"] = None
for use in ("from datasets import load_dataset", "import datasets.table") * 2:
    try:
        exec(use)
    except ImportError as error:
        print("pyarrow" in str(error))
del sys.modules["pyarrow"]
from datasets import load_dataset
"""
    assert run("-c", code, env=ENVIRONMENT, fresh=True).stdout.split() == ["True"] * 4


@pytest.mark.thorough
@installed
def test_threads_can_import_at_the_same_time():
    code = """
import threading, datasets
start, done = threading.Barrier(3), []
def use(text):
    start.wait()
    exec(text)
    done.append(text)
uses = ("from datasets import Dataset", "from datasets import load_dataset", "datasets.config")
threads = [threading.Thread(target=use, args=(text,)) for text in uses]
for thread in threads:
    thread.start()
for thread in threads:  # no module can be imported while the program ends
    thread.join()
print(len(done))
"""
    assert run("-c", code, env=ENVIRONMENT, fresh=True).stdout == "3\n"


@pytest.mark.thorough
@installed
def test_its_data_sets_work_in_a_job(tmp_path):
    """Also in worker processes, in a process that does not fork, and from files."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import multiprocessing, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler

def double(row):
    return {{"x": [2 * each for each in row["x"]]}}

def add_up(data):
    return float(data["x"][:].sum())

def main():
    from datasets import Dataset, load_dataset, load_from_disk
    os.chdir({str(tmp_path)!r})
    rows = {{"x": [[float(n), n + 0.5] for n in range(60)], "label": [n % 3 for n in range(60)]}}
    Dataset.from_dict(rows).to_parquet("rows.parquet")
    data = load_dataset("parquet", data_files="rows.parquet", split="train", cache_dir="cache")
    data = data.map(double, num_proc=2).with_format("torch")
    data.save_to_disk("saved")
    assert load_from_disk("saved")["x"][59].tolist() == [118.0, 119.0]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(add_up, [data]) == add_up(data) == 2 * sum(map(sum, rows["x"]))
    batches = []
    for workers in (0, 2):
        sampler = BatchSampler(60, 20, 5, 1, None)
        loader = map_style_loader(data, sampler, torch.device("cpu"), workers=workers)
        batches.append([(inputs["x"], labels) for inputs, labels in loader])
        loader.close()
    for (x, labels), (x2, labels2) in zip(*batches, strict=True):
        assert torch.equal(x, x2) and torch.equal(labels, labels2)
    print("batches", len(batches[0]))

if __name__ == "__main__":
    main()
""")
    assert "batches 3\n" in run(program, env=ENVIRONMENT, fresh=True).stdout


@installed
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="accelerate is not installed")
def test_the_trainer_of_transformers_takes_its_data_sets(tmp_path):
    code = f"""
import torch, transformers, datasets
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3)
    def forward(self, x, labels):
        logits = self.head(x)
        return {{"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}}
rows = {{"x": [[n, n + 0.5] for n in range(8)], "labels": [0, 1, 2, 0, 1, 2, 0, 1], "unused": ["a"] * 8}}
options = {{"max_steps": 2, "per_device_train_batch_size": 4, "report_to": []}}
arguments = transformers.TrainingArguments({str(tmp_path)!r}, **options)
trainer = transformers.Trainer(Model(), arguments, train_dataset=datasets.Dataset.from_dict(rows))
print("steps", trainer.train().global_step)
"""
    assert "steps 2\n" in run("-c", code, env=ENVIRONMENT, fresh=True).stdout


@installed
@pytest.mark.thorough
def test_the_example_of_the_guide_trains_and_resumes(tmp_path):
    guide = (ROOT / "guides" / "own_data.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(from datasets import load_dataset\n.*?)^```$", guide, re.M | re.S)
    data = f"""
    import functools
    from bootfile.loaders.map_style import map_style_loader
    # - train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    {example.replace("DATA/", f"{tmp_path}/DATA/").replace(chr(10), chr(10) + "    ")}
    """
    model = """
    # -
    # - model = models.resnet18(train_set.channels, train_set.classes, args.width)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 3)
        def forward(self, inputs):
            return self.head(inputs["x"])
    model = Model()
    """
    criterion = """
    # - criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    """
    job = write_job(tmp_path / "job", (data, model, criterion), distributed=False)
    (tmp_path / "DATA").mkdir()
    code = (
        "import datasets\n"
        "rows = {'x': [[n / 99, n % 2] for n in range(99)], 'label': [n % 3 for n in range(99)]}\n"
        f"datasets.Dataset.from_dict(rows).to_parquet({str(tmp_path / 'DATA/0.parquet')!r})"
    )
    options = {"env": ENVIRONMENT | {"HF_HOME": str(tmp_path / "cache")}}
    run("-c", code, **options)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(job, *OPTIONS, "--batch_size=16", f"--output_dir={whole}", **options)
    run(job, *OPTIONS, "--batch_size=16", "--max_steps=7", f"--output_dir={stopped}", **options)
    resumed = run(job, *OPTIONS, "--batch_size=16", f"--output_dir={stopped}", **options).stdout
    assert re.search(r"resumed from .* step 7 of 15", resumed)
    assert (stopped / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()


def test_a_package_that_is_not_installed_is_one_line():
    job = "from common.distributed.entry import entry\nfrom datasets import load_dataset"
    assert "datasets.load_dataset" in (line := refused("-S", "-c", job)) and "pip install datasets" in line
    code = (
        "import datasets\n"
        "try:\n    from datasets import Dataset\n"
        "except ImportError:\n    print(hasattr(datasets, 'Dataset'), hasattr(datasets, '__version__'))"
    )
    assert run("-S", "-c", code).stdout == "False False\n", "other packages ask so whether it is installed"


@installed
def test_a_module_of_ours_does_not_load_it():
    """Python asks the package for the name first: `from datasets import files` is an import of a module."""
    code = "import sys; from datasets import files; print('datasets.arrow_dataset' in sys.modules)"
    assert run("-c", code, env=ENVIRONMENT, fresh=True).stdout == "False\n"
