"""Let the script of one device train on several: add blocks as those of jobs/train_ddp.py.

A block opens with `### tag k/n, reason ###` and closes with the same line; the blank line before it belongs
to it. Without its blocks the script is what it was, byte for byte. The new script needs torch only, and
torchrun starts it. The batch size counts the samples of a step over all ranks. Each rank evaluates all of the
validation set, so its figures are those of one device. What cannot be placed is named, and then nothing is
changed.
"""

import ast
import re
from typing import Any, NamedTuple

from bootfile.fix.edits import Script, require
from bootfile.fix.training import Training, last_import, walk_own
from bootfile.lint.sources import is_main_test, unparse
from bootfile.lint.values import root

TAG = "分布式改造 (distributed)"
_RANK = "torch.distributed.get_rank()"
_SIZE = "torch.distributed.get_world_size()"
_WAIT = "    torch.distributed.barrier()"
# what DistributedDataParallel has, too
_OF_MODULES = re.compile(
    r"train|eval|(named_)?(parameters|modules|children|buffers)|(load_)?state_dict|to|cuda|cpu|zero_grad|apply"
    r"|half|float|double|bfloat16|requires_grad_|forward|register_\w+"
)
# functions that write files: on the other ranks they do nothing
_WRITERS = re.compile(
    r"(torch|numpy|cv2|shutil|matplotlib\.pyplot|torchvision\.utils)"
    r"\.(save|savez|savetxt|imwrite|copy|copyfile|savefig|save_image)"
)
_SAVE = """
    torch_save = torch.save
    torch.save = lambda value, file, *args, **options: (
        torch_save(value, file, *args, **options) if hasattr(file, "write") else None  # into memory
    )"""
_OPEN = '''
    import builtins

    def open(path, mode="r", *args, **options):
        """Open a file for reading, or write nowhere."""
        path = os.devnull if set(mode) & set("wax+") else path
        return builtins.open(path, mode, *args, **options)'''
_IMPORTS = """
import os
import sys

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler"""
_CONNECT = """
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))"""


class _Block(NamedTuple):
    """Lines to insert at a node. place: for the order of the blocks. where: "before", "after" or "first"."""

    place: tuple[int, int]
    where: str
    node: Any
    reason: str
    lines: tuple[str, ...]


def make_distributed(script: Script) -> list[str]:
    """Plan the blocks of a script, and return notes for the user. Raises CannotEdit, and BadInput if lint
    cannot read the file."""
    return _Distributed(script).run()


