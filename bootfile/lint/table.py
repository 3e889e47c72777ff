"""The rules (what each one finds, what happens after a restart, the fix, a public report) and the finding."""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One rule. title: what it finds. consequence: what happens. fix: what to do. report: a public thread or
    page about it. is_hint: it was often wrong, or depends on what lint does not know: always a hint.
    is_repaired: `bootfile fix` repairs it if that is safe."""

    title: str
    consequence: str
    fix: str
    report: str
    is_hint: bool = False
    is_repaired: bool = False


_GITHUB = "https://github.com"
_TORCH = "https://docs.pytorch.org/docs/stable"

RULES = {
    "R101": Rule("the optimizer is stepped, but not in the checkpoint",
         "after a restart the optimizer begins without its momentum, and the loss jumps",
         "save optimizer.state_dict() with the model, and load it with optimizer.load_state_dict()",
         f"{_GITHUB}/milesial/Pytorch-UNet/issues/376", is_repaired=True),
    "R103": Rule("the scheduler is stepped, but not in the checkpoint",
         "after a restart the schedule of the learning rate begins again",
         "save scheduler.state_dict(), and load it after the state of the optimizer",
         f"{_GITHUB}/PolymathicAI/the_well/issues/77", is_repaired=True),
    "R104": Rule("the GradScaler is used, but not in the checkpoint",
         "after a restart the loss scale begins at its first value, and the first steps overflow "
         "and are skipped", "save scaler.state_dict(), and load it",
         f"{_GITHUB}/PolymathicAI/the_well/issues/77", is_repaired=True),
    "R105": Rule("the average of the weights (EMA) is updated, but not in the checkpoint",
         "after a restart the average begins again from the weights of that moment",
         "save the state of the average, with its counter, and load it",
         f"{_GITHUB}/lightly-ai/lightly-train/issues/892", is_hint=True, is_repaired=True),
    "R106": Rule("a generator is drawn from in the loop, but its state is not in the checkpoint",
         "after a restart the order or the noise of the first steps comes again",
         "save generator.get_state() and load it with set_state(), or seed it from the epoch with "
         "manual_seed()",
         f"{_GITHUB}/Lightning-AI/pytorch-lightning/issues/21938", is_hint=True, is_repaired=True),
    "R107": Rule("a counter begins again at each start, and the training depends on it",
         "after a restart the learning rate, early stopping or the orders of the epochs begin again",
         "save the counter in the checkpoint, and restore it before the loop",
         f"{_GITHUB}/huggingface/transformers/issues/28544", is_repaired=True),
    "R108": Rule("the best result begins again at each start",
         "after a restart the first result counts as the best one, and a worse model replaces the "
         "best file", "save the best result in the checkpoint, and restore it before the loop",
         f"{_GITHUB}/KaiyangZhou/deep-person-reid/issues/63", is_repaired=True),
    "R109": Rule("a module is trained, but not in the checkpoint",
         "after a restart this module begins with new weights",
         "save the state_dict() of each module whose parameters an optimizer has, and load it",
         f"{_TORCH}/notes/serialization.html", is_hint=True, is_repaired=True),
    "R201": Rule("something is in the checkpoint, but not loaded",
         "after a restart it begins as in a new training",
         "load it with load_state_dict() where the model is loaded",
         f"{_GITHUB}/lorenlugosch/end-to-end-SLU/issues/2", is_repaired=True),
    "R301": Rule("a restart repeats or skips an epoch",
         "an epoch is trained twice, or not at all",
         'save the number of the next epoch ("epoch": epoch + 1) and begin with it',
         f"{_GITHUB}/KaiyangZhou/deep-person-reid/issues/64", is_repaired=True),
    "R302": Rule("the loop begins with the first epoch, although a checkpoint was loaded",
         "after a restart all epochs are trained again, with the learning rates of the first ones",
         "save the epoch, and begin the loop with the saved one",
         f"{_GITHUB}/kuanghuei/SCAN/pull/19", is_repaired=True),
    "R303": Rule("a checkpoint within an epoch, but a restart begins an epoch with its first batch",
         "some samples are read twice in this epoch, or the rest of it is left out",
         "save the number of batches too, and skip them in the same order",
         f"{_GITHUB}/facebookresearch/fairseq/issues/848", is_repaired=True),
    "R305": Rule("batches are skipped in another order",
         "some samples are read twice in this epoch, and others never",
         "seed the order from the epoch (set_epoch() of a sampler, or a generator), or restore its "
         "generator", f"{_GITHUB}/huggingface/accelerate/issues/2823", is_hint=True, is_repaired=True),
    "R307": Rule("set_epoch() of a DistributedSampler is not called",
         "each epoch has the same order, with and without a restart",
         "sampler.set_epoch(epoch) at the beginning of each epoch",
         f"{_GITHUB}/pytorch/pytorch/issues/31771", is_repaired=True),
    "R308": Rule("set_epoch() gets the same number in each epoch",
         "each epoch has the same order, with and without a restart",
         "sampler.set_epoch(epoch) with the variable of the loop",
         f"{_GITHUB}/pytorch/pytorch/issues/31771", is_hint=True, is_repaired=True),
    "R310": Rule("the end of the loop moves with its beginning",
         "each restart trains the whole number of epochs again, and not the rest",
         "for epoch in range(start_epoch, epochs)",
         f"{_GITHUB}/huggingface/transformers/issues/28544", is_hint=True),
    "R401": Rule("random numbers are seeded at each start, but drawn in the loop",
         "after a restart the random numbers (order, noise, dropout) of the first steps come again",
         "restore their state from the checkpoint, or seed them at each epoch from the seed and the "
         "epoch", f"{_GITHUB}/ai2cm/ace/issues/690", is_repaired=True),
    "R402": Rule("samples in the order of a folder's listing",
         "on another machine, or after a copy, the same numbers mean other samples",
         "sorted(os.listdir(folder))", f"{_GITHUB}/pytorch/vision/issues/192", is_repaired=True),
    "R405": Rule("the split of the samples is drawn again at each start",
         "after a restart samples of the evaluation are trained on",
         "random_split(..., generator=torch.Generator().manual_seed(seed)), or save the split",
         f"{_GITHUB}/pytorch/pytorch/issues/32467"),
    "R501": Rule("the checkpoint is written over the one before it",
         "a kill during the write leaves a file that cannot be loaded, and no other one",
         "write to another name in the same folder, then os.replace()",
         f"{_GITHUB}/Lightning-AI/pytorch-lightning/issues/688", is_repaired=True),
    "R502": Rule("the newest checkpoint is chosen by its name",
         "epoch_9 comes after epoch_10: a restart continues from an old checkpoint",
         "compare the numbers: max(paths, key=number_of), or write them with zeros ({epoch:05d})",
         f"{_GITHUB}/NVIDIA/physicsnemo/pull/1843", is_hint=True, is_repaired=True),
    "R503": Rule("all ranks write the same file",
         "two processes write into one file, which can be damaged",
         "if rank == 0: torch.save(...), or a file for each rank",
         f"{_GITHUB}/Tramac/awesome-semantic-segmentation-pytorch/issues/67", is_repaired=True),
    "R506": Rule("torch.load() refuses the checkpoint since PyTorch 2.6",
         "the restart ends with an UnpicklingError: weights_only is True unless it is given",
         "save plain values, such as vars(args), or load your own file with weights_only=False",
         f"{_GITHUB}/nanoporetech/remora/issues/226", is_repaired=True),
    "R507": Rule("a log is opened with mode w at each start",
         "after a restart the lines of the epochs before are lost",
         'open(path, "a") if the training continues', f"{_GITHUB}/flairNLP/flair/issues/1718", is_hint=True),
    "R508": Rule("states that belong together are in two files",
         "a kill between the two writes leaves states of different steps, with which a restart "
         "continues", "save them in one file", f"{_TORCH}/notes/serialization.html", is_hint=True),
    "R601": Rule("names of a wrapped model are loaded into the bare one",
         "the restart ends with missing keys, or with strict=False nothing is loaded",
         "save model.module.state_dict(), and load it into the bare model or into model.module",
         f"{_GITHUB}/pytorch/pytorch/issues/3805", is_hint=True, is_repaired=True),
    "R602": Rule("a checkpoint between two steps of the optimizer",
         "the gradients that were accumulated before the checkpoint are lost",
         "save after a step of the optimizer only",
         f"{_GITHUB}/huggingface/transformers/issues/22143", is_hint=True, is_repaired=True),
    "R701": Rule("a call of another package with a known restart defect",
         "it depends on the release: see the report in the line",
         "use a release with the fix, or the way around it in the report", "guides/zoo.md", is_hint=True),
    "R702": Rule("a trainer of another package",
         "it saves and restores by itself, and lint does not follow it",
         "see guides/trainers.md, and run prove", "guides/trainers.md", is_hint=True),
    "R703": Rule("the script cannot continue: it saves nothing, or weights only, or never loads its "
         "checkpoint", "a restart begins a new training",
         "bootfile fix --exact SCRIPT, or the seven lines of guides/own_loop.md",
         "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html", is_hint=True),
    "R704": Rule("checkpoints only when a result improves",
         "a restart loses all epochs since the best one",
         "save the state of each epoch, too, in a file of its own",
         f"{_GITHUB}/huggingface/pytorch-image-models/issues/98", is_hint=True),
    "R801": Rule("checkpoints at the ends of epochs only, and no handler for SIGTERM",
         "when a platform ends the job, the steps since the last epoch are lost",
         "save every N steps, or at SIGTERM: bootfile.Exact does it",
         "guides/own_loop.md", is_hint=True, is_repaired=True),
}  # fmt: skip

# rules of earlier releases, which were rare or often wrong (tests/lint/precision.csv): comments may name them
RETIRED = (
    "R102", "R202", "R203", "R204", "R304", "R306", "R309", "R403", "R404", "R504", "R505", "R603",
)  # fmt: skip


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """One finding. rule: "R103". is_hint: it may be intended, and does not change the exit code. fix: text
    in place of that of the rule. prove: the command that shows the effect. script: the one that was read,
    which may import the file of the finding.

    evidence: what a repair needs: "event" is the event, loop, value or syntax node at the place of the
    finding; "value" the object or number; "save" and "load" the events that write and read the checkpoint.
    """

    path: str
    line: int
    rule: str
    message: str
    is_hint: bool = False
    fix: str = ""
    prove: str = ""
    script: str = ""
    evidence: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def as_hint(self) -> "Finding":
        """Return the finding as a hint."""
        return dataclasses.replace(self, is_hint=True)


def at(event: Any, rule: str, message: str, is_hint: bool = False, **evidence: Any) -> Finding:
    """Return a finding at the place of an event, loop or value; a hint if its rule gives hints only."""
    is_hint = is_hint or RULES[rule].is_hint
    return Finding(event.path, event.line, rule, message, is_hint, evidence={"event": event, **evidence})


def name_line(event: Any, other: Any) -> str:
    """Return "line 57", with the file if it is another one than that of the finding."""
    is_same = event.path == other.path
    return f"line {event.line}" if is_same else f"line {event.line} of {os.path.basename(event.path)}"
