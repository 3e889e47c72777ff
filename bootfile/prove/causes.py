"""Find the cause of a difference after a restart: what differs first, and what the checkpoint lacks.

The files at the end of a run show effects. So the reference and a restart run once more, with a line for each
step of an optimizer (traced.py). The first step of the restart has the weights of a step of the reference:
from there on, the pairs of steps are compared. The first row of _CAUSES that fits names the cause.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bootfile.exact.kinds import HYPERPARAMETER
from bootfile.receipt.weights import Difference, describe_numbers

Step = dict[str, Any]  # a line of traced.py

# the source of random numbers -> (its name, what returns its state)
_SOURCES = {
    "torch": ("torch", "torch.get_rng_state()"),
    "numpy": ("NumPy", "np.random.get_state()"),
    "random": ("Python", "random.getstate()"),
}
_SHOWN = 12  # names of objects or of files in a line


class Saved(NamedTuple):
    """What the files have from which a restart continues.

    files: the name of a file -> the names of the objects in it; [] for a file of weights alone.
    has_optimizer, has_scheduler: whether there is such a state.
    """

    files: dict[str, list[str]]
    has_optimizer: bool = False
    has_scheduler: bool = False

    def __str__(self) -> str:
        """Return the objects of a file or the names of several files, for the end of a line."""
        files = [name for name in self.files if not is_best(name)]
        if not files:
            return ""
        objects = self.files[files[-1]]
        # all files may have the same objects, as those of several epochs
        if objects and all(self.files[name] == objects for name in files):
            return f" {files[-1]} has {join(objects[:_SHOWN])}"
        return f" It has {join(files[:_SHOWN])}"


def is_best(path: str) -> bool:
    """Return whether a file has the best weights so far, by its name."""
    return "best" in os.path.basename(path).lower()


def describe_saved(states: dict[str, dict[str, Any]]) -> Saved:
    """Return what files of tensors have. states: the name of a file -> its content."""
    # the keys of weights are names of tensors, not of objects
    weights = [file for file, state in states.items() if all(map(torch.is_tensor, state.values()))]
    files = {file: [] if file in weights else [*map(str, state)] for file, state in states.items() if state}
    kinds = _find_kinds(states)
    return Saved(files, "optimizer" in kinds, "scheduler" in kinds)


def _find_kinds(value: Any) -> set[str]:
    """Return which of "optimizer" and "scheduler" have a state in an object of a checkpoint, by the keys of
    torch's state_dict()."""
    if isinstance(value, list | tuple):
        return set[str]().union(*map(_find_kinds, value))
    if not isinstance(value, dict):
        return set()
    if value.keys() >= {"state", "param_groups"}:
        return {"optimizer"}
    kinds = {"scheduler"} if "last_epoch" in value else set[str]()
    return kinds.union(*map(_find_kinds, value.values()))


class Pair(NamedTuple):
    """A step of the restart, and the step of the reference that it should equal, for the rows of _CAUSES."""

    reference: list[Step]  # all steps of the reference
    number: int  # of the step that should be equal, from 1
    got: Step  # the step of the restart
    is_first: bool  # it is the first step of the restart
    saved: Saved  # what the restart could read

    @property
    def expected(self) -> Step:
        return self.reference[self.number - 1]

    @property
    def when(self) -> str:
        """Return the step in words."""
        text = f"step {self.number}"
        return f"{text} (the first after the restart)" if self.is_first else text

    @property
    def other_option(self) -> str:
        """Return the name of an option in the parameter groups whose value differs; "" without one. The
        learning rate comes first, because it shows that a scheduler is missing."""
        expected, got = self.expected["options"], self.got["options"]
        names = [name for name in expected if expected[name] != got.get(name)]
        return min(names, key=lambda name: not name.endswith(".lr"), default="")

    @property
    def option_in_words(self) -> str:
        """Return in words that other_option() differs, with both values."""
        name = self.other_option
        is_rate = name.endswith(".lr")
        what = "the learning rate" if is_rate else f"{name.partition('.')[2]} of the optimizer"
        before = self.expected["options"][name]
        values = describe_numbers(self.got["options"].get(name), before, "in the reference ")
        return f"{what} differs after the restart (step {self.number}: {values})"

    @property
    def scales(self) -> str:
        """Return both scales of GradScaler in words."""
        return describe_numbers(self.got["scale"], self.expected["scale"], "in the reference ")

    @property
    def counts(self) -> str:
        """Return both numbers of batches in words."""
        return f"{len(self.got['batches'])} in place of {len(self.expected['batches'])} batches"

    @property
    def step_of_batches(self) -> int:
        """Return the number of the last step of the reference that has the batches of this step; 0 without
        one. It tells how many steps the data of the restart are off."""
        batches = self.got["batches"]
        numbers = [number for number, step in enumerate(self.reference, 1) if step["batches"] == batches]
        return numbers[-1] if batches and numbers else 0

    @property
    def sources(self) -> list[str]:
        """Return the sources of random numbers whose state differs; of several, those from which most steps
        draw. A DataLoader draws a number of torch in each epoch, so a source with few draws tells little."""
        expected, got = self.expected["random"], self.got["random"]
        draws = dict.fromkeys(expected, 0)  # source -> steps that draw from it
        for before, after in itertools.pairwise(self.reference):
            for name in draws:
                draws[name] += before["random"].get(name) != after["random"].get(name)
        different = [name for name in draws if draws[name] and expected[name] != got.get(name)]
        most = max((draws[name] for name in different), default=0)
        return [name for name in different if draws[name] == most]

    @property
    def source_names(self) -> str:
        return join([_SOURCES.get(name, (f"torch on {name}", ""))[0] for name in self.sources])

    @property
    def source_states(self) -> str:
        return join([_SOURCES.get(name, ("", f"torch.{name}.get_rng_state()"))[1] for name in self.sources])


