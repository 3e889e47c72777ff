"""train_fsdp.py has the data, losses and checkpoints of train_ddp.py; states move between processes."""

import signal

import pytest
import torch
from PIL import Image

from bootfile.exact import checked_files, digest
from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from bootfile.histories import read_states
from bootfile.receipt import receipt
from common.checkpoint.weights import read
from common.parallel import fsdp
from tests.common.checkpoint.test_mirror import keys, read_list
from tests.conftest import CAN_FORK, QUICK, losses, records, run, run_ranks
from tests.jobs.test_urls import output_of
from tests.support.exact import changed, facts
from tests.support.simulated import rows

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="fully_shard() needs torch 2.6, too")
JOB = "jobs/train_fsdp.py"
SMALL = (*QUICK, "--batch_size=32", "--max_steps=6", "--save_every=2", "--report_every=1", "--lr=0.02")
SHARDED = "--checkpoint_format=sharded"
END = "            due = checkpoint.end_step()\n"
KILLED = (END, "            if train_loader.step == int(os.environ.get('KILL_AT', 0)):\n"
          "                os.kill(os.getpid(), int(os.environ['KILL_BY']))\n" + END)  # fmt: skip
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)"
ADAMW = (SGD, "optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, fused=True)")


@pytest.mark.thorough
def test_losses_are_those_of_train_on_1_2_and_4_processes(tmp_path):
    """In double precision, so that only errors in the computation remain (see tests/support/float64.py)."""
    for name, ranks in (("train", 1), ("train_fsdp", 1), ("train_fsdp", 2), ("train_fsdp", 4)):
        command = ("-m", "tests.support.float64", f"jobs/{name}.py", *SMALL, "--max_steps=12")
        run_ranks(*command, f"--output_dir={tmp_path / f'{name}{ranks}'}", ranks=ranks)
    expected = losses(tmp_path / "train1")
    assert len(expected) == 12 and max(expected) - min(expected) > 0.02, "the loss does not change"
    for ranks in (1, 2, 4):
        output = tmp_path / f"train_fsdp{ranks}"
        assert losses(output) == pytest.approx(expected, abs=1e-5)
        assert (output / receipt.FILE).read_bytes() == (tmp_path / "train1" / receipt.FILE).read_bytes()


@pytest.mark.thorough
def test_a_state_moves_between_jobs_and_1_2_and_4_processes_without_a_changed_bit(tmp_path):
    """A run that is resumed at its last step only evaluates, and writes the digest of what it has loaded."""
    run("jobs/train.py", *SMALL, f"--output_dir={tmp_path / '0'}")
    expected = read_states(str(tmp_path / "0"))[6]
    assert any("momentum_buffer" in name for name in expected["parts"])
    path = tmp_path / "0" / "checkpoints" / "step_6.pt"
    for number, ranks in enumerate((2, 4, 1), start=1):
        output = tmp_path / str(number)
        run_ranks(JOB, *SMALL, f"--resume={path}", f"--output_dir={output}", ranks=ranks)
        assert read_states(str(output))[6]["parts"] == expected["parts"]
        weights = torch.load(output / "best.pth", weights_only=True)  # in this process: plain tensors
        assert digest.summarize(6, {"model": weights})["parts"].items() <= expected["parts"].items()


def test_a_restart_after_sigterm_is_bit_equal(tmp_path, monkeypatch):
    monkeypatch.setenv("KILL_BY", str(int(signal.SIGTERM)))
    job = changed("train_fsdp.py", tmp_path / "job.py", KILLED, ADAMW)
    run_ranks(job, *SMALL, f"--output_dir={tmp_path / 'whole'}")
    for kill_at, code in ((4, 143), (0, 0)):
        monkeypatch.setenv("KILL_AT", str(kill_at))
        run_ranks(job, *SMALL, f"--output_dir={tmp_path / 'killed'}", code=code)
    whole = facts(tmp_path / "whole")
    assert same(facts(tmp_path / "killed"), whole) and len(whole["state"]) == 3


