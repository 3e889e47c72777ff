"""No step of a job makes the host wait for the GPU.

The steps are those of the jobs; tests/support/fake_gpu.py describes the substitute of the GPU.
"""

import pytest
import torch

from common.distributed import compilation
from datasets.loaders import pixels
from tests.support import fake_gpu

pytestmark = pytest.mark.skipif(torch.__version__ < "2.14", reason="the stand-ins are for torch 2.14")
AMPERE, TURING = (8, 0), (7, 5)
EFFECTS = ("--color_jitter=0.4", "--random_erasing=0.5", "--mixup=0.2", "--cutmix=1", "--trivial_augment")


def _imagenet(*options):
    sizes = "--arch=resnet18", "--image_size=64", "--batch_size=16", "--warmup=1"
    return "imagenet.py", "--data_backend=synthetic", *sizes, "--training_only", "--compile=false", *options


JOBS = {
    "train": (("train.py", "--dataset=digits"), AMPERE),
    "train_amp": (("train_amp.py", "--dataset=digits"), AMPERE),
    "train_amp, float16": (("train_amp.py", "--dataset=digits"), TURING),
    "train_fast": (("train_fast.py", "--dataset=digits", "--batch_size=128", "--compile=false"), AMPERE),
    "imagenet": (_imagenet("--ema=0.99"), AMPERE),
    "imagenet, float16": (_imagenet(), TURING),
    "imagenet, effects": (_imagenet("--optimizer=adamw", *EFFECTS), AMPERE),
}


def _waits(recorder):
    """Return the source lines at which the host waits after the first step."""
    return [text for step, text in recorder.waits if step]


@pytest.mark.parametrize("name", JOBS)
def test_the_host_waits_for_nothing(name, monkeypatch, tmp_path):
    command, capability = JOBS[name]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *command, capability=capability)
    assert not _waits(recorder) and not recorder.races
    steps = [step for step, _ in recorder.seeds]  # one seed a step, before its forward pass
    assert [steps.count(step) for step in range(3)][1:] == [1, 1]
    assert len({seed for _, seed in recorder.seeds}) == len(steps)
    assert torch.backends.cudnn.benchmark == ("train_fast" in name or "imagenet" in name)


@pytest.mark.parametrize(("options", "compiles"), [([], True), (["--compile=false"], False)])
def test_imagenet_compiles_on_a_gpu(options, compiles, monkeypatch, tmp_path):
    asked = []

    def compile_module(module, images, log, graphs=False):
        asked.extend((each.device.type, *each.shape, graphs) for each in images)
        return module

    monkeypatch.setattr(compilation, "compile_module", compile_module)
    command = [each for each in _imagenet() if not each.startswith("--compile")]
    fake_gpu.run_steps(monkeypatch, tmp_path, *command, *options, steps=1)
    assert asked == ([("cuda", 16, 3, 64, 64, False)] if compiles else [])


def test_prof_waits_only_when_its_clock_begins_and_ends(monkeypatch, tmp_path):
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *_imagenet("--prof=2"), steps=20)
    assert recorder.steps == 12 and len(_waits(recorder)) == 2
    assert [step for step, _ in recorder.waits if step] == [10, 12]


def test_a_gpu_without_bfloat16_is_named(monkeypatch, tmp_path, capsys):
    command, _ = JOBS["train_fast"]
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *command, capability=TURING)
    assert not _waits(recorder) and "warning: this GPU has no units for bfloat16" in capsys.readouterr().out
    fake_gpu.run_steps(monkeypatch, tmp_path, *command, capability=AMPERE)
    assert "bfloat16 (" not in capsys.readouterr().out


def test_a_wait_in_the_loader_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(pixels, "_send", lambda tensor, device: tensor.to(device))
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS["imagenet, effects"][0])
    assert len(_waits(recorder)) > 2 and all("not non_blocking" in each for each in _waits(recorder))


def test_a_verdict_that_is_read_before_its_event_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(fake_gpu.Event, "synchronize", lambda self: None)
    races = fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS["train"][0]).races
    assert races and all("the host reads" in each and "nonfinite.py" in each for each in races)
