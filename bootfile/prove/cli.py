"""Show whether a job continues exactly after a restart, with your data and your options.

    bootfile prove own.py --compare "OUT/*.pt" --resume_with "--resume OUT/last.pt" -- --out OUT
    bootfile prove --check proof.json
    bootfile prove jobs/train.py -- --dataset digits     a job with Bootfile's options

The job runs several times in a temporary folder: a reference; the same again with another PYTHONHASHSEED, in
another working folder and with folders listed in another order; with SIGKILLs and restarts; with another
number of processes and of workers; with another engine for image folders; with another seed; with a SIGKILL
on 2 processes; and from a checkpoint that is damaged on purpose. 24 steps are trained, unless the options
name a number: 4 epochs that are cut to 6 steps, so that restarts reach later epochs and the end. Each SIGKILL
waits for a new checkpoint. Each run is compared with the reference, and the killed one on 2 processes with
the whole one: the samples of every step, the state (weights, buffers, optimizer) at every checkpoint, the
figures of the log and the files of weights. With another number of processes only the samples are compared,
unless the job has --exact_shards. If it also has --elastic, processes of one run are killed while the others
stay alive, and it must continue to the same bits. The runs with another seed and with the damage must differ.
If the job refuses the damaged checkpoint, the verdict says so: whether a wrong weight would be seen was not
shown. What cannot be checked is named.

On Linux without a GPU, runs are forks of a process that has PyTorch loaded, except the second one, which is
made by a new process. If a run differs, new processes make it and the reference again, and their difference
counts.

--to proof.html writes a page, and proof.json with commit, versions, hardware, commands, comparisons and
digests (guides/prove.md). --check proof.json runs nothing: it shows what has changed since.

A script that does not use Bootfile needs --compare, the files of weights that it writes, and --resume_with,
the options of a restart. The folder of --compare must not exist: it is moved away after each run. If a
receipt of `bootfile.Receipt` is in it, the samples are compared too. If a restart differs, two more runs
record their steps, and the line begins with the cause, for example a scheduler that is not in the checkpoint.

Exit codes: 0 exact; 20 differs: a run that should be equal is not; 21 unverified: the runs are equal, but
prove nothing, for example because the damage was not noticed; 2 bad input.
With --check: 0 the proof still holds; 20 something has changed, or the verdict was not exact; 2 bad input.
"""

import os
from collections.abc import Callable

from bootfile.console.parser import Parser, positive_int
from bootfile.ground.errors import BadInput


def main(arguments: list[str], find_modules: Callable[[str], dict[str, str]] | None = None) -> int:
    """Run the job, print the verdict and return the exit code. Raises BadInput.

    find_modules: finds the modules of a job whose digests are in the proof; default: proof.find_modules().
    """
    words, options = split_words(arguments)
    parser = Parser(__doc__, "bootfile prove")
    add = parser.add_argument
    add("job", metavar="JOB", nargs="?", help="the script; its options follow --")
    add("--to", metavar="FILE", help="also write a page, such as proof.html, and proof.json")
    add("--check", metavar="FILE", help="run nothing; show what has changed since the proof.json of --to")
    add("--force", action="store_true", help="replace the files even if they are not those of a proof")
    add("--kills", type=positive_int, default=3, help="SIGKILLs, each after another checkpoint (default: 3)")
    help = "also SIGTERMs of a script without Bootfile, at other moments than a write (default: 0)"
    add("--stops", type=positive_int, metavar="N", help=help)
    add("--keep", metavar="FOLDER", help="keep the runs in this new or empty folder (default: temporary)")
    add("--compare", metavar="FILES", help='for a script without Bootfile: its weights, as "OUT/*.pt"')
    add("--resume_with", metavar="OPTIONS", help="for a script without Bootfile: options of a restart")
    args = parser.parse_args(words)
    from bootfile.prove import proof, runs  # import torch, which --help does not need

    find_modules = find_modules or proof.find_modules
    if args.check:
        others = (args.to, args.keep, args.compare, args.resume_with, args.stops, args.force, options)
        if any(others):
            raise BadInput("--check runs nothing: expected no other option")
        return runs.check(args.check, args.job, find_modules)
    if not args.job:
        parser.error("expected JOB")
    if not os.path.isfile(args.job):
        raise BadInput(f"{args.job}: no such file")
    if (args.compare is None) != (args.resume_with is None):
        raise BadInput("expected --compare FILES together with --resume_with OPTIONS")
    if args.stops and not args.compare:
        raise BadInput("--stops needs --compare FILES: a job of Bootfile saves at the end of a step")
    return runs.run(args, options, find_modules)


def split_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of this command, and the options of the script, which follow --."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments[:end]
    if "--resume_with" in words[:-1]:  # its value may look like an option
        place = words.index("--resume_with")
        words[place : place + 2] = [f"--resume_with={words[place + 1]}"]
    return words, arguments[end + 1 :]
