"""jobs/imagenet.py works at a small size: real and generated folders, backends, restarts, errors."""

import functools
import importlib.util
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from bootfile.ground.errors import BadInput
from bootfile.receipt import receipt
from bootfile.records import read_starts
from common.compute import classifiers
from common.ground import endings
from datasets.folders import image_folder, listing
from datasets.loaders import backends
from tests.conftest import (
    ROOT,
    finish,
    interrupt,
    losses,
    names,
    records,
    refused,
    run,
    run_ranks,
    start,
    wait_until,
)
from tests.support import tars

CPU = torch.device("cpu")
JOB = ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--print_freq=1")
CHECK = functools.cache(classifiers.check)  # most of the refused commands have the same network
HERE = [name for name, reason in backends.reasons(CPU).items() if not reason and name != "synthetic"]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Return (arguments for generated images, which are made once; the cache folder)."""
    cache = tmp_path_factory.mktemp("cache")
    run(*JOB, "--custom_data=true", f"--cache_dir={cache}", "--max_steps=1", "--training_only",
        "--data_backend=threads", f"--output_dir={cache / 'first'}")  # fmt: skip
    return f"--data_url={cache / 'generated'}", f"--cache_dir={cache}"


EPOCH = ("--epochs=1", "--lr=0.01", "--data_backend=threads", "--save_every=4")


def job(generated, output, *more):
    return *JOB, *generated, "--batch_size=64", f"--output_dir={output}", *more


@pytest.fixture(scope="module")
def whole(generated, tmp_path_factory):
    """Return the output of a job of one epoch from the files, which is never interrupted."""
    output = tmp_path_factory.mktemp("whole")
    run(*job(generated, output, *EPOCH))
    return output


def weights(output, epoch) -> dict:
    return torch.load(Path(output) / f"epoch_{epoch}.pth", weights_only=True)


@pytest.mark.thorough
def test_a_restart_with_another_backend_and_number_of_processes(generated, tmp_path):
    """A job that resumes in the second epoch, from a pack, in two processes, has the same data."""
    arguments = ("--epochs=2", "--lr=0.01", "--trivial_augment", "--color_jitter=0.4", "--random_erasing=0.5",
                 "--mixup=0.2", "--cutmix=1", "--first_image_size=16")  # fmt: skip
    run(*job(generated, tmp_path / "whole", *arguments, "--data_backend=threads"))
    stopped = job(generated, tmp_path / "both", *arguments, "--data_backend=pytorch", "--workers=1")
    interrupt(*stopped, at="^epoch=2 step=11/", by=signal.SIGTERM)  # 9 steps from its end
    pack = f"--pack={tmp_path / 'pack'}"
    both = job(generated, tmp_path / "both", *arguments, "--data_backend=threads", pack)
    printed = run_ranks(*both)[0].stdout
    assert "resumed from" in printed
    one, other = ((tmp_path / name / receipt.FILE).read_bytes() for name in ("whole", "both"))
    assert one == other
    assert [line["step"] for line in records(tmp_path / "both") if "val_acc" in line] == [10, 20]


@pytest.mark.thorough
def test_small_jpegs_train_and_resume(generated, whole, tmp_path):
    """A run from a pack of JPEGs that was killed: the receipt of a whole run from the files."""
    small = (*EPOCH, "--training_only", f"--pack={tmp_path / 'packs'}", "--pack_form=jpeg")
    killed = start(*job(generated, tmp_path / "killed", *small))
    wait_until((tmp_path / "killed" / "checkpoints" / "step_4.pt").exists, killed)
    killed.kill()
    finish(killed, -signal.SIGKILL)
    [made] = (tmp_path / "packs").glob("*-jpeg256.pack")
    parts = {part: part.stat().st_mtime_ns for part in made.glob("*.arrow")}
    printed = run(*job(generated, tmp_path / "killed", *small)).stdout
    assert "resumed from" in printed and "packing" not in printed
    assert parts and {part: part.stat().st_mtime_ns for part in made.glob("*.arrow")} == parts
    assert (tmp_path / "killed" / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()


NO_COMPILER = """
import runpy, sys, torch
def fail(*_, **__): raise RuntimeError("no compiler\\nhere")
torch.compile = fail
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.thorough
def test_what_cannot_be_compiled_trains_as_it_is(generated, whole, tmp_path):
    options = (*EPOCH, "--training_only", "--compile=true")
    printed = run("-c", NO_COMPILER, *job(generated, tmp_path, *options)).stdout
    assert names(printed, "not compiled", "RuntimeError: no compiler here")
    assert losses(tmp_path) == losses(whole)


