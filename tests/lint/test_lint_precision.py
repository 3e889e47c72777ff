"""Correct scripts that look like a bug. Each is of the kind of a false finding in a public script
(tests/lint/README.md), in our own words: the rule finds nothing in it, or gives a hint."""

import os
import textwrap

import pytest

from bootfile.lint.engine import lint, lint_all
from bootfile.lint.table import RULES
from tests.lint.examples import DDP, DISTRIBUTED, EMA, FOLDER, RATE, SCALED, SHUFFLED, UPDATE, write

LISTED = FOLDER.format(names="os.listdir(folder)")
OPTIONS = "import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
DIGITS = (
    "import re\ndef find_step(name):\n    if not name:\n        return 0\n"
    "    return int(re.sub('\\\\D', '', name))\n"
    "offset = find_step('model_12.pt')\n"
)
PLATEAU = (
    "class Plateau:\n    def __init__(self, optimizer):\n"
    "        self.lr_scheduler = ReduceLROnPlateau(optimizer)\n"
    "    def state_dict(self):\n        return {'best': self.lr_scheduler.best}\n"
    "    def load_state_dict(self, state):\n        self.lr_scheduler.best = state['best']\n"
    "    def step(self, loss):\n        self.lr_scheduler.step(loss)\n"
)
SAVES = (
    "\ndef save(state, is_last):\n    if is_last:\n"
    "        torch.save(state, 'new.pt'); os.replace('new.pt', 'last.pt')"
)
DRAWN = (
    "class Drawn(Dataset):\n    def __len__(self):\n        return 9\n"
    "    def __getitem__(self, _):\n        return torch.ones(4)"
)
AVERAGE = (
    "class ModelEMA:\n    def __init__(self, model):\n        self.ema = copy.deepcopy(model)\n"
    "    def update(self, model):\n        for a, b in zip(self.ema.parameters(), model.parameters()):\n"
    "            a.data.lerp_(b.data, 0.1)"
)
WARM_UP = (
    "best = 0\nfor number in range(4):\n    loss = model(data).mean()\n    loss.backward()\n"
    "    optimizer.step()\n    if loss > best:\n        best = loss\n"
    "        torch.save(model.state_dict(), 'warm.pt')"
)
ITS_STATE = "\n    def state_dict(self):\n        return self.ema.state_dict()"
ALL_STATES = (
    "\nclass Holder:\n    def __init__(self, ema):\n        self.ema = ema\n    def state_dict(self):\n"
    "        state = {}\n        for name, part in self.__dict__.items():\n"
    "            if hasattr(part, 'state_dict'):\n                state[name] = part.state_dict()\n"
    "        return state"
)
NAMED_STATES = (
    "class Holder:\n    def __init__(self, model, scaler):\n        self.model = model\n"
    "        self.scaler = scaler\n"
    "    def state_dict(self):\n        state = {}\n        for name in ('model', 'scaler'):\n"
    "            state[name] = getattr(self, name).state_dict()\n        return state"
)
# rule, and the parts of tests/lint/examples.py with which it must be silent
LOOKALIKES = {
    "an optimizer of a stage that ends before the first checkpoint":
        ("R101", {"setup": "head = nn.Linear(4, 4)\nwarm = torch.optim.SGD(head.parameters(), 0.1)\n"
                          "for number in range(4):\n    head(data).mean().backward()\n    warm.step()"}),
    "each epoch has its file: format() with a name":
        ("R501", {"top": OPTIONS, "write": "torch.save(state, args.checkpoint_format.format(epoch=epoch))"}),
    "each epoch has its file: an attribute that another function counts":
        ("R501", {"top": "class Progress:\n    epoch = 0\nprogress = Progress()\n"
                        "def end_epoch(progress):\n    progress.epoch += 1",
                 "write": 'torch.save(state, "model_{}.pt".format(progress.epoch))\nend_epoch(progress)'}),
    "steps and checkpoints count the same batches":
        ("R602", {"top": OPTIONS, "batch": "if number % args.accumulate == 0:\n    optimizer.step()",
                 "step": "if number % args.save_every == 0:\n    torch.save("
                         '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")'}),
    "checkpoints at a multiple of the batches of a step":
        ("R602", {"batch": "if number % 4 == 0:\n    optimizer.step()",
                 "step": "if number % 8 == 0:\n    torch.save("
                         '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")'}),
    "a number too large for a float":
        ("R101", {"top": f"limit = int({'9' * 320})"}),
    "a generator that only tells its seed":
        ("R106", {"setup": "g = torch.Generator().manual_seed(1)", "batch": "print(g.initial_seed())"}),
    "a counter is added to the steps before the restart":
        ("R107", {"top": DIGITS, "setup": "steps = 0",
                 "step": RATE.replace("steps / 100", "(steps + offset) / 100")}),
    "a loop over the steps that are left":
        ("R302", {"top": DIGITS, "range": "10 - offset"}),
    "the state of a wrapper has what it needs of its scheduler":
        ("R103", {"top": PLATEAU, "setup": "plateau = Plateau(optimizer)", "end": "plateau.step(loss)",
                 "save": '"plateau": plateau.state_dict()',
                 "resume": 'plateau.load_state_dict(saved["plateau"])'}),
    "optimizers that a loop over a list of another object loads":
        ("R201", {"top": "from others import Outer",
                 "setup": "outer = Outer()\nscaler = torch.amp.GradScaler()",
                 "resume": "for part, state in zip(outer.parts, saved['parts']):\n"
                           "    part.load_state_dict(state)",
                 "step": SCALED, "save": '"scaler": scaler.state_dict()'}),
    "one checkpoint, at a step that is given":
        ("R501", {"top": OPTIONS, "write": 'if epoch == args.save_at:\n    torch.save(state, "last.pt")'}),
    "a figure that is made in the first order":
        ("R308", {"setup": DISTRIBUTED, "begin": "sampler.set_epoch(epoch)", "end": "sampler.set_epoch(0)"}),
    "each batch is a step, and another one follows after some of them":
        ("R602", {"step": "if number % 4 == 0:\n    optimizer.step()\nif number % 10 == 0:\n    torch.save("
                         '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")'}),
    "gradients that are made in the branch of the step":
        ("R602", {"train": "loss = model(batch).mean()\nif number % 2 == 0:\n    loss.backward()\n"
                           "    optimizer.step()\n    optimizer.zero_grad()",
                 "step": "if number % 5 == 0:\n    torch.save("
                         '{"optimizer": optimizer.state_dict(), "number": number}, f"{number}.pt")'}),
    "the step is the number of the loop and the first step":
        ("R302", {"top": OPTIONS, "next": "0", "range": "10", "begin": "step = epoch + args.first_step"}),
    "a save that a call guards":
        ("R503", {"top": DDP + SAVES, "write": "if rank == 0:\n    save(state, True)\nsave(state, False)"}),
    "a save in the branch that no call takes":
        ("R503", {"top": DDP + SAVES, "write": "save(state, False)"}),
    "samples that do not depend on their number":
        ("R401", {"top": "torch.manual_seed(0)\n" + DRAWN,
                 "setup": "loader = DataLoader(Drawn(), 8, shuffle=True)"}),
    "the seed of the GPU, with which no loader shuffles":
        ("R401", {"top": "torch.cuda.manual_seed(0)", "setup": "loader = DataLoader(data, 8, shuffle=True)"}),
    "SGD without momentum has no state":
        ("R101", {"setup": "second = torch.optim.SGD(model.parameters(), lr=0.1)", "step": "second.step()"}),
    "a copy of the average is saved":
        ("R105", {"top": AVERAGE, "setup": "ema = ModelEMA(model)", "step": "ema.update(model)",
                 "save": '"ema": copy.deepcopy(ema.ema).half()',
                 "resume": 'ema.ema.load_state_dict(saved["ema"].state_dict())'}),
    "a model of DataParallel has one process":
        ("R503", {"top": DDP, "setup": "model = nn.DataParallel(model)",
                 "write": "torch.save(state, 'last.pt')"}),
    "one of two loaders gets the epoch":
        ("R307", {"setup": DISTRIBUTED + "\nother = DataLoader(data, 8, sampler=DistributedSampler(data))",
                 "begin": "chosen = other if epoch > 5 else loader\nchosen.sampler.set_epoch(epoch)"}),
    "a loop that counts on from the step in the name of a file":
        ("R302", {"top": DIGITS, "setup": "current_step = find_step('model_12.pt')",
                 "next": "0", "range": "10", "step": "current_step += 1"}),
    "a loop whose number is not in the checkpoint":
        ("R302", {"next": "0", "range": "10", "end": "epoch = None"}),
    "the states of all attributes":
        ("R105", {"top": AVERAGE + ITS_STATE + ALL_STATES,
                 "setup": "ema = ModelEMA(model)\nholder = Holder(ema)",
                 "step": "holder.ema.update(model)", "write": "torch.save(holder.state_dict(), 'last.pt')"}),
    "a scheduler gets the epoch of a dict":
        ("R103", {"top": "from others import Progress\nprogress = Progress()",
                 "setup": "scheduler = StepLR(optimizer, 3)",
                 "end": "scheduler.step(progress.state['epoch'])"}),
    "the text of a model":
        ("R506", {"save": '"text": str(model)'}),
    "samples in the order of a listing, for an evaluation only":
        ("R402", {"top": LISTED, "setup": "val_images = Folder('images')"}),
    "samples that are drawn, and not read by their number":
        ("R402", {"top": LISTED.replace("[index]", "[0]"),
                 "setup": "images = Folder('images')"}),
    "a listing in a method that nothing calls":
        ("R402", {"top": FOLDER.format(names="[]") + "\n    @staticmethod\n    def find(folder):\n"
                        "        return os.listdir(folder)", "setup": "images = Folder('images')"}),
    "a file of each rank, whose name a function returns":
        ("R503", {"top": DDP, "end": "name = f'state_{dist.get_rank()}.pt'",
                 "write": "torch.save(state, os.path.join('out', name))"}),
    "a counter that a loop brings to its value again":
        ("R107", {"setup": "drops = 0\nmilestones = [10, 20]",
                 "begin": "while drops < 2 and epoch >= milestones[drops]:\n    drops += 1\n"
                          "    for group in optimizer.param_groups:\n        group['lr'] = 0.1 ** drops"}),
    "a dict of optimizers, which are saved under longer names":
        ("R101", {"setup": "second = torch.optim.Adam(model.parameters())\nparts = {'second': second}",
                 "step": "for part in parts.values():\n    part.step()",
                 "end": "states = {name + '_state': part.state_dict() for name, part in parts.items()}",
                 "save": "**states"}),
    "the states of attributes that a tuple names":
        ("R104", {"top": NAMED_STATES,
                 "setup": "scaler = torch.amp.GradScaler()\nholder = Holder(model, scaler)",
                 "step": SCALED, "save": '"holder": holder.state_dict()'}),
    "a seed that is drawn if no option gives one":
        ("R401", {"top": OPTIONS + "if args.seed is None:\n    args.seed = random.randint(1, 99)\n"
                                  "torch.manual_seed(args.seed)", "setup": SHUFFLED}),
    "an option whose default is drawn":
        ("R401", {"top": "import argparse\nparser = argparse.ArgumentParser()\n"
                        "parser.add_argument('--seed', default=random.randrange(99))\n"
                        "args = parser.parse_args()\ntorch.manual_seed(args.seed)", "setup": SHUFFLED}),
    "a seed from the clock after the checkpoint is loaded":
        ("R401", {"top": "import time\ntorch.manual_seed(0)", "setup": SHUFFLED,
                 "resume": "torch.manual_seed(int(time.time()))"}),
    "a draw that is not reached":
        ("R401", {"top": "np.random.seed(0)", "step": "is_new = True or np.random.rand() > 0.5"}),
    "a checkpoint without the optimizer, but only where a call gives none":
        ("R101", {"setup": "optimizer = torch.optim.Adam(model.parameters())",
                 "top": "def save(state=None):\n    if state is None:\n"
                        "        state = {'model': model.state_dict()}\n    torch.save(state, 'last.pt')",
                 "write": "save(state)"}),
    "the scheduler of the noise of a picture":
        ("R103", {"top": "class Painter:\n    def __init__(self, scheduler):\n"
                        "        self.scheduler = scheduler\n    def paint(self, latents):\n"
                        "        for t in self.scheduler.timesteps:\n"
                        "            latents = self.scheduler.step(model(latents), t, latents)[0]\n"
                        "        return latents\nfrom others import load_scheduler",
                 "setup": "painter = Painter(load_scheduler())", "end": "painter.paint(data)"}),
    "an entry that is replaced if it has no state":
        ("R104", {"setup": "scaler = torch.amp.GradScaler()\nparts = {'scaler': scaler}", "step": SCALED,
                 "resume": "for name, part in parts.items():\n"
                           "    if hasattr(part, 'load_state_dict'):\n"
                           "        part.load_state_dict(saved[name])\n"
                           "    else:\n        parts[name] = saved[name]",
                 "save": "**{name: part.state_dict() for name, part in parts.items()}"}),
    "a listing of pictures without labels":
        ("R402", {"top": LISTED.replace("Folder", "NoLabels"),
                 "setup": "images = NoLabels('images')"}),
    "a listing that is only counted":
        ("R402", {"top": LISTED.replace("self.names[index]", "index"),
                 "setup": "images = Folder('images')"}),
    "a listing whose files are written into another one":
        ("R402", {"top": FOLDER.format(names="['all.pt']") + "\n    def prepare(self):\n"
                        "        parts = [torch.load(name) for name in os.listdir('raw')]\n"
                        "        torch.save(torch.cat(parts), 'all.pt')",
                 "setup": "images = Folder('images')\nimages.prepare()"}),
    "a listing that is shuffled without a seed":
        ("R402", {"top": LISTED,
                 "setup": "loader = DataLoader(Folder('images'), 8, shuffle=True)"}),
    "a restart within an epoch begins with it, and one at its end with the next":
        ("R301", {"resume": 'if not saved["is_last"]:\n    start = saved["epoch"]',
                 "save": '"is_last": True'}),
    "a stage before the one that a restart continues":
        ("R108", {"setup": WARM_UP}),
    "an average that a function copies from the checkpoint":
        ("R201", {"top": "from others import copy_state", "setup": EMA, "step": UPDATE,
                 "save": '"average": average.state_dict()',
                 "resume": 'copy_state(average, saved["average"])',
                 "end": 'torch.save(average.state_dict(), "best.pt")'}),
    "a class of samples that the script does not use":
        ("R402", {"top": LISTED}),
    "a class with the loss is made of the model that is saved":
        ("R109", {"top": "class WithLoss(nn.Module):\n    def __init__(self, inner):\n"
                        "        super().__init__()\n        self.inner = inner\n"
                        "    def forward(self, rows):\n        return self.inner(rows).mean()",
                 "setup": "whole = WithLoss(model)\noptimizer = torch.optim.Adam(whole.parameters())"}),
    "a scheduler that one of two branches makes at its place":
        ("R103", {"before": "if start:\n    scheduler = StepLR(optimizer, 3, last_epoch=start)\n"
                           "else:\n    scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()"}),
    "each checkpoint has a number that a method counts":
        ("R501", {"top": "class Files:\n    def num_files(self):\n        return len(os.listdir('out'))",
                 "setup": "files = Files()", "write": 'torch.save(state, f"out/{files.num_files()}.pt")'}),
    "a function that seeds, which nothing calls":
        ("R402", {"top": "def seed_all():\n    torch.manual_seed(0)\n"
                        + LISTED,
                 "setup": "loader = DataLoader(Folder('images'), 8, shuffle=True)"}),
    "a network with the name of a generator of random numbers":
        ("R402", {"top": "class Generator(nn.Module):\n    pass\n" + LISTED,
                 "setup": "maker = Generator(3)\nloader = DataLoader(Folder('images'), 8, shuffle=True)"}),
    "a listing of the test split":
        ("R402", {"top": FOLDER.format(names="['a']\n        if folder == 'test':\n"
                                            "            self.names = os.listdir(folder)"),
                 "setup": "images = Folder('train')"}),
    "objects whose state is saved if they have one":
        ("R506", {"top": "def save(**parts):\n    state = {'optimizer': optimizer.state_dict()}\n"
                        "    for name, part in parts.items():\n        if hasattr(part, 'state_dict'):\n"
                        "            state[name] = part.state_dict()\n        else:\n"
                        "            state[name] = part\n    torch.save(state, 'last.pt')",
                 "setup": "scheduler = StepLR(optimizer, 3)", "write": "save(scheduler=scheduler)"}),
    "a file whose name no other rank has":
        ("R503", {"top": DDP + "\nimport uuid", "end": 'path = f"{uuid.uuid4()}.pt"',
                 "write": "torch.save(state, path)"}),
    "the newest log":
        ("R502", {"setup": 'newest = sorted(glob.glob("saved_models/*.csv"))[-1]',
                 "write": 'torch.save(state, f"model_{epoch}.pt")'}),
    "a number of the epoch that a method counts":
        ("R308", {"top": "class Passes:\n    def __init__(self, sampler):\n        self.sampler = sampler\n"
                        "        self.count = 0\n    def end(self):\n        self.count += 1\n"
                        "        self.sampler.set_epoch(self.count)",
                 "setup": DISTRIBUTED + "\npasses = Passes(sampler)", "end": "passes.end()"}),
    "an average that is made again if its file is missing":
        ("R201", {"top": "def restore(ema):\n    try:\n"
                        "        ema.load_state_dict(torch.load('average.pt'))\n"
                        "    except FileNotFoundError:\n        ema = copy.deepcopy(model)\n"
                        "    return ema",
                 "setup": EMA, "step": UPDATE, "save": '"average": average.state_dict()',
                 "resume": "average = restore(average)"}),
    "a seed for data that is made once":
        ("R401", {"before": 'if not os.path.exists("split.pt"):\n    np.random.seed(0)',
                 "batch": "batch = batch + np.random.rand()"}),
    "a seed for the split of a data set":
        ("R401", {"top": FOLDER.format(names="sorted(os.listdir(folder))\n        np.random.seed(0)"),
                 "setup": "images = Folder('images')", "batch": "batch = batch + np.random.rand()"}),
    "a counter of the learning rate":
        ("R107", {"setup": "steps = 0", "step": RATE}),
    "a temporary file of tempfile, whose name is not known":
        ("R501", {"top": "import tempfile",
                 "write": 'with tempfile.NamedTemporaryFile("wb", delete=False) as file:\n'
                          '    torch.save(state, file)\nos.replace(file.name, "last.pt")'}),
    "a file that a package gives its name when it is whole":
        ("R501", {"top": "from atomicwrites import atomic_write",
                 "write": 'with atomic_write("last.pt", mode="wb") as file:\n    torch.save(state, file)'}),
    "a name, and the same text where it is renamed":
        ("R501", {"setup": 'new = "new.pt"',
                 "write": 'torch.save(state, new)\nos.replace("new.pt", "last.pt")'}),
    "a function that renames the file":
        ("R501", {"top": "def swap(old, new):\n    os.replace(old, new)",
                 "write": 'torch.save(state, "new.pt")\nswap("new.pt", "last.pt")'}),
    "the path is the name of a module that is not known, which may set it":
        ("R501", {"top": "import others", "begin": "others.advance()",
                 "write": "torch.save(state, others.path)"}),
    "a sampler that does not shuffle, by its place":
        ("R307", {"setup": DISTRIBUTED.replace("(data)", "(data, 2, 0, False)")}),
    "set_epoch() of an object that gives no samples":
        ("R308", {"top": "class Meter:\n    def set_epoch(self, number):\n        self.number = number",
                 "setup": "meter = Meter()", "begin": "meter.set_epoch(0)"}),
    "listings by the name of a part, which are sorted":
        ("R402", {"top": FOLDER.format(names="{}\n        self.names[0] = os.listdir(folder)"
                                            "\n        self.names[0].sort()"),
                 "setup": "images = Folder('images')"}),
    "a stage before that saves weights only":
        ("R101", {"setup": "warm = torch.optim.Adam(model.parameters())\nfor number in range(4):\n"
                          "    model(data).mean().backward()\n    warm.step()\n"
                          "    torch.save(model.state_dict(), f'warm_{number}.pt')"}),
    "a state that is loaded if it is not None, with `not` first":
        ("R201", {"top": "def restore(scheduler, state):\n    if not state is None:\n"
                        "        scheduler.load_state_dict(state['scheduler'])",
                 "setup": "scheduler = StepLR(optimizer, 3)", "end": "scheduler.step()",
                 "resume": "state = {'scheduler': None}\nstate.update(saved)\nrestore(scheduler, state)",
                 "save": '"scheduler": scheduler.state_dict()'}),
    "a module that becomes a part of the one that is saved":
        ("R109", {"setup": "head = nn.Linear(4, 4)\nmodel.head = head\noptimizer = torch.optim.Adam(\n"
                          "    [*head.parameters(), *model.parameters()])"}),
    "a loop that fills memory":
        ("R401", {"top": "torch.manual_seed(0)",
                  "before": "for size in range(8):\n    model(torch.randn(8, 4)).mean().backward()"}),
}  # fmt: skip


