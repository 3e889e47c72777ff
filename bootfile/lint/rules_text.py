"""Rules about the text of a module: an order that another start or machine does not have."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from bootfile.lint.facts import Facts
from bootfile.lint.findings import Finding
from bootfile.lint.sources import Source
from bootfile.lint.syntax import unparse

_LISTINGS = re.compile(r"^(os\.listdir|os\.scandir|glob\.glob|glob\.iglob|glob|listdir|iglob)$")
_PATH_LISTINGS = ("iterdir", "glob", "rglob")
SORTS = re.compile(r"sort")
_WITHOUT_ORDER = (
    "len",
    "set",
    "any",
    "all",
    "sum",
    "max",
    "min",
    "sorted",
    "natsorted",
    "frozenset",
    "Counter",
    "bool",
)
_VOCABULARY = re.compile(r"class|label|vocab|word|char|token|categor|speaker|name|species|id", re.IGNORECASE)
_TEXTS = re.compile(
    r"split|word|vocab|token|char|text|names?\b|_name|string|species|categor|speaker|letter|sentence|\bstr\("
    r"|listdir|path|file|strip\(|lower\(|[\"']",
    re.IGNORECASE,
)
_OF_SPLIT = re.compile(r"==\s*['\"](val|valid|validation|test|eval)['\"]", re.IGNORECASE)
_MAY_MATCH = re.compile(rb"listdir|scandir|glob\(|iterdir|\(\s*set\(|\bhash\(|\(\s*\{")
_EVALUATES = re.compile(rb"(^|_|\b)(val|valid|test|eval|infer|predict|demo|no_?label)", re.IGNORECASE)
_OF_NUMBERS = re.compile(r"seed|epoch|getuid|getpid|rank|\btime\b")
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
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the texts of the script and of the modules that it imports."""
    if not facts.loops:
        return
    modules = list_modules(facts)

    def is_used(cls: ast.ClassDef) -> bool:
        return bool(cls.decorator_list) or any(_mentions(source, cls) for source in modules)

    # without a seed, each start has an order of its own in any case; a function that seeds has to be called
    is_seeded = any(_SEEDED.search(source.data) for source in modules) or bool(facts.calls(_SEEDS))
    is_random = not is_seeded and any(_SHUFFLED.search(source.data) for source in modules)
    for source in modules:
        # a search in the bytes first: most modules have none of these words, and their trees need no walk
        if not _MAY_MATCH.search(source.data):
            continue
        nodes, parents = find_candidates(source.tree)
        listings = []
        for node in nodes:
            for listing in _check_listing(source.path, node, parents, is_used):
                # a split by a seed depends on the order, too
                is_hint = is_random and not _is_seeded_here(node, parents)
                listings.append(listing._replace(is_hint=is_hint))
        yield from _keep_first(source.tree, listings)
        for node in nodes:
            yield from _check_set(source.path, node, parents)
            yield from _check_hash(source.path, node, parents)


def list_modules(facts: Facts) -> list[Source]:
    """Return the script and the modules of its project that it imports."""
    walked = {event.path for event in facts.events}
    modules = [facts.tracer.source]
    for module in facts.tracer.imported.values():
        if module.source.path in walked or module.source.path in facts.tracer.imported:
            modules.append(module.source)
    return modules


def _keep_first(tree: ast.Module, listings: list[Finding]) -> Iterator[Finding]:
    """Yield the first listing of each class: what the others become (samples, or labels by name) is not
    followed."""
    if not listings:
        return
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        inside = [listing for listing in listings if cls.lineno <= listing.line <= (cls.end_lineno or 0)]
        if inside:
            yield min(inside)


def _mentions(source: Source, cls: ast.ClassDef) -> bool:
    """Return whether a module uses a class outside of it: an import is not a use."""
    if cls.name.encode() not in source.data:
        return False
    last = cls.end_lineno or cls.lineno
    for node in ast.walk(source.tree):
        name = None
        if isinstance(node, ast.Name | ast.Attribute):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
        elif isinstance(node, ast.Constant):
            name = node.value  # getattr(module, "Images")
        if name == cls.name:
            number = node.lineno  # type: ignore[attr-defined]
            is_inside = cls in source.tree.body and cls.lineno <= number <= last
            # the order of an evaluation has no effect
            line = source.data.splitlines()[number - 1]
            if not is_inside and (b"train" in line or not _EVALUATES.search(line)):
                return True
    return False


def find_candidates(tree: ast.Module) -> tuple[list[ast.AST], dict[ast.AST, ast.AST]]:
    """Return (the calls, subscripts and sums of a module, the node around each node).

    The tree keeps both: the scripts of a folder import the same modules.
    """
    kept: tuple[list[ast.AST], dict[ast.AST, ast.AST]] | None = getattr(tree, "bootfile_candidates", None)
    if kept is None:
        nodes: list[ast.AST] = []
        parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call | ast.Subscript | ast.BinOp):
                nodes.append(node)
            for child in ast.iter_child_nodes(node):
                parents[child] = node
        kept = (nodes, parents)
        tree.bootfile_candidates = kept  # type: ignore[attr-defined]
    return kept


