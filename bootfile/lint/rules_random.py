"""Rules about random numbers: are they seeded again at each start, and is the state of a generator saved?"""

import ast
import re
from collections.abc import Iterator

from bootfile.lint import values
from bootfile.lint.facts import Facts, Save, describe, is_constant
from bootfile.lint.findings import Finding, at, name_line, of_a_restart
from bootfile.lint.record import Condition, Event
from bootfile.lint.syntax import is_modulo, unparse
from bootfile.lint.values import Value, kind_of, list_deps, root

_SEEDS = {
    "torch": r"^torch\.(random\.)?manual_seed$",
    "numpy": r"^numpy\.random\.seed$",
    "python": r"^random\.seed$",
}
_SEEDS_ALL = re.compile(r"(^|\.)(seed_everything|set_seed|set_random_seed|setup_seed|seed_all|init_seeds)$")
_SETS = {
    "torch": r"torch\.(random\.)?(cuda\.)?set_rng_state(_all)?$",
    "numpy": r"^numpy\.random\.set_state$",
    "python": r"^random\.setstate$",
}
_DRAWS = {
    "torch": r"^torch\.(rand|randn|randint|randperm|(rand|randn|randint)_like|bernoulli|normal|multinomial)$",
    "numpy": r"^numpy\.random\.(?!seed|set_state|get_state|RandomState|default_rng|Generator)\w+$",
    "python": r"^random\.(random|randint|choice|choices|shuffle|sample|uniform|gauss|randrange|betavariate)$",
}
_ASIDE = re.compile(
    r"val|eval|test|log|plot|sample|visual|image|infer|generate|write|save|show|report", re.IGNORECASE
)
_NAMES = {"torch": "torch", "numpy": "NumPy", "python": "Python"}
_SHOWN = re.compile(r"diagn|monitor|track|(^|_)log|plot|metric|histogram", re.IGNORECASE)
_MADE_ONCE = re.compile(r"exists\(|is_?file\(|is_?dir\(")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about random numbers."""
    return of_a_restart(_find_all(facts), facts)


def _find_all(facts: Facts) -> Iterator[Finding]:
    yield from _find_random(facts)
    yield from _find_generators(facts)


def _find_random(facts: Facts) -> Iterator[Finding]:
    """Find random numbers that begin again at each start, although the training loop draws them."""
    if facts.restores_all or facts.uses(r"bootfile"):
        return
    for source in _SEEDS:
        seed = _find_seed(facts, source)
        if seed is None or _is_set(facts, source):
            continue
        draw, what, is_hint = _find_draw(facts, source)
        if draw is None:
            continue
        # `if args.seed is not None: torch.manual_seed(args.seed)`: the option decides
        if any("seed" in condition.text for condition in seed.conditions) or _may_be_drawn(facts, seed):
            is_hint = True
        # a restart may not come here: data that is made once, a data set that is split
        is_once = any(_is_once(condition) for condition in seed.conditions)
        is_hint = is_hint or is_once or _is_of_data(facts, seed)
        message = (
            f"{_NAMES[source]} gets the same seed at each start, and {name_line(draw, seed)} draws "
            "from it in the loop "
            f"({what}), but its state is not restored"
        )
        yield at(seed, "R401", message, is_hint)


def _is_once(condition: Condition) -> bool:
    """Return whether a condition is that a file is missing, and not only that a script has not stopped: `if
    os.path.exists(folder): raise`."""
    has_branch = condition.is_true or bool(getattr(condition.node, "orelse", []))
    return has_branch and _MADE_ONCE.search(condition.text) is not None


def _is_of_data(facts: Facts, event: Event) -> bool:
    """Return whether an event is in the class of a data set."""
    sources = [facts.tracer.source, *[module.source for module in facts.tracer.imported.values()]]
    for source in sources:
        if source.path != event.path:
            continue
        for part in ast.walk(source.tree):
            if not isinstance(part, ast.ClassDef):
                continue
            is_around = part.lineno <= event.line <= (part.end_lineno or 0)
            if is_around and any(getattr(inner, "name", "") == "__getitem__" for inner in part.body):
                return True
    return False


def _may_be_drawn(facts: Facts, seed: Event) -> bool:
    """Return whether a seed is drawn unless an option gives it: `if args.seed is None: args.seed =
    random.randint(1, 9999)`."""
    names = {unparse(given).rpartition(".")[2] for given in getattr(seed.node, "args", [])}
    # `add_argument("--seed", default=random.randrange(200))`
    for event in facts.calls(r"^add_argument$"):
        default = next((part for part in event.node.keywords if part.arg == "default"), None)
        name = unparse(event.node.args[0]).strip("'\"-").replace("-", "_") if event.node.args else ""
        if default is not None and name in names and re.search(r"rand|time", unparse(default.value)):
            return True
    for event in facts.select("set_attribute"):
        value = event.args.get(0, Value())
        is_drawn = any(re.search(r"rand|time|entropy", str(dep.key)) for dep in list_deps(value))
        if event.text in names and is_drawn and event.conditions:
            return True
    return False


def _find_seed(facts: Facts, source: str) -> Event | None:
    """Return where a source gets the same seed at each start; None if it gets one in the loop."""
    seed = None
    for event in facts.select("call", "method"):
        is_all = _SEEDS_ALL.search(event.text) is not None and event.value.kind in (
            "module",
            "unknown",
            "instance",
        )
        if not re.search(_SEEDS[source], event.text) and not is_all:
            continue
        if event.name == "method" and not is_all:
            continue
        given = event.args.get(0)
        # a seed in the loop, as of (seed, epoch), is the same after a restart
        if facts.is_in_training(event):
            return None
        if given is None or values.is_restored(given) or not _is_fixed_seed(given):
            # what loads the checkpoint may seed again, from the clock
            if seed is not None and given is not None:
                return None
            continue
        # a machine with a GPU does not come here
        if any("cuda" in condition.text and not condition.is_true for condition in event.conditions):
            continue
        seed = seed or event
    return seed


def _is_fixed_seed(value: Value, depth: int = 0) -> bool:
    """Return whether a seed is the same at each start: an option, also with the rank added."""
    if value.kind != "unknown":
        return value.kind not in ("rank", "counter")
    # `seed + rank` is fixed; the rank alone is not a seed that the user chose
    if re.search(r"(^|\.)(get_)?(global_|local_)?rank$", str(value.key or value.label)):
        return depth > 0
    inner = [dep for dep in value.deps if dep is not value]
    return bool(inner) and depth < 5 and all(_is_fixed_seed(dep, depth + 1) for dep in inner)


def _is_set(facts: Facts, source: str) -> bool:
    saves = facts.training_saves() or facts.saves
    keys = {entry.key.partition(".")[0] for save in saves for entry in save.entries}
    is_known = not any(save.is_open or _has_own_state(facts, save) for save in saves)
    for event in facts.calls(_SETS[source]):
        given = event.args.get(0, Value())
        key = next((str(dep.key) for dep in list_deps(given) if dep.kind == "field" and dep.key), None)
        # the script would restore what its checkpoint does not have
        # restored from this checkpoint, or from an entry that is not known
        if not is_known or key is None or key in keys:
            return True
    return False


def _has_own_state(facts: Facts, save: Save) -> bool:
    """Return whether a checkpoint has the state of an object whose class has its own state_dict(): it may
    have anything."""
    for entry in save.entries:
        state = root(entry.value)
        if (
            state.kind == "state"
            and state.of is not None
            and facts.tracer.find_method(state.of, "state_dict")
        ):
            return True
    return False


def _find_draw(facts: Facts, source: str) -> tuple[Event | None, str, bool]:
    """Return where the loop draws from a source, what for, and whether that is a hint only."""
    if source == "torch":
        event = _find_shuffled(facts)
        if event is not None:
            return event, "the order of a loader with shuffle=True", False
    for event in facts.calls(_DRAWS[source]):
        # a draw from a generator of its own is a matter of R106
        if event.name != "call" or not facts.is_in_training(event) or "generator" in event.args:
            continue
        if _trains_with(facts, event):
            return event, f"{event.text.rpartition('.')[2]}()", False
    if source == "torch":
        for event in facts.select("create", "call"):
            if (
                re.search(r"nn\.(\w+\.)?(Dropout\w*|dropout\w*)$", event.text)
                and event.path == facts.tracer.source.path
            ):
                return event, "dropout", True
    return None, "", False


def _trains_with(facts: Facts, event: Event) -> bool:
    """Return whether the training depends on random numbers: they are not for a figure or an evaluation, and
    not drawn in a worker, which has its own seed."""
    # in a function with a name such as log_images() or evaluate()
    if any(_ASIDE.search(function) for function in event.functions):
        return False
    if any(is_modulo(getattr(condition.node, "test", None)) for condition in event.conditions):
        return False
    is_in_data = any(function in ("__getitem__", "__iter__", "collate_fn") for function in event.functions)
    if is_in_data and any("num_workers" in other.args for other in facts.select("create")):
        return False
    for other in facts.select("backward", "step"):
        if other.loops[: len(event.loops)] == event.loops:
            return True
    return is_in_data


def _find_shuffled(facts: Facts) -> Event | None:
    """Return where the training loop reads a loader whose order comes from torch's random numbers."""
    for event in facts.select("iterate"):
        loader = root(event.value)
        if not facts.is_in_training(event) or not _is_random(loader):
            continue
        if "prepared" in loader.flags or not _trains_on(facts, event) or _ignores_index(facts, loader):
            continue
        return event
    return None


