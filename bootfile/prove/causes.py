"""Find the cause of a difference after a restart: what differs first, and what the checkpoint lacks.

The files at the end of a run show effects. So the reference and a restart run once more, with a line for each
step of an optimizer (traced.py). The first step of the restart has the weights of a step of the reference:
from there on, the pairs of steps are compared, causes first.
"""

import itertools
import os
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
        files = []
        has_same = True  # whether all files have the same objects, as those of several epochs
        for name in self.files:
            if not is_best(name):
                files.append(name)
                has_same = has_same and self.files[name] == self.files[files[0]]
        if not files:
            return ""
        objects = self.files[files[-1]]
        if has_same and objects:
            return f" {files[-1]} has {_join(objects[:_SHOWN])}"
        return f" It has {_join(files[:_SHOWN])}"

    def has(self, name: str) -> bool:
        """Return whether an object of a file has this name."""
        return any(name in names for names in self.files.values())


def is_best(path: str) -> bool:
    """Return whether a file has the best weights so far, by its name."""
    return "best" in os.path.basename(path).lower()


def describe_saved(states: dict[str, dict[str, Any]]) -> Saved:
    """Return what files of tensors have. states: the name of a file -> its content."""
    files: dict[str, list[str]] = {}
    kinds = set[str]()
    for file, state in states.items():
        is_weights = all(isinstance(value, torch.Tensor) for value in state.values())
        files[file] = []
        if not is_weights:  # else its names are those of tensors
            files[file] = [*map(str, state)]
        kinds |= _find_kinds(state)
    return Saved(files, "optimizer" in kinds, "scheduler" in kinds)


def _find_kinds(value: Any) -> set[str]:
    """Return which of "optimizer" and "scheduler" have a state in an object of a checkpoint."""
    kinds = set[str]()
    if isinstance(value, dict):
        # known by the keys of torch's state_dict(), wherever the file has it
        if value.keys() >= {"state", "param_groups"}:
            return {"optimizer"}
        if "last_epoch" in value:
            kinds.add("scheduler")
        for part in value.values():
            kinds |= _find_kinds(part)
    elif isinstance(value, list | tuple):
        for part in value:
            kinds |= _find_kinds(part)
    return kinds


def explain(reference: list[Step], restart: list[Step], saved: Saved, differences: list[Difference]) -> str:
    """Return the cause in words; "" if it is not known.

    reference, restart: the steps of an undisturbed run, and those after a restart, of this start only.
    saved: what the restart could read.
    differences: those of the files at the end, possible causes first.
    """
    # no optimizer of torch in the process of the script: it starts others, or changes the weights itself
    if not reference or not restart:
        return _explain_files(differences, saved)
    return explain_steps(reference, restart, saved) or _explain_accessories(differences, saved)


def explain_steps(reference: list[Step], restart: list[Step], saved: Saved) -> str:
    """Return the cause that the steps show; "" if all are equal. There is at least one of each. The arguments
    are those of explain()."""
    begin = _find_begin(reference, restart[0])
    if begin is None:
        return (
            "the weights at the first step after the restart are those of no step of the reference: are all "
            f"parts of the model in the checkpoint, as they are at the end of a step?{saved}"
        )
    expected_steps = reference[begin:]
    length = ""
    if len(expected_steps) != len(restart):
        length = f"; the restart trained {len(restart)} steps, the reference {len(expected_steps)}"
        if len(restart) == len(reference):
            length += ": is the epoch, or the step, in the checkpoint?"
    # the first pair that differs has the cause; differences in later ones follow from it
    for number, (expected, got) in enumerate(zip(expected_steps, restart, strict=False), begin + 1):
        when = f"step {number}"
        if number == begin + 1:
            when += " (the first after the restart)"
        cause = _explain_pair(when, expected, got, saved, reference)
        # a checkpoint is written after a step: the weights before step 1 are those of a new model
        if cause and begin == 0 and len(reference) > 1:
            return (
                "the weights at the first step after the restart are those of the beginning: is the model in "
                f"the checkpoint, and loaded?{saved}"
            )
        if cause:
            return cause + length
    if length:
        return (
            f"all steps are equal up to the end of one run{length}: are the epoch and the counter of early "
            f"stopping in the checkpoint?{saved}"
        )
    return ""