@pytest.mark.thorough  # compiling takes a minute or more
def test_compiled_it_learns_the_same(generated, tmp_path):
    options = ("--max_steps=4", "--training_only", "--processes_per_node=2", "--data_backend=threads",
               "--arch=resnet18", "--lr=0.0001")  # fmt: skip
    run(*job(generated, tmp_path / "plain", *options))
    printed = run(*job(generated, tmp_path / "compiled", *options, "--compile=true"), timeout=900).stdout
    assert "not compiled" not in printed and re.search(r"^compilation +\d", printed, re.MULTILINE)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    first, second = ((tmp_path / name / receipt.FILE).read_bytes() for name in ("plain", "compiled"))
    assert first == second


@pytest.mark.thorough
def test_evaluation_alone_gives_the_figures_of_the_training(generated, whole, tmp_path):
    said = [line for line in records(whole) if "val_acc" in line][-1]
    checkpoint = whole / "checkpoints" / "step_10.pt"
    printed = run(
        *job(generated, tmp_path / "evaluated", "--epochs=1", "--data_backend=threads", "--evaluate",
             f"--resume={checkpoint}")
    ).stdout  # fmt: skip
    found = re.search(r"\nval_loss=(\S+) val_acc=(\S+) .*val_count=160\n", printed)
    assert float(found[1]) == pytest.approx(said["val_loss"], rel=1e-3)
    assert float(found[2]) == pytest.approx(said["val_acc"], abs=1e-6)
    assert not (tmp_path / "evaluated" / "checkpoints").exists()
    assert said["val_top5"] >= said["val_acc"] == pytest.approx(said["val_class_acc"])  # 16 images a class
    by_class = json.loads((whole / "confusion.json").read_text())
    assert by_class["count"] == [16] * 10 and sum(by_class["correct"]) == round(160 * said["val_acc"])
    assert (whole / "classes.json").read_text() == json.dumps(
        [f"class_{label}" for label in range(10)]
    ) + "\n"
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    run(
        *job(generated, whole, "--epochs=1", "--data_backend=threads", "--evaluate",
             f"--weights={whole / 'best.pth'}", "--processes_per_node=2", "--seed=3",
             "--ema=0.9")
    )  # fmt: skip
    after = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert before == after, "evaluating in a training's folder leaves it as it is"
    missing = run(*job(generated, tmp_path / "evaluated", "--evaluate"), code=2)
    assert names(missing.stderr, "error: --evaluate", "--weights FILE", "--resume PATH")


