"""Examples of each rule: edits of one short script, with which the rule must find something, or nothing."""

SCRIPT = """
import copy
import glob
import hashlib
import itertools
import os
import pathlib
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler


{top}
data = torch.rand(96, 4)
loader = DataLoader(data, 8)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{setup}
start = 0
if os.path.exists("last.pt"):
    saved = torch.load({file}{load})
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = {next}
    {resume}
{before}
for epoch in range({range}):
    {begin}
    for number, batch in enumerate(loader):
        {batch}
        {train}
        {step}
    {end}
    state = {{"model": {model}, "optimizer": optimizer.state_dict(), "epoch": epoch, {save}}}
    {write}
"""
TRAIN = "loss = model(batch).mean()\nloss.backward()\noptimizer.step()\noptimizer.zero_grad()"
PARTS = {
    "top": "", "setup": "", "file": '"last.pt"', "load": "", "next": 'saved["epoch"] + 1',
    "resume": "pass", "before": "",
    "range": "start, 10", "begin": "pass", "batch": "pass", "train": TRAIN, "step": "pass", "end": "pass",
    "save": "",
    "model": "model.state_dict()", "write": 'torch.save(state, "new.pt"); os.replace("new.pt", "last.pt")',
}  # fmt: skip


def write(parts: dict[str, str]) -> str:
    """Return the script with other parts. A part of several lines is indented as its place."""
    text = SCRIPT
    values = dict(PARTS)
    values.update(parts)
    for name, part in values.items():
        place = next(line for line in SCRIPT.splitlines() if "{" + name + "}" in line)
        indent = " " * (len(place) - len(place.lstrip()))
        values[name] = part.replace("\n", "\n" + indent)
    return text.format(**values)


