"""Repairs of the files of checkpoints: how they are written, chosen and read."""

import ast
import itertools
import re
from typing import Any

from bootfile.fix.checkpoint import Job
from bootfile.fix.edits import Script, require
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse

_MOVES = re.compile(r"\bos\.(replace|rename|remove|fsync)\(|\bshutil\.|\.(rename|replace)\(")
_SHARDED = r"fully_shard|FullyShardedDataParallel|FSDP|deepspeed"
_NUMBERS = 'key=lambda path: [int(number) for number in {}.findall(r"\\d+", str(path))]'


def write_whole(job: Job) -> None:
    """Write a checkpoint under another name, and then rename it (R501)."""
    save: Event = job.find("save")
    statement = job.scope.statement(save.path, save.node)
    is_alone = isinstance(statement, ast.Expr) and statement.value is save.node and save.text == "torch.save"
    is_plain = is_alone and len(save.node.args) == 2 and not save.node.keywords
    require(is_plain, "the checkpoint is not written by torch.save(object, path) in a line of its own")
    script, suffix = job.open(save.path), ""
    is_of_node = any("%" in part.text and "rank" in part.text for part in save.conditions)
    # several processes write the file: each has a temporary file of its own
    if is_of_node or (job.facts.is_distributed() and not save.conditions):
        dist = _find_distributed(job, script)
        suffix = f"{{{dist}.get_rank() if {dist}.is_initialized() else 0}}"
    os_name = script.add_import("os")
    path: Any = save.node.args[1]
    target = script.source(path)
    require("\n" not in target, "the path has several lines")
    # names that the script does not have yet: those of its first file have no number
    names, bound = ["final_path", "new_path", "new_file"], script.find_bound()
    endings = ["", *[f"_{number}" for number in range(2, len(bound) + 3)]]
    ending = next(one for one in endings if not bound & {name + one for name in names})
    final_path, new_path, new_file = (name + ending for name in names)
    if not isinstance(path, ast.Name | ast.Attribute | ast.Constant):
        script.insert_before(statement, [f"{final_path} = {target}"])
        target = final_path
    new = f"{target[:-1]}.new{target[-1]}"
    if suffix or not isinstance(path, ast.Constant):
        quoted = str(path.value) if isinstance(path, ast.Constant) else f"{{{target}}}"
        new = f'f"{quoted}.new{suffix}"'
    script.insert_before(statement, [f"{new_path} = {new}"])
    script.guard(statement, statement, f'with open({new_path}, "wb") as {new_file}:')
    script.replace(path, new_file)
    synced = [f"    {new_file}.flush()", f"    {os_name}.fsync({new_file}.fileno())"]
    script.insert_after(statement, [*synced, f"{os_name}.replace({new_path}, {target})"])


def choose_by_number(job: Job) -> None:
    """Compare the numbers in the names of checkpoints (R502)."""
    load: Event = job.find("load")
    calls = [node for node in job.facts.nodes(load.path, ast.Call) if not node.keywords]
    sorts = [node for node in calls if _compares(node)]
    # the one that leads to the load: the line of the listing or of a name that is made of it
    listed = job.find("value")
    near = [node for node in sorts if node.lineno >= listed.line]
    # if a line has two of these calls, sorted() or max() and not .sort()
    near.sort(key=lambda node: unparse(node.func) not in ("sorted", "max"))
    require(near and listed.path == load.path, "the call that sorts the names is not found")
    script = job.open(load.path)
    nearest = min(near, key=lambda node: node.lineno - listed.line)
    script.add_argument(nearest, _NUMBERS.format(script.add_import("re")))


def _compares(node: ast.Call) -> bool:
    name = unparse(node.func)
    return (name in ("sorted", "max") and len(node.args) == 1) or (name.endswith(".sort") and not node.args)


def write_on_rank_0(job: Job) -> None:
    """Write a file on rank 0 only (R503)."""
    save: Event = job.find("save")
    scope, path = job.scope, save.path
    is_sharded = job.facts.imports(_SHARDED) or job.facts.calls(_SHARDED)
    require(not is_sharded, "a sharded model may be saved by all ranks together")
    script = job.open(path)
    dist = _find_distributed(job, script)
    first: Any = scope.statement(path, save.node)
    while isinstance(around := scope.parents[path][first], ast.With) and "open(" in unparse(around.items[0]):
        first = around
    block = scope.block(path, first)
    # what renames the file comes after it, and would fail on the other ranks
    later = itertools.takewhile(lambda part: _MOVES.search(unparse(part)), block[block.index(first) + 1 :])
    last = [first, *later][-1]
    script.guard(first, last, f"if not {dist}.is_initialized() or {dist}.get_rank() == 0:")


def _find_distributed(job: Job, script: Script) -> str:
    """Return the name of torch.distributed. Raises CannotEdit if the ranks may be those of another package,
    or if the file does not import torch."""
    is_of_torch = not job.facts.imports(r"\b(horovod|torch_xla)\b")
    require(is_of_torch, "several processes write the file, and their ranks are not those of torch")
    torch = script.imported("torch")
    require(torch, "torch is not imported by its name")
    return script.imported("torch.distributed") or f"{torch}.distributed"


def read_whole(job: Job) -> None:
    """Let torch.load() read a file of the script itself (R506)."""
    event: Event = job.find("event")
    job.open(event.path).add_argument(event.node, "weights_only=False")
    note = "torch.load() with weights_only=False runs code of the file: load only files that you trust"
    job.notes.append(note)


def rename_entries(job: Job) -> None:
    """Load the weights of a wrapped model into the bare one, or the other way round (R601)."""
    load: Event = job.find("load")
    loaded = load.text.partition(":")[2]
    script = job.open(load.path)
    prefix = next((one for one in ("_orig_mod.", "module.") if one in job.finding.message), "")
    if loaded:
        called = load.node.func.value
        script.wrap(called, "getattr(", f', "{loaded.rstrip(".")}", {script.source(called)})')
        return
    require(prefix and load.node.args, "the names of the weights are not known")
    before = f'{{name.removeprefix("{prefix}"): part for name, part in '
    script.wrap(load.node.args[0], before, ".items()}")