def _ignores_index(facts: Facts, loader: Value) -> bool:
    """Return whether the data set of a loader draws its samples, and does not read its argument."""
    method = facts.tracer.find_method(root(loader.parts.get("dataset", Value())), "__getitem__")
    if method is None or len(method.node.args.args) < 2:
        return False
    index = method.node.args.args[1].arg
    return not any(isinstance(part, ast.Name) and part.id == index for part in ast.walk(method.node))


def _trains_on(facts: Facts, event: Event) -> bool:
    """Return whether a loop over a loader trains."""
    if not event.loops or event.loops[-1].node is not event.node:
        return False
    depth = len(event.loops)
    for other in facts.select("backward", "step"):
        if other.order > event.order and other.loops[:depth] == event.loops:
            return True
    return False


def _is_random(loader: Value) -> bool:
    """Return whether the order of a loader comes from the random numbers of torch."""
    generator = loader.options.get("generator")
    if (generator is not None and generator.kind != "none") or loader.cls is not None:
        return False
    shuffle = loader.options.get("shuffle") or loader.options.get(2)
    sampler = loader.parts.get("sampler")
    if sampler is not None and sampler.kind != "none":
        base = root(sampler)
        if base.kind == "sampler" and base.key == "BatchSampler":
            base = root(base.options.get(0) or base.options.get("sampler") or base)
        # samplers of torch that draw their order from torch's generator if they get none
        is_drawn = base.kind == "sampler" and base.key in (
            "RandomSampler",
            "WeightedRandomSampler",
            "SubsetRandomSampler",
        )
        return is_drawn and "generator" not in base.options
    return is_constant(shuffle, True)


