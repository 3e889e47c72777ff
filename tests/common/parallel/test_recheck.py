"""A shard of a step is computed again on another process: one that computes wrongly is named."""

import re
import types

import pytest
import torch

from bootfile import histories, records
from bootfile.exact import files
from bootfile.exact.due import Due
from bootfile.ground.exit_codes import DIFFERS
from bootfile.receipt.compare import compare_states
from common.parallel import recheck
from tests.conftest import QUICK, names, refused, run_ranks
from tests.support.exact import changed
from tests.support.proofs import audit

SHARDS = 4
WORDS = (*QUICK, "--batch_size=128", f"--exact_shards={SHARDS}", "--max_steps=9", "--save_every=1step")
BACKWARD = "            loss.backward()\n"
LOSS = "            loss = criterion(logits, targets)\n"
UPDATE = "            scheduler.step()\n"
# A fault of the hardware: one gradient of a shard is another one. A file notes that it has happened.
FAULT = """
            import pathlib
            mark = pathlib.Path(MARK)
            if (shards.index, train_loader.step) == PLACE and not mark.exists():
                mark.touch()
                next(model.parameters()).grad.view(-1)[0] += 1
"""


def make_job(folder, shard, step):
    """Return a copy of train_exact.py that computes a shard of a step wrongly, once."""
    fault = FAULT.replace("MARK", repr(str(folder / "mark"))).replace("PLACE", repr((shard, step)))
    return changed("train_exact.py", folder / "job.py", (BACKWARD, BACKWARD + fault))


@pytest.mark.thorough
@pytest.mark.parametrize("processes, owner", [(3, 1), (1, 0)])
def test_a_process_that_computes_wrongly_is_named_before_the_step_is_used(processes, owner, tmp_path):
    words = (*WORDS, "--recheck=1")
    whole = tmp_path / "whole"
    run_ranks("jobs/train_exact.py", *words, f"--output_dir={whole}", ranks=processes)
    job = make_job(tmp_path, 1, 5)  # the first shard of the second process of three
    output = f"--output_dir={tmp_path / 'run'}"
    results = run_ranks(job, *words, output, ranks=processes, code=20)
    line = re.search("error: step 5: .*shard 1 .*", results[0].stderr)[0]
    assert re.search(f" differ.* rank {owner} .*wrong in 1 of ", line)
    assert "The step was not used" in line
    again = run_ranks(job, *words, output, ranks=processes)[0].stdout
    assert "step 4 of 9" in re.search("resumed from .*", again)[0]
    assert compare_states(str(whole), str(tmp_path / "run"))[0]
    sums = histories.read_shards(str(whole))
    assert list(sums) == list(range(1, 10)) and {len(of_step) for of_step in sums.values()} == {SHARDS}
    assert (tmp_path / "run" / records.SHARDS).read_text() == (whole / records.SHARDS).read_text()


@pytest.mark.thorough
def test_the_bits_are_those_of_a_run_without_it(tmp_path):
    for every, processes in ((0, 2), (1, 1), (2, 2), (1, 3)):
        output = f"--output_dir={tmp_path / f'{every}-{processes}'}"
        words = (*WORDS, f"--recheck={every}", output)
        assert "warning" not in run_ranks("jobs/train_exact.py", *words, ranks=processes)[0].stdout
        assert compare_states(str(tmp_path / "0-2"), str(tmp_path / f"{every}-{processes}"))[0]
    none, *sums = (histories.read_shards(str(tmp_path / name)) for name in ("0-2", "1-1", "2-2", "1-3"))
    assert not none and sums[0] and sums == sums[:1] * 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    "place, fault, processes, expected",
    [
        (BACKWARD, FAULT, 2, r"shard 3 \(rank 1 of 2\) .*step 5 .*other gradients"),
        (UPDATE, FAULT.replace(".grad.", ".data."), 1, "all shards .* 1-5 .*same gradients"),
    ],
    ids=["gradients of a shard", "weights after the step"],
)
def test_an_audit_names_the_shard(place, fault, processes, expected, tmp_path):
    """The weights are wrong after the gradients of the step, and before its state was saved."""
    fault = fault.replace("MARK", repr(str(tmp_path / "mark")))
    if place == UPDATE:
        fault = fault.replace("shards.index, train_loader.step", "step + 1").replace("PLACE", "(5)")
    fault = fault.replace("PLACE", "(3, 5)")
    job = changed("train_exact.py", tmp_path / "job.py", (place, place + fault))
    words = (*WORDS, "--recheck=100", "--keep=1")  # no step of these is computed twice
    run_ranks(job, *words, f"--output_dir={tmp_path / 'run'}", ranks=processes)
    assert (tmp_path / "mark").exists()
    shown = audit(tmp_path / "run", "--share=all", "--processes=1", code=DIFFERS)
    [line] = re.findall("^steps 1-9: the steps .*", shown, re.M)
    assert re.search(expected, line), line
    assert re.search(r"state after step 5 .*another .*\(model\.", line)


