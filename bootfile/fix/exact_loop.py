"""Make the training loop of a script one of `Exact`, with the lines of guides/own_loop.md.

The lines go before the loop over epochs and to the end of the loop over batches, which reads the loader of
Exact. The DataLoader keeps its name for all other uses. Files of weights that the script writes stay. What
cannot be placed is named, and then nothing is changed.
"""

import ast
import re
from typing import Any

from bootfile.fix.edits import Script
from bootfile.fix.numbers import find_needs, find_numbers
from bootfile.fix.training import Training, last_import, walk_own
from bootfile.lint.epoch_loop import find_call, find_range
from bootfile.lint.sources import unparse
from bootfile.lint.values import Value, kind_of, list_deps, root

_NUMBERS = '''

class Numbers(dict):
    """Numbers of the loop that a checkpoint has."""

    state_dict, load_state_dict = dict.copy, dict.update'''
_WHOLE = '''

def whole_batch(collate, items):
    """Return a batch as inputs without targets: torch_loader() takes pairs."""
    return collate(items), ()'''
_WIDTH = 100
_INNER = {"module.": "module", "_orig_mod.": "_orig_mod"}
_ASKS = re.compile("resum|restart|restor|continue", re.IGNORECASE)


def make_exact(script: Script) -> list[str]:
    """Plan the edits that make the loop of a script exact, and return notes for the user. Raises CannotEdit,
    and BadInput if lint cannot read the file."""
    return _ExactLoop(script).run()


