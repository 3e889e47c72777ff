"""Rules about the order of the samples: does each epoch have its own, and another machine the same?"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.sources import FUNCTIONS, Source, ignores_index, is_listing, list_above, unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import NUMBERS, Value, list_deps, root
from bootfile.lint.walk import describe, is_constant

_MAY_LIST = re.compile(rb"listdir|scandir|glob\(|iterdir")
_SORTS = re.compile(r"sort")
_WITHOUT_ORDER = (
    "len", "set", "any", "all", "sum", "max", "min", "sorted", "natsorted", "frozenset", "Counter", "bool",
)  # fmt: skip
_OF_SPLIT = re.compile(r"==\s*['\"](val|valid|validation|test|eval)['\"]", re.IGNORECASE)
_EVALUATES = re.compile(rb"(^|_|\b)(val|valid|test|eval|infer|predict|demo|no_?label)", re.IGNORECASE)
# a generator with a seed, or a sampler that has one without being told
_SEEDED = re.compile(rb"torch\.Generator\(|DistributedSampler\(|Accelerator\(|Fabric\(")
_SEEDED_HERE = re.compile(
    r"random\.seed\(|random_state=|(RandomState|default_rng|Random)\([^)]|manual_seed\("
)
_SEEDS = (
    r"(^|\.)(torch\.(random\.)?manual_seed|set_\w*seed|seed_(everything|torch|all)|fix_\w*seed|setup_seed"
    r"|init_seeds?)$"
)
_SHUFFLED = re.compile(rb"shuffle\s*(:\s*bool\s*)?=\s*(?!False|None)[\w(]|RandomSampler\(")
_NOT_KNOWN = ("attribute", "unknown", "instance", "loader", "option", "none")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about samplers and about data sets."""
    if not facts.loops:
        return
    # a loader of Bootfile calls set_epoch()
    if not facts.imports(r"\bbootfile\b"):
        calls = [event for event in facts.calls(r"^set_epoch$") if event.name == "method"]
        yield from _find_set_epoch(facts, calls)
        yield from _find_fixed_epoch(facts, calls)
    yield from _find_listings(facts)


# R307, R308: set_epoch()


def _find_set_epoch(facts: Facts, calls: list[Event]) -> Iterator[Finding]:
    """Find a DistributedSampler whose set_epoch() is not called."""
    # a call for an object that is not known may be one for this sampler
    objects = [root(call.value) for call in calls]
    is_open = any(one.kind in _NOT_KNOWN or "by_name" in one.flags for one in objects)
    for event in facts.in_training("iterate"):
        loader = root(event.value)
        sampler = root(loader.parts.get("sampler", Value()))
        shuffle = sampler.options.get("shuffle") or sampler.options.get(3) or Value("const", key=True)
        is_shuffled = is_constant(shuffle, True)
        is_told = is_open or sampler in objects or "prepared" in loader.flags
        is_distributed = sampler.key == "DistributedSampler" and is_shuffled
        if not is_distributed or is_told or len(event.loops) < 2 or not facts.trains_within(event):
            continue
        where = ""
        if calls:
            other = describe(calls[0].value, "another object")
            where = f": {name_line(calls[0], sampler)} calls that of {other}"
        name = describe(sampler, "the sampler")
        message = f"set_epoch() of {name} is not called: each epoch has the same order{where}"
        # what is called may be one of several loaders
        yield at(sampler, "R307", message, bool(calls), value=sampler, loop=event.loops[0])
        return


def _find_fixed_epoch(facts: Facts, calls: list[Event]) -> Iterator[Finding]:
    """Find a set_epoch() with a number that is the same in each epoch."""
    # an evaluation may read the loader in its first order
    numbers = {event: [dep for value in event.args.values() for dep in list_deps(value)] for event in calls}
    counted = [event for event in calls if any(dep.kind in NUMBERS for dep in numbers[event])]
    varied = {unparse(event.node.func) for event in counted}
    for event in [event for event in calls if facts.is_in_training(event)]:
        # a number that is written there: a name may be counted in a way that is not followed
        given = [*event.node.args, *[keyword.value for keyword in event.node.keywords]]
        is_fixed = any(isinstance(node, ast.Constant) for node in given)
        is_sampler = root(event.value).kind in ("sampler", "loader", "unknown")
        if is_fixed and is_sampler and unparse(event.node.func) not in varied:
            message = f"set_epoch() gets the same number in each epoch: {unparse(event.node)}"
            yield at(event, "R308", message, value=event.value, loop=event.loops[0])
            return


