"""Run a job on this machine as a platform would: with its arguments, environment, folders, nodes and faults.

    python -m launch simulate --nodes 2 --processes 2 jobs/train_ddp.py -- --dataset digits --max_steps 40
    python -m launch simulate --nodes 2 --platform pai-dlc --fault kill:rank=1,step=5 jobs/train_ddp.py -- ...

A --train_url that is a folder of this machine stands for a mounted volume: all nodes write to it, and a new
container finds it as it was. Otherwise each node has a folder of outputs, as with pre-download. Its folders:
    user-job-dir/<name of the repository>     the files that `pack` keeps; the job is started here
    inputs/data_url_0                         a link to the --data_url of the job's arguments, or its folder
    outputs/train_url_0                       passed as --train_url unless the job's arguments name another
    cache                                     its scratch disk (BOOTFILE_SCRATCH)
    logs                                      its log

URLs among the job's arguments are not changed. Options in a file of its --config are not looked at. The job
uses the GPUs if there is one for every process, else the CPU. On the CPU it also
gets --processes_per_node if the platform does not start every process. A script outside a Bootfile repository
gets only the arguments that the platform passes (guides/own_script.md).

--fault may be repeated:
    kill:rank=R,step=S  term:...  stop:...    SIGKILL, SIGTERM, SIGSTOP to the process of a global rank
    hang:rank=R,step=S[,for=20s]              the main thread waits, as for data; hold: in C code that holds
                                              Python's lock. Without `for` it never ends
    kill:every=20step                         SIGKILL to a random process, every 20 steps; every=10s: seconds
    pause:node=N,step=S,for=20s               SIGSTOP to all processes of a node, and SIGCONT after 20 s
    pause:rank=R,every=10step,for=2s          the same to a rank, again every 10 steps
    throttle:rank=R,step=S,to=30%             the process runs 30 % of each 0.1 s, as with a cgroup's quota
    slow_data:node=N,step=S,by=0.2s           a slow mount: each file of --data_url opens 0.2 s later
    restart:node=N,step=S                     SIGKILL, then the command again in the same folders
    reschedule:node=N,step=S                  SIGKILL, then a new container with only a copy of the nodes'
                                              outputs; all nodes if none is named
    evict:node=N,step=S                       SIGTERM, SIGKILL 35 s after --grace, then a new pod with an
                                              empty disk: only a --train_url that is a folder is kept
After restart and reschedule, another node that fails is restarted in place once, as platforms with a restart
policy do; after evict, as a new pod.
pause, throttle and slow_data take rank= or node=; the last two end with for=20s. slow_data delays open() of
Python below the node's input folder, also in workers: data that a job holds in memory are not slow.
The processes of a job with --elastic true are those of its newest line `generation N: pids ...`.

Exit code: 0 if every node that was started ended with 0, else that of the node that failed first; 2 bad
input, 3 nothing failed but a fault never fired, 124 --limit, 128 + n the simulation was ended by signal n.
"""

import argparse
import contextlib
import os
import shutil
import signal
import tempfile

from bootfile.console import outputs
from bootfile.console.parser import expand_home
from bootfile.console.words import get_option, split_option
from bootfile.ground.errors import BadInput
from bootfile.processes import signals
from common.console.arguments import Parser, positive_float, positive_int
from datasets.folders import tar_files
from launch.bundle.code_folder import CodeFolder
from launch.profiles import PROFILES, Folders, make_starts
from launch.simulate import faults
from launch.simulate.job import Commands, log
from launch.simulate.nodes import Node
from launch.simulate.simulation import Simulation

_MOST_PROCESSES = 1024  # on one machine