def _find_begin(reference: list[Step], first: Step) -> int | None:
    """Return the place of the step of the reference with the weights of a restart's first step; None without
    one. If there are several, the most similar one."""
    best = None
    most = -1
    # equal weights come twice if a learning rate is 0, as at the beginning of a warm-up
    for place, step in enumerate(reference):
        if (step["optimizer"], step["weights"]) != (first["optimizer"], first["weights"]):
            continue
        equal = 0
        for name in step:
            if step[name] == first[name]:
                equal += 1
        if equal >= most:
            best = place
            most = equal
    return best


def _explain_pair(when: str, expected: Step, got: Step, saved: Saved, reference: list[Step]) -> str:
    """Return what differs in a step of the reference and of the restart, causes before effects; "" if nothing
    does. when: the step, in words."""
    # from what a restart loads to what follows from it: each question supposes that those before it are equal
    if expected["state"] and not got["state"]:
        return (
            f"the optimizer has no state at {when}, as a new one: is the optimizer in the checkpoint?{saved}"
        )
    if expected["options"] != got["options"]:
        return _explain_options(when.partition(" (")[0], expected["options"], got["options"], saved)
    if expected["scale"] != got["scale"]:
        values = describe_numbers(got["scale"], expected["scale"], "in the reference ")
        return f"the scale of GradScaler differs at {when}: {values}: is the scaler in the checkpoint?{saved}"
    if expected["weights"] != got["weights"]:
        return (
            f"the weights differ at {when}, although the step before had the same batch and gradient: is "
            f"something that changes the weights, such as an average, not in the checkpoint?{saved}"
        )
    # an accumulation: several batches make the gradient of one step
    count = len(got["batches"])
    usual_count = len(expected["batches"])
    if count != usual_count:
        return (
            f"the gradient of {when} is that of {_count(count)} in place of {usual_count}: is the gradient "
            "lost that was accumulated before the checkpoint? Save after a step of the optimizer"
        )
    # the buffers before each batch: later ones of a step depend on the batches before them
    if expected["buffers"][:1] != got["buffers"][:1]:
        return (
            f"the buffers of the model (statistics of BatchNorm) differ at {when}: are they in the "
            "checkpoint, as model.state_dict() has them, and not the parameters alone?"
        )
    if expected["batches"] != got["batches"]:
        return _explain_batches(when, expected, got, saved, reference)
    if expected["state"] != got["state"]:
        return f"the state of the optimizer differs at {when}: is all of it in the checkpoint?{saved}"
    if expected["gradients"] == got["gradients"]:
        return ""
    sources = _find_other_random(expected, got, reference)
    if sources:
        names, states = _name_sources(sources)
        return (
            f"the random numbers of {names} differ at {when} and the gradient with them (dropout): is "
            f"{states} in the checkpoint?{saved}"
        )
    return (
        f"the gradient differs at {when} although weights and batch are equal: does the loss depend on a "
        f"counter, an average or a generator of random numbers that is not in the checkpoint?{saved}"
    )


def _explain_options(when: str, expected: dict[str, Any], got: dict[str, Any], saved: Saved) -> str:
    """Explain different numbers in the parameter groups of an optimizer. The learning rate comes first."""
    name = ""
    # the learning rate before other numbers: in it the lack of a scheduler shows
    for candidate in expected:
        is_first = not name or (candidate.endswith(".lr") and not name.endswith(".lr"))
        if is_first and expected[candidate] != got.get(candidate):
            name = candidate
    if not name:
        return f"the optimizer has other parameter groups at {when} than in the reference"
    what = f"{name.partition('.')[2]} of the optimizer"
    if name.endswith(".lr"):
        what = "the learning rate"
    values = describe_numbers(got.get(name), expected[name], "in the reference ")
    text = f"{what} differs after the restart ({when}: {values})"
    if not saved.has_optimizer and not saved.has_scheduler:
        return f"{text}: are the optimizer and the scheduler in the checkpoint?{saved}"
    if saved.has_scheduler:
        return (
            f"{text}: is the state of the scheduler loaded, after the one of the optimizer, and is the step "
            f"of a warm-up in the checkpoint?{saved}"
        )
    return f"{text}: is the scheduler in the checkpoint, or the step from which the rate follows?{saved}"