def find_rules(text, folder, hints=False):
    """Return the rules of the findings, without hints unless they are asked for."""
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return [finding.rule for finding in lint(str(path)) if hints or not finding.is_hint]


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_correct_script_that_looks_like_a_bug(name, tmp_path):
    rule, parts = LOOKALIKES[name]
    # a rule that gives hints only gives none here
    assert rule not in find_rules(write(parts), tmp_path, hints=RULES[rule].is_hint)


def test_first_weights_are_not_a_restart(tmp_path):
    """An option "resume" that loads weights only: the training begins with its first epoch."""
    parts = {
        "top": OPTIONS,
        "setup": "scaler = torch.amp.GradScaler()",
        "step": SCALED,
        "next": "0",
        "range": "10",
    }
    text = write(parts).replace('if os.path.exists("last.pt")', "if args.resume")
    weights = text.replace('    optimizer.load_state_dict(saved["optimizer"])\n', "")
    assert "R104" in find_rules(text, tmp_path)
    assert find_rules(weights, tmp_path) == []


def test_the_first_number_of_count_is_named(tmp_path):
    text = write({}).replace("range(start, 10)", "itertools.count(start=3)")
    path = tmp_path / "script.py"
    path.write_text(text, encoding="utf-8")
    messages = [finding.message for finding in lint(str(path)) if finding.rule == "R302"]
    assert len(messages) == 1
    assert "begins with 3 " in messages[0]