@pytest.mark.thorough
def test_a_small_test_set_alone_is_evaluated(generated, whole, tmp_path):
    """The batch size does not matter. The labels are those of the training, also if the set lacks a class."""
    data, (val,) = tmp_path / "data", Path(generated[0].partition("=")[2]).glob("val")
    shutil.copytree(val, data / "val")
    found = []
    for classes in (10, 9):
        if classes == 9:
            shutil.rmtree(data / "val" / "class_0")
        printed = run(
            *JOB, f"--data_url={data}", "--data_backend=threads", "--evaluate",
            f"--weights={whole / 'best.pth'}", f"--cache_dir={tmp_path / 'index'}",
        ).stdout  # fmt: skip
        found.append(re.search(r"\nval_loss=(\S+) val_acc=(\S+) .*val_count=(\d+)\n", printed).groups())
        assert "warning" not in printed
    said = [line for line in records(whole) if "val_acc" in line][-1]
    assert float(found[0][1]) == pytest.approx(said["val_acc"], abs=1e-6) and found[0][2] == "160"
    by_class = json.loads((whole / "confusion.json").read_text())["correct"]
    assert float(found[1][1]) == pytest.approx(sum(by_class[1:]) / 144, abs=1e-6) and found[1][2] == "144"
    assert [path.name.partition("-")[0] for path in (tmp_path / "index").glob("*-*[0-9a-f]")] == ["val"]


@pytest.mark.thorough
def test_the_profile_is_the_figure_and_nothing_else(generated, tmp_path):
    printed = run(*job(generated, tmp_path, "--prof=3", "--data_backend=threads", "--epochs=1")).stdout
    assert re.search(r"prof: \d+\.\d images/s with threads, 3 batches\n", printed)
    assert "test_accuracy" not in printed and not (tmp_path / "checkpoints").exists()


@pytest.mark.thorough
def test_a_restart_takes_the_backend_of_the_last_start_which_else_is_the_fastest(generated, tmp_path):
    """A new measurement may choose another one, whose pixels differ by rounding."""
    options = job(generated, tmp_path, "--max_steps=1", "--training_only", "--save_every=1")
    run(*options, "--data_backend=threads")
    assert re.search("data_backend auto: threads, .*last start", run(*options).stdout)
    history = tmp_path / "starts.jsonl"
    history.write_text(history.read_text().replace('"threads"', '"dali-gpu"'))
    shown = run(*options).stdout
    assert "warning: the run used --data_backend dali-gpu" in shown
    said = re.search(r"data_backend auto: (\S+); measured: (.*) images/s\n", shown)
    rates = {name: int(rate) for name, rate in (each.split() for each in said[2].split(", "))}
    assert set(rates) == set(HERE) and rates[said[1]] == max(rates.values())