@pytest.mark.thorough
def test_a_start_without_it_computes_the_steps_of_an_earlier_one_again(tmp_path):
    """The sums of a shard that was wrong stay in the file, and an audit compares what counts."""
    fault = FAULT.replace("MARK", repr(str(tmp_path / "mark"))).replace("PLACE", "(3, 5)")
    job = changed("train_exact.py", tmp_path / "job.py", (BACKWARD, BACKWARD + fault))
    states = tmp_path / "run" / "checkpoints"
    words = (*WORDS, "--keep=1", "--keep_every=1step", f"--output_dir={tmp_path / 'run'}")

    def delete(*steps):
        for step in steps:
            (states / files.name_of(step)).unlink()

    run_ranks(job, *words, "--recheck=100", ranks=1)
    assert (tmp_path / "mark").exists()
    delete(5, 6, 7, 8, 9)
    run_ranks(job, *words, ranks=1)
    delete(5, 6, 8, 9)
    run_ranks(job, *words, "--recheck=100", ranks=1)
    delete(7)
    assert list(histories.read_shards(str(tmp_path / "run"))) == list(range(1, 10))
    shown = audit(tmp_path / "run", "--share=all")
    assert re.search("^steps 5-8: equal", shown, re.MULTILINE), shown
    assert re.search("^equal: 6 of 6 intervals", shown, re.MULTILINE), shown


@pytest.mark.thorough
def test_a_first_difference_is_a_doubt(tmp_path):
    """A process that is wrong in its own first shard may have a loss that cannot be compared."""
    job = make_job(tmp_path, 1, 1)
    output = f"--output_dir={tmp_path / 'run'}"
    shown = run_ranks(job, *WORDS, "--recheck=1", output, ranks=2)[0].stdout
    warnings = re.findall("warning: .*", shown)
    assert len(warnings) == 1
    assert names(warnings[0], "step 1", "rank 0", "shard 1", "twice", "differ")
    assert "is off" not in warnings[0]


@pytest.mark.thorough
def test_a_loss_that_uses_the_weights_is_not_compared(tmp_path):
    decay = "            loss = loss + 1e-3 * sum(each.square().sum() for each in model.parameters())\n"
    job = changed("train_exact.py", tmp_path / "job.py", (LOSS, LOSS + decay))
    output = f"--output_dir={tmp_path / 'run'}"
    shown = run_ranks(job, *WORDS, "--recheck=1", output, ranks=2)[0].stdout
    warnings = re.findall("warning: .*", shown)
    assert len(warnings) == 2
    assert warnings[1].endswith("; --recheck is off")