def test_an_attribute_of_a_module_is_set(tmp_path):
    (tmp_path / "settings.py").write_text("rate = 0.1\n", encoding="utf-8")
    text = write({"top": "import settings\nsettings.rate = 0.2"})
    assert find_rules(text, tmp_path) == []


def test_weights_of_another_training_are_not_a_restart(tmp_path):
    """The optimizer comes with the weights, and the training begins with its first epoch."""
    text = write({"top": OPTIONS, "next": "0", "range": "10"})
    resumed = text.replace('if os.path.exists("last.pt")', "if args.resume")
    assert "R302" in find_rules(resumed, tmp_path)
    for option in ("load_weights_folder", "first_lora_folder"):
        tuned = text.replace('if os.path.exists("last.pt")', f"if args.{option} is not None")
        assert find_rules(tuned, tmp_path) == []


def test_a_compiled_model_passes_module_on(tmp_path):
    parts = {
        "setup": "model = DistributedDataParallel(model)\nmodel = torch.compile(model)",
        "model": "model.module.state_dict()",
    }
    text = write(parts).replace("model.load_state_dict", "model.module.load_state_dict")
    assert "R601" not in find_rules(text, tmp_path)


def test_a_class_has_one_listing(tmp_path):
    """The names of the labels become the keys of a dict, whose order has no effect."""
    names = "os.listdir(folder); self.labels = {}; self.labels.update(zip(os.listdir(folder), range(9)))"
    text = write({"top": FOLDER.format(names=names), "setup": "images = Folder('images')"})
    assert find_rules(text, tmp_path).count("R402") == 1