@pytest.mark.thorough
def test_checkpointed_activations_have_the_same_bits_and_bfloat16_is_near(tmp_path):
    output = {}
    for precision in ("float32", "bfloat16"):
        for again in ("false", "true"):
            output[precision, again] = tmp_path / f"{precision}-{again}"
            options = (f"--precision={precision}", f"--grad_checkpointing={again}")
            run_ranks(JOB, *SMALL, *options, f"--output_dir={output[precision, again]}")
        assert facts(output[precision, "true"]) == facts(output[precision, "false"])
    whole, half = losses(output["float32", "true"]), losses(output["bfloat16", "true"])
    assert half != whole and half == pytest.approx(whole, abs=0.1)
    state = checked_files.read(str(output["bfloat16", "true"] / "checkpoints" / "step_6.pt"))
    assert {each.dtype for _, each in digest.leaves({"": state["objects"]["model"]})} == {
        torch.float32, torch.int64,
    }  # fmt: skip


@pytest.mark.thorough
def test_ranks_with_different_numbers_of_batches_evaluate_every_sample_once(tmp_path):
    """359 samples on 4 ranks: one batch of 89 on the first, two on the others. And 2 samples on 4 ranks."""
    for samples, batch in ((359, 89), (2, 250)):
        sampler = "test_sampler = SequentialBatchSampler(len(test_set), 250)"
        change = (sampler, f"test_sampler = SequentialBatchSampler({samples}, {batch})")
        job, output = changed("train_fsdp.py", tmp_path / "job.py", change), tmp_path / str(samples)
        run_ranks(job, *SMALL, "--max_steps=2", f"--output_dir={output}", ranks=4)
        (evaluated,) = [line for line in records(output) if "val_count" in line]
        assert evaluated["val_count"] == samples
        evaluate = ("--evaluate", f"--weights={output / 'best.pth'}", "--dataset=digits", "--width=8")
        if samples == 359:
            shown = run("jobs/train.py", *evaluate).stdout
            assert f"val_acc={evaluated['val_acc']:.6g}" in shown


@pytest.mark.thorough
def test_a_gradient_that_is_not_finite_in_one_shard_skips_the_step_on_all_ranks(tmp_path):
    line = "            loss.backward()\n"
    spoil = "            if (train_loader.step, rank) == (3, 1):\n"
    spoil += "                model.dense_layer.weight.grad.to_local().fill_(torch.nan)\n"
    job = changed("train_fsdp.py", tmp_path / "job.py", (line, line + spoil))
    first, _ = run_ranks(job, *SMALL, f"--output_dir={tmp_path / 'output'}")
    assert first.stdout.count("skipped a step: ") == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the facts of a run on 2 processes with checkpoints in the full format."""
    output = tmp_path_factory.mktemp("whole")
    run_ranks(JOB, *SMALL, f"--output_dir={output}")
    return facts(output)


def stopped(job, output, monkeypatch) -> None:
    """Run a job in the sharded format until it is stopped; the signal of step 4 stops it after step 5."""
    monkeypatch.setenv("KILL_AT", "4")
    monkeypatch.setenv("KILL_BY", "15")
    run_ranks(job, *SMALL, SHARDED, f"--output_dir={output}", code=143)
    monkeypatch.setenv("KILL_AT", "0")


def same(run_facts: dict, whole: dict) -> bool:
    run_facts["state"] = {step: run_facts["state"].get(step) for step in whole["state"]}  # SIGTERM saves, too
    return run_facts == whole


@pytest.mark.thorough
def test_a_sharded_checkpoint_has_the_state_of_a_full_one_and_a_damaged_shard_is_refused(
    whole, tmp_path, monkeypatch
):
    job, output = changed("train_fsdp.py", tmp_path / "job.py", KILLED), tmp_path / "output"
    stopped(job, output, monkeypatch)
    shard = output / "checkpoints" / "step_5.shards" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    first, _ = run_ranks(job, *SMALL, SHARDED, "--keep=2", f"--output_dir={output}")
    assert "step_5.pt: its file __1_0.distcp changed" in first.stdout and "step 4 of 6" in first.stdout
    assert same(facts(output), whole)
    left = {path.name for path in (output / "checkpoints").iterdir()}
    assert left == {f"step_{n}.{end}" for n in (4, 6) for end in ("pt", "pt.json", "shards")}

    path = output / "checkpoints" / "step_6.pt"  # readable by any job, on any number of processes
    for command, ranks in (("jobs/train.py", 1), ("jobs/train_ddp.py", 2), (JOB, 4)):
        moved = tmp_path / str(ranks)
        run_ranks(command, *SMALL, f"--resume={path}", f"--output_dir={moved}", ranks=ranks)
        assert read_states(str(moved))[6]["parts"] == whole["state"][6]
    assert digest.summarize(6, {"model": read(str(path))[0]})["parts"].items() <= whole["state"][6].items()


FAILING = """
    import torch.distributed.checkpoint as dcp

    write_data = dcp.FileSystemWriter.write_data

    def fail_once(self, *args):
        if rank == 1 and "step_4." in str(self.path):
            raise OSError(28, "No space left on device")
        return write_data(self, *args)

    dcp.FileSystemWriter.write_data = fail_once
