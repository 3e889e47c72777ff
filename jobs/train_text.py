# PYTHON_ARGCOMPLETE_OK
"""Train a language model, a small GPT, to predict the next token: train.py plus eight marked blocks.

    python jobs/train_text.py                      the sources of Python on this machine: no download
    python jobs/train_text.py --data_url FOLDER --layers 12 --heads 12 --width 768 --context 1024 \\
        --batch_size 480 --accumulate 40 --lr 6e-4    GPT-2: 124 million weights with its 50,257 tokens

--data_url: a text, a folder of texts, or nanoGPT's train.bin and val.bin. A byte of a text is a token. After
each evaluation the log shows a text that the model wrote. `python -m launch new FOLDER --text --ddp` adds the
blocks of train_ddp.py.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # our `datasets`, not PyPI's
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # if this file is a link
from common.distributed.entry import entry  # before torch, so that Ctrl-C ends its import cleanly

# isort: split
import torch

from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler
from common.checkpoint.checkpointer import Checkpointer, TrainingParser
from common.compute import models
from common.console.arguments import BATCH_SIZE_HELP, boolean, positive_float, positive_int, seed
from common.run import evaluation
from common.run.run import Run
from datasets.loaders.engines.memory import make_loader
from datasets.memory import image_set


@entry  # bad input ends the job with one line `error: ...` and exit code 2
def main() -> None:
    # The parser adds --output_dir, --report_every, --max_steps, --resume, --save_every, --weights and more.
    parser = TrainingParser(__doc__)
    data = parser.add_argument_group("data and model", role="identity")  # other values: another run

    ### 新增 (new) 1/8, the texts and the network ###
    # - data.add_argument("--dataset", choices=image_set.NAMES, default="cifar10", help="default: cifar10")
    # - data.add_argument("--custom_data", type=boolean, default=False, help="true: use generated images")
    # - data.add_argument("--width", type=positive_int, default=64, help=models.WIDTH_HELP)
    # - data.add_argument("--data_url", role="operation", help="folder of the data set (default: input_dir/)")
    from common.console.arguments import non_negative_float

    data.add_argument("--context", type=positive_int, default=128, help="tokens of a window (default: 128)")
    data.add_argument("--layers", type=positive_int, default=4, help="blocks of the network (default: 4)")
    data.add_argument("--heads", type=positive_int, default=4, help="heads of an attention (default: 4)")
    data.add_argument("--width", type=positive_int, default=128, help="features of a token (default: 128)")
    help = "share of the features that are set to 0 (default: 0)"
    data.add_argument("--dropout", role="", type=non_negative_float, default=0.0, metavar="SHARE", help=help)
    help = "a text, a folder of texts, or of train.bin and val.bin (default: Python's own modules)"
    data.add_argument("--data_url", role="operation", metavar="PATH|URL", help=help)
    ### 新增 (new) 1/8, the texts and the network ###
    data.add_argument("--batch_size", type=positive_int, default=128, help=BATCH_SIZE_HELP)
    data.add_argument("--seed", type=seed, default=0, help="seed of all random numbers (default: 0)")
    optimization = parser.add_argument_group("optimization")
    optimization.add_argument("--lr", type=positive_float, default=0.1, help="peak LR (default: %(default)s)")
    optimization.add_argument("--epochs", type=positive_int, default=20, help="default: %(default)s")

    ### 新增 (new) 2/8, defaults for AdamW; options of the parts of a batch, clipping and the schedule ###
    parser.set_defaults(lr=1e-3, epochs=1, batch_size=32)
    help = "parts of a batch that are computed one after the other, to save memory (default: 1)"
    optimization.add_argument("--accumulate", type=positive_int, default=1, metavar="N", help=help)
    help = "largest norm of the gradients (default: 1)"
    optimization.add_argument("--clip_grad", type=positive_float, default=1.0, metavar="NORM", help=help)
    help = "steps in which the rate rises to --lr; then it falls as a cosine (default: 100)"
    optimization.add_argument("--warmup", type=positive_int, default=100, metavar="STEPS", help=help)
    help = "weight decay of AdamW, without norms and biases (default: 0.1)"
    optimization.add_argument("--weight_decay", type=non_negative_float, default=0.1, help=help)
    ### 新增 (new) 2/8, defaults for AdamW; options of the parts of a batch, clipping and the schedule ###
    args = parser.parse_args()

    run = Run(args)  # finds the device, and opens the output folder and the log
    device = run.device
    log = run.log
    torch.manual_seed(args.seed)

    # A step's samples and their random parts are a function of (seed, step): a restart continues exactly.

    ### 新增 (new) 3/8, windows of tokens ###
    # - train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    from bootfile.loaders.map_style import map_style_loader as make_loader
    from datasets.memory import tokens

    train_set, test_set = tokens.load(args.data_url, args.context)
    ### 新增 (new) 3/8, windows of tokens ###
    log.print_data(train_set, test_set)
    train_sampler = BatchSampler(
        len(train_set), args.batch_size, args.seed, args.epochs, args.max_steps, args.epoch_steps
    )
    test_sampler = SequentialBatchSampler(len(test_set), 250)

    ### 新增 (new) 4/8, smaller test batches: the logits of 250 windows may not fit on a GPU ###
    rows = max(1, args.batch_size // args.accumulate)
    test_sampler = SequentialBatchSampler(len(test_set), rows)
    ### 新增 (new) 4/8, smaller test batches: the logits of 250 windows may not fit on a GPU ###
    train_loader = make_loader(train_set, train_sampler, device, augment=True)
    test_loader = make_loader(test_set, test_sampler, device)

    ### 新增 (new) 5/8, a GPT ###
    # -
    # - model = models.resnet18(train_set.channels, train_set.classes, args.width)
    from common.compute import gpt

    shape = args.layers, args.heads, args.width
    model = gpt.GPT(train_set.vocabulary, args.context, *shape, dropout=args.dropout)
    ### 新增 (new) 5/8, a GPT ###
    model = model.to(device).to(memory_format=torch.channels_last)
    forward = model  # variants wrap `forward`; `model` stays the raw module, which is saved and evaluated

    total_steps = train_sampler.total_steps

    ### 新增 (new) 6/8, AdamW, a warm-up and a cosine; cross entropy of the next token ###
    # - recipe = models.FUSED[device.type] | {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    # - optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)
    # - scheduler = torch.optim.lr_scheduler.OneCycleLR(
    # -     optimizer, args.lr, total_steps=total_steps, cycle_momentum=False
    # - )
    # - criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    import math

    from common.run import metrics

    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    recipe = models.FUSED[device.type] | {"betas": (0.9, 0.99), "weight_decay": args.weight_decay}
    groups: list[dict] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, **recipe)

    def share_of_peak(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        decayed = min(1, (step - args.warmup) / max(1, total_steps - args.warmup))
        return (1 + math.cos(math.pi * decayed)) / 2

    def criterion(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)
    log.use(metrics.Metrics(perplexity=metrics.Perplexity(), best="loss"))
    ### 新增 (new) 6/8, AdamW, a warm-up and a cosine; cross entropy of the next token ###
    running = evaluation.zero_sums(device, 3)  # float64: loss_sum, correct, count since a report

    checkpoint = Checkpointer(
        run,
        model=model,
        forward=forward,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=train_loader,
        val_loader=test_loader,
    )
    step = checkpoint.resume()  # 0, or the step of the newest checkpoint

    for epoch in train_loader.epochs_from(step):  # after a restart: first the rest of the epoch
        model.train()
        for inputs, targets in train_loader:
            ### 新增 (new) 7/8, gradients are added over the parts of a batch, and clipped ###
            # - optimizer.zero_grad()
            # - logits = forward(inputs)
            # - loss = criterion(logits, targets)
            # - loss.backward()
            # - if checkpoint.accepts(loss):  # finite on all ranks; on a GPU the optimizer skips the step
            # -     running += evaluation.batch_sums(loss, logits, targets)
            # -     optimizer.step()
            optimizer.zero_grad()
            loss = torch.zeros((), device=device)
            parts = [*zip(inputs.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True)]
            for number, (part, following) in enumerate(parts, start=1):
                # DistributedDataParallel sends the gradients after the last part only
                forward.require_backward_grad_sync = number == len(parts)  # type: ignore[assignment]
                logits = forward(part)
                part_loss = criterion(logits, following) * len(part) / len(inputs)
                part_loss.backward()
                loss += part_loss.detach()
            if checkpoint.accepts(loss):  # finite on all ranks; on a GPU the optimizer skips the step
                running += evaluation.batch_sums(loss, None, targets)  # no logits: a text has no accuracy
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                optimizer.step()
            ### 新增 (new) 7/8, gradients are added over the parts of a batch, and clipped ###
            scheduler.step()
            step += 1
            due = checkpoint.end_step()
            if due.report:  # after --report_every, and before a save
                log.report(running, scheduler)  # waits for the device, and sets `running` to 0
            if due.save:  # after --save_every, and if the platform has sent SIGTERM: then it exits
                checkpoint.save()
        val_sums = evaluation.evaluate(model, test_loader, criterion, log.metrics, checkpoint.must_stop)
        checkpoint.save_weights(epoch, val_sums)  # or exits, if the evaluation was stopped
        log.validation(val_sums)

        ### 新增 (new) 8/8, a text that the model writes; its first 16 tokens are those of the test set ###
        start = test_set[0][0][:16].to(device)
        written = gpt.generate(model, start, 200, args.context, args.seed)
        for line in test_set.text(torch.cat([start, written])).splitlines():
            log.info(f"| {line}")
        ### 新增 (new) 8/8, a text that the model writes; its first 16 tokens are those of the test set ###
    checkpoint.finish()  # waits for the last save and upload, and prints the TIME COST table


if __name__ == "__main__":
    main()
