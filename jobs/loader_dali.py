# PYTHON_ARGCOMPLETE_OK
"""Load pairs of images with NVIDIA DALI, timed: loader.py plus the marked blocks.

    pip install nvidia-dali-cuda120
    python jobs/loader_dali.py                                 try it anywhere, on generated pairs, on the CPU
    python jobs/loader_dali.py --data_source PAIRS --resize 480 --crop 256
    torchrun --nproc-per-node=2 jobs/loader_dali.py --data_source PAIRS
    python -m launch receipt RUN_OF_LOADER RUN_OF_LOADER_DALI  the same pairs, crops and flips

DALI decodes, resizes, crops and flips the images of the plan, by default on the GPU if there is one
(--dali_device). On the CPU its pixels are those of loader.py; after --resize they differ by less than 2 of
255 on average, because the antialiasing differs. The GPU path has not been run on a GPU.
"""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # our `datasets`, not PyPI's
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # if this file is a link
from common.distributed.entry import entry  # before torch, so that Ctrl-C ends its import cleanly

# isort: split
import torch

from bootfile.ground import accelerator
from bootfile.processes import ranks
from bootfile.sampling.sampler import WholeBatchSampler
from common.checkpoint import resume
from common.console import arguments
from common.console.arguments import positive_int
from common.distributed import process_group
from common.run.run import JobParser, Run
from datasets.folders import paired_images, random_folder
from datasets.loaders import backends
from datasets.loaders.image_loader import ImageLoader
from datasets.stores.files import PairFiles


@entry
def main() -> None:
    parser = JobParser(__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--data_source", "--data_url", dest="data_url", help="folder of pairs (default: generated ones)")
    add("--custom_data", type=arguments.boolean, default=False, help="true: use generated pairs")
    add("--split", choices=["train", "test"], default="train", help="default: train")
    add("--resize", type=positive_int, default=0, help="rows of a resized image, aspect kept (default: none)")
    add("--crop", type=positive_int, default=256, help="side of the squares, pixels (default: 256)")
    add = parser.add_argument_group("loading").add_argument
    add("--batch_size", type=positive_int, default=12, help="pairs over all processes (default: 12)")
    add("--num_workers", type=positive_int, help="threads of a process (default: one for each core)")
    add("--seed", type=arguments.seed, default=0, help="seed of order, crops and flips (default: 0)")
    add("--epochs", type=positive_int, default=1, help="default: 1")
    add("--enable_gpu", type=arguments.boolean, help="default: true if there is a GPU")
    add = parser.add_argument_group("output").add_argument
    add("--result_dir", "--output_dir", "--train_url", dest="output_dir", help="default: a new one")
    add("--cache_dir", metavar="FOLDER", help="folder for the index (default: index/ in --result_dir)")
    add("--preview", metavar="FILE.png", help="the first batch (default: preview.png in --result_dir)")
    process_group.add_arguments(parser)

    ### 新增 (new) 1/2, on a GPU DALI decodes with nvJPEG, and the images never leave it ###
    add("--dali_device", choices=["cpu", "gpu"], help="device that decodes (default: gpu if there is one)")
    ### 新增 (new) 1/2, on a GPU DALI decodes with nvJPEG, and the images never leave it ###
    args = parser.parse_args()
    run = Run(args)
    device = run.device
    log = run.log
    rank, world_size = run.join()

    cache = args.cache_dir or run.output.index_folder
    generated = None if args.data_url and not args.custom_data else os.path.join(cache, "generated_pairs")
    folder = random_folder.make_pairs(generated) if generated else args.data_url
    pairs = paired_images.load_on_nodes(folder, args.split, cache, args.resize, log.info)
    ranks.assert_equal_across_ranks("pairs (fingerprint)", pairs.fingerprint)
    training = args.split == "train"
    sampler = WholeBatchSampler(len(pairs), args.batch_size, args.seed, args.epochs, shuffle=training)
    sampler = sampler.for_rank(rank, world_size)
    plan = paired_images.plan(pairs, sampler, args.crop, augment=training)
    log.info(f"data {args.split}={len(pairs)} pairs, steps_per_epoch={len(plan)} source={pairs.source}")
    workers = args.num_workers or backends.cores()
    store = PairFiles(pairs)

    ### 新增 (new) 2/2, DALI instead of our threads; the plan still decides pairs and crops ###
    # - engine = backends.engine("threads", store, device, workers)
    from datasets.loaders.engines.dali import PairedDali

    engine = PairedDali(store, workers, device, args.dali_device)
    ### 新增 (new) 2/2, DALI instead of our threads; the plan still decides pairs and crops ###
    with ImageLoader(engine, plan, device, mean=(0.5,) * 3, std=(0.5,) * 3) as loader:  # pixels in -1..1
        resume.claim(args, run.output)
        log.start(loader, 0, loader.total_steps)
        step = 0
        total = 0.0
        for _ in loader.epochs_from(0):
            delivered = torch.zeros(1, dtype=torch.int64, device=device)
            seconds = 0.0
            start = time.perf_counter()
            for images, _ in loader:
                blurry, sharp = images.tensor_split(2)
                accelerator.of(device).synchronize()  # for the clock only: what was sent has arrived
                waited = time.perf_counter() - start
                step += 1
                delivered += len(blurry)
                seconds += waited
                log.show(step, pairs=len(blurry), seconds=waited)
                if step == 1 and rank == 0:
                    preview = args.preview or os.path.join(run.output.folder, "preview.png")
                    paired_images.save_sheet(preview, blurry, sharp)
                start = time.perf_counter()
            torch.distributed.all_reduce(delivered)
            count = delivered.item()
            log.epoch(pairs=count, seconds=seconds, images_per_s=2 * count / seconds)  # a pair has two images
            total += seconds
        log.info(f"total_seconds={total:.4f} epochs={args.epochs} steps={step} receipt={loader.receipt}")


if __name__ == "__main__":
    main()