@pytest.mark.parametrize("arguments, message", [
    (["--data_backend=nonsense"], "data_backend nonsense: unknown backend; available here: pytorch"),
    (["--data_backend=dali-gpu"], "data_backend dali-gpu: it needs a GPU; available here:"),
    (["--arch=resnet19"], "resnet19 is not a torchvision classifier"),
    (["--ema=1"], "argument --ema: 1: expected less than 1"),
    (["--cutmix=1", "--batch_size=63"], "--mixup ... --cutmix ... expected an even number ... got 63"),
    (["--max_bad_images=2"], "'2' is not a share like 0.1%"),
    (["--val_share=0"], "'0' is not a share like 10%"),
    (["--cache=http://host"], "is not redis://"),
    (["--cache=redis://a:1,b"], "--cache is not redis:// ... of one host"),
    (["--cache_mode=always"], "argument --cache_mode: invalid choice: 'always'"),
    (["--cache=redis://me:word@host"], "--cache is not redis:// ... BOOTFILE_CACHE_PASSWORD"),
    (["--pack={file}/packs"], "--pack {file}/packs cannot ... {file}: Not a directory"),
    (["--pack=s3://bucket/packs"], "--pack s3://bucket/packs: expected a path ... URL"),
    (["--pack_form=jpeg"], "--pack_form jpeg: ... no pack; ... with --pack"),
    (["--pack=output_dir/packs", "--cache=redis://host"], "--pack and --cache contradict each other"),
    (["--data_backend=kspeed"], "kspeed needs --cache URL or --pack FOLDER, such as --pack /dev/shm/packs"),
    (["--cache=redis://host?form=jpeg"], "form=decoded|encoded"),
    (["--cache_dir={file}"], "--cache_dir {file} cannot ... {file}: Not a directory"),
    (["--accumulate=5"], "not divisible by 5 ... 1 processes x 5 of --accumulate"),
    (["--first_image_size=64"], "--first_image_size 64 exceeds --image_size 32"),
    (["--first_image_size=16", "--arch=vit_b_16"], "--image_size 32 cannot take images of 16 pixels"),
    (["--accumulate=64"], "cannot be trained on 1 image ... --image_size 32 ... --batch_size"),
    (["--freeze"], "--freeze needs --weights FILE or DEFAULT"),
    (["--weights=NONE"], "--weights NONE: no such file; shufflenet_v2_x0_5 has DEFAULT, IMAGENET1K_V1"),
    (["--weights=DEFAULT"], "--weights DEFAULT ... shufflenet_v2_x0_5 ... not in the cache"),
    (["--pack=/proc/packs"], "--pack /proc/packs cannot be written"),
    (["--cache_dir=/proc/index"], "--cache_dir /proc/index cannot be written"),
    (["--image_size=200000"], "200000 is more than 8192 pixels"),
    (["--first_image_size=200000"], "200000 is more than 8192 pixels"),
    (["--arch=inception_v3"], "--arch inception_v3 cannot take images of --image_size 32"),
    (["--arch=vit_b_16", "--image_size=100"], "--arch vit_b_16 cannot take images of --image_size 100"),
    (["--data_backend=ray", "--ray_address=nowhere"], "no Ray cluster at nowhere"),
    (["--data_backend=ray", "--ray_address=start"], "no Ray cluster at start: "),
    (["--resume={file}.pt"], "--resume {file}.pt: no such file"),
    (["--weights={file}.pth"], "--weights {file}.pth: no such file"),
])  # fmt: skip
def test_what_the_arguments_decide_is_refused_before_the_scan(arguments, message, tmp_path, monkeypatch):
    """The job reads nothing and writes nothing."""
    spec = importlib.util.spec_from_file_location("imagenet_job", ROOT / "jobs" / "imagenet.py")
    spec.loader.exec_module(imagenet := importlib.util.module_from_spec(spec))
    (tmp_path / "file").touch()
    names = {"file": tmp_path / "file"}
    monkeypatch.setattr(sys, "argv", [
        *JOB, "--data_backend=threads", f"--data_url={tmp_path}", f"--output_dir={tmp_path / 'out'}",
        "--batch_size=64", *(each.format(**names) for each in arguments),
    ])  # fmt: skip
    monkeypatch.setattr(classifiers, "check", CHECK)
    monkeypatch.setattr(imagenet.Run, "join", lambda run: (0, 1))
    monkeypatch.setattr(image_folder, "load", lambda *_: pytest.fail("the images were scanned"))
    monkeypatch.setattr(endings, "_at_end", {place: [] for place in endings.PLACES})
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", _no_network)
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    parts = message.format(**names).split(" ... ")
    with pytest.raises(BadInput, match=".*".join(map(re.escape, parts))):
        imagenet.main.__wrapped__()
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "nothing"}


def _no_network(*_, **__):
    raise OSError("no network")


def test_a_batch_larger_than_the_data_set_is_refused_before_the_scan(generated, tmp_path):
    result = run(*JOB, generated[0], "--batch_size=641", f"--output_dir={tmp_path / 'out'}", code=2)
    assert names(result.stderr, "batch size 641", "larger", "640 samples", "at most 640", "--batch_size")
    assert not [*tmp_path.rglob("index.json")]


