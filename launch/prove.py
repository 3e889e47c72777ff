"""Prove that a job continues exactly after a restart, as `bootfile prove` does (bootfile/prove/cli.py). The
modules of the proof are those that `pack` would upload with the job."""

import os

from bootfile.prove import cli


def main(arguments: list[str]) -> int:
    """Run the job, print the verdict and return the exit code. Raises BadInput."""
    return cli.main(arguments, find_modules)


def find_modules(job: str) -> dict[str, str]:
    """Return the modules that `pack` would upload: path in the code folder -> its file. Raises BadInput."""
    from launch.bundle.code_folder import CodeFolder  # imports pathspec, which --help does not need

    job = os.path.abspath(job)
    code = CodeFolder(job)
    modules = {name: path for name, path in code.files.items() if name.endswith(".py")}
    return {**modules, code.job_path: job}