class _Distributed(Training):
    """The blocks of one script."""

    def plan(self) -> None:
        self.blocks: list[_Block] = []
        created = self.facts.select("create")
        self.made = [event for event in created if event.value in (self.loader, *self.models)]
        self.check_loader()
        self._check()
        if self.missing:
            return
        imports = last_import(self.script)
        reason = "find the rank of this process: torchrun sets RANK and LOCAL_RANK"
        self._add("after", imports, reason, *_IMPORTS.split("\n")[1:])
        test = 'if os.environ.get("RANK", "0") != "0":'
        self._add("after", imports, "rank 0 prints and writes", test, *self._silence())
        self._connect(imports)
        self._divide_loader()
        self._wrap_model()
        self._sum_figures()
        self._take_turns()
        self.notes.append(f"start it with: torchrun --nproc_per_node=2 {self.script.path}")
        # places of edits do not depend on their order, but for those at one place
        self.blocks.sort(key=lambda block: block.place)
        for number, block in enumerate(self.blocks, 1):
            mark = f"### {TAG} {number}/{len(self.blocks)}, {block.reason} ###"
            getattr(self.script, f"insert_{block.where}")(block.node, ["", mark, *block.lines, mark])

    def _add(self, where: str, node: Any, reason: str, *lines: str) -> None:
        at = node.body[0] if where == "first" else node
        place = (at.end_lineno, 1) if where == "after" else (at.lineno, 0)
        self.blocks.append(_Block(place, where, node, reason, lines))

    def _check(self) -> None:
        require(not self.facts.is_distributed(), "the script is distributed already")
        for number, line in enumerate(self.script.text.splitlines(), 1):
            is_plain = "###" not in line and not line.startswith("\t")
            require(is_plain, f"line {number}: a tab or ### does not go with the marks of blocks")
        options = self.loader.options.keys()
        reason = "the loader has a sampler of its own: divide it among the ranks"
        self.expect(not options & {"sampler", "batch_sampler"}, self.loader, reason)
        has_batches = "dataset" not in self.loader.parts or options & {1, "batch_size"}
        reason = "a batch of one sample cannot be divided: give batch_size"
        self.expect(has_batches, self.loader, reason)
        self.expect(isinstance(self.epochs.target, ast.Name), self.epochs, "the epoch has no number here")
        reason = f"expected one model that optimizers change, found {len(self.models)}"
        self.expect(len(self.models) == 1, self.epochs, reason)
        for save in self.facts.saves:
            is_whole = any(root(entry.value) in self.models for entry in save.entries)
            self.expect(not is_whole, save.event, "it saves the module itself: save its state_dict()")
        for event in [] if self.facts.calls(r"manual_seed$") else self.facts.calls(r"random_split$"):
            reason = "each rank would split the data in another way: give it a generator"
            self.expect("generator" in event.args, event, reason)

    def _silence(self) -> list[str]:
        """Return the lines of a rank that does not print and write."""
        events = [event for event in self.facts.calls(_WRITERS.pattern) if event.path == self.script.path]
        names = [unparse(event.node.func) for event in events if _WRITERS.fullmatch(event.text)]
        lines = ['    sys.stdout = open(os.devnull, "w")']
        for name in dict.fromkeys(names):
            lines += (
                _SAVE.split("\n")[1:]
                if name == "torch.save"
                else [f"    {name} = lambda *args, **options: None"]
            )
        lines += ["    logging.disable(logging.WARNING)"] if self.script.imported("logging") else []
        lines += ['    os.environ["WANDB_MODE"] = "disabled"'] if self.script.imported("wandb") else []
        opened = [event for event in self.facts.calls(r"^open$") if event.path == self.script.path]
        modes = [event.args.get(1) or event.args.get("mode") for event in opened]
        is_written = any(set(str(mode.key)) & set("wax+") for mode in modes if mode)
        return [*lines, *_OPEN.split("\n")[1:]] if is_written else lines

    def _connect(self, imports: ast.stmt) -> None:
        """Connect the processes where all is made that trains: in a function, below `if __name__ ==
        "__main__":`, or after the imports."""
        reason = "one process per GPU: started by torchrun; then they connect"
        entry: Any = None
        first = self.outer.calls[0][0] if self.outer.calls else None
        if first is not None and all(event.functions[:1] == (first.name,) for event in self.made):
            entry = first
        for node in self.tree.body:
            if isinstance(node, ast.If) and is_main_test(node.test) and not self.outer.calls:
                is_inside = all(event.line > node.lineno for event in self.made)
                entry = node if is_inside and self.epochs.lineno > node.lineno else entry
        self._add("first" if entry else "after", entry or imports, reason, *_CONNECT.split("\n")[1:])
        last = (entry or self.tree).body[-1]
        where = "before" if isinstance(last, ast.Return) else "after"
        self._add(where, last, "the processes disconnect", "torch.distributed.destroy_process_group()")
        for part in [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]:
            name = unparse(part.targets[0])
            if name.isidentifier() and "cuda:" in unparse(part.value):
                line = f'    {name} = torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
                reason = "each process has a GPU of its own"
                self._add("after", part, reason, "if torch.cuda.is_available():", line)

    def _divide_loader(self) -> None:
        name, _ = self.find(self.outer, self.loader)
        kept = ("num_workers", "collate_fn", "pin_memory", "drop_last", "worker_init_fn")
        is_random = f"isinstance({name}.sampler, torch.utils.data.RandomSampler)"
        lines = [
            f"{name} = torch.utils.data.DataLoader(",
            f"    {name}.dataset,",
            f"    batch_size={name}.batch_size // {_SIZE},",
            "    sampler=DistributedSampler(",
            f"        {name}.dataset, shuffle={is_random}",
            "    ),",
            *[f"    {one}={name}.{one}," for one in kept],
            ")",
        ]
        self._add("before", self.epochs, "each rank reads its own part of every global batch", *lines)
        epoch = unparse(self.epochs.target)
        self._add("first", self.epochs, "each epoch has another order", f"{name}.sampler.set_epoch({epoch})")

    def _wrap_model(self) -> None:
        model = self.models[0]
        name, _ = self.find(self.outer, model)
        attribute = name.rpartition(".")[2]
        lines = []
        has_statistics = re.compile(rb"BatchNorm|torchvision|timm|resnet").search
        if any(has_statistics(source.data) for source in self.facts.sources):
            lines.append("if torch.cuda.is_available():  # statistics of the global batch")
            lines.append(f"    {name} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({name})")
        if "DataParallel" in model.flags:  # the names of the weights in its files are those of DDP
            lines.append(f'{name} = DistributedDataParallel(getattr({name}, "module", {name}))')
        else:
            lines += [
                f"{name} = DistributedDataParallel({name})",
                f"{name}.state_dict = {name}.module.state_dict  # the files stay those of one device",
                f"{name}.load_state_dict = {name}.module.load_state_dict",
            ]
        is_called = False
        for event in self.facts.select("call", "method"):
            is_in_loop = self.batches in [loop.node for loop in event.loops]
            is_attribute = root(root(event.value).parts.get(event.text, event.value)) is model
            is_its_own = root(event.value) is model and event.name == "method"
            is_called |= is_in_loop and is_attribute and (event.name == "call" or event.text == attribute)
            if not is_its_own or "forward" in event.functions or _OF_MODULES.fullmatch(event.text):
                continue
            if is_in_loop:
                text = f"the gradients of {event.text}() would not be averaged: let forward() call it"
                self.miss(event, text)
            elif event.order > self.facts.first_step:
                lines.append(f"{name}.{event.text} = {name}.module.{event.text}")
        reason = "the loop does not call the model itself, as in model(inputs)"
        self.expect(is_called, self.batches, reason)
        self._add("before", self.epochs, "average the gradients of all ranks", *dict.fromkeys(lines))

    def _sum_figures(self) -> None:
        """Sum over all ranks what the loop over batches adds up: it begins before the loop, and is read after
        it."""
        around: Any = self.parents[self.batches]
        block: list[Any] = around.body
        place = block.index(self.batches)
        assigned = [unparse(node) for node in block[:place] if isinstance(node, ast.Assign)]
        begun = {name for text in assigned for name in text.split("=")[0].strip(" ()").split(", ")}
        after = "\n".join(map(unparse, block[place + 1 :]))
        nodes = walk_own(self.batches.body)
        added = dict.fromkeys(unparse(node.target) for node in nodes if isinstance(node, ast.AugAssign))
        names = [name for name in added if name in begun and re.search(rf"\b{name}\b", after)]
        if not names:
            return
        listed = ", ".join(names)
        lines = [f"figures = [None] * {_SIZE}", f"torch.distributed.all_gather_object(figures, [{listed}])"]
        lines.append(f"{listed}{',' * (len(names) == 1)} = map(sum, zip(*figures, strict=True))")
        loader, _ = self.find(self.inner, self.loader)
        for name in names:  # a mean over batches: each rank has as many as one device
            if re.search(rf"\b{name}\b[^\n,]*/ *\(?len\({re.escape(loader)}\)", after):
                lines.append(f"{name} /= {_SIZE}")
        self._add("after", self.batches, "sum the figures over all ranks; rank 0 prints and writes", *lines)

    def _take_turns(self) -> None:
        """Let one rank after the other do what fails, or reads half of a file, if two do it at once."""
        for call in [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]:
            given = {keyword.arg: unparse(keyword.value) for keyword in call.keywords}
            statement = self._statement(call)
            around = self.parents.get(statement)
            is_folder = unparse(call.func) in ("os.makedirs", "os.mkdir") and "exist_ok" not in given
            if is_folder and isinstance(around, ast.If) and re.search("exists|isdir", unparse(around.test)):
                line = f"os.makedirs({unparse(call.args[0])}, exist_ok=True)"
                self._add("before", around, "another rank may make the folder at the same time", line)
            elif is_folder:
                self.miss(call, "it fails if another rank has made the folder: exist_ok=True")
            if unparse(call.func) in ("os.remove", "os.unlink", "shutil.rmtree", "shutil.move"):
                self.miss(call, "each rank would remove it: do it on rank 0 only")
            if given.get("download", "False") != "False":
                self._add("before", statement, "rank 0 downloads first", f"if {_RANK} != 0:", _WAIT)
                self._add("after", statement, "then the others find the files", f"if {_RANK} == 0:", _WAIT)
        saved = min((save.event.order for save in self.facts.saves), default=0)
        loads = [load for load in self.facts.select("load") if load.path == self.script.path]
        for load in [load for load in loads if 0 < saved < load.order]:
            self._add("before", self._statement(load.node), "rank 0 has written the file", _WAIT.strip())

    def _statement(self, node: Any) -> Any:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node