def test_a_hook_of_accelerate_saves_the_average(tmp_path):
    text = (
        "import torch\nfrom accelerate import Accelerator\nfrom diffusers import EMAModel\n"
        "from torch.utils.data import DataLoader\n"
        "def main(folder):\n    accelerator = Accelerator()\n    model = torch.nn.Linear(4, 4)\n"
        "    average = EMAModel(model.parameters())\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    loader = DataLoader(torch.rand(96, 4), 8)\n"
        "    def save_hook(models, weights, folder):\n        average.save_pretrained(folder)\n"
        "    {hook}\n"
        "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "    accelerator.load_state(folder)\n"
        "    for epoch in range(9):\n        for batch in loader:\n"
        "            accelerator.backward(model(batch).mean())\n            optimizer.step()\n"
        "            average.step(model.parameters())\n        accelerator.save_state(folder)\n"
        "main('out')\n"
    )
    hook = "accelerator.register_save_state_pre_hook(save_hook)"
    assert "R105" in find_rules(text.replace("{hook}", "pass"), tmp_path, hints=True)
    assert "R105" not in find_rules(text.replace("{hook}", hook), tmp_path, hints=True)


def test_an_import_of_a_class_is_not_its_use(tmp_path):
    samples = "import os\nfrom torch.utils.data import Dataset\n" + LISTED
    (tmp_path / "samples.py").write_text("import torch\n" + samples, encoding="utf-8")
    assert "R402" not in find_rules(write({"top": "from samples import Folder"}), tmp_path)
    assert "R402" in find_rules(
        write({"top": "from samples import Folder\nimages = Folder('images')"}), tmp_path
    )