@pytest.mark.thorough
def test_bad_images_end_the_job_or_are_left_out_on_request(generated, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(generated[0].removeprefix("--data_url="), root)
    victims = sorted((root / "train").rglob("*.jpg"))[:3]
    victims[0].write_bytes(victims[0].read_bytes()[:-200])
    victims[1].write_bytes(b"<html>not found</html>")
    Image.open(victims[2]).save(victims[2], format="PNG")  # this one is valid: its content decides
    arguments = (*JOB, f"--data_url={root}", "--batch_size=64", "--max_steps=2", "--training_only",
                 "--data_backend=threads", f"--output_dir={tmp_path / 'out'}")  # fmt: skip
    refused = run(*arguments, code=2).stderr
    assert "2 of 640 images" in refused and all(str(path) in refused for path in victims[:2])
    printed = "".join(result.stdout for result in run_ranks(*arguments, "--max_bad_images=1%"))
    assert printed.count("skipped 2 bad of 640 images") == 1 and "data train=638 " in printed


def test_a_cut_tar_of_images_is_one_line(tmp_path):
    path = tars.write(tmp_path / "train.tar", [("a/1.jpg", bytes(700)), ("a/2.jpg", bytes(700))])
    path.write_bytes(path.read_bytes()[:2000])
    line = refused(*JOB, f"--data_url={tmp_path}/*.tar", f"--output_dir={tmp_path / 'output'}")
    assert names(line, f"{path} is damaged", "tar", "byte 1536")


@pytest.mark.thorough
def test_the_split_of_an_earlier_version_is_refused_and_a_restart_with_another_share(generated, tmp_path):
    """Images of the training would validate the weights."""
    root = tmp_path / "flat"
    shutil.copytree(Path(generated[0].removeprefix("--data_url=")) / "val", root)
    options = (f"--data_url={root}", "--batch_size=16", "--save_every=1", "--data_backend=threads",
               "--epochs=1", f"--cache_dir={tmp_path / 'cache'}", "--val_share=0.25")  # fmt: skip
    output = tmp_path / "out"
    job = (*JOB, *options, f"--output_dir={output}")
    printed = run(*job, "--max_steps=1").stdout
    split = rf"train=(\d+) test=(\d+) split of {root} by path, --val_share 25%\n"
    train, test = map(int, re.search(split, printed).groups())
    assert train + test == 160 and f"data train={train} test={test} " in printed
    assert "training data" in run(*job, "--max_steps=2", "--val_share=0.1", code=2).stderr
    [start] = read_starts(str(output))
    assert start.pop("division") == listing.BY_CLASS
    (output / "starts.jsonl").write_text(f"{json.dumps(start)}\n")
    weights = ("--evaluate", f"--weights={output / 'best.pth'}")
    assert "version 0.31" in run(*JOB, *options, *weights, code=2).stderr


@pytest.mark.thorough
def test_splits_of_other_names_are_an_option_and_part_of_the_run(generated, tmp_path):
    root, source = tmp_path / "data", Path(generated[0].removeprefix("--data_url="))
    for name, split in (("Learning", "val"), ("Holdout", "val"), ("Other", "val")):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(source / split)
    arguments = (*JOB, f"--data_url={root}", "--batch_size=16", "--max_steps=1", "--data_backend=threads",
                 f"--output_dir={tmp_path / 'out'}")  # fmt: skip
    assert names(run(*arguments, code=2).stderr, root, "--splits TRAIN,VAL", "--splits none")
    printed = run(*arguments, "--splits=Learning,Holdout").stdout
    for split, name in (("train", "Learning"), ("val", "Holdout")):
        assert re.search(rf"^{split}: 160 images of \d+ classes \(.*\) in {root}/{name}$", printed, re.M), (
            printed
        )
    assert "its --splits is Learning,Holdout" in run(*arguments, "--splits=Learning,Other", code=2).stderr


@pytest.mark.thorough
def test_without_data_at_all(tmp_path):
    """The job uses generated images. A trial of two steps does not evaluate 50,000 images."""
    printed = run(
        *JOB, "--data_backend=syntetic", "--max_steps=2", "--batch_size=4", f"--output_dir={tmp_path}"
    ).stdout
    assert "data train=1281167 test=8 source=synthetic\n" in printed and " val_count=8\n" in printed
