"""Start train.py through torchrun on every node of a ModelArts job."""

import argparse
import os
import sys
from urllib.parse import urlparse

env = os.environ  # a custom image gets variables, and no arguments
first = env.get("VC_WORKER_HOSTS", "127.0.0.1").split(",")[0]
parser = argparse.ArgumentParser()
parser.add_argument("--init_method", default=f"tcp://{first}:{env.get('MASTER_PORT', 29500)}")
parser.add_argument("--rank", type=int, default=int(env.get("VC_TASK_INDEX", 0)))  # of the node
parser.add_argument("--world_size", type=int, default=int(env.get("MA_NUM_HOSTS", 1)))  # nodes
parser.add_argument("--num_gpus", type=int, default=int(env.get("MA_NUM_GPUS", 0)))  # of this node
parser.add_argument("--processes", type=int, help="of this node (default: one per GPU)")
args, rest = parser.parse_known_args()
master = urlparse(args.init_method)
script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
command = [
    sys.executable, "-m", "torch.distributed.run",
    f"--nnodes={args.world_size}", f"--node-rank={args.rank}",
    f"--nproc-per-node={args.processes or args.num_gpus or 1}",
    f"--master-addr={master.hostname}", f"--master-port={master.port}", script, *rest,
]  # fmt: skip
os.execv(sys.executable, command)  # the same process: signals and the exit code are torchrun's
