"""No step of a job makes the host wait for the GPU.

The steps are those of the jobs; tests/support/fake_gpu.py describes the substitute of the GPU.
"""

import pytest
import torch

from common.checkpoint.checkpointer import Checkpointer
from common.parallel import compilation
from common.run import evaluation, metrics
from common.run.log import Log
from datasets.loaders import backends, pixels
from datasets.loaders.engines import memory
from datasets.loaders.engines.memory import Resident
from tests.conftest import names
from tests.support import fake_gpu

pytestmark = pytest.mark.skipif(torch.__version__ < "2.11", reason="the stand-ins are for torch 2.11")
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_the_host_waits_for_nothing(name, monkeypatch, tmp_path):
    command, capability = JOBS[name]
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *command, capability=capability)
    assert not _waits(recorder) and not recorder.races
    steps = [step for step, _ in recorder.seeds]  # one seed a step, before its forward pass
    assert [steps.count(step) for step in range(3)][1:] == [1, 1]
    assert len({seed for _, seed in recorder.seeds}) == len(steps)
    assert torch.backends.cudnn.benchmark == ("train_fast" in name or "imagenet" in name)
    assert recorder.layouts == {True} and recorder.losses <= {torch.float32}
    assert recorder.losses or "effects" in name
    assert isinstance(recorder.loader.engine, Resident) == ("train_fast" in name)


@pytest.mark.parametrize("name", ["train_fast", "imagenet"])
def test_cudnn_chooses_no_algorithm_by_its_time_if_they_must_be_deterministic(name, monkeypatch, tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS[name][0], capability=AMPERE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.backends.cudnn.benchmark


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in JOBS if "float16" in name])
def test_gradients_are_unscaled_before_the_step_and_the_scale_changes_after_it(name, monkeypatch, tmp_path):
    called = []
    scaler = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
    for method in ("scale", "unscale_", "step", "update"):
        real = getattr(scaler, method)
        record = lambda *args, real=real, method=method: called.append(method) or real(*args)  # noqa: E731
        monkeypatch.setattr(scaler, method, record)
    fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS[name][0], capability=TURING)
    assert called == [*("scale", "unscale_", "step", "update") * 2, "scale"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["train_ddp", "imagenet"])
def test_a_step_of_several_ranks_has_one_collective_besides_the_gradients(name, monkeypatch, tmp_path):
    command = _imagenet() if name == "imagenet" else ("train_ddp.py", "--dataset=digits")
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *command, world_size=2)
    assert [recorder.collectives[step] for step in (1, 2)] == [1, 1]  # that of Guard
    assert not _waits(recorder) and [each["device_ids"] for each in fake_gpu.Wrapper.made] == [[0]]


def test_resident_images_are_gathered_from_pinned_ids(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CHUNK", 1)  # so that each step gathers
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS["train_fast"][0])
    assert not _waits(recorder) and not recorder.races


def test_an_evaluation_waits_for_nothing_and_a_measurement_for_each_batch(monkeypatch):
    with fake_gpu.fake_gpu(monkeypatch) as recorder:
        model = torch.nn.Linear(4, 3, device="cuda")
        batches = [(torch.zeros(8, 4, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda"))] * 3
        before = len(recorder.waits)
        evaluation.evaluate(model, batches, torch.nn.CrossEntropyLoss(), metrics.of_classes(3, False, None))
        assert len(recorder.waits) == before
        backends.rate(batches, seconds=60)
        assert [text.partition(":")[0] for _, text in recorder.waits[before:]] == ["synchronize()"] * 3


@pytest.mark.thorough
def test_evaluations_of_train_fast_have_few_batches(monkeypatch, tmp_path):
    """Only the last evaluation also sees the mirror images."""
    seen = []

    def evaluate(model, loader, *_, mirrored=False):
        seen.append((loader.plan.largest, mirrored))
        return torch.zeros(3, device="cuda")

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    monkeypatch.setattr(Checkpointer, "save_weights", lambda *_: None)
    monkeypatch.setattr(Log, "validation", lambda *_: None)
    monkeypatch.setattr(Checkpointer, "finish", lambda *_: None)
    command = "train_fast.py", "--custom_data=true", "--batch_size=128", "--compile=false", "--epochs=2"
    fake_gpu.run_steps(monkeypatch, tmp_path, *command, steps=10**6)
    assert [largest > 250 for largest, _ in seen] == [True, True]
    assert [mirrored for _, mirrored in seen] == [False, True]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["train_fast", "imagenet"])
def test_only_train_fast_records_cuda_graphs(name, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options) or module)
    monkeypatch.setattr(compilation, "backward_without_trace", lambda *_: None)
    command = [each.replace("--compile=false", "--compile=true") for each in JOBS[name][0]]
    fake_gpu.run_steps(monkeypatch, tmp_path, *command, steps=1)
    assert asked == [{"mode": "reduce-overhead" if name == "train_fast" else None, "dynamic": False}]


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "compiles"), [([], True), (["--compile=false"], False)])
def test_imagenet_compiles_on_a_gpu(options, compiles, monkeypatch, tmp_path):
    asked = []

    def compile_module(module, images, log, graphs=False):
        asked.extend((each.device.type, *each.shape, graphs) for each in images)
        return module

    monkeypatch.setattr(compilation, "compile_module", compile_module)
    command = [each for each in _imagenet("--first_image_size=32") if not each.startswith("--compile")]
    fake_gpu.run_steps(monkeypatch, tmp_path, *command, *options, steps=1)
    assert asked == ([("cuda", 16, 3, side, side, False) for side in (32, 64)] if compiles else [])


@pytest.mark.thorough
def test_prof_waits_only_when_its_clock_begins_and_ends(monkeypatch, tmp_path):
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *_imagenet("--prof=2"), steps=20)
    assert recorder.steps == 12 and len(_waits(recorder)) == 2
    assert [step for step, _ in recorder.waits if step] == [10, 12]


@pytest.mark.thorough
def test_a_gpu_without_bfloat16_is_named(monkeypatch, tmp_path, capsys):
    command, _ = JOBS["train_fast"]
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *command, capability=TURING)
    assert not _waits(recorder)
    assert names(capsys.readouterr().out, "warning: this GPU", "no units", "bfloat16")
    fake_gpu.run_steps(monkeypatch, tmp_path, *command, capability=AMPERE)
    assert "bfloat16 (" not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_wait_in_the_loader_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(pixels, "_send", lambda tensor, device: tensor.to(device))
    recorder = fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS["imagenet, effects"][0])
    assert len(_waits(recorder)) > 2 and all("not non_blocking" in each for each in _waits(recorder))


@pytest.mark.thorough
def test_a_verdict_that_is_read_before_its_event_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(fake_gpu.Event, "synchronize", lambda self: None)
    races = fake_gpu.run_steps(monkeypatch, tmp_path, *JOBS["train"][0]).races
    assert races and all("the host reads" in each and "nonfinite.py" in each for each in races)
