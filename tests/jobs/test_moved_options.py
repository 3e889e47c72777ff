"""A run whose own files are moved continues: its own option is a path."""

import pytest

from tests.conftest import refused, run
from tests.jobs.test_train_own import write_job


def write(folder, option: str):
    """Write a job whose data are in the file of --my_file."""
    job = write_job(folder, None, distributed=False)
    text = job.read_text(encoding="utf-8")
    line = "    args = parser.parse_args()\n"
    read = "    torch.load(args.my_file)\n"
    text = text.replace(line, f"    {option}\n{line}{read}")
    job.write_text(text, encoding="utf-8")
    return job


TEXT = 'data.add_argument("--my_file", metavar="PATH")'
ROLE = 'data.add_argument("--my_file", role="operation")'
PATH = 'import pathlib; data.add_argument("--my_file", type=pathlib.Path)'


@pytest.mark.thorough
@pytest.mark.parametrize("after", [ROLE, PATH], ids=["role", "type"])
def test_the_refusal_says_how_an_option_may_change_and_then_it_may(tmp_path, after):
    import torch

    first = tmp_path / "first.pt"
    torch.save(torch.zeros(1), first)
    out = f"--output_dir={tmp_path / 'out'}"
    steps = ("--epochs=3", "--batch_size=96", "--save_every=1")
    job = write(tmp_path / "before", TEXT)
    run(job, *steps, out, "--max_steps=2", f"--my_file={first}")
    moved = first.rename(tmp_path / "moved.pt")
    line = refused(job, *steps, out, f"--my_file={moved}")
    assert f"its --my_file is {first}, this run's is {moved}" in line
    assert 'role="operation"' in line

    mended = write(tmp_path / "after", after)
    printed = run(mended, *steps, out, "--max_steps=3", f"--my_file={moved}").stdout
    assert "resumed from" in printed
    moved = moved.rename(first)
    assert "resumed from" in run(mended, *steps, out, f"--my_file={moved}").stdout