def test_a_loop_that_starts_processes_is_not_the_training_loop(tmp_path):
    head, first, body = write({"next": 'saved["epoch"]'}).partition("data = ")
    text = head + "import torch.multiprocessing as mp\ndef run(rank, count):\n"
    text += textwrap.indent(first + body, "    ")
    text += "\nfor number in range(2):\n    mp.Process(target=run, args=(number, 2)).start()\n"
    assert "R301" in find_rules(text, tmp_path)


def test_a_first_epoch_that_is_an_option_continues_a_training(tmp_path):
    """The weights are loaded, and --start_epoch says where the loop begins: the optimizer begins again."""
    text = write({"top": OPTIONS, "range": "args.start_epoch, 10"})
    text = text.replace("lr=0.1", "lr=0.1, momentum=0.9").replace('"optimizer": optimizer.state_dict(), ', "")
    text = text.replace('    optimizer.load_state_dict(saved["optimizer"])\n', "").replace(
        'saved["epoch"] + 1', "0"
    )
    assert "R101" in find_rules(text, tmp_path)


@pytest.mark.parametrize(
    "limit", ["==2.1.0", "<2.6", "<2.6.0", ">=2.0,<2.6", "<=2.5.1", "~=2.1", ">=1, ==2.1"]
)
def test_a_release_that_reads_all_objects(limit, tmp_path):
    text = write({"top": OPTIONS, "save": '"args": args'})
    for other in (">=2.1", "<=2.6", "<2.7", ">=2.0,<3"):
        (tmp_path / "requirements.txt").write_text(f"torch{other}\n", encoding="utf-8")
        assert "R506" in find_rules(text, tmp_path)
    (tmp_path / "requirements.txt").write_text(f"torch{limit}\n", encoding="utf-8")
    assert "R506" not in find_rules(text, tmp_path)
    assert "R506" in find_rules(text, tmp_path, hints=True)


