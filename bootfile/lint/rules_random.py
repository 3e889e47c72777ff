"""Rules about random numbers: are they seeded again at each start, and is the state of a generator saved?"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.lint import values
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Condition, Event
from bootfile.lint.sources import ignores_index, is_modulo, unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, kind_of, list_deps, root
from bootfile.lint.walk import describe, is_constant


class Source(NamedTuple):
    """A global generator of random numbers: patterns of the calls that seed, restore and draw from it."""

    name: str
    seeds: str
    sets: str
    draws: str


SOURCES = [
    Source("torch", r"^torch\.(random\.)?manual_seed$", r"torch\.(random\.)?(cuda\.)?set_rng_state(_all)?$",
           r"^torch\.(rand|randn|randint|randperm|(rand|randn|randint)_like|bernoulli|normal|multinomial)$"),
    Source("NumPy", r"^numpy\.random\.seed$", r"^numpy\.random\.set_state$",
           r"^numpy\.random\.(?!seed|set_state|get_state|RandomState|default_rng|Generator)\w+$"),
    Source("Python", r"^random\.seed$", r"^random\.setstate$",
           r"^random\.(random|randint|choice|choices|shuffle|sample|uniform|gauss|randrange|betavariate)$"),
]  # fmt: skip
_SEEDS_ALL = (
    r"(^|\.)(seed_everything|(set|setup|fix|init|make)_?(the_)?(all_)?(random_)?(manual_)?seeds?|seed_all|seed_torch|random_seed"
    r"|manual_seed_all)$|^(?!.*random\.)\w+\.seed$"
)
# of images, and of activations
_DRAWS = re.compile(
    r"transforms\.(\w+\.)?(Random\w+|ColorJitter|TrivialAugment\w*|AutoAugment)$|nn\.(\w+\.)?[Dd]ropout\w*$"
)
_SAMPLERS = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
_ASIDE = re.compile(
    r"val|eval|test|log|plot|sample|visual|image|infer|generate|write|save|show|report", re.IGNORECASE
)
_RANK = re.compile(r"(^|\.)(get_)?(global_|local_)?rank$")
_MADE_ONCE = re.compile(r"exists\(|is_?file\(|is_?dir\(")
_IS_DRAWN = re.compile(r"rand|time|entropy")
# methods of a generator that draw no number
_NO_DRAWS = ("manual_seed", "initial_seed", "get_state", "set_state", "seed")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about random numbers."""
    finds = [] if facts.imports(r"bootfile") else [_find_random, _find_splits]
    finds += [] if facts.saves_all else [_find_generators]
    for find in [] if facts.restores_all else finds:
        yield from of_a_restart(find(facts), facts)


# R401: seeded at each start, and drawn in the loop


def _find_random(facts: Facts) -> Iterator[Finding]:
    for source in SOURCES:
        seed = _find_seed(facts, source)
        draw, what = _find_draw(facts, source) if seed is not None else (None, "")
        if seed is None or draw is None or _is_restored(facts, source, seed):
            continue
        message = f"{source.name} gets the same seed at each start, and {name_line(draw, seed)} draws "
        message += f"from it in the loop ({what}), but its state is not restored"
        # an option decides about the seed, or a restart may not come there: it makes data once, or splits it
        is_asked = any("seed" in condition.text or _is_once(condition) for condition in seed.conditions)
        is_hint = what == "dropout" or is_asked or _may_be_drawn(facts, seed) or _is_of_data(facts, seed)
        yield at(seed, "R401", message, is_hint, draw=draw)


def _find_splits(facts: Facts) -> Iterator[Finding]:
    """Find a split of the samples that is drawn without a seed."""
    seeds = facts.calls(f"{_SEEDS_ALL}|" + "|".join(f"{source.seeds}|{source.sets}" for source in SOURCES))
    first = min((event.order for event in seeds), default=len(facts.events))
    for event in facts.calls(r"(^|\.)(random_split|train_test_split)$"):
        is_seeded = bool(event.args.keys() & {"generator", "random_state", 2}) or event.order > first
        is_ordered = is_constant(event.args.get("shuffle"), False)
        if event.name == "call" and not is_seeded and not is_ordered and event.order < facts.first_step:
            name = event.text.rpartition(".")[2]
            yield at(event, "R405", f"{name}() splits the samples in another way at each start")
            return


def find_used(facts: Facts) -> set[str]:
    """Return the names of the sources that a program seeds, or draws from. The repair of R401 asks."""
    used = {"torch"}  # a loader draws from it
    return used | {one.name for one in SOURCES if facts.calls(f"{one.seeds}|{one.draws}|{_SEEDS_ALL}")}