class _Wrapper(torch.nn.Module):
    """Stands for the DistributedDataParallel of a model."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(1, 1)


def make_recheck(every: int, lines: list, count: int = 2) -> recheck.Recheck:
    """Return the Recheck of a run of one process."""
    shards = types.SimpleNamespace(
        count=count, first=0, device=torch.device("cpu"), find_owner=lambda shard: 0, make_rows=torch.stack
    )
    return recheck.Recheck(shards, _Wrapper(), every, lines.append)


def take_step(checked: recheck.Recheck, step: int, again: float | None) -> None:
    """Exchange a step whose shards have the sums 5 and 7. again: that of the shard that is computed twice."""
    checked._sums = [torch.tensor(5.0).double(), torch.tensor(7.0).double()]
    checked._compute = lambda restore: again
    checked.compare(step, lambda: None)
    losses = torch.tensor([0.5, 0.25]).double()
    assert checked.exchange(step, losses, lambda: None).tolist() == [0.5, 0.25]


def test_the_shards_take_turns():
    checked = make_recheck(3, [], count=4)
    chosen = {step: checked.find_shard(step) for step in range(1, 16)}
    assert {step: shard for step, shard in chosen.items() if shard is not None} == {
        3: 1, 6: 2, 9: 3, 12: 0, 15: 1,
    }  # fmt: skip


def test_a_difference_after_an_equal_shard_ends_the_job(tmp_path):
    checked = make_recheck(1, [])
    parts = types.SimpleNamespace(
        saver=types.SimpleNamespace(folder=str(tmp_path)), say_once=print, writes=True
    )
    histories.write_shards(str(tmp_path), {1: [5, 7], 2: [0, 0]})
    checked.begin(parts, 1)
    take_step(checked, 2, 5.0)
    take_step(checked, 3, recheck._UNKNOWN)  # the model was called twice in this shard
    checked.ended(3, Due(report=False, save=False))
    assert histories.read_shards(str(tmp_path)) == {1: [5, 7]}
    checked.ended(3, Due(report=True, save=False))
    assert histories.read_shards(str(tmp_path)) == {1: [5, 7], 2: [5, 7], 3: [5, 7]}
    with pytest.raises(recheck.WrongResult, match=r"step 5: .*shard 1 .*differ") as error:
        take_step(checked, 5, 8.0)
    assert error.value.code == DIFFERS


def test_two_differences_before_any_equal_shard_are_doubts():
    checked = make_recheck(1, lines := [])
    take_step(checked, 1, 8.0)
    assert names(lines[0], "step 1", "shard 1", "rank 0") and "is off" not in lines[0]
    take_step(checked, 2, 8.0)
    assert len(lines) == 2 and lines[1].endswith("; --recheck is off")
    take_step(checked, 3, 8.0)
    assert len(lines) == 2 and checked.find_shard(3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_each_bit_and_the_order_of_the_gradients_count(dtype):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(6, generator=generator).to(dtype) for _ in range(3)]
    device = torch.device("cpu")
    total = recheck.sum_bits(gradients, device).item()
    assert 0 <= total < 2**48 and total == int(total)
    assert recheck.sum_bits([gradients[1], gradients[0], gradients[2]], device).item() != total
    for byte in (0, gradients[0].nbytes - 1):
        gradients[0].view(torch.uint8)[byte] ^= 128
        assert recheck.sum_bits(gradients, device).item() != total
        gradients[0].view(torch.uint8)[byte] ^= 128
    assert recheck.sum_bits(gradients, device).item() == total


def test_a_job_without_shards_is_refused(tmp_path):
    line = refused("jobs/train.py", *QUICK, "--recheck=1", f"--output_dir={tmp_path}")
    assert "--recheck 1 needs --exact_shards" in line


@pytest.mark.parametrize(
    "votes, expected",
    [
        ([(0, 7), (1, 7), (1, 8), (2, 7)], r"rank 1 [a-z ]*1 of 2"),
        ([(0, 8), (0, 8), (1, 7), (1, 7), (2, 7)], r"rank 0 [a-z ]*2 of 2"),
        ([(0, 8), (0, 8), (1, 7), (1, 7)], "there is no majority"),
        ([(0, 8), (0, 7), (1, 7), (1, 6)], r"rank 0 [a-z ]*1 of 2, rank 1 [a-z ]*1 of 2"),
    ],
)
def test_the_majority_is_right(votes, expected):
    text = recheck.describe(3, 1, votes)
    assert re.match(rf"step 3: .*shard 1 .*\b{len(votes)} times\b.* differ", text)
    assert re.search(expected, text)