def _find_generators(facts: Facts) -> Iterator[Finding]:
    """Find generators that the training draws from, and whose state no checkpoint has."""
    if facts.saves_all() or facts.restores_all:
        return
    seen: set[Value] = set()
    for event in facts.events:
        # a worker of a loader has a copy of its own
        if not facts.is_in_training(event) or "__getitem__" in event.functions:
            continue
        for generator in _list_generators(event):
            if generator in seen or facts.is_own_state(generator):
                continue
            seen.add(generator)
            if facts.is_saved(generator, "generator"):
                continue
            if _is_seeded_again(facts, generator):
                continue
            message = (
                f"{describe(generator, 'the generator')} is drawn from in the loop "
                f"({name_line(event, generator)}), but "
                "its state is not in the checkpoint"
            )
            # what the draw decides may only be shown
            is_hint = any(_SHOWN.search(function) for function in event.functions)
            yield at(generator, "R106", message, is_hint)


def _list_generators(event: Event) -> list[Value]:
    given = []
    if event.name == "iterate":
        loader = root(event.value)
        given.append(loader.options.get("generator"))
        sampler = loader.parts.get("sampler")
        if sampler is not None:
            given.append(root(sampler).options.get("generator"))
    if event.name in ("call", "method"):
        given.append(event.args.get("generator"))
    if event.name == "method" and root(event.value).kind == "generator" and event.text != "manual_seed":
        given.append(event.value)
    return [root(value) for value in given if value is not None and kind_of(value) == "generator"]


def _is_seeded_again(facts: Facts, generator: Value) -> bool:
    for event in facts.select("method"):
        if root(event.value) is generator and event.text in ("manual_seed", "seed", "set_state"):
            given = event.args.get(0, Value())
            if facts.is_in_training(event) or values.is_restored(given):
                return True
    return False