"""


@pytest.mark.thorough
def test_a_shard_that_was_not_written_is_forgotten_after_a_checkpoint_that_was(tmp_path):
    line = "    device = run.device\n"
    job, output = changed("train_fsdp.py", tmp_path / "job.py", (line, line + FAILING)), tmp_path / "output"
    first, _ = run_ranks(job, *SMALL, SHARDED, f"--output_dir={output}")
    assert first.stdout.count("step_4.pt was not saved: rank 1: ") == 1
    assert {path.stem for path in output.glob("checkpoints/*.pt")} == {"step_2", "step_6"}


@pytest.mark.thorough
def test_nodes_with_folders_of_their_own_save_nothing(tmp_path):
    nodes = ("--nodes=2", "--platform=modelarts", f"--keep={tmp_path / 'nodes'}")
    job = (JOB, "--", *SMALL, SHARDED, "--max_steps=2")
    shown = run("-m", "launch", "simulate", *nodes, *job, code=None).stdout
    assert "step_2.pt was not saved: " in shown and rows(shown)["0"].code == errors.NOT_SAVED
    assert not [*tmp_path.rglob("step_*.pt")] and [*tmp_path.rglob("step_2.shards")]


@pytest.mark.thorough
def test_sharded_checkpoints_at_a_url_continue_on_another_node(whole, server, tmp_path, monkeypatch):
    job, url = changed("train_fsdp.py", tmp_path / "job.py", KILLED), "s3://runs/fsdp"
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for scratch in (tmp_path / "a", tmp_path / "b"):
        scratch.mkdir()
        monkeypatch.setenv("BOOTFILE_SCRATCH", str(scratch))
        if scratch.name == "a":
            stopped(job, url, monkeypatch)
        else:
            first, _ = run_ranks(job, *SMALL, SHARDED, "--keep=2", f"--output_dir={url}")
            assert "restored step_5.pt" in first.stdout
    assert same(facts(output_of(tmp_path / "b")), whole)
    files = {each["path"] for each in read_list(server, url)["files"]}
    assert {path for path in files if ".shards/" in path} == {
        f"checkpoints/step_{step}.shards/{name}"
        for step in (5, 6) for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
    }  # fmt: skip
    assert files >= {f"checkpoints/step_{step}.pt" for step in (5, 6)}
    assert {key for key in keys(server, url) if "step_" in key} == {key for key in files if "step_" in key}


@pytest.mark.thorough
def test_simulate_pack_report_predict_and_export_know_the_job(tmp_path):
    job = (JOB, "--", *SMALL, "--max_steps=2")
    keep = f"--keep={tmp_path / 'nodes'}"
    shown = run("-m", "launch", "simulate", "--nodes=2", "--platform=modelarts", keep, *job).stdout
    assert {row.code for row in rows(shown).values()} == {0}
    output = tmp_path / "nodes" / "node-0" / "outputs" / "train_url_0"
    run("-m", "launch", "report", output, "--to", tmp_path / "report.html")
    assert "train_fsdp.py" in (tmp_path / "report.html").read_text()
    image = tmp_path / "image.png"
    Image.new("L", (32, 32), 90).save(image)
    assert len(run("-m", "launch", "predict", output / "best.pth", image).stdout.splitlines()) == 5
    run("-m", "launch", "export", output / "best.pth", "--to", tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_size
    run("-m", "launch", "pack", JOB, "--to", tmp_path / "to")
    (packed,) = [path for path in (tmp_path / "to").iterdir() if path.is_dir()]
    run(packed / JOB, "--help", cwd=tmp_path, fresh=True)


def test_torch_before_2_6_is_one_line(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(BadInput, match=r"needs torch 2\.6 .*torch 2\.5\.1"):
        fsdp.add_arguments(None)
