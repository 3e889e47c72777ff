"""Train a run again as if some samples had never been in it, in a new folder.

    python -m launch replay RUN --without IDS_FILE --output_dir NEW
    python -m launch replay RUN --without IDS_FILE --output_dir NEW -- --data_url PLACE    options of the job

RUN: the output folder of a job: it is only read. IDS_FILE: the id of a sample on each line (`launch data RUN
--sample FILE` shows that of an image). The job of the run begins at its last state before the first use of
any of them, and trains to the end of the run. A removed sample is left out of its batches. All others keep
their batch, crops and seeds; sums and means are over what is left. A batch without any sample is left out.

The result has the bits of a run from step 1 with the same option (JOB --without IDS_FILE), in jobs of one
process, and with --exact_shards at any number of processes. Other jobs are refused.

The command becomes the job: its output and exit codes are those of the job. The same command continues it.
Exit codes before: 0 RUN never had any of the samples, and is the run without them; 2 bad input.
"""

import os
import shlex
import sys

import numpy as np

from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.numbers import counted
from bootfile.histories import parent_of
from bootfile.history.cli import make_parser, parse
from bootfile.receipt.recorded_run import Run
from bootfile.sampling.removal import REMOVED, name_samples, parse_ids, write_removed


def main(arguments: list[str]) -> int:
    """Start the job in the place of this process; or return 0 if there is nothing to do. Raises BadInput."""
    parser = make_parser(__doc__, "python -m launch replay")
    add = parser.add_argument
    add("--without", metavar="FILE", required=True, help="the ids of the samples, one on each line")
    add("--output_dir", metavar="NEW", required=True, help="a new folder for the results")
    args, options = parse(parser, arguments)
    command = _plan(args.run, args.without, args.output_dir, args.job, args.processes)
    if not command:
        return 0
    words = [*command, *options]
    print_line(f"starts {shlex.join(['python', *words])}")
    sys.stdout.flush()
    # signals of a user or a platform reach the job itself
    return os.execv(sys.executable, [sys.executable, *words])


def _plan(folder: str, path: str, output: str, job: str | None, processes: int | None) -> list[str]:
    """Return the script and its options, or [] if the run never had the samples. Raises BadInput."""
    from bootfile.history.parent import Parent  # imports torch, which --help does not need

    wanted = parse_ids("--without", path)
    run = Run(folder)
    ids = np.union1d(run.removed, wanted)  # the run may lack samples already: the new run lacks them, too
    uses = run.find_uses(ids, run.last)
    never = f"the steps 1-{run.last} of {folder} never had"
    if not uses:
        print_line(f"{never} {counted(len(ids), 'sample')} of {path}: it is the run without them already")
        return []
    if unused := np.setdiff1d(ids, np.concatenate([run.removed, *uses.values()])).tolist():
        print_line(f"{never} {name_samples(unused)}")
    first = min(uses)
    samples = name_samples(uses[first].tolist())
    origin = parent_of(run.starts)
    # the steps before are those of another run, whose records are not in this folder
    if origin and first <= origin["step"]:
        raise BadInput(
            f"{folder} begins at step {origin['step']} of {origin.get('folder')}, which had {samples} in "
            f"step {first}: replay that run"
        )
    # the newest state before the first use: the steps before it never had the samples
    parent = Parent(folder, first - 1)
    script = parent.find_script(job)
    size = processes or parent.world_size
    if size > 1 and not parent.is_exact:
        raise BadInput(
            f"{folder} had {parent.world_size} processes without --exact_shards: the mean of a step would "
            "not be over what is left; jobs of one process and jobs with --exact_shards can be replayed"
        )
    begin = f"the state after step {parent.state}" if parent.state else "step 1"
    print_line(f"first use: {samples} in step {first}, of {len(uses)} steps with such; from {begin} on")
    if len(run.removed):  # the new run lacks these, too: its list is in its folder
        if "://" in output:
            raise BadInput(
                f"--output_dir {output}: the run lacks {len(run.removed)} samples already: expected a "
                "folder, or a file with their ids, too"
            )
        os.makedirs(output, exist_ok=True)
        write_removed(output, ids)
        path = os.path.join(output, REMOVED)
    command = [script, f"--from={parent.folder}", f"--at_step={first - 1}"]
    command += [f"--without={os.path.abspath(path)}", f"--output_dir={output}"]
    return [*command, *parent.name_processes(size)]
