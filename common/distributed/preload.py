"""What a job imports late: agent.py lets the process import it from which it forks the others."""

import contextlib
import gc
import importlib
import threading

from tqdm import tqdm

from common.distributed import launcher

launcher.die_with_parent()  # the fork server of multiprocessing lives as long as its forks; they end with it
for _name in ("torch._dynamo", "torch.utils.tensorboard", "common.exact.replicas"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
tqdm.set_lock(threading.RLock())  # tqdm's own is one of all processes, which a killed one leaves behind
gc.freeze()  # else the end of each fork visits all objects of PyTorch, which takes a second