def _find_seed(facts: Facts, source: Source) -> Event | None:
    """Return where a source gets the same seed at each start; None if it gets one in the loop."""
    seed = None
    for event in facts.calls(f"{source.seeds}|{_SEEDS_ALL}"):
        is_all = re.search(_SEEDS_ALL, event.text) and event.value.kind in ("module", "unknown", "instance")
        if not is_all and not (event.name == "call" and re.search(source.seeds, event.text)):
            continue
        # a seed in the loop, as of (seed, epoch), is the same after a restart
        if facts.is_in_training(event):
            return None
        given = event.args.get(0)
        is_fixed = given is not None and not values.is_restored(given) and _is_fixed_seed(given)
        # what loads the checkpoint may seed again, from the clock
        if not is_fixed and given is not None and seed is not None:
            return None
        # a machine with a GPU does not come here
        is_reached = not any("cuda" in test.text and not test.is_true for test in event.conditions)
        seed = seed or (event if is_fixed and is_reached else None)
    return seed


def _is_fixed_seed(value: Value, depth: int = 0) -> bool:
    """Return whether a seed is the same at each start: an option, also with the rank added."""
    if value.kind != "unknown":
        return value.kind not in ("rank", "counter")
    # `seed + rank` is fixed; the rank alone is not a seed that the user chose
    if _RANK.search(str(value.key or value.label)):
        return depth > 0
    inner = [dep for dep in value.deps if dep is not value]
    return bool(inner) and depth < 5 and all(_is_fixed_seed(dep, depth + 1) for dep in inner)


def _is_once(condition: Condition) -> bool:
    """Return whether a condition is that a file is missing, and not only that a script has not stopped: `if
    os.path.exists(folder): raise`."""
    has_branch = condition.is_true or bool(getattr(condition.node, "orelse", []))
    return has_branch and _MADE_ONCE.search(condition.text) is not None


def _is_of_data(facts: Facts, event: Event) -> bool:
    """Return whether an event is in the class of a data set."""
    around = [
        cls for cls in facts.nodes(event.path, ast.ClassDef) if cls.lineno <= event.line <= cls.end_lineno
    ]
    return any(getattr(part, "name", "") == "__getitem__" for cls in around for part in cls.body)


def _may_be_drawn(facts: Facts, seed: Event) -> bool:
    """Return whether a seed is drawn unless an option gives it: `if args.seed is None: args.seed =
    random.randint(1, 9999)`."""
    names = {unparse(given).rpartition(".")[2] for given in getattr(seed.node, "args", [])}
    # `add_argument("--seed", default=random.randrange(200))`
    nodes = [event.node for event in facts.calls(r"^add_argument$")]
    pairs = [(unparse(node).replace("-", "_"), keyword) for node in nodes for keyword in node.keywords]
    pairs = [pair for pair in pairs if any(f"__{name}'" in pair[0] for name in names)]
    defaults = [unparse(keyword.value) for _, keyword in pairs if keyword.arg == "default"]
    sets = [event for event in facts.select("set_attribute") if event.text in names and event.conditions]
    given = [str(dep.key) for event in sets for dep in list_deps(event.args.get(0, Value()))]
    return any(map(_IS_DRAWN.search, [*defaults, *given]))


def _is_restored(facts: Facts, source: Source, seed: Event) -> bool:
    """Return whether the state of a source is restored from a checkpoint, and not seeded again after that."""
    saves = facts.restart_saves
    keys = {entry.key.partition(".")[0] for save in saves for entry in save.entries}
    # a class with its own state_dict() may save anything
    owners = [owner for save in saves for owner in save.owners()]
    is_own = any(facts.tracer.find_method(owner, "state_dict") for owner in owners)
    is_known = not is_own and not any(save.is_open for save in saves)
    seeds = [event for event in facts.calls(source.seeds) if not event.conditions and event.name == "call"]
    last = max((event.order for event in [seed, *seeds] if event.order < facts.first_step), default=0)
    for event in facts.calls(source.sets):
        if event.order < last and not facts.is_in_training(event):
            continue
        fields = [dep for dep in list_deps(event.args.get(0, Value())) if dep.kind == "field" and dep.key]
        # restored from this checkpoint, maybe from a dict in it, or from an entry that is not known
        if not is_known or not fields or any(str(one.key) in keys for one in fields):
            return True
    return False