def _explain_batches(when: str, expected: Step, got: Step, saved: Saved, reference: list[Step]) -> str:
    """Explain other batches in a step."""
    # the place of this batch in the reference tells how far the restart is off
    usual = _find_step_with(reference, got["batches"])
    here = reference.index(expected) + 1
    sources = _find_other_random(expected, got, reference)
    if usual == here - 1:
        return f"{when} has the batch of the step before: is the step in the checkpoint one too low?{saved}"
    if usual == here + 1:
        return f"{when} has the batch of the next step: is the step in the checkpoint one too high?{saved}"
    if usual:
        text = (
            f"the order of the data begins again, {when} has the batch of step {usual}: are the epoch, the "
            "place in the epoch and the state of the sampler or of its generator in the checkpoint"
        )
        if "torch" in sources:
            text += ", or torch.get_rng_state(), if shuffle=True draws the order from it"
        return f"{text}?{saved}"
    if sources:
        names, states = _name_sources(sources)
        return (
            f"the random numbers of {names} differ at {when} and the batch with them (augmentation, "
            f"shuffle=True): is {states} in the checkpoint?{saved}"
        )
    return (
        f"{when} has a batch that the reference never had, with the same random numbers of torch, NumPy and "
        "Python: is the state of the generator of the DataLoader, the sampler or the augmentation in the "
        f"checkpoint?{saved}"
    )


def _find_step_with(reference: list[Step], batches: list[str]) -> int:
    """Return the number of the last step with these batches, 0 without one."""
    number = 0
    for place, step in enumerate(reference, 1):
        if batches and step["batches"] == batches:
            number = place
    return number


def _find_other_random(expected: Step, got: Step, reference: list[Step]) -> list[str]:
    """Return the sources of random numbers whose state differs, of those from which the training draws most
    often."""
    draws = dict.fromkeys(expected["random"], 0)
    for before, after in itertools.pairwise(reference):
        for name in draws:
            if before["random"].get(name) != after["random"].get(name):
                draws[name] += 1
    # a DataLoader draws one number of torch for each epoch, whatever its order is
    most = 1
    sources: list[str] = []
    for name in draws:
        if expected["random"][name] == got["random"].get(name) or draws[name] < most:
            continue
        if draws[name] > most:
            sources = []
        most = draws[name]
        sources.append(name)
    return sources


def _explain_accessories(differences: list[Difference], saved: Saved) -> str:
    """Explain what differs although all steps are equal, such as an average of the weights."""
    best = ""  # the file of the best weights
    tensor = None
    number = None
    for difference in differences:
        if is_best(difference.file):
            best = difference.file
        elif difference.is_number:
            number = number or difference
        else:
            tensor = tensor or difference
    # a wrong tensor tells more than a wrong number; the best file follows from both
    first = tensor or number
    if best and not tensor:
        return f"all steps are equal, and {best} differs: is the best result so far in the checkpoint?{saved}"
    if not first:
        return ""
    if first.kind == HYPERPARAMETER and saved.has_optimizer:  # the rate after the last step
        return f"all steps are equal, and {first.text} differs: is the scheduler in the checkpoint?{saved}"
    name = first.name.partition(".")[0]
    if saved.has(name):
        return f"all steps are equal, and {first.text} differs: is it in the checkpoint, and loaded?{saved}"
    return f"all steps are equal, and {name} differs: is it in the checkpoint?{saved}"


def _explain_files(differences: list[Difference], saved: Saved) -> str:
    """Explain what differs if the steps are not known, for example because other processes made them."""
    if not differences:
        return ""
    first = differences[0]
    if first.kind == HYPERPARAMETER and saved.has_optimizer:
        return f"{first.name} differs: is the scheduler in the checkpoint, and loaded?{saved}"
    if any(saved.files.values()) and not saved.has_optimizer:
        return f"is the optimizer in the checkpoint?{saved}"
    return ""


def _count(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _join(names: list[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _name_sources(sources: list[str]) -> tuple[str, str]:
    """Return (the names of sources of random numbers, what returns their states)."""
    names = []
    states = []
    for source in sources:
        of_accelerator = f"torch on {source}", f"torch.{source}.get_rng_state()"
        name, state = _SOURCES.get(source, of_accelerator)
        names.append(name)
        states.append(state)
    return _join(names), _join(states)