# R402: a data set in the order in which a file system lists its files


class Listing(NamedTuple):
    """A call that lists files in the class of a data set. above: the nodes around it, from the inside.
    function: the method with it."""

    node: Any
    above: list[Any]
    function: Any
    cls: ast.ClassDef


def _find_listings(facts: Facts) -> Iterator[Finding]:
    # without a seed, each start has an order of its own in any case; a function that seeds has to be called
    is_seeded = any(_SEEDED.search(source.data) for source in facts.sources) or bool(facts.calls(_SEEDS))
    is_random = not is_seeded and any(_SHUFFLED.search(source.data) for source in facts.sources)
    # a search in the bytes first: most modules have none of these words, and their trees need no walk
    for source in [source for source in facts.sources if _MAY_LIST.search(source.data)]:
        told: set[ast.ClassDef] = set()
        listings = [*_list_listings(source)]
        for listing in sorted(listings, key=lambda one: (one.node.lineno, unparse(one.node.func))):
            is_of_sample = listing.function.name in ("__getitem__", "__len__")
            is_silent = is_of_sample or listing.cls in told or any(test(listing) for test in SPARED)
            # a data set that no module mentions is not trained on
            is_used = listing.cls.decorator_list or any(_mentions(one, listing.cls) for one in facts.sources)
            if is_silent or not is_used:
                continue
            # the first of a class: what the others become (samples, or labels by name) is not followed
            told.add(listing.cls)
            message = f"the samples have the order in which {unparse(listing.node.func)}() lists them, "
            message += "which another machine does not have"
            # a split by a seed depends on the order, too
            is_hint = is_random and not _SEEDED_HERE.search(unparse(listing.function))
            evidence = {"event": listing.node}
            yield Finding(source.path, listing.node.lineno, "R402", message, is_hint, evidence=evidence)


def _list_listings(source: Source) -> Iterator[Listing]:
    for node in source.find(ast.Call):
        above = list_above(node, source.parents()) if is_listing(node) else []
        functions = [part for part in above if isinstance(part, FUNCTIONS)]
        classes = [part for part in above if isinstance(part, ast.ClassDef)]
        names = {getattr(part, "name", "") for cls in classes[:1] for part in cls.body}
        bases = [unparse(base) for cls in classes[:1] for base in cls.bases]
        is_sized = "__len__" in names or any("Dataset" in base for base in bases)
        if functions and "__getitem__" in names and is_sized:
            yield Listing(node, above, functions[-1], classes[0])


def _mentions(source: Source, cls: ast.ClassDef) -> bool:
    """Return whether a module uses a class outside of it, not for an evaluation: an import is not a use."""
    inside = range(cls.lineno, (cls.end_lineno or 0) + 1) if cls in source.tree.body else ()
    nodes = source.find(ast.Name | ast.Attribute | ast.Constant) if cls.name.encode() in source.data else []
    # also getattr(module, "Images")
    parts = [(node.lineno, getattr(node, name, "")) for node in nodes for name in ("id", "attr", "value")]
    named = [line for line, name in parts if name == cls.name]
    lines = [source.data.splitlines()[number - 1] for number in named if number not in inside]
    return any(b"train" in line or not _EVALUATES.search(line) for line in lines)


# The order of a listing has no effect


def _is_sorted(listing: Listing) -> bool:
    """Return whether the class sorts what is listed, or something that is not known."""
    calls = [part for part in ast.walk(listing.cls) if isinstance(part, ast.Call)]
    sorts = [unparse(call) for call in calls if _SORTS.search(unparse(call.func).rpartition(".")[2])]
    assigns = [part for part in listing.above if isinstance(part, ast.Assign)]
    name = unparse(assigns[0].targets[0]).rpartition(".")[2] if assigns else ""
    # `self.files[part]`, and what a loop over the names makes of them, are not followed
    is_name = name.isidentifier() and not any(isinstance(part, ast.For) for part in listing.above)
    return any(not is_name or re.search(rf"\b{name}\b", text) for text in sorts)