def test_scripts_of_a_folder_whose_steps_are_in_a_module(tmp_path):
    """main.py has no backward(): it is linted with the folder all the same, and a finding is given once."""
    module = write({"write": "pass"}).partition("for epoch")[0]
    loop = "def train_one_epoch(model, loader, optimizer):\n    for batch in loader:\n"
    loop += "        model(batch).mean().backward()\n        optimizer.step()\n"
    (tmp_path / "engine_of_epochs.py").write_text(loop, encoding="utf-8")
    main = "from engine_of_epochs import train_one_epoch\n" + module
    main += "for epoch in range(start, 10):\n    train_one_epoch(model, loader, optimizer)\n"
    main += "    torch.save({'optimizer': optimizer.state_dict(), 'epoch': epoch}, 'last.pt')\n"
    for name in ("main.py", "other.py"):
        (tmp_path / name).write_text(main, encoding="utf-8")
    findings, errors, count = lint_all([str(tmp_path)])
    assert errors == []
    assert count >= 2
    places = [(finding.path, finding.line, finding.rule) for finding in findings]
    assert {os.path.basename(path) for path, _, rule in places if rule == "R501"} == {"main.py", "other.py"}
    assert len(places) == len(set(places))


def test_modules_in_lib_are_found(tmp_path):
    """A script that adds lib/ to sys.path."""
    (tmp_path / "lib").mkdir()
    saves = (
        "import torch\ndef save_all(model, optimizer, epoch):\n    torch.save({'model': model.state_dict(), "
    )
    saves += "'optimizer': optimizer.state_dict(), 'epoch': epoch}, 'last.pt')\n"
    (tmp_path / "lib" / "saves.py").write_text(saves, encoding="utf-8")
    text = write({"top": "from saves import save_all", "write": "save_all(model, optimizer, epoch)"})
    assert "R501" in find_rules(text, tmp_path)