EMA = "average = copy.deepcopy(model)"
UPDATE = "for a, b in zip(average.parameters(), model.parameters()):\n    a.data.lerp_(b.data, 0.1)"
SCALED = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
SHUFFLED = "loader = DataLoader(data, 8, shuffle=True)"
DDP = 'dist.init_process_group("gloo"); rank = dist.get_rank()'
RANK_0 = 'if rank == 0:\n    torch.save(state, "new.pt"); os.replace("new.pt", "last.pt")'
DISTRIBUTED = "sampler = DistributedSampler(data)\nloader = DataLoader(data, 8, sampler=sampler)"
FOLDER = (
    "class Folder(Dataset):\n    def __init__(self, folder):\n        self.names = {names}\n"
    "    def __len__(self):\n        return len(self.names)\n"
    "    def __getitem__(self, index):\n        return torch.load(self.names[index])"
)
BEST = 'if loss < best:\n    best = loss\n    torch.save(model.state_dict(), "best.pt")'
STOP = "patience += 1\nif loss < 1:\n    patience = 0\nif patience > 3:\n    break"
RATE = "steps += 1\nfor group in optimizer.param_groups:\n    group['lr'] = 0.1 * min(1, steps / 100)"
PADDED = (
    "val_sampler = DistributedSampler(data, shuffle=False)\n"
    "val_loader = DataLoader(data, 8, sampler=val_sampler)"
)
EVALUATE = (
    "total = torch.zeros(1)\nwith torch.no_grad():\n    for rows in val_loader:\n"
    "        total += model(rows).sum()\n{sum}"
)
NO_SYNC = (
    "if (number + 1) % 4 != 0:\n    with model.no_sync():\n        model(batch).mean().backward()\n"
    "else:\n    model(batch).mean().backward()\n    optimizer.step(){count}"
)
BACKWARD = "model(batch).mean().backward()"
SUMMED = "model = DistributedDataParallel(model)\nwaiting = 0"
NAMED = (
    f"is_last = (number + 1) % 4 == 0\nif is_last:\n    {BACKWARD}\n    optimizer.step()\n"
    f"else:\n    with model.no_sync():\n        {BACKWARD}"
)
COUNTED = (
    f"waiting += 1\nif waiting < 4:\n    with model.no_sync():\n        {BACKWARD}\n"
    f"else:\n    {BACKWARD}\n    optimizer.step()\n    waiting = 0"
)
ACCUMULATED = "import accelerate\naccelerator = accelerate.Accelerator(gradient_accumulation_steps=4)"
NUMBERED = 'torch.save({"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")'
CONTINUED = (
    f"if (number + 1) % 4 != 0:\n    with model.no_sync():\n        {BACKWARD}\n"
    f"    if number % 10 == 0:\n        {NUMBERED}\n    continue\n{BACKWARD}\noptimizer.step()"
)
# the newest file is loaded: `found` is what a line in the place of "top" gives the name
NEWEST = [
    'found = sorted(glob.glob("checkpoint_*.pt"))[-1]',
    'found = max(os.listdir("checkpoints"))',
    'files = sorted(glob.glob("checkpoint_*.pt"))\nfound = files[-1]',
    'files = glob.glob("checkpoint_*.pt")\nfiles.sort()\nfound = files[-1]',
    'files = [name for name in os.listdir("saved") if "_" in name]\nfiles = sorted(files)\nfound = files[-1]',
    'def find(folder):\n    files = folder.glob("checkpoint_*.pt")\n    return sorted(files)[-1]\n'
    'found = find(pathlib.Path("saved"))',
    'if files := sorted(pathlib.Path("checkpoints").glob("*.pt")):\n    found = files[-1]',
]
NEWEST_BY_KEY = [
    'files = sorted(glob.glob("checkpoint_*.pt"), key=os.path.getmtime)\nfound = files[-1]',
    'files = glob.glob("checkpoint_*.pt")\nfiles.sort(key=lambda name: int(name[11:-3]))\nfound = files[-1]',
    'files = sorted(glob.glob("checkpoint_*.pt"))\nfiles.sort(key=os.path.getmtime)\nfound = files[-1]',
    'files = glob.glob("checkpoint_*.pt")\nfiles = natsorted(files)\nfound = files[-1]',
    'files = glob.glob("checkpoint_*.pt")\nfound = max(files, key=os.path.getmtime)',
    'files = [int(name[11:-3]) for name in glob.glob("checkpoint_*.pt")]\nfound = f"{max(files)}.pt"',
    'files = sorted(glob.glob("checkpoint_*.pt"))\nfiles.reverse()\nfound = files[-1]',
    'found = "last.pt"\nmodel_log = sorted(glob.glob("logs_*.csv"))[-1]',
]
NUMBERED_FILE = 'torch.save(state, f"checkpoint_{epoch}.pt")'
RENAMED = [
    'torch.save(state, "new.pt")\nos.replace("new.pt", f"checkpoint_{epoch}.pt")',
    'name = f"checkpoint_{epoch}.pt"\ntorch.save(state, "new.pt")\nos.rename("new.pt", name)',
    'new = pathlib.Path("new.pt")\ntorch.save(state, new)\nnew.rename(f"checkpoint_{epoch}.pt")',
    'with open("new", "wb") as file:\n    torch.save(state, file)\n'
    'pathlib.Path("new").replace(f"checkpoint_{epoch}.pt")',
]
WITHIN = (
    "if number % 100 == 99:\n    state = {'optimizer': optimizer.state_dict(), 'epoch': epoch}\n"
    "    torch.save(state, 'new.pt'); os.replace('new.pt', 'last.pt')"
)
SPLIT = "parts = torch.utils.data.random_split(data, [80, 16]{})\nloader = DataLoader(parts[0], 8)"
APART = "torch.save(model.state_dict(), 'a.pt')\ntorch.save(optimizer.state_dict(), 'b.pt')"
IMPROVES = f"if loss < best:\n    best = loss\n    {PARTS['write']}"
SKIP = 'skipped = saved["number"]'
PLACE = '"number": number'