def _find_draw(facts: Facts, source: Source) -> tuple[Event | None, str]:
    """Return where the loop draws from a source, and what for."""
    is_torch = source.name == "torch"
    for event in facts.in_training("iterate") if is_torch else ():
        if _is_shuffled(facts, event):
            return event, "the order of a loader with shuffle=True"
    # a draw from a generator of its own is a matter of R106
    draws = [one for one in facts.calls(source.draws) if one.name == "call" and "generator" not in one.args]
    for event in draws:
        if facts.is_in_training(event) and _trains_with(facts, event):
            return event, f"{event.text.rpartition('.')[2]}()"
    # torch seeds Python's random numbers in its workers
    in_workers = facts.calls(f"{SOURCES[0].draws}|{SOURCES[2].draws}") if is_torch else []
    for event in in_workers if any("num_workers" in one.args for one in facts.select("create")) else []:
        if facts.is_in_training(event) and event.functions[-1:] == ("__getitem__",):
            return event, f"{event.text.rpartition('.')[2]}() in the workers"
    for event in facts.select("create", "call") if is_torch else ():
        what = "dropout" if "ropout" in event.text else "augmentation"
        is_here = what == "augmentation" or event.path == facts.tracer.source.path
        if is_here and _DRAWS.search(event.text):
            return event, what
    return None, ""


def _trains_with(facts: Facts, event: Event) -> bool:
    """Return whether the training depends on random numbers: they are not for a figure or an evaluation, and
    not drawn in a worker, which has its own seed."""
    # in a function with a name such as log_images() or evaluate()
    is_aside = any(_ASIDE.search(name) and "train" not in name for name in event.functions)
    if is_aside or any(is_modulo(getattr(test.node, "test", None)) for test in event.conditions):
        return False
    if set(event.functions) & {"__getitem__", "__iter__", "collate_fn"}:
        return not any("num_workers" in other.args for other in facts.select("create"))
    depth = len(event.loops)
    return any(other.loops[:depth] == event.loops for other in facts.select("backward", "step"))


def _is_shuffled(facts: Facts, event: Event) -> bool:
    """Return whether a loop trains on a loader whose order comes from torch's random numbers."""
    loader = root(event.value)
    # a data set that draws its samples does not read their numbers
    method = facts.tracer.find_method(root(loader.parts.get("dataset", Value())), "__getitem__")
    is_other = "prepared" in loader.flags or (method is not None and ignores_index(method.node))
    return not is_other and _is_drawn(loader) and facts.trains_within(event)


def _is_drawn(loader: Value) -> bool:
    """Return whether the order of a loader comes from the random numbers of torch."""
    sampler = root(loader.parts.get("sampler", Value("none")))
    if loader.options.get("generator", Value("none")).kind != "none" or loader.cls is not None:
        return False
    shuffle = loader.options.get("shuffle") or loader.options.get(2) or Value()
    # `shuffle=sampler is None`: a run of one process shuffles
    is_alone = shuffle.kind == "compared" and isinstance(shuffle.node.ops[0], ast.Is)
    if sampler.kind == "none" or is_alone:
        return is_alone or is_constant(shuffle, True)
    if sampler.key == "BatchSampler":
        sampler = root(sampler.options.get(0) or sampler.options.get("sampler") or sampler)
    # samplers of torch that draw their order from torch's generator if they get none
    return sampler.kind == "sampler" and sampler.key in _SAMPLERS and "generator" not in sampler.options


# R106: a generator of its own


def _find_generators(facts: Facts) -> Iterator[Finding]:
    """Find generators that the training draws from, and whose state no checkpoint has."""
    # a worker of a loader has a copy of its own
    draws = [
        one for one in facts.in_training("iterate", "call", "method") if "__getitem__" not in one.functions
    ]
    first = {generator: event for event in reversed(draws) for generator in _list_generators(event)}
    for generator, event in first.items():
        is_kept = facts.is_own_state(generator) or facts.is_saved(generator, "generator")
        if not is_kept and not _is_seeded_again(facts, generator):
            name = describe(generator, "the generator")
            where = name_line(event, generator)
            message = f"{name} is drawn from in the loop ({where}), but its state is not in the checkpoint"
            yield at(generator, "R106", message, value=generator, draw=event)


def _list_generators(event: Event) -> list[Value]:
    """Return the generators that an event draws from: the argument `generator` of a call, those of the loader
    that a loop reads and of its sampler, or the object of a method such as `rng.random()`."""
    base = root(event.value)
    sampler = root(base.parts.get("sampler", Value()))
    given = [event.args.get("generator"), base if event.name == "method" else None]
    if event.name == "iterate":
        given = [base.options.get("generator"), sampler.options.get("generator")]
    elif event.text in _NO_DRAWS:
        return []
    return [root(value) for value in given if value is not None and kind_of(value) == "generator"]


def _is_seeded_again(facts: Facts, generator: Value) -> bool:
    seeds = [
        event for event in facts.calls("^(manual_seed|seed|set_state)$") if root(event.value) is generator
    ]
    again = [event for event in seeds if values.is_restored(event.args.get(0, Value()))]
    return bool(again) or any(map(facts.is_in_training, seeds))