def test_a_number_that_is_printed_only_is_not_a_restart(tmp_path):
    """The weights of another training: the script prints how many steps they had."""
    text = write({"top": "torch.manual_seed(0)", "setup": "loader = DataLoader(data, 8, shuffle=True)"})
    text = text.replace('    optimizer.load_state_dict(saved["optimizer"])\n', "")
    printed = text.replace('start = saved["epoch"] + 1', 'print(saved["epoch"])').replace("start, 10", "10")
    assert "R401" in find_rules(text, tmp_path)
    assert "R401" not in find_rules(printed, tmp_path)


def test_a_file_after_the_last_epoch_has_the_optimizer(tmp_path):
    """The files of the epochs may be those of an evaluation: a hint."""
    text = write({"setup": "second = torch.optim.Adam(model.parameters())", "step": "second.step()"})
    whole = text + "\ntorch.save({'second': second.state_dict()}, 'whole.pt')\n"
    assert "R101" in find_rules(text, tmp_path)
    assert "R101" not in find_rules(whole, tmp_path)
    assert "R101" in find_rules(whole, tmp_path, hints=True)


def test_a_script_that_loads_weights_only_may_not_continue(tmp_path):
    parts = {"setup": EMA, "step": UPDATE, "save": '"average": average.state_dict()'}
    text = write(parts)
    weights = text.replace('    optimizer.load_state_dict(saved["optimizer"])\n', "")
    first = weights.replace("range(start, 10)", "range(10)")
    assert "R201" in find_rules(text, tmp_path)
    assert "R201" in find_rules(weights, tmp_path)
    assert "R201" not in find_rules(first, tmp_path)
    assert "R201" in find_rules(first, tmp_path, hints=True)


