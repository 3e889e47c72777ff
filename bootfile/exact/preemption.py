"""Save and stop when a cloud, or a file, announces the end of a machine of the run.

    Exact(..., plugins=[*usual(), Preemption("aws")])

Experimental. The run ends as after SIGTERM: all ranks save after the same step and exit with 143, and a
scheduler starts it elsewhere in the time that is left. A step costs nothing: a thread asks, on the first rank
of each node.
"""

import os
import signal
import threading

from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground.errors import Once, in_one_line, print_line, printable
from bootfile.processes import host_names, notices, ranks, signals


class Preemption(Plugin):
    """A notice of preemption saves and ends the run. A server that does not answer, or wrongly, is named
    once, and asked again.
    source: "aws", "google", "azure", "alibaba", or the path of a file, with a /, that exists when the machine
        ends (bootfile/processes/notices.py).
    address: http://HOST:PORT of the metadata server (default: AWS_EC2_METADATA_SERVICE_ENDPOINT,
        GCE_METADATA_HOST, or the usual one of the cloud). Raises BadInput.
    """

    def __init__(self, source: str | os.PathLike[str], address: str | None = None):
        self._source = notices.find_source(os.fspath(source), address)
        self._is_over = threading.Event()

    def begin(self, parts: Parts, step: int) -> None:
        self._is_over = threading.Event()  # the thread of an earlier run keeps its own
        # the ranks of a node would get the same answer: its first one asks
        node = next(node for node in host_names.find_nodes() if ranks.rank() in node.ranks)
        if parts.writes and ranks.rank() == node.ranks[0]:
            arguments = node.name, self._is_over
            threading.Thread(target=self._follow, args=arguments, name="notices", daemon=True).start()

    def close(self, error: BaseException | None) -> None:
        self._is_over.set()

    def _follow(self, node: str, is_over: threading.Event) -> None:
        """Ask until there is a notice, or the run is over: the thread "notices"."""
        name = self._source.name
        say_once = Once(print_line)
        while not is_over.is_set():
            what = ""
            try:
                what = self._source.find()
            except Exception as error:  # a server may answer anything, and the run must not depend on it
                line = f"warning: notices of preemption by {name} cannot be read on node {node}"
                say_once(f"{line}, and are asked for again: {in_one_line(error)}", name)
            if what and not is_over.is_set():
                reason = f"notice of preemption by {name} for node {node} ({what})"
                signals.ask(int(signal.SIGTERM), printable(reason))
                return
            is_over.wait(self._source.every)
