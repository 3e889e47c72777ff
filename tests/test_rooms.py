"""Imports point in one direction.

Imports run one way: jobs and launch import datasets and common, datasets imports common. Inside a package,
neither its rooms (files directly in it, and sub-packages) nor its files import each other in a circle.
Imports inside functions also count.
"""

import ast
import re

import pytest

from tests.conftest import QUICK, ROOT, run

ALLOWED = {
    "common": {"common"},
    "datasets": {"datasets", "common"},
    "launch": {"launch", "datasets", "common"},
    "jobs": {"jobs", "datasets", "common"},
}

# The rooms of common. A room imports only rooms after it.
ROOMS = [
    "checkpoint", "run", "exact", "parallel", "distributed", "compute", "console", "platform", "object_store",
    "machine", "ground",
]  # fmt: skip

Graph = dict[str, set[str]]


def read_sources() -> dict[str, str]:
    """Return the text of every module of the four packages, by its dotted name ("common.files")."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for package in ALLOWED
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def find_imports(sources: dict[str, str]) -> Graph:
    """Return the modules of `sources` that each module imports, also inside functions.

    `from a.b import c` imports a.b.c if that is a module, else a.b, or a.b.__init__ if a.b is a package.
    """
    graph: Graph = {}
    for name, text in sources.items():
        wanted = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                wanted += [(alias.name,) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        candidates = ([f"{each}{end}" for each in names for end in ("", ".__init__")] for names in wanted)
        found = (next((each for each in names if each in sources), None) for names in candidates)
        graph[name] = {each for each in found if each and each != name}
    return graph


def find_upward(graph: Graph, allowed: dict[str, set[str]]) -> set[str]:
    """Return the imports "a.b -> c.d" that are not allowed."""
    return {
        f"{name} -> {other}"
        for name, others in graph.items()
        for other in others
        if other.partition(".")[0] not in allowed[name.partition(".")[0]]
    }


def find_cycles(graph: Graph) -> set[str]:
    """Return the strongly connected components of two nodes or more, each as its sorted names."""
    reach: Graph = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[start] = seen
    groups = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in graph}
    return {" ".join(sorted(group)) for group in groups if len(group) > 1}


def find_room_cycles(graph: Graph) -> set[str]:
    """Return the cycles between the rooms of each package and sub-package."""
    packages = {name.rpartition(".")[0] for name in graph}
    packages |= {name.rpartition(".")[0] for name in packages if "." in name}
    found = set()
    for package in packages:
        start = f"{package}."
        inside: Graph = {}
        for name, others in graph.items():
            if name.startswith(start):
                room = start + name.removeprefix(start).partition(".")[0]
                there = {
                    start + each.removeprefix(start).partition(".")[0]
                    for each in others
                    if each.startswith(start)
                }
                inside.setdefault(room, set()).update(there - {room})
        found |= find_cycles(inside)
    return found


SOURCES = read_sources()
GRAPH = find_imports(SOURCES)


def test_imports_run_one_way():
    assert find_upward(GRAPH, ALLOWED) == set()


def test_rooms_of_common_import_only_lower_ones():
    names = [name for name in GRAPH if name.startswith("common.") and name != "common.__init__"]
    places = {name: ROOMS.index(name.split(".")[1]) for name in names}
    upward = {f"{a} -> {b}" for a in places for b in GRAPH[a] & places.keys() if places[b] < places[a]}
    assert upward == set()


def find_closure(graph: Graph, first: set[str]) -> set[str]:
    """Return these modules and all that they import, also through others."""
    seen, todo = set(first), list(first)
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_the_core_knows_no_option_log_platform_or_url():
    exact = {name for name in GRAPH if name.startswith("common.exact.")}
    rooms = {name.split(".")[1] for name in find_closure(GRAPH, exact) if name.startswith("common.")}
    assert rooms - {"__init__"} == {"exact", "parallel", "distributed", "compute", "machine", "ground"}
    run = {name for name in GRAPH if name.startswith("common.run.")}
    assert not {name for name in find_closure(GRAPH, run) if name.startswith("common.exact.")}


def test_rooms_do_not_import_each_other_in_a_circle():
    assert find_room_cycles(GRAPH) == set()


def test_files_do_not_import_each_other_in_a_circle():
    assert find_cycles(GRAPH) == set()


@pytest.mark.parametrize("package", ["common", "datasets"])
def test_importing_a_package_imports_nothing(package):
    code = (
        "import sys, importlib.machinery, typing; before = set(sys.modules)\n"
        f"import {package}; print(set(sys.modules) - before)"
    )
    assert run("-c", code, fresh=True).stdout == f"{{{package!r}}}\n"


# What train.py loads on digits: files of common.console and common.ground, and these.
PLAIN_FILES = {
    "common.checkpoint": {"checkpointer", "options", "resume"},
    "common.compute": {"loss_means", "losses", "models"},
    "common.distributed": {"barrier", "devices", "entry", "preemption", "ranks"},
    "common.exact": {
        "choose", "digest", "digest_lines", "files", "loop", "machines", "nonfinite", "optimizer_steps",
        "saver", "schedules", "state",
    },
    "common.machine": {
        "convolution", "cores", "differences", "facts", "instructions", "probe", "processor", "threads",
        "vector_math",
    },
    "common.parallel": {"dtensors"},  # asks whether the model is sharded
    "common.platform": {"platforms", "topology"},
    "common.run": {
        "environment", "evaluation", "folder_lease", "job", "lease", "log", "metrics", "output", "run",
        "starts",
    },
    "datasets": {"files"},
    "datasets.loaders": {"loader", "engines.memory"},
    "datasets.memory": {"digits", "image_set"},
    "datasets.sampling": {"augment", "generators", "philox", "receipt", "records", "sampler"},
}  # fmt: skip


def test_a_plain_job_loads_only_the_rooms_that_it_uses(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['', *{QUICK}, '--max_steps=1', '--output_dir', {str(tmp_path)!r}]\n"
        "runpy.run_path('jobs/train.py', run_name='__main__')\n"
        "print('imported:', *sys.modules)\n"
    )
    printed = run("-c", code, fresh=True).stdout
    imported = re.search("^imported: (.*)$", printed, re.MULTILINE).group(1).split()
    files = [name for name in imported if name in SOURCES]  # without packages, whose __init__.py is empty
    assert "common.distributed.entry" in files
    allowed = {f"{room}.{name}" for room, names in PLAIN_FILES.items() for name in names}
    rooms = ("common.console.", "common.ground.")
    assert not [name for name in files if name not in allowed and not name.startswith(rooms)]
    assert not allowed - set(files), "these files are not used any more"
    slow = {"datasets.arrow_dataset", "scipy", "sklearn", "pandas", "torchvision"}  # a second or so each
    assert not slow & set(imported)


CUDA_ONLY = {  # they use NVIDIA's libraries, or are the one module that knows the accelerator
    "common.ground.accelerator", "common.platform.node", "datasets.compat.alias.dali",
    "datasets.compat.dali_dataset",
}  # fmt: skip


def test_one_module_knows_the_accelerator():
    assert {name for name, text in SOURCES.items() if "torch.cuda" in text} == CUDA_ONLY


SMALL = {  # made-up modules and their texts
    "common.files": "import os\n",
    "common.a.__init__": "",
    "common.a.x": "from common import files\nfrom common.a import y\n",
    "common.a.y": "def later():\n    import common.files\n    from common.b import thing\n",
    "common.b.__init__": "thing = 1\n",
    "common.b.z": "from common.a.x import name\nfrom common.bar import nothing\n",
    "datasets.d": "from common.a.x import name\nimport launch.go\n",
    "launch.go": "from jobs import train\nfrom datasets import d\n",
    "jobs.train": "import torch\nfrom datasets.d import other\n",
}


def test_the_checks_can_fail():
    graph = find_imports(SMALL)
    assert graph["common.a.y"] == {"common.files", "common.b.__init__"}, "also inside a function"
    assert find_upward(graph, ALLOWED) == {"datasets.d -> launch.go", "launch.go -> jobs.train"}
    assert find_cycles(graph) == {"datasets.d jobs.train launch.go"}
    assert find_room_cycles(graph) == {"common.a common.b"}, "the files of these rooms have no cycle"
