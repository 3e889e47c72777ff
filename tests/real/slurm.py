"""A real Slurm of two nodes on this machine, which ends with its test.

    apt-get install -y slurm-wlm munge

Its nodes are n1 and n2. Their names resolve by a file of its own, in a mount namespace of each daemon, and a
node is a PID namespace, so it needs root. Partition `low` is preempted by `high`, after GraceTime.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import environment, free_port, wait_until

DAEMONS = ("munged", "slurmctld", "slurmd")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
FirstJobId={first}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=40
PartitionName=high Nodes=n1,n2 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Return why no Slurm can be started here; "" if it can."""
    lost = [name for name in DAEMONS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    if lost:
        return f"{', '.join(lost)} not found: apt-get install -y slurm-wlm munge"
    return "" if os.geteuid() == 0 else "a private /etc/hosts needs root"


class Cluster:
    """The cluster, started by `with`. folder: for its state and logs. `daemons`: name -> process."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, dict[str, subprocess.Popen]()
        for name in ("state", "spool", "log"):
            (folder / name).mkdir(parents=True)
        ports = [free_port() for _ in range(3)]
        conf = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        first = 1000 + secrets.randbelow(100_000)  # a job's port follows from its id: another test's differ
        conf.write_text(_CONF.format(host=host, folder=folder, ports=ports, first=first))
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n1 n2\n")
        (folder / "munge.key-file").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key-file").chmod(0o400)
        self.env = environment(SLURM_CONF=str(conf), PATH=f"{os.environ['PATH']}:/usr/sbin")

    def __enter__(self) -> "Cluster":
        names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        options = [f"--{name}={self.folder}/munge.{name}" for name in names]
        try:
            self.start("munged", "munged", "--foreground", "--force", *options)
            wait_until((self.folder / "munge.socket").exists, timeout=60)
            self.start("slurmctld", "slurmctld", "-D")
            for node in ("n1", "n2"):
                self.start_node(node)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.daemons)):
            self.stop(name)

    def start(
        self,
        name: str,
        *command: str,
        namespaces: Sequence[str] = ("--mount",),
        hosts: Path | None = None,
    ) -> None:
        """Start a daemon in a mount namespace with its own /etc/hosts. hosts: default: n1 and n2 resolve."""
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        words = ["unshare", *namespaces, "sh", "-c", script, str(hosts or self.folder / "hosts"), *command]
        with open(self.folder / "log" / name, "ab") as log:
            self.daemons[name] = subprocess.Popen(words, env=self.env, stdout=log, stderr=log)

    def start_node(self, name: str, hosts: Path | None = None) -> None:
        """Start a node: all its processes end with its slurmd."""
        own = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self.start(name, "slurmd", "-D", "-N", name, namespaces=own, hosts=hosts)

    def stop(self, name: str) -> None:
        daemon = self.daemons.pop(name)
        daemon.kill()  # unshare ignores SIGTERM while its child runs
        daemon.wait()

    def ask(self, *command: object) -> str:
        """Return what a command of Slurm prints. Raises CalledProcessError."""
        words = list(map(str, command))
        return subprocess.run(
            words, env=self.env, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are free."""
        words, end = ["sinfo", "-hNp", "low", "-o", "%T"], time.monotonic() + 120
        while subprocess.run(words, env=self.env, capture_output=True).stdout != b"idle\nidle\n":
            assert time.monotonic() < end, "a node is not free after 120 s"
            time.sleep(0.2)

    def get(self, job: str, field: str) -> str:
        """Return a field of `scontrol show job`: JobState, Restarts, ExitCode, ..."""
        return self.ask("scontrol", "show", "job", job).partition(f"{field}=")[2].split()[0]

    def wait(self, job: str, *states: str, seconds: float = 400) -> None:
        """Wait until a job has one of these states. Fail if it has ended with another one."""
        end = time.monotonic() + seconds
        while (state := self.get(job, "JobState")) not in states:
            is_over = state in ENDS or time.monotonic() > end
            assert not is_over, f"job {job} is {state}, expected {states}"
            time.sleep(0.5)

    def processes(self, job: str) -> list[int]:
        """Return the process ids of a job, its batch script included."""
        marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={self.env['SLURM_CONF']}".encode()}
        alive = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                    alive.append(int(folder.name))
        return alive
