"""Start a script on two processes of this machine: python two.py SCRIPT OUT"""

import os
import sys

words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
os.execv(sys.executable, [sys.executable, *words, *sys.argv[1:]])
