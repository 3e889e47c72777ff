"""What a job opens: its place among the processes, its device, its output folder and its log."""

import copy
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from bootfile.ground.errors import print_line
from common.console.arguments import Arguments
from common.distributed import devices
from common.platform import platforms
from common.platform.platforms import MEMBER
from common.platform.topology import Topology
from common.run.log import Log
from common.run.output import Output, open_output

_GRACE = 5.0  # seconds from a signal to the end of the processes, of a job that saves nothing


class Run:
    """A run of a job, as this process sees it. Each process makes one when its options are parsed, before it
    reads data or joins the others.

    args: the options of a JobParser.
    topology: the processes of the job, and the place of this one.
    device: the GPU of this process, or the CPU.
    output: the folder of the results.
    log: prints and writes the reports.
    Raises BadInput; nothing is left on the disk then.
    """

    def __init__(self, args: Arguments):
        self.args = args
        # the order matters: the device needs the rank, and only rank 0 opens a new folder
        self.topology: Topology = devices.find_topology(args)
        if MEMBER in os.environ:  # an agent has started this process
            from common.elastic.members import this_process  # most jobs are not elastic

            self.topology = dataclasses.replace(self.topology, members=this_process())
        self.device: torch.device = devices.select(args, self.topology)
        self.output: Output = open_output(args, self.topology)
        self.log = Log(args, self.output)

    def replaced(self, values: Mapping[str, Any]) -> "Run":
        """Return a copy with other values of its options. Call it before anything is printed or written."""
        run = copy.copy(self)
        run.args = self.args.replaced(values)
        run.log = Log(run.args, self.output)
        return run

    def print_topology(self) -> Topology:
        """Return the topology, which was found from the launcher (torchrun, torch.distributed.launch, Slurm,
        ...), the options of process_group.add_arguments(), or the variables of the platform. The first
        process of each node prints it, and the preflight report of the node. Raises BadInput."""
        from common.platform import node  # a job of one process does not need it

        if platforms.is_first_on_node():
            print_line(str(self.topology))
            node.print_findings(self.args, self.topology, self.output.folder)
        return self.topology

    def join(self) -> tuple[int, int]:
        """Return (rank, world_size) of this process, with torch.distributed initialised. A job of several
        processes calls it on each of them before the first use of its rank; all wait for each other.

        These are the steps of train_ddp.py. If the platform started one process per node, this one starts the
        node's processes, waits for them, and exits with their exit code: it does not return. Raises BadInput
        and NoRendezvous.
        """
        from common.distributed import launcher, process_group

        topology = self.print_topology()
        # this process trains nothing: it waits for its children, which run the same main()
        if topology.starts_processes:
            sys.exit(launcher.start(topology, vars(self.args).get("grace", _GRACE)))
        # all ranks of the job wait here for the last one
        torch.distributed.init_process_group(**process_group.meet(self.args, topology))
        return topology.rank, topology.world_size