def _loses_order(listing: Listing) -> bool:
    """Return whether what is listed is counted or tested, or becomes a set or a dict."""
    for part in listing.above:
        name = unparse(part.func).rpartition(".")[2] if isinstance(part, ast.Call) else ""
        if name in _WITHOUT_ORDER or isinstance(part, ast.Compare | ast.SetComp | ast.DictComp | ast.If):
            return True
        if isinstance(part, ast.Assign | ast.Return | ast.For | ast.Expr):
            return False
    return False


def _becomes_keys(listing: Listing) -> bool:
    """Return whether the names become keys, in an order that the script sets elsewhere:
    `files = os.listdir(folder)`, `{name: ... for name in files}`."""
    assigns = [part for part in listing.above if isinstance(part, ast.Assign)]
    dicts = [part for part in ast.walk(listing.function) if isinstance(part, ast.DictComp)]
    read = [unparse(part.generators[0].iter) for part in dicts]
    return assigns[:1] != [] and unparse(assigns[0].targets[0]) in read


def _is_drawn(listing: Listing) -> bool:
    """Return whether the data set draws its samples, and does not read their number."""
    methods = [part for part in listing.cls.body if getattr(part, "name", "") == "__getitem__"]
    return ignores_index(methods[0])


def _is_not_called(listing: Listing) -> bool:
    """Return whether the method is static and its class does not call it; others may call one that is not."""
    is_static = any(unparse(part) == "staticmethod" for part in listing.function.decorator_list)
    return is_static and not re.search(rf"\.{listing.function.name}\b", unparse(listing.cls))


def _is_only_counted(listing: Listing) -> bool:
    """Return whether the names are only counted: `self.files = os.listdir(folder)`, `len(self.files)`."""
    statement = listing.above[0]
    target = unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    # a name is one of the method
    texts = [unparse(part) for part in ast.walk(listing.function if target.isidentifier() else listing.cls)]
    # the assignment itself is a use, too
    return 0 < texts.count(f"len({target})") == texts.count(target) - 1


def _leaves_nothing(listing: Listing) -> bool:
    """Return whether the method gives nothing to its class or caller: it writes files that others read."""
    given = tuple(f"{name.arg}{mark}" for name in listing.function.args.args for mark in ".[")
    for part in ast.walk(listing.function):
        # `self.files = names`, `self.files.append(name)`, `self.add(name)`, `names.append(name)`
        is_change = isinstance(part, ast.Call) or isinstance(getattr(part, "ctx", None), ast.Store)
        is_return = isinstance(part, ast.Return) and part.value is not None
        is_result = is_return or isinstance(part, ast.Yield | ast.YieldFrom)
        if is_result or (is_change and unparse(part).startswith(given)):
            return False
    return True


def _is_not_read(listing: Listing) -> bool:
    """Return whether the names become attributes that the samples do not come from: no method reads them."""
    statement = next(part for part in listing.above if isinstance(part, ast.stmt))
    nodes = [*ast.walk(statement)] if isinstance(statement, ast.Assign | ast.For) else []
    added = [unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    given = {name.removesuffix(".append") for name in added if name.endswith(".append")}
    given |= {unparse(target) for target in getattr(statement, "targets", [])}
    others = [part for part in listing.cls.body if part is not listing.function]
    read = {unparse(node) for other in others for node in ast.walk(other) if isinstance(node, ast.Attribute)}
    is_own = given != set() and all(name.startswith("self.") for name in given)
    return is_own and given.isdisjoint(read)


def _is_for_evaluation(listing: Listing) -> bool:
    """Return whether a listing is under `if split == "test"`."""
    branches = [part for part in listing.above if isinstance(part, ast.If)]
    body = [part for branch in branches if _OF_SPLIT.search(unparse(branch.test)) for part in branch.body]
    return any(listing.node in ast.walk(part) for part in body)


SPARED: tuple[Callable[[Listing], bool], ...] = (
    _loses_order, _is_sorted, _becomes_keys, _is_drawn, _is_not_called, _is_only_counted, _leaves_nothing,
    _is_not_read, _is_for_evaluation,
)  # fmt: skip