class _Cause(NamedTuple):
    """A row of _CAUSES: the text names the cause if this part of the steps differs and fits(pair) is true. If
    the text is a question, a sentence on the content of the files follows."""

    part: str
    text: str
    fits: Callable[[Pair], object] = lambda pair: True


_ORDER = (
    "the order of the data begins again, {pair.when} has the batch of step {pair.step_of_batches}: are the "
    "epoch, the place in the epoch and the state of the sampler or of its generator in the checkpoint"
)
# from what a restart loads to what follows from it: each row supposes that no row before it fits
_CAUSES = (
    _Cause(
        "state",
        "the optimizer has no state at {pair.when}, as a new one: is the optimizer in the checkpoint?",
        lambda pair: not pair.got["state"],
    ),
    _Cause(
        "options",
        "the optimizer has other parameter groups at step {pair.number} than in the reference",
        lambda pair: not pair.other_option,
    ),
    _Cause(
        "options",
        "{pair.option_in_words}: is the state of the scheduler loaded, after the one of the optimizer, and "
        "is the step of a warm-up in the checkpoint?",
        lambda pair: pair.saved.has_scheduler,
    ),
    _Cause(
        "options",
        "{pair.option_in_words}: is the scheduler in the checkpoint, or the step from which the rate "
        "follows?",
        lambda pair: pair.saved.has_optimizer,
    ),
    _Cause("options", "{pair.option_in_words}: are the optimizer and the scheduler in the checkpoint?"),
    _Cause(
        "scale",
        "the scale of GradScaler differs at {pair.when}: {pair.scales}: is the scaler in the checkpoint?",
    ),
    _Cause(
        "weights",
        "the weights differ at {pair.when}, although the step before had the same batch and gradient: is "
        "something that changes the weights, such as an average, not in the checkpoint?",
    ),
    _Cause(
        "batches",
        "the gradient of {pair.when} is that of {pair.counts}: is the gradient lost that was accumulated "
        "before the checkpoint? Save after a step of the optimizer",
        lambda pair: len(pair.got["batches"]) != len(pair.expected["batches"]),
    ),
    _Cause(
        "buffers",
        "the buffers of the model (statistics of BatchNorm) differ at {pair.when}: are they in the "
        "checkpoint, as model.state_dict() has them, and not the parameters alone?",
        # before the first batch: later ones of a step depend on the batches before them
        lambda pair: pair.expected["buffers"][:1] != pair.got["buffers"][:1],
    ),
    _Cause(
        "batches",
        "{pair.when} has the batch of the step before: is the step in the checkpoint one too low?",
        lambda pair: pair.step_of_batches and pair.step_of_batches == pair.number - 1,
    ),
    _Cause(
        "batches",
        "{pair.when} has the batch of the next step: is the step in the checkpoint one too high?",
        lambda pair: pair.step_of_batches == pair.number + 1,
    ),
    _Cause(
        "batches",
        _ORDER + ", or torch.get_rng_state(), if shuffle=True draws the order from it?",
        lambda pair: pair.step_of_batches and "torch" in pair.sources,
    ),
    _Cause("batches", f"{_ORDER}?", lambda pair: pair.step_of_batches),
    _Cause(
        "batches",
        "the random numbers of {pair.source_names} differ at {pair.when} and the batch with them "
        "(augmentation, shuffle=True): is {pair.source_states} in the checkpoint?",
        lambda pair: pair.sources,
    ),
    _Cause(
        "batches",
        "{pair.when} has a batch that the reference never had, with the same random numbers of torch, NumPy "
        "and Python: is the state of the generator of the DataLoader, the sampler or the augmentation in the "
        "checkpoint?",
    ),
    _Cause("state", "the state of the optimizer differs at {pair.when}: is all of it in the checkpoint?"),
    _Cause(
        "gradients",
        "the random numbers of {pair.source_names} differ at {pair.when} and the gradient with them "
        "(dropout): is {pair.source_states} in the checkpoint?",
        lambda pair: pair.sources,
    ),
    _Cause(
        "gradients",
        "the gradient differs at {pair.when} although weights and batch are equal: does the loss depend on a "
        "counter, an average or a generator of random numbers that is not in the checkpoint?",
    ),
)


