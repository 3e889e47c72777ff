"""Imports point in one direction, and no room knows the private names of another one.

Imports run one way: jobs and launch import datasets and common, datasets imports common, and all of them
import bootfile, which imports nothing of the others. Inside a package,
neither its rooms (files directly in it, and sub-packages) nor its files import each other in a circle.
Imports inside functions also count.
"""

import argparse
import ast
import os
import re
from typing import NamedTuple

import pytest
import torch

from tests.conftest import QUICK, ROOT, run

ALLOWED = {
    "bootfile": {"bootfile"},
    "common": {"common", "bootfile"},
    "datasets": {"datasets", "common", "bootfile"},
    "launch": {"launch", "datasets", "common", "bootfile"},
    "jobs": {"jobs", "datasets", "common", "bootfile"},
}

# The rooms of two packages. A room imports only rooms after it.
ROOMS = {
    "bootfile": [
        "__main__", "cli", "fix", "prove", "lint", "history", "loaders", "receipt", "exact", "sampling",
        "processes", "machine", "histories", "records", "console", "ground",
    ],
    "common": [
        "checkpoint", "run", "elastic", "parallel", "distributed", "compute", "console", "platform",
        "object_store", "ground",
    ],
}  # fmt: skip

Graph = dict[str, set[str]]


