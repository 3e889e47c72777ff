"""An experimental option has modules of its own, and a job without the option does not load them."""

import pytest

from tests.conftest import QUICK, ROOT, environment, run

# option -> the modules that exist only for it
MODULES = {
    "--recheck": ["common.parallel.recheck"],
    "--exact_shards": ["common.parallel.exact_shards", "common.parallel.repeated_calls"],
    "--preemption": ["bootfile.exact.preemption", "bootfile.processes.notices"],
    "--sample_losses": ["common.run.sample_losses"],
    "--without": ["common.checkpoint.without", "bootfile.sampling.removal"],
    "--from": ["common.checkpoint.fork", "bootfile.exact.forked", "bootfile.history.parent"],
    "--elastic": ["common.elastic"],
}  # fmt: skip
LIST = """
import atexit, runpy, sys
atexit.register(lambda: print("loaded:", *sys.modules))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MOST = 700  # lines of an option


def list_modules(*words: object) -> set[str]:
    """Return the modules that a job has loaded at its end."""
    shown = run("-c", LIST, *words, env=environment(PYTHONPATH=str(ROOT)), fresh=True).stdout
    return {*shown.rpartition("loaded: ")[2].split()}


@pytest.mark.thorough
def test_a_job_without_an_option_does_not_load_its_modules(tmp_path):
    words = (*QUICK, "--max_steps=1")
    loaded = list_modules("jobs/train.py", *words, f"--output_dir={tmp_path / 'plain'}")
    assert "common.checkpoint.checkpointer" in loaded
    assert not loaded & {module for modules in MODULES.values() for module in modules}
    job = ("jobs/train_exact.py", *words, "--recheck=1", "--sample_losses=true")
    loaded = list_modules(*job, f"--output_dir={tmp_path / 'exact'}")
    for option in ("--recheck", "--exact_shards", "--sample_losses"):
        assert loaded >= {*MODULES[option]}, option


@pytest.mark.parametrize("option", ["--recheck", "--sample_losses", "--without"])
def test_the_modules_of_an_option_are_short(option):
    paths = [ROOT / f"{module.replace('.', '/')}.py" for module in MODULES[option]]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MOST