def explain(reference: list[Step], restart: list[Step], saved: Saved, differences: list[Difference]) -> str:
    """Return the cause in words; "" if it is not known.

    reference, restart: the steps of an undisturbed run, and those after a restart, of this start only.
    saved: what the restart could read.
    differences: those of the files at the end, possible causes first.
    """
    if reference and restart:
        return explain_steps(reference, restart, saved) or _explain_accessories(differences, saved)
    # no optimizer of torch in the process of the script: it starts others, or changes the weights itself
    if differences and differences[0].kind == HYPERPARAMETER and saved.has_optimizer:
        return f"{differences[0].name} differs: is the scheduler in the checkpoint, and loaded?{saved}"
    if differences and any(saved.files.values()) and not saved.has_optimizer:
        return f"is the optimizer in the checkpoint?{saved}"
    return ""


def explain_steps(reference: list[Step], restart: list[Step], saved: Saved) -> str:
    """Return the cause that the steps show; "" if all are equal, or if a run has none. The arguments are
    those of explain()."""
    if not reference or not restart:
        return ""
    begin = _find_begin(reference, restart[0])
    if begin is None:
        return (
            "the weights at the first step after the restart are those of no step of the reference: are all "
            f"parts of the model in the checkpoint, as they are at the end of a step?{saved}"
        )
    remaining = len(reference) - begin  # the steps of the reference from there on
    length = f"; the restart trained {len(restart)} steps, the reference {remaining}"
    if len(restart) == len(reference):
        length += ": is the epoch, or the step, in the checkpoint?"
    if remaining == len(restart):
        length = ""
    # the first pair that differs has the cause; differences in later ones follow from it
    pairs = (
        Pair(reference, number, got, number == begin + 1, saved)
        for number, got in zip(range(begin + 1, len(reference) + 1), restart, strict=False)
    )
    cause = next(filter(None, map(_explain_pair, pairs)), "")
    # a checkpoint is written after a step: the weights before step 1 are those of a new model
    if cause and begin == 0 and len(reference) > 1:
        return (
            "the weights at the first step after the restart are those of the beginning: is the model in "
            f"the checkpoint, and loaded?{saved}"
        )
    if length and not cause:
        return (
            f"all steps are equal up to the end of one run{length}: are the epoch and the counter of early "
            f"stopping in the checkpoint?{saved}"
        )
    return cause + length


def _find_begin(reference: list[Step], first: Step) -> int | None:
    """Return the place in the reference of the step with the weights of a restart's first step; None without
    one. Several steps have equal weights if a learning rate is 0, as at the beginning of a warm-up: then it
    is the most similar step, and of equally similar ones the last."""

    def count_equal_parts(place: int) -> tuple[int, int]:
        return sum(first[name] == value for name, value in reference[place].items()), place

    wanted = first["optimizer"], first["weights"]
    places = [place for place, step in enumerate(reference) if (step["optimizer"], step["weights"]) == wanted]
    return max(places, key=count_equal_parts, default=None)


def _explain_pair(pair: Pair) -> str:
    """Return the cause of what differs in a pair of steps; "" if nothing does."""
    for part, text, fits in _CAUSES:
        if pair.expected[part] != pair.got[part] and fits(pair):
            cause = text.format(pair=pair)
            return f"{cause}{pair.saved}" if text.endswith("?") else cause
    return ""


def _explain_accessories(differences: list[Difference], saved: Saved) -> str:
    """Explain what differs although all steps are equal, such as an average of the weights."""
    if not differences:
        return ""
    # a wrong tensor tells more than the best file, and that more than a wrong number
    first = min(differences, key=lambda each: (is_best(each.file) or each.is_number, not is_best(each.file)))
    name = first.name.partition(".")[0]
    if is_best(first.file):
        cause = f"{first.file} differs: is the best result so far in the checkpoint?"
    elif first.kind == HYPERPARAMETER and saved.has_optimizer:  # the rate after the last step
        cause = f"{first.text} differs: is the scheduler in the checkpoint?"
    elif any(name in names for names in saved.files.values()):
        cause = f"{first.text} differs: is it in the checkpoint, and loaded?"
    else:
        cause = f"{name} differs: is it in the checkpoint?"
    return f"all steps are equal, and {cause}{saved}"


def join(names: list[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]]) if len(names) > 1 else "".join(names)