def list_above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    """Return the nodes around a node, from the inside."""
    above = []
    while node in parents:
        node = parents[node]
        above.append(node)
    return above


def is_listing(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = unparse(node.func)
    if _LISTINGS.match(name):
        return True
    return isinstance(node.func, ast.Attribute) and node.func.attr in _PATH_LISTINGS and "glob." not in name


def _check_listing(
    path: str, node: Any, parents: dict[ast.AST, ast.AST], is_used: Callable[[ast.ClassDef], bool]
) -> Iterator[Finding]:
    """Find a data set whose order is the one in which a file system lists its files."""
    if not is_listing(node):
        return
    above = list_above(node, parents)
    functions = [part for part in above if isinstance(part, FUNCTIONS)]
    classes = [part for part in above if isinstance(part, ast.ClassDef)]
    if not functions or not classes or not _is_dataset(classes[0]):
        return
    if _becomes_keys(above, functions[-1]):
        return
    in_dict = isinstance(above[0], ast.comprehension) and isinstance(above[1], ast.DictComp)
    # one sample, a count, or a sorted list: the order has no effect on that of the samples
    if functions[-1].name in ("__getitem__", "__len__") or in_dict or _loses_order(above):
        return
    # a data set that no module mentions is not trained on
    if _is_sorted_later(node, functions[-1], classes[0], above) or not is_used(classes[0]):
        return
    if _ignores_index(classes[0]) or not _is_called(functions[-1], classes[0]):
        return
    if _is_only_counted(above, classes[0]) or _leaves_nothing(functions[-1]):
        return
    if _is_searched(above, functions[-1]) or _is_for_evaluation(node, above):
        return
    text = (
        f"the samples have the order in which {unparse(node.func)}() lists them, which another "
        "machine does not have"
    )
    yield Finding(path, node.lineno, "R402", text)


def _is_seeded_here(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether the function around a listing seeds random numbers, as for a split."""
    function = next((part for part in list_above(node, parents) if isinstance(part, FUNCTIONS)), node)
    return _SEEDED_HERE.search(unparse(function)) is not None


def _is_for_evaluation(node: ast.AST, above: list[ast.AST]) -> bool:
    """Return whether a listing is under `if split == "test"`: the order of an evaluation has no effect."""
    for part in above:
        if isinstance(part, ast.If) and _OF_SPLIT.search(unparse(part.test)):
            inside = any(inner is node for statement in part.body for inner in ast.walk(statement))
            if inside:
                return True
    return False


def _is_searched(above: list[ast.AST], function: Any) -> bool:
    """Return whether what is listed is only searched for each sample of another list: a loop in a loop."""
    statement = next((part for part in above if isinstance(part, ast.Assign | ast.AugAssign)), None)
    if statement is None or isinstance(above[0], ast.For):
        return False
    target = unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
    searches = set()
    for outer in ast.walk(function):
        for loop in ast.walk(outer) if isinstance(outer, ast.For) else ():
            if isinstance(loop, ast.For) and loop is not outer and unparse(loop.iter) == target:
                searches.add(loop)
    reads = [
        part
        for part in ast.walk(function)
        if isinstance(getattr(part, "ctx", None), ast.Load) and unparse(part) == target
    ]
    # the sum `found = found + glob(...)` reads the name, too
    own_reads = sum(part in reads for part in ast.walk(statement))
    return bool(searches) and len(reads) == len(searches) + own_reads


def _ignores_index(cls: ast.ClassDef) -> bool:
    """Return whether a data set draws its samples, and does not read their number."""
    for part in cls.body:
        if isinstance(part, FUNCTIONS) and part.name == "__getitem__" and len(part.args.args) > 1:
            index = part.args.args[1].arg
            return not any(isinstance(node, ast.Name) and node.id == index for node in ast.walk(part))
    return False


def _is_only_counted(above: list[ast.AST], cls: ast.ClassDef) -> bool:
    """Return whether a class only counts what it keeps of a listing: `len(self.files)`."""
    statement = above[0] if above else None
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Attribute):
        return False
    target = unparse(statement.targets[0])
    counted = 0
    for part in ast.walk(cls):
        if isinstance(part, ast.Call) and unparse(part.func) == "len" and unparse(part.args[0]) == target:
            counted += 1
    uses = sum(isinstance(part, ast.Attribute) and unparse(part) == target for part in ast.walk(cls))
    # the assignment itself is a use, too
    return counted > 0 and uses == counted + 1


def _leaves_nothing(function: Any) -> bool:
    """Return whether a method gives nothing to its class or its caller: it writes files that others read."""
    given = tuple(f"{name.arg}{mark}" for name in function.args.args for mark in ".[")
    for part in ast.walk(function):
        if isinstance(part, ast.Yield | ast.YieldFrom) or (isinstance(part, ast.Return) and part.value):
            return False
        # `self.files = names`, `self.files.append(name)`, `self.add(name)`, `names.append(name)`
        is_stored = isinstance(getattr(part, "ctx", None), ast.Store)
        if (is_stored or isinstance(part, ast.Call)) and unparse(part).startswith(given):
            return False
    return True


def _is_called(function: Any, cls: ast.ClassDef) -> bool:
    """Return whether a class calls its method; others may call one that is not static."""
    if not any(unparse(part) == "staticmethod" for part in function.decorator_list):
        return True
    return any(isinstance(node, ast.Attribute) and node.attr == function.name for node in ast.walk(cls))


def _becomes_keys(above: list[ast.AST], function: ast.AST) -> bool:
    """Return whether what is listed becomes the keys of a dict, whose order the script sets elsewhere."""
    statement = next((part for part in above if isinstance(part, ast.Assign)), None)
    if statement is None:
        return False
    target = unparse(statement.targets[0])
    for part in ast.walk(function):
        if isinstance(part, ast.DictComp) and unparse(part.generators[0].iter) == target:
            return True
    return False


def _is_dataset(node: ast.ClassDef) -> bool:
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return "__getitem__" in names and (
        "__len__" in names or any("Dataset" in unparse(base) for base in node.bases)
    )


def _loses_order(above: list[ast.AST]) -> bool:
    """Return whether the order of a listing has no effect: it is sorted, counted or tested."""
    for part in above:
        if isinstance(part, ast.Call):
            name = unparse(part.func).rpartition(".")[2]
            if name in _WITHOUT_ORDER or SORTS.search(name):
                return True
        if isinstance(part, ast.Compare | ast.SetComp | ast.If):
            return True
        if isinstance(part, ast.Assign | ast.Return | ast.For | ast.Expr):
            break
    return False


def _is_sorted_later(node: ast.AST, function: Any, cls: ast.ClassDef, above: list[ast.AST]) -> bool:
    """Return whether the function, or for an attribute the class, sorts what was listed."""
    for part in [*ast.walk(function), *ast.walk(cls)]:
        if not isinstance(part, ast.Call):
            continue
        name = unparse(part.func)
        if SORTS.search(name.rpartition(".")[2]):
            return True
    return False


def _check_set(path: str, node: Any, parents: dict[ast.AST, ast.AST]) -> Iterator[Finding]:
    """Find numbers of classes or words that come from the order of a set."""
    inner = _find_set_order(node)
    if inner is None:
        return
    above = list_above(node, parents)
    if _loses_order(above):
        return
    statement = next((part for part in above if isinstance(part, ast.Assign | ast.Return | ast.For)), None)
    # `classes = list(set(labels))` does harm only if its entries get numbers, by enumerate() or index()
    if isinstance(node, ast.Call) and unparse(node.func) == "list":
        if not isinstance(statement, ast.Assign) or not _VOCABULARY.search(unparse(statement.targets[0])):
            return
        scope = next((part for part in above if isinstance(part, FUNCTIONS)), above[-1])
        target = unparse(statement.targets[0])
        for part in ast.walk(scope):
            if isinstance(part, ast.Call) and SORTS.search(unparse(part.func)) and target in unparse(part):
                return
        if not _numbers_entries(scope, target):
            return
    # a set of numbers has the same order in each process
    is_hint = not _TEXTS.search(unparse(statement if statement is not None else node))
    text = f"the order of a set is another one in each process: {unparse(node)}"
    yield Finding(path, node.lineno, "R403", text, is_hint)


def _find_set_order(node: Any) -> ast.AST | None:
    """Return the set in list(set(...)) or enumerate(set(...))."""
    if not isinstance(node, ast.Call) or unparse(node.func) not in ("list", "enumerate") or not node.args:
        return None
    first = node.args[0]
    if isinstance(first, ast.Set | ast.SetComp):
        return first
    if isinstance(first, ast.Call) and unparse(first.func) == "set" and first.args:
        inner = first.args[0]
        # small integers are their own hashes: set(range(n)) has one order
        is_number = isinstance(inner, ast.Call) and unparse(inner.func) == "range"
        if not is_number:
            return first
    return None


def _numbers_entries(scope: ast.AST, target: str) -> bool:
    """Return whether the entries of a list get numbers."""
    for part in ast.walk(scope):
        if isinstance(part, ast.Call) and unparse(part) == f"enumerate({target})":
            return True
        if isinstance(part, ast.Call) and unparse(part.func) == f"{target}.index":
            return True
    return False


def _check_hash(path: str, node: Any, parents: dict[ast.AST, ast.AST]) -> Iterator[Finding]:
    """Find hash() of a text as a number: it is another one in each process."""
    # `hash(name) % buckets`: only a number that is used as one
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return
    for part in ast.walk(node.left):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "hash":
            # the hash of numbers is the same in each process
            if not part.args or isinstance(part.args[0], ast.Tuple) or _OF_NUMBERS.search(unparse(part)):
                return
            text = f"hash() of a text is another one in each process: {unparse(node)}"
            # what is hashed may be a number
            yield Finding(path, part.lineno, "R404", text, True)
            return