def main(argv: list[str]) -> int:
    """Run the simulation and return its exit code. Raises BadInput before it starts anything."""
    args = _parse_args(argv)
    simulation = Simulation(args.processes, args.faults, args.limit)
    signals.unwind_within(60.0)  # seconds after Ctrl-C to end the nodes, and print their table
    with contextlib.ExitStack() as stack:
        # from here on a signal ends the nodes first; when main() returns, the old handlers are back
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup it stays ignored
                stack.callback(signal.signal, number, signal.signal(number, simulation.interrupt))
        folder = args.keep or tempfile.mkdtemp(prefix="bootfile-simulate-")
        if not args.keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        places = [os.path.join(folder, f"node-{index}") for index in range(args.nodes)]
        nodes = [Node(index, place, args.code, args.data) for index, place in enumerate(places)]
        commands = Commands(args)
        kept = "" if args.keep else " (--keep FOLDER keeps them)"
        log(
            f"platform={args.platform} nodes={args.nodes} processes={args.processes} "
            f"device={commands.device} folders={folder}{kept}"
        )
        code = simulation.run(nodes, commands)
        if args.keep:
            for node in nodes:
                log(f"node {node.index}: outputs={node.output} log={node.log}")
        return code


def _parse_args(argv: list[str]) -> argparse.Namespace:
    """Return the options, checked, and what follows from them: all errors are found before anything starts.

    job_arguments: what follows `--`. code: the uploaded files. faults: parsed. data: the folder of
    --data_url, None if the job fetches it or there is none. below: what follows that folder in --data_url.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(__doc__, "python -m launch simulate")
    add = parser.add_argument
    add("job", help="the script; its arguments follow --")
    add("--nodes", type=positive_int, default=1, help="simulated nodes (default: 1)")
    add("--processes", type=positive_int, default=1, help="processes of every node (default: 1)")
    add("--platform", choices=PROFILES, default="modelarts", help="platform to simulate (default: modelarts)")
    add("--fault", action="append", default=[], metavar="KIND:rank=R,step=S", help="may be repeated")
    add("--code_dir", metavar="FOLDER", help="the uploaded folder of a script (default: the script's own)")
    add("--keep", metavar="FOLDER", help="keep the nodes' folders in this new folder (default: temporary)")
    add("--limit", type=positive_float, help="end the simulation after this many seconds (default: never)")
    try:
        args = parser.parse_args(argv[:split])
    except BadInput as error:
        raise BadInput(f"{error} (the job's own arguments follow --)") from None
    job_words = _name_results([expand_home(word) for word in argv[split + 1 :]])
    if not os.path.isfile(args.job):
        raise BadInput(f"{args.job}: no such file")
    # the same files as in an upload: a module that would be missing there is missing here
    code = CodeFolder(args.job, code_dir=args.code_dir)
    code.check_modules_above()
    if args.nodes * args.processes > _MOST_PROCESSES:
        raise BadInput(f"--nodes {args.nodes} --processes {args.processes}: at most {_MOST_PROCESSES} in all")
    somewhere = Folders("", "", "", "", "")
    addresses = ["127.0.0.1"] * args.nodes
    make_starts(args.platform, 0, args.nodes, args.processes, addresses, 1, somewhere)  # checks
    parsed = [faults.parse(spec, args.nodes, args.processes) for spec in args.fault]
    data, below = _find_input(job_words)
    if args.keep:
        args.keep = os.path.abspath(args.keep)
        outputs.make_empty(args.keep)
    args.job_arguments = job_words
    args.code = code
    args.faults = parsed
    args.data = data and os.path.abspath(data)
    args.below = below
    return args


def _name_results(job_words: list[str]) -> list[str]:
    """Return the job's arguments with the whole path of a folder in --train_url: each node has a working
    directory of its own."""
    place, others = split_option(job_words, "--train_url")
    if not place or "://" in place:
        return job_words
    return [*others, f"--train_url={os.path.abspath(place)}"]


def _find_input(job_words: list[str]) -> tuple[str | None, list[str]]:
    """Return the folder of --data_url and what follows it, such as a pattern; None if there is none here."""
    data = get_option(job_words, "--data_url")
    if data is None or "://" in data:  # the job itself fetches it
        return None, []
    if os.path.isdir(data):
        return data, []
    if not os.path.isfile(data) and not set(data) & set("*?[{"):
        raise BadInput(f"--data_url {data} is not a folder on this machine")
    tar_files.find(data)  # a file, or a pattern that matches some: their folder is the input
    folder, *below = tar_files.split_pattern(data)
    return folder, below