OWN_STATE = """import os
import torch


class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.epoch = 0

    def state_dict(self):
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**parts, "epoch": self.epoch, "random": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        torch.set_rng_state(state["random"])


torch.manual_seed(0)
trainer = Trainer()
if os.path.exists("last.pt"):
    trainer.load_state_dict(torch.load("last.pt"))
for epoch in range(trainer.epoch, 10):
    trainer.optimizer.zero_grad()
    trainer.model(torch.randn(8, 4)).sum().backward()
    trainer.optimizer.step()
    trainer.epoch = epoch + 1
    torch.save(trainer.state_dict(), "new.pt")
    os.replace("new.pt", "last.pt")
"""


def test_a_state_dict_of_its_own_has_the_random_numbers(tmp_path):
    assert find_rules(OWN_STATE, tmp_path) == []
    inner = OWN_STATE.replace("torch.save(trainer.state_dict()", 'torch.save({"all": trainer.state_dict()}')
    inner = inner.replace('torch.load("last.pt")', 'torch.load("last.pt")["all"]')
    assert find_rules(inner, tmp_path) == []
    forgotten = OWN_STATE.replace('        torch.set_rng_state(state["random"])\n', "")
    assert "R401" in find_rules(forgotten, tmp_path)


FITS = """import os
import torch


class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.epoch, self.best = 0, 0.0

    def fit(self):
        for epoch in range(self.epoch, 10):
            self.optimizer.zero_grad()
            self.model(torch.ones(4)).sum().backward()
            self.optimizer.step()
            self.epoch = epoch + 1
            score = self.model.weight.sum().item()
            if score > self.best:
                self.best = score
                torch.save(self.model.state_dict(), "new.pt")
                os.replace("new.pt", "best.pt")
            torch.save(self.pack(), "new.pt")
            os.replace("new.pt", "last.pt")

    def pack(self):
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**parts, "epoch": self.epoch, "best": self.best}

    def unpack(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.best = state["epoch"], state["best"]


def main():
    trainer = Trainer()
    if os.path.exists("last.pt"):
        trainer.unpack(torch.load("last.pt"))
    trainer.fit()
"""


def test_main_is_called_by_a_command_of_the_package(tmp_path):
    assert set(find_rules(FITS, tmp_path, hints=True)) <= {"R801"}
    forgotten = FITS.replace('state["epoch"], state["best"]', 'state["epoch"], 0.0')
    assert "R108" in find_rules(forgotten, tmp_path)


def test_a_class_trains_if_main_does_not(tmp_path):
    """main() shows figures: the methods are walked over as without it."""
    text = FITS.partition("def main")[0] + "def main():\n    print(Trainer().best)\n"
    without = FITS.partition("def main")[0]
    assert find_rules(text, tmp_path, hints=True) == find_rules(without, tmp_path, hints=True) != []
