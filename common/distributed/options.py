"""The options of a job's processes. This module imports no torch."""

from common.console.arguments import OPERATION, Parser, positive_float, positive_int


def add_arguments(parser: Parser) -> None:
    """Add the options that platforms inject. --rank and --world_size count nodes."""
    add = parser.add_argument_group("processes", role=OPERATION).add_argument
    add("--init_method", metavar="ADDRESS", help="tcp://host:port of the first node")
    add("--rank", type=int, help="index of this node")
    add("--world_size", type=int, help="number of nodes")
    add("--local_rank", type=int, help="set by torch.distributed.launch")
    add("--processes_per_node", type=positive_int, help="processes of this node (default: the GPUs, else 1)")
    help = "give up after SECONDS of waiting for another process (default: 300)"
    add("--timeout", type=positive_float, default=300, metavar="SECONDS", help=help)