# rule -> (parts with which it finds something, parts with which it does not)
EXAMPLES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "R101": (
        [{"setup": "second = torch.optim.Adam(model.parameters())", "step": "second.step()"},
         {"setup": "lbfgs = torch.optim.LBFGS(model.parameters())", "batch": "lbfgs.step(lambda: None)"}],
        [{"setup": "second = torch.optim.Adam(model.parameters())", "step": "second.step()",
          "save": '"second": second.state_dict()', "resume": 'second.load_state_dict(saved["second"])'},
         {"begin": "fresh = torch.optim.Adam(model.parameters())", "step": "fresh.step()"}],
    ),
    "R103": (
        [{"setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()"},
         {"setup": "plateau = ReduceLROnPlateau(optimizer)", "end": "plateau.step(loss)"}],
        [{"setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()",
          "save": '"scheduler": scheduler.state_dict()',
          "resume": 'scheduler.load_state_dict(saved["scheduler"])'},
         {"before": "scheduler = CosineAnnealingLR(optimizer, 10, last_epoch=start - 1)",
         "end": "scheduler.step()"},
         {"setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step(epoch)"}],
    ),
    "R104": (
        [{"setup": "scaler = torch.amp.GradScaler()", "step": SCALED},
         {"setup": "amp = torch.cuda.amp.GradScaler()", "step": SCALED.replace("scaler", "amp")}],
        [{"setup": "scaler = torch.amp.GradScaler()", "step": SCALED, "save": '"scaler": scaler.state_dict()',
          "resume": 'scaler.load_state_dict(saved["scaler"])'},
         {"setup": "scaler = torch.amp.GradScaler(enabled=False)", "step": SCALED}],
    ),
    "R105": (
        [{"setup": EMA, "step": UPDATE},
         {"setup": "ema = torch.optim.swa_utils.AveragedModel(model)",
         "step": "ema.update_parameters(model)"}],
        [{"setup": EMA, "step": UPDATE, "save": '"average": average.state_dict()',
          "resume": 'average.load_state_dict(saved["average"])'},
         {"setup": "teacher = copy.deepcopy(model)", "batch": "teacher(batch)"}],
    ),
    "R106": (
        [{"setup": "g = torch.Generator().manual_seed(1)\nloader = "
        "DataLoader(data, 8, shuffle=True, generator=g)"},
         {"setup": "rng = np.random.default_rng(0)", "batch": "batch = batch * rng.random()"}],
        [{"setup": "g = torch.Generator()\nloader = DataLoader(data, 8, shuffle=True, generator=g)",
          "begin": "g.manual_seed(epoch)"},
         {"setup": "g = torch.Generator()\nloader = DataLoader(data, 8, shuffle=True, generator=g)",
          "save": '"g": g.get_state()', "resume": 'g.set_state(saved["g"])'}],
    ),
    "R107": (
        [{"setup": "patience = 0", "end": STOP}, {"setup": "steps = 0", "step": RATE},
         {"setup": DISTRIBUTED + "\npasses = 0", "begin": "passes += 1\nsampler.set_epoch(passes)"}],
        [{"setup": "patience = 0", "end": STOP, "save": '"patience": patience',
        "resume": 'patience = saved["patience"]'},
         {"setup": "steps = 0", "step": RATE, "before": "steps = start * len(loader)"},
         {"setup": DISTRIBUTED + "\npasses = 0", "begin": "passes += 1\nsampler.set_epoch(passes)",
          "before": "passes = start"}],
    ),
    "R108": (
        [{"setup": "best = 1e9", "end": BEST},
         {"setup": "best_loss = float(1000)\nbest_loss = 1000", "end": BEST.replace("best",
         "best_loss").replace(
             "best_loss.pt", "best.pt")}],
        [{"setup": "best = 1e9", "end": BEST, "save": '"best": best', "resume": 'best = saved["best"]'},
         {"begin": "best = 1e9", "end": BEST}],
    ),
    "R109": (
        [{"setup": "head = nn.Linear(4, 4)\noptimizer = "
        "torch.optim.SGD([*model.parameters(), *head.parameters()])"},
         {"setup": "loss_net = nn.Linear(4, 1)\nother = torch.optim.SGD(loss_net.parameters())",
         "step": "other.step()",
          "save": '"other": other.state_dict()', "resume": 'other.load_state_dict(saved["other"])'}],
        [{"setup": "head = nn.Linear(4, 4)\noptimizer = "
        "torch.optim.SGD([*model.parameters(), *head.parameters()])",
          "save": '"head": head.state_dict()', "resume": 'head.load_state_dict(saved["head"])'},
         {"setup": "head = nn.Linear(4, 4)", "batch": "head(batch)"}],
    ),
    "R201": (
        [{"setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()",
          "save": '"scheduler": scheduler.state_dict()'},
         {"setup": "scaler = torch.amp.GradScaler()", "step": SCALED,
         "save": '"scaler": scaler.state_dict()'}],
        [{"setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()",
          "save": '"scheduler": scheduler.state_dict()',
          "resume": 'scheduler.load_state_dict(saved["scheduler"])'},
         {"setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()",
          "save": '"scheduler": scheduler.state_dict()',
          "resume": 'for name, part in {"scheduler": scheduler}.items():\n'
          "    part.load_state_dict(saved[name])"}],
    ),
    "R301": (
        [{"next": 'saved["epoch"]'}, {"next": 'saved["epoch"] + 2'}],
        [{}, {"write": 'state["epoch"] = epoch + 1\n' + PARTS["write"],
              "next": 'saved["epoch"]'}],
    ),
    "R302": ([{"range": "10"}, {"range": "0, 10", "next": "0"}], [{}, {"range": "10",
    "begin": "if epoch < start:\n    continue"}]),
    "R303": (
        [{"step": WITHIN, "write": "pass", "next": 'saved["epoch"]'}, {"step": WITHIN, "write": "pass"}],
        [{}, {"step": WITHIN.replace("epoch}", "epoch, 'number': number}"), "write": "pass",
              "next": 'saved["epoch"]', "resume": SKIP,
              "batch": "if epoch == start and number < skipped:\n    continue"}],
    ),
    "R305": (
        [{"setup": SHUFFLED, "resume": SKIP, "save": PLACE,
        "batch": "if epoch == start and number < skipped:\n    continue"},
         {"setup": SHUFFLED, "resume": SKIP, "save": PLACE,
          "begin": "for rows in itertools.islice(loader, skipped, None):\n    pass"}],
        [{"resume": SKIP, "save": PLACE, "batch": "if epoch == start and number < skipped:\n    continue"},
         {"setup": SHUFFLED, "resume": SKIP, "save": PLACE, "begin": "torch.manual_seed(epoch)",
          "batch": "if epoch == start and number < skipped:\n    continue"}],
    ),
    "R310": (
        [{"range": "start, start + 5"}, {"setup": "epochs = 7", "range": "start, epochs + start"}],
        [{}, {"setup": "epochs = 7", "range": "start, epochs + 1"}],
    ),
    "R307": (
        [{"setup": DISTRIBUTED},
         {"setup": DISTRIBUTED + "\nval_sampler = DistributedSampler(data)",
         "begin": "val_sampler.set_epoch(epoch)"}],
        [{"setup": DISTRIBUTED, "begin": "sampler.set_epoch(epoch)"},
         {"setup": DISTRIBUTED.replace("(data)", "(data, shuffle=False)")}],
    ),
    "R308": (
        [{"setup": DISTRIBUTED, "begin": "sampler.set_epoch(0)"}, {"setup": DISTRIBUTED,
        "begin": "sampler.set_epoch(epoch=1)"}],
        [{"setup": DISTRIBUTED, "begin": "sampler.set_epoch(epoch)"}, {"setup": DISTRIBUTED,
        "begin": "sampler.set_epoch(epoch + 1)"}],
    ),
    "R401": (
        [{"top": "torch.manual_seed(0)", "setup": SHUFFLED},
         {"top": "np.random.seed(0)", "batch": "batch = batch * np.random.uniform(0.9, 1.1)"},
         {"top": "random.seed(0)", "batch": "batch = batch * random.random()"}],
        [{"top": "torch.manual_seed(0)", "setup": SHUFFLED, "begin": "torch.manual_seed(epoch)"},
         {"top": "torch.manual_seed(0)", "setup": SHUFFLED, "save": '"random": torch.get_rng_state()',
          "resume": 'torch.set_rng_state(saved["random"])'},
         {"top": "torch.manual_seed(0)"}],
    ),
    "R402": (
        [{"top": FOLDER.format(names="os.listdir(folder)"), "setup": "images = Folder('images')"},
         {"top": FOLDER.format(names='[name for name in glob.glob(folder + "/*")]'),
          "setup": "images = Folder('images')"}],
        [{"top": FOLDER.format(names="sorted(os.listdir(folder))")},
         {"top": FOLDER.format(names="list(range(len(os.listdir(folder))))")}],
    ),
    "R405": (
        [{"setup": SPLIT.format("")}, {"setup": SPLIT.format("") + "\ntorch.manual_seed(0)"}],
        [{"setup": SPLIT.format(", generator=torch.Generator().manual_seed(1)")},
         {"top": "torch.manual_seed(0)", "setup": SPLIT.format("")}],
    ),
    "R501": (
        [{"write": 'torch.save(state, "last.pt")'},
        {"write": 'torch.save(state, os.path.join("out", "last.pt"))'}],
        [{"write": 'torch.save(state, f"epoch_{epoch}.pt")'}, {}],
    ),
    "R502": (
        [*[{"file": "found", "top": top, "write": NUMBERED_FILE} for top in NEWEST],
         *[{"file": "found", "top": NEWEST[0], "write": write} for write in RENAMED]],
        [*[{"file": "found", "top": top, "write": NUMBERED_FILE} for top in NEWEST_BY_KEY],
         *[{"file": "found", "top": NEWEST[0], "write": write.replace("{epoch}.pt", "{epoch:05d}.pt")}
           for write in (*RENAMED, NUMBERED_FILE)],
         # another file is loaded
         {"top": NEWEST[0], "write": NUMBERED_FILE}],
    ),
    "R503": (
        [{"top": DDP}, {"setup": "dist.init_process_group('nccl')\nmodel = DistributedDataParallel(model)"}],
        [{"top": DDP, "write": RANK_0}, {"top": DDP, "write": 'torch.save(state, f"rank_{rank}.pt")'}, {}],
    ),
    "R506": (
        [{"top": "import argparse\nargs = argparse.ArgumentParser().parse_args()", "save": '"args": args'},
         {"save": '"numpy": np.random.get_state()', "resume": 'np.random.set_state(saved["numpy"])'}],
        [{"top": "import argparse\nargs = argparse.ArgumentParser().parse_args()",
        "save": '"args": vars(args)'},
         {"top": "import argparse\nargs = argparse.ArgumentParser().parse_args()", "save": '"args": args',
          "load": ", weights_only=False"}],
    ),
    "R507": (
        [{"setup": "log = open('log.txt', 'w')", "end": "log.write(f'{loss}')"},
         {"top": "import logging\nlogging.basicConfig(filename='a', filemode='w')", "end": "logging.log(1)"},
         {"top": "from pathlib import Path\nlog = Path('log.txt')", "setup": "log.open('w').write('loss')",
          "end": "log.open('a').write(f'{loss}')"}],
        [{"setup": "log = open('log.txt', 'a')", "end": "log.write(f'{loss}')"},
         {"setup": "log = open('options.txt', 'w')\nlog.write('1')"},
         {"top": "import logging\nlogging.basicConfig(filemode='w')", "end": "logging.log(1)"},
         {"top": "from pathlib import Path", "setup": "Path('options.txt').open('w').write('1')",
          "end": "Path(f'{epoch}.txt').open('w').write(f'{loss}')"}],
    ),
    "R508": (
        [{"write": APART}, {"write": APART.replace("\n", "\nprint(1)\n")}],
        [{}, {"write": f"torch.save(model.state_dict(), 'weights.pt')\n{PARTS['write']}"}],
    ),
    "R601": (
        [{"before": "model = DistributedDataParallel(model)"}, {"before": "model = torch.compile(model)"}],
        [{"setup": "model = DistributedDataParallel(model)"},
         {"before": "model = DistributedDataParallel(model)", "model": "model.module.state_dict()"}],
    ),
    "R602": (
        [{"batch": "if number % 4 == 0:\n    optimizer.step()", "train": BACKWARD,
        "step": "if number % 10 == 0:\n    torch.save("
          '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")', "write": "pass"},
         {"setup": "model = DistributedDataParallel(model)", "train": NO_SYNC.format(count=""),
          "step": f"if (number + 1) % 10 == 0:\n    {NUMBERED}"},
         {"top": ACCUMULATED, "train": "with accelerator.accumulate(model):\n    optimizer.step()",
          "step": f"if number % 10 == 0:\n    {NUMBERED}"},
         {"batch": "if (number + 1) % 4 == 0:\n    optimizer.step()", "train": BACKWARD,
         "step": "if number % 100 == 99:\n    torch.save("
          '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")', "write": "pass"},
         {"setup": SUMMED, "train": NAMED, "step": f"if (number + 1) % 10 == 0:\n    {NUMBERED}"},
         {"setup": SUMMED, "train": NO_SYNC.format(count=""), "step": NUMBERED},
         {"setup": SUMMED, "train": COUNTED, "step": f"if (number + 1) % 10 == 0:\n    {NUMBERED}"},
         {"setup": SUMMED, "train": CONTINUED},
         {"batch": "optimizer.step() if number % 4 == 0 else None", "train": BACKWARD,
          "step": f"if number % 10 == 0:\n    {NUMBERED}"}],
        [{"setup": SUMMED, "train": NAMED, "step": f"if is_last and number > 5:\n    {NUMBERED}"},
         {"step": "if number % 4 == 0:\n    optimizer.step()\n" + f"if number % 10 == 0:\n    {NUMBERED}"},
         {"train": f"with Timer('%d s'):\n    {BACKWARD}\n    optimizer.step()",
          "step": f"if number % 10 == 0:\n    {NUMBERED}"},
         {"setup": "model = DistributedDataParallel(model)\nsteps = 0",
          "train": NO_SYNC.format(count="\n    steps += 1"), "step": f"if steps % 10 == 0:\n    {NUMBERED}"},
         {"top": ACCUMULATED, "setup": "steps = 0",
          "train": "with accelerator.accumulate(model):\n    optimizer.step()\n"
                   "if accelerator.sync_gradients:\n    steps += 1",
          "step": f"if steps % 10 == 0:\n    {NUMBERED}"},
         {"batch": "if number % 4 == 0:\n    optimizer.step()\n    if number % 100 == 0:\n        torch.save("
          '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")', "write": "pass"},
         {"batch": "if number % 1 == 0:\n    optimizer.step()",
         "step": "if number % 10 == 0:\n    torch.save("
          '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")', "write": "pass"}],
    ),
    "R704": (
        [{"setup": "best = 9.0", "write": IMPROVES, "save": '"best": best'}, {"setup": "best = None",
          "write": IMPROVES.replace("loss < best", "best is None or loss < best")}],
        [{}, {"setup": "best = 9.0", "write": IMPROVES.replace("if loss", "if epoch % 2 == 0 or loss")}],
    ),
}  # fmt: skip
