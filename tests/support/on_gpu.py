"""A plugin of pytest with which the jobs that tests start see the GPU: tests/conftest.py hides it from them.

    python -m pytest -p tests.support.on_gpu -n 8 tests/jobs/test_train_exact.py ...

So tests that compare the bits of runs (1 to 8 processes, restarts) do it on a GPU. Several processes share
one GPU, over gloo. Each job is a new Python: a fork of a process that has used CUDA cannot use it.
PYTHONPATH, which may name a folder with packages, stays. A failure is printed when it happens: a run may be
cut.

Not every test is made for a GPU: NOT_FOR_A_GPU in tests/gpu/checks.py names some of them, with the reasons.
"""

import functools
import os

import pytest

_SHOWN = 1800  # last characters of a failure
REASON = "#### "  # begins the line of a failed test


def pytest_configure() -> None:
    show_gpu()


def show_gpu() -> None:
    """Let the jobs that start() of tests/conftest.py starts in this process see the GPU."""
    from tests import conftest  # pytest has loaded it by now

    environment = functools.partial(make_environment, conftest.environment, dict(os.environ))
    conftest.environment = environment
    conftest.USUAL = environment()
    conftest.forkserver.can_fork = lambda *_: False


def make_environment(usual, outside: dict[str, str], **extra: str) -> dict[str, str]:
    """Return the environment of a job. usual: conftest.environment; outside: the variables of pytest."""
    env = usual(**extra)
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        if name in extra:
            continue
        env.pop(name, None)
        if name in outside:
            env[name] = outside[name]
    return env


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{REASON}{report.nodeid} {report.when}\n{report.longreprtext[-_SHOWN:]}", flush=True)