class _ExactLoop(Training):
    """The lines of Exact for one script."""

    def __init__(self, script: Script):
        super().__init__(script)
        owners = [place.names.get("self", Value()) for place in (self.outer, self.inner)]
        # the methods of one object share what it has; functions get it as an argument
        is_one_object = "self" in self.outer.local and root(owners[0]) is root(owners[1])
        self.holder = "self." if is_one_object else ""
        self.passes = [*self.calls] if self.outer.calls and not is_one_object else []
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.name = "self.exact" if is_one_object else "exact" if "run" in used else "run"
        self.kept = f"{self.holder}numbers"
        self.of_epochs, self.of_all = find_numbers(self, self.holder)
        self.numbers = [*self.of_epochs, *self.of_all]
        self.range: Any = find_range(self.epochs)

    def plan(self) -> None:
        self.check_loader()
        self._check()
        for node, text in find_needs(self.batches, self.parents, self.numbers):
            self.miss(node, text)
        if not self.missing:
            imports = ["from bootfile import Exact, torch_loader"]
            imports += _NUMBERS.split("\n") if self.numbers else []
            if self._pair_batches():
                imports = ["from functools import partial", *imports, *_WHOLE.split("\n")]
            self.script.insert_after(last_import(self.script), imports)
            self.notes.append('the checkpoints go to the folder "OUT": edit its name as you like')
            self._place_start()
            self._place_batches()
            self._place_ends()

    def _check(self) -> None:
        workers = self.loader.options.get("persistent_workers")
        is_kept = workers is not None and workers.key is not False
        self.expect(not is_kept, self.loader, "persistent_workers=True: they keep their random numbers")
        form = "expected a loop over epochs of the form `for epoch in range(N)`"
        self.expect(self.range is not None, self.epochs, form)
        self.expect(self.models, self.epochs, "no model was found that an optimizer changes")
        target = self.batches.target
        is_pair = isinstance(target, ast.Tuple) and len(target.elts) == 2
        is_taken_apart = is_pair or not find_call(self.batches.iter, "enumerate")
        self.expect(is_taken_apart, self.batches, "expected `for number, batch in enumerate(loader)`")
        is_starred = any(isinstance(node, ast.Starred) for node in ast.walk(target))
        form = "expected a name for each part of a batch, not `*name`"
        self.expect(not is_starred, self.batches, form)
        is_one = sum(loop.node is self.batches for loop in self.tracer.all_loops) <= 1
        form = "this loop also runs for another loader, or for another training"
        self.expect(is_one, self.batches, form)
        for node in [one for one in walk_own(self.batches.body) if isinstance(one, ast.Return)]:
            self.miss(node, "`return` in the loop over batches")
        for function, node in self.passes:
            name = unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            is_plain = name == function.name and not function.args.vararg
            is_plain = is_plain and len(self.tracer.entered[function]) == 1
            self.expect(is_plain, node, f"this call cannot give {function.name}() the argument {self.name}")
        for load in self.facts.restart_loads() if self.facts.intent in ("optimizer", "counter") else []:
            tests = [test for test in load.conditions if "(" not in test.text]
            options = [test.text for test in tests if _ASKS.search(test.text) or _is_option(test.value)]
            if options:
                text = f"start without `{options[0]}` from now on: Exact continues the run"
                self.notes.append(f"line {load.line}: {text}")
            else:
                self.miss(load, "it continues a training by itself: remove it, as Exact does this")

    def _pair_batches(self) -> bool:
        """Edit a loop whose batches are not pairs of inputs and targets: each batch then comes as the inputs,
        with () as targets. Return whether the loop was edited."""
        target: Any = self.batches.target
        if find_call(self.batches.iter, "enumerate") and isinstance(target, ast.Tuple):
            target = target.elts[-1]  # the batch in `for number, batch in enumerate(loader)`
        text = self.script.source(target)
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:  # `for inputs, targets in loader`
            return False
        if isinstance(target, ast.Name):  # `for batch in loader`
            self.script.insert_first(self.batches, [f"{text}, _ = {text}"])
        else:  # `for a, b, c in loader`
            text = text if text.startswith(("(", "[")) else f"({text})"
            self.script.replace(target, f"{text}, _" if target is self.batches.target else f"({text}, _)")
        loader, _ = self.find(self.outer, self.loader)
        line = f"{loader}.collate_fn = partial(whole_batch, {loader}.collate_fn)"
        self.script.insert_before(self.epochs, [line])
        return True

    def _place_start(self) -> None:
        loader, _ = self.find(self.outer, self.loader)
        start = self.script.source(self.range.args[0]) if len(self.range.args) == 2 else "0"
        options = f"{self._device()}{self._seed()}, epochs={self._count_epochs(self.range.args[-1], start)}"
        begin = f"{self.name} = Exact("
        arguments = ['"OUT"', f"torch_loader({loader}, {options})", *self._list_arguments()]
        line = f"{begin}{', '.join(arguments)})"
        lines = [line] if len(line) <= _WIDTH else [begin, *[f"    {one}," for one in arguments], ")"]
        step = f"{self.name}.resume()"
        if self.numbers:
            lines = [f"{self.kept} = Numbers({_give(self.numbers)})", *lines, f"first_step = {step}"]
            lines += [f'{text} = {self.kept}["{text.removeprefix("self.")}"]' for text in self.numbers]
            step = "first_step"
        self.script.insert_before(self.epochs, lines)
        self.script.replace(self.range, f"{self.name}.loader.epochs_from({step})")
        epoch = self.epochs.target.id
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == epoch]
        if start != "1" and any(isinstance(node.ctx, ast.Load) for node in names):
            change = "-= 1" if start == "0" else f"+= {start} - 1"
            self.script.insert_first(self.epochs, [f"{epoch} {change}  # the loader counts from 1"])

    def _device(self) -> str:
        """Return the device of the training as an expression."""
        named = next((name for name, one in self.outer.names.items() if one.key == "torch.device"), "")
        return named or f"next({self.find(self.outer, self.models[0])[0]}.parameters()).device"

    def _seed(self) -> str:
        """Return the seed of the script as an argument, if its names are known at the loop."""
        for event in self.facts.calls(r"^torch\.manual_seed$"):
            for seed in event.node.args:
                names = {node.id for node in ast.walk(seed) if isinstance(node, ast.Name)}
                if names <= self.outer.local and (not names or event.path == self.script.path):
                    return f", seed={unparse(seed)}"
        return ""

    def _count_epochs(self, stop: Any, start: str) -> str:
        """Return the number of epochs of `range(start, stop)` as an expression."""
        if isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add) and unparse(stop.right) == start:
            return self.script.source(stop.left)
        text = self.script.source(stop)
        text = f"({text})" if isinstance(stop, ast.IfExp | ast.BoolOp) else text
        start = start if start.isalnum() else f"({start})"
        return text if start == "0" else f"{text} - {start}"

    def _list_arguments(self) -> list[str]:
        """Return the arguments of Exact for the objects that the loop changes."""
        given: dict[str, str] = {}
        for value in dict.fromkeys([*self.models, *self.optimizers, *self.facts.changed]):
            text, there = self.find(self.outer, value)
            kind = {"ema": "average", "copied": "average"}.get(kind_of(value), kind_of(value))
            name = re.sub(r"\W+", "_", text.removeprefix("self.")).strip("_") if kind in given else kind
            given[name] = text
            while there.kind == "wrapped" and there.of is not None:
                inner = _INNER.get(there.key, "")
                # the script may wrap it only on several devices
                given[name] = f'getattr({given[name]}, "{inner}", {given[name]})' if inner else given[name]
                there = there.of
            if name == "model" and given[name] != text:
                given["forward"] = text
        given |= {"numbers": self.kept} if self.numbers else {}
        return [f"{name}={text}" for name, text in given.items()]

    def _place_batches(self) -> None:
        """Let the loop read the loader of Exact, also by a bar such as `bar = tqdm(loader)`."""
        text, _ = self.find(self.inner, self.loader)
        bars = {node.id for node in ast.walk(self.batches.iter) if isinstance(node, ast.Name)} - {text}
        read = [self.batches.iter]
        for around in (self.epochs, *[function for function, _ in self.calls]):
            assigned = [node for node in ast.walk(around) if isinstance(node, ast.Assign)]
            read += [node.value for node in assigned if unparse(node.targets[0]) in bars]
        names = [node for expression in read for node in ast.walk(expression) if unparse(node) == text]
        for node in names:
            self.script.replace(node, f"{self.name}.loader")  # type: ignore[arg-type]
        self.expect(names, self.batches, f"the loop does not read {text} by its name")
        # after a restart the number of a batch begins with that of its epoch
        call = find_call(self.batches.iter, "enumerate")
        step = f"{self.name}.loader.step % len({self.name}.loader)"
        starts = [*call.args[1:], *[keyword.value for keyword in call.keywords]] if call else []
        for start in starts:
            self.script.replace(start, step if unparse(start) == "0" else f"{unparse(start)} + ({step})")
        if call is not None and not starts:
            self.script.add_argument(call, step)

    def _place_ends(self) -> None:
        lines = [f"if {self.name}.end_step().save:", f"    {self.name}.save()"]
        if self.of_epochs:  # they do not change in the loop over batches
            self.script.insert_first(self.epochs, [f"{self.kept}.update({_give(self.of_epochs)})"])
        if self.of_all:
            lines.insert(0, f"{self.kept}.update({_give(self.of_all)})")
        for node in walk_own(self.batches.body, ast.For, ast.While):
            if isinstance(node, ast.Continue):
                self.script.insert_before(node, lines)
            elif isinstance(node, ast.Break):
                text = "`break` within an epoch may only end the whole training"
                self.notes.append(f"line {node.lineno}: {text}")
        if not isinstance(self.batches.body[-1], ast.Continue | ast.Break):
            self.script.insert_after(self.batches.body[-1], lines)
        for node in [one for one in walk_own(self.epochs.body) if isinstance(one, ast.Return)]:
            self.script.insert_before(node, [f"{self.name}.close()"])
        self.script.insert_after(self.epochs, [f"{self.name}.close()"])
        for function, call in self.passes:
            self.script.add_argument(call, f"{self.name}={self.name}")
            self.script.add_parameter(function, f"{self.name}=None" if function.args.defaults else self.name)


def _is_option(value: Value) -> bool:
    return any(part.kind == "option" for part in list_deps(value))


def _give(numbers: list[str]) -> str:
    """Return numbers as arguments by name."""
    return ", ".join(f"{text.removeprefix('self.')}={text}" for text in numbers)