def read_sources() -> dict[str, str]:
    """Return the text of every module of the four packages, by its dotted name ("common.files")."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for package in ALLOWED
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def find_nodes_for_types(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes below `if TYPE_CHECKING:`, which never run."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    blocks = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def find_imports(sources: dict[str, str]) -> Graph:
    """Return the modules of `sources` that each module imports, also inside functions.

    Imports for a type checker only do not count.
    `from a.b import c` imports a.b.c if that is a module, else a.b, or a.b.__init__ if a.b is a package.
    """
    graph: Graph = {}
    for name, text in sources.items():
        wanted = []
        tree = ast.parse(text)
        unused = find_nodes_for_types(tree)
        for node in ast.walk(tree):
            if node in unused:
                continue
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


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_lower_ones(package):
    names = [name for name in GRAPH if name.startswith(f"{package}.") and name != f"{package}.__init__"]
    places = {name: ROOMS[package].index(name.split(".")[1]) for name in names}
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


def test_the_core_knows_only_processes_machines_records_and_the_ground():
    exact = {name for name in GRAPH if name.startswith("bootfile.exact.")}
    rooms = {name.split(".")[1] for name in find_closure(GRAPH, exact)}
    assert rooms - {"__init__"} <= {"exact", "processes", "machine", "histories", "records", "ground"}


def test_rooms_do_not_import_each_other_in_a_circle():
    assert find_room_cycles(GRAPH) == set()


def test_files_do_not_import_each_other_in_a_circle():
    assert find_cycles(GRAPH) == set()


@pytest.mark.parametrize("package", ["bootfile", "common", "datasets"])
def test_importing_a_package_imports_nothing(package):
    code = (
        "import sys, importlib.machinery, typing; before = set(sys.modules)\n"
        f"import {package}; print(set(sys.modules) - before)"
    )
    assert run("-c", code, fresh=True).stdout == f"{{{package!r}}}\n"


@pytest.mark.thorough
def test_a_plain_job_loads_no_slow_package(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['', *{QUICK}, '--max_steps=1', '--output_dir', {str(tmp_path)!r}]\n"
        "runpy.run_path('jobs/train.py', run_name='__main__')\n"
        "print('imported:', *sys.modules)\n"
    )
    printed = run("-c", code, fresh=True).stdout
    imported = re.search("^imported: (.*)$", printed, re.MULTILINE).group(1).split()
    assert "common.distributed.entry" in imported
    slow = {"datasets.arrow_dataset", "scipy", "sklearn", "pandas", "torchvision"}  # a second or so each
    assert not slow & set(imported)


CUDA_ONLY = {  # they use NVIDIA's libraries, or are the one module that knows the accelerator
    "bootfile.fix.ddp",  # in the text of a script
    "bootfile.ground.accelerator", "common.platform.node", "datasets.compat.alias.dali",
    "datasets.compat.dali_dataset",
}  # fmt: skip


def test_one_module_knows_the_accelerator():
    assert {name for name, text in SOURCES.items() if "torch.cuda" in text} <= CUDA_ONLY


SMALL = {  # made-up modules and their texts
    "common.files": "import os\n",
    "common.a.__init__": "",
    "common.a.x": "from common import files\nfrom common.a import y\n",
    "common.a.y": "def later():\n    import common.files\n    from common.b import thing\n",
    "common.b.__init__": "thing = 1\n",
    "common.b.z": "from common.a.x import name\nfrom common.bar import nothing\n",
    "common.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import launch.go\n",
    "datasets.d": "from common.a.x import name\nimport launch.go\n",
    "launch.go": "from jobs import train\nfrom datasets import d\n",
    "jobs.train": "import torch\nfrom datasets.d import other\n",
}


def test_the_checks_can_fail():
    graph = find_imports(SMALL)
    assert graph["common.a.y"] == {"common.files", "common.b.__init__"}, "also inside a function"
    assert graph["common.c"] == set(), "a type checker only reads it"
    assert find_upward(graph, ALLOWED) == {"datasets.d -> launch.go", "launch.go -> jobs.train"}
    assert find_cycles(graph) == {"datasets.d jobs.train launch.go"}
    assert find_room_cycles(graph) == {"common.a common.b"}, "the files of these rooms have no cycle"


class _Pair(NamedTuple):
    first: int


# private names of other packages that they document, or that modules of ours may share with them
_OF_OTHERS = {"_", *dir(os), *dir(_Pair), *dir(argparse.HelpFormatter), *vars(torch.nn.Module())}


def find_private(sources: dict[str, str]) -> set[str]:
    """Return where a module uses or overrides a private name of a class or module in another room.

    A private name begins with one underscore. A room is a folder. A name counts as one of another room if it
    is defined there, and not in the room that uses it.
    """
    defined: dict[str, set[str]] = {}  # room -> private names that it defines
    classes: dict[str, list[tuple[str, ast.ClassDef]]] = {}  # name of a class -> its room and its tree
    trees = {name: ast.parse(text) for name, text in sources.items()}
    for name, tree in trees.items():
        room = name.rpartition(".")[0]
        defined.setdefault(room, set()).update(_defines(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((room, node))
    everywhere = set().union(*defined.values())
    wrong = set()
    for name, tree in trees.items():
        room = name.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                if node.attr in everywhere and node.attr not in defined[room]:
                    wrong.add(f"{name}:{node.lineno} uses {node.attr}")
            elif isinstance(node, ast.ImportFrom):
                foreign = [alias.name for alias in node.names if is_private(alias.name)]
                if (node.module or "").rpartition(".")[0] != room and node.module in sources:
                    wrong.update(f"{name}:{node.lineno} imports {each}" for each in foreign)
            elif isinstance(node, ast.ClassDef):
                own = _defines(node)
                for base in node.bases:
                    base_name = ast.unparse(base).rpartition(".")[2]
                    for base_room, base_class in classes.get(base_name, ()):
                        if base_room != room:
                            overridden = sorted(own & _defines(base_class))
                            wrong.update(f"{name}:{node.name} overrides {each}" for each in overridden)
    return wrong


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defines(tree: ast.AST) -> set[str]:
    """Return the private names that functions, classes, assignments and attributes of self define."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)  # of self, mostly
    return {name for name in names if is_private(name)} - _OF_OTHERS


@pytest.mark.thorough
def test_no_class_knows_private_names_of_another_room():
    assert find_private(read_sources()) == set()


def test_private_names_of_another_room_are_found():
    sources = {
        "a.one.first": "class First:\n    def _run(self): self._count = 1\n",
        "a.one.same": "from a.one.first import First\nFirst()._count\n",
        "a.two.other": (
            "from a.one.first import First\nclass Other(First):\n    def _run(self): pass\n"
            "def read(first):\n    return first._count\n"
        ),
        "b": "from a.one.first import _helper\n",
    }
    assert find_private(sources) == {
        "a.two.other:Other overrides _run",
        "a.two.other:5 uses _count",
        "b:1 imports _helper",
    }
