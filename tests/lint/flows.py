"""Forms of one fault: the start value, the names and the helpers differ, the flow is the same.

Each row is a rule, parts of the script of examples.py in which it must find something, and parts in which it
must not. A row without the second one is a further form of the row before it.
"""

from typing import NamedTuple

from tests.lint.examples import BEST, FOLDER, PARTS, SCALED, SHUFFLED, WITHIN, write


class Flow(NamedTuple):
    """One form. bad, good: parts of the script with and without the fault; good may be left out."""

    rule: str
    bad: dict[str, str]
    good: dict[str, str] | None = None


FALSE_NAMES = [
    {
        "before": f"print([scheduler for scheduler in {names}])",
        "setup": "scheduler = StepLR(optimizer, 3)",
        "end": "scheduler.step()",
    }
    for names in ("('a', 'b')", "os.listdir('.')")
]
SAVED = {"save": '"best": best', "resume": 'best = saved["best"]'}
STARTS = [
    'float("inf")',
    "math.inf",
    "np.inf",
    "torch.inf",
    "10**9",
    "float(1e9)",
    '-float("inf")',
    "sys.maxsize",
]
STARTED = [{"top": "import math, sys", "setup": f"best = {start}", "end": BEST} for start in STARTS]
FIRST = BEST.replace("loss < best", "best is None or loss < best")
KEPT = "if loss < best['loss']:\n    best['loss'] = loss\n    torch.save(model.state_dict(), 'best.pt')"
SMALLEST = "if not history or loss < min(history):\n    torch.save(model.state_dict(), 'best.pt')\n"
COPIED = (
    "score = loss.item()\nis_good = score > top\ntop = max(score, top)\n"
    "torch.save(state, 'new.pt')\nif is_good:\n    shutil.copyfile('new.pt', 'top.pt')"
)
VALIDATES = (
    "def validate(low):\n    score = 3 * loss.item()\n    if score < low:\n"
    "        torch.save(model.state_dict(), 'low.pt')\n        low = score\n    return low"
)
SHARED = (
    "def validate():\n    global low\n    score = 3 * loss.item()\n    if score < low:\n"
    "        torch.save(model.state_dict(), 'low.pt')\n        low = score"
)
WAITS = ["bad", "counter", "epochs_no_improve", "es_counter"]
WAIT = "if loss < best:\n    best = loss\n    {0} = 0\nelse:\n    {0} += 1\nif {0} > 3:\n    break"
TEST = "if bad > 3:\n    break"
ENDS = [
    (TEST, "if bad <= 3:\n    pass\nelse:\n    break"),
    ("break", "sys.exit()"),
    ("break", "raise SystemExit"),
]
STOPPER = """class Stopper:
    def __init__(self, limit=7):
        self.limit, self.counter, self.score, self.stops = limit, 0, None, False

    def __call__(self, loss, model):
        if self.score is None:
            self.score = -loss
        elif -loss < self.score:
            self.counter += 1
            if self.counter >= self.limit:
                self.stops = True
        else:
            self.score = -loss
            torch.save(model.state_dict(), "best.pt")
            self.counter = 0
"""
STOPS = "stopper(loss.item(), model)\nif stopper.stops:\n    break"
DROPS = "if epoch in (3, 6):\n    rate *= 0.1\nfor group in optimizer.param_groups:\n    group['lr'] = rate"
GLOBAL = (
    "rates = {'lr': 0.1}\ndef adjust(optimizer, epoch):\n    global rates\n    if epoch in (3, 6):\n"
    "        rates['lr'] *= 0.1\n        for group in optimizer.param_groups:\n"
    "            group['lr'] = rates['lr']"
)
LOCAL = (
    "def adjust(optimizer, epoch, rate):\n    lr = rate\n    if epoch >= 3:\n        lr *= 0.1\n"
    "    for group in optimizer.param_groups:\n        group['lr'] = lr"
)
NUMBERED = "torch.save(state, f'out/{epoch}.pt')"
RANDOM = {
    "setup": SHUFFLED,
    "save": '"random": torch.get_rng_state()',
    "resume": 'torch.set_rng_state(saved["random"])',
}
SEEDS = "torch.manual_seed(0)"
OPTIONS = "import argparse\nargs = argparse.ArgumentParser().parse_args()"
# a run of one process shuffles
ALONE = "sampler = None\nloader = DataLoader(data, 8, shuffle=sampler is None, sampler=sampler)"
PLACED = "scheduler = CosineAnnealingLR(optimizer, 100, last_epoch=start - 1)"
CAUGHT_UP = "scheduler = CosineAnnealingLR(optimizer, 100)\nfor _ in range(start):\n    scheduler.step()"
SCHEDULED = {
    "setup": "scheduler = StepLR(optimizer, 3)",
    "end": "scheduler.step()",
    "save": '"scheduler": scheduler.state_dict()',
}
CRITIC = {
    "setup": "critic = nn.Linear(4, 1)\n"
    "optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()])",
    "save": '"critic": critic.state_dict()',
}
COUNTED = {"setup": "steps = 0", "resume": 'steps = saved["steps"]', "write": "pass"}
SAVES = (
    "state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'steps': steps}\n"
    "torch.save(state, 'new.pt')\nos.replace('new.pt', 'last.pt')"
)
NEWEST = (
    "def newest(folder):\n"
    "    names = sorted(name for name in os.listdir(folder) if name.startswith('epoch'))\n"
    "    return os.path.join(folder, names[-1])"
)

YACS = "from yacs.config import CfgNode as CN\nbase = CN()\nconfig = base.clone()"
BATCHES = "torch.utils.data.BatchSampler(RandomSampler(data), 8, True)"
BATCHED = f"loader = DataLoader(data, batch_sampler={BATCHES})"
CACHES = "def cache_labels(read):\n    rows = read()\n    torch.save(rows, 'labels.pt')\n    return rows"
KEEPS = (
    "class Kept(Dataset):\n    def __len__(self):\n        return 9\n"
    "    def __getitem__(self, index):\n        sample = np.fft.fft(index)\n"
    "        torch.save(sample, f'{index}.pt')\n        return sample"
)
SCALES = {"setup": "scaler = torch.amp.GradScaler()\nloader = DataLoader(Kept(), 8)", "step": SCALED}

SEED_OPTION = (
    "import argparse\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--seed', default=3, help='with default=3 no random one')\n"
    "args = parser.parse_args()\ntorch.manual_seed(args.seed)"
)
GIVEN = (
    FOLDER.format(names="list(map(self.find, [folder]))[0]")
    + "\n    @staticmethod\n    def find(folder):\n        return os.listdir(folder)"
)
CLONES = "slow = {name: part.detach().clone() for name, part in model.named_parameters()}"
TARGET = "slow = nn.Linear(4, 4)"
# weights beside the model: how they begin, how the loop changes them, and what only sums or copies
AVERAGES = [
    (CLONES,
     "for name, part in model.named_parameters():\n    slow[name].mul_(0.9).add_(part.data, alpha=0.1)",
     "slow['loss'] = loss.item()"),
    (CLONES,
     "for name, part in model.state_dict().items():\n    slow[name] = 0.9 * slow[name] + 0.1 * part",
     "for name, part in model.state_dict().items():\n    slow[name] = part.clone()"),
    (CLONES,
     "weights = model.state_dict()\nfor name, part in slow.items():\n    part.lerp_(weights[name], 0.1)",
     "for name, part in slow.items():\n    part.zero_()\n    part.add_(model.state_dict()[name])"),
    (TARGET,
     "for old, new in zip(slow.parameters(), model.parameters()):\n"
     "    old.data = old.data * 0.9 + new.data * 0.1",
     "for old, new in zip(slow.parameters(), model.parameters()):\n    old.data.copy_(new.data)"),
    (TARGET, "if number % 9 == 0:\n    slow.load_state_dict(model.state_dict())",
     "slow.load_state_dict(model.state_dict())"),
]  # fmt: skip
CHANCE = "if random.random() < chance:\n    print(number)\nchance = max(0.1, chance * 0.99)"
OTHER = {
    "setup": "slow = copy.deepcopy(model)",
    "step": "for old, new in zip(slow.parameters(), model.parameters()):\n"
            "    old.data.copy_(0.9 * old.data + 0.1 * new.data)",
    "save": '"slow": slow.state_dict()',
    "resume": 'slow.load_state_dict(saved["slow"])',
}  # fmt: skip
ORDERS = "def orders(generator):\n    for part in generator.permutation(4):\n        yield part"
FLOWS = [
    Flow("R104", {**SCALES, "top": CACHES, "begin": "cache_labels(input)"}),
    Flow("R104", {**SCALES, "top": KEEPS}),
    Flow("R401", {"top": SEEDS, "setup": BATCHED}, {"setup": BATCHED}),
    Flow("R401", {"top": f"if os.path.exists('out'):\n    raise SystemExit\n{SEEDS}", "setup": SHUFFLED}),
    Flow("R506", {"top": YACS, "save": '"config": config'}, {"top": YACS, "save": '"config": config.dump()'}),
    *[Flow("R108", bad, {**bad, **SAVED}) for bad in STARTED],
    Flow("R108", {"setup": "best = None", "end": FIRST}, {"setup": "best = None", "end": FIRST, **SAVED}),
    Flow("R108", {"setup": "best = {'loss': 9.0, 'epoch': 0}", "end": KEPT}),
    Flow("R108", {"setup": "history = []", "end": SMALLEST + "history.append(loss)"},
         {"setup": "history = []",
          "end": "history.append(loss)\nif len(history) % 3 == 0:\n    torch.save(1, 'x')"}),
    Flow("R108", {"top": "import shutil", "setup": "top = 0.0", "end": COPIED}),
    Flow("R108", {"top": VALIDATES, "setup": "low = 9.0", "end": "low = validate(low)"}),
    Flow("R108", {"top": SHARED, "setup": "low = 9.0", "end": "validate()"}),
    *[Flow("R107", {"setup": f"best, {name} = 9.0, 0", "end": WAIT.format(name)},
           {"setup": f"{name} = 0", "end": WAIT.format(name), "resume": f'{name} = saved["bad"]'})
      for name in WAITS],
    *[Flow("R107",
           {"top": "import sys", "setup": "best, bad = 9.0, 0", "end": WAIT.format("bad").replace(old, new)})
      for old, new in ENDS],
    *[Flow("R103", bad) for bad in FALSE_NAMES],
    Flow("R107", {"top": STOPPER, "setup": "stopper = Stopper()", "end": STOPS}),
    Flow("R108", {"top": STOPPER, "setup": "stopper = Stopper()", "end": STOPS}),
    Flow("R107",
         {"setup": "best, place = 9.0, 0",
          "end": "if loss < best:\n    best, place = loss, epoch\nif epoch - place > 5:\n    break"},
         {"setup": "is_nan = False", "end": "if loss != loss:\n    is_nan = True\nif is_nan:\n    break"}),
    Flow("R107", {"setup": "rate = 0.1", "end": DROPS},
         {"setup": "rate = 0.1", "begin": "rate = 0.1", "end": DROPS}),
    Flow("R107", {"top": GLOBAL, "begin": "adjust(optimizer, epoch)"},
         {"top": LOCAL, "begin": "adjust(optimizer, epoch, 0.1)"}),
    Flow("R107", {"setup": "steps = 0", "step": "steps += 1\nif steps > 1000:\n    break"},
         {"begin": "steps = 0", "step": "steps += 1\nif steps > 1000:\n    break"}),
    Flow("R107", {"setup": "steps = 0", "step": "steps += 1\ntorch.save(model.state_dict(), f'{steps}.pt')"}),
    Flow("R107",
         {"setup": "losses = []", "end": "losses.append(loss.item())\nnp.save('losses.npy', losses)"},
         {"begin": "losses = []", "end": "losses.append(loss.item())\nnp.save('losses.npy', losses)"}),
    Flow("R401", {**RANDOM, "before": SEEDS}, {**RANDOM, "setup": f"{SEEDS}\n{SHUFFLED}"}),
    Flow("R401", {"top": SEEDS, "setup": ALONE}, {"setup": ALONE}),
    Flow("R103", {"before": PLACED, "step": "scheduler.step()"},
         {"before": PLACED, "end": "scheduler.step()"}),
    Flow("R103", {"before": CAUGHT_UP, "step": "scheduler.step()"},
         {"before": CAUGHT_UP, "end": "scheduler.step()"}),
    Flow("R103", {"before": PLACED.replace("start - 1", "-1"), "end": "scheduler.step()"}),
    Flow("R201",
         {**SCHEDULED,
          "resume": 'if "schedular" in saved:\n    scheduler.load_state_dict(saved["schedular"])'},
         {**SCHEDULED,
          "resume": 'if "scheduler" in saved:\n    scheduler.load_state_dict(saved["scheduler"])'}),
    Flow("R201", {"before": "optimizer = torch.optim.Adam(model.parameters())"}),
    Flow("R201", CRITIC, {**CRITIC, "resume": 'critic.load_state_dict(saved["critic"])'}),
    Flow("R301", {**COUNTED, "step": f"{SAVES}\nsteps += 1"}, {**COUNTED, "step": f"steps += 1\n{SAVES}"}),
    Flow("R301",
         {"top": OPTIONS, "range": "start, args.epochs",
          "write": f"state['epoch'] = args.epochs\n{PARTS['write']}"},
         {"top": OPTIONS, "range": "start, args.epochs"}),
    Flow("R303", {"step": WITHIN, "write": "pass", "next": 'saved["epoch"]'}),
    Flow("R502",
         {"top": NEWEST, "file": "newest('out')", "write": "torch.save(state, f'out/epoch_{epoch}.pt')"}),
    Flow("R501", {"write": NUMBERED, "file": "max(glob.glob('out/*.pt'), key=os.path.getmtime)"},
         {"write": NUMBERED}),
    Flow("R501", {"write": "torch.save({'model': model.state_dict(), 'epoch': epoch}, 'last.pt')"}),
    Flow("R402", {"top": GIVEN, "setup": "images = Folder('images')"}),
    Flow("R402", {"top": FOLDER.format(names="os.listdir(folder)"),
                  "setup": "images = globals()['Folder']('images')"}),
    Flow("R401", {"top": SEED_OPTION, "setup": SHUFFLED}),
    Flow("R201", {"top": "from others import parts", "setup": "scheduler = StepLR(optimizer, 3)",
                  "end": "scheduler.step()\nfor part in parts:\n    part.load_state_dict(torch.load('b.pt'))",
                  "save": '"scheduler": scheduler.state_dict()'}),
    *[Flow("R105", {"setup": setup, "step": step}, {"setup": setup, "step": other})
      for setup, step, other in AVERAGES],
    Flow("R107", {"setup": "chance = 1.0", "step": CHANCE},
         {"setup": "chance = 1.0", "step": CHANCE, "save": '"chance": chance',
          "resume": 'chance = saved["chance"]'}),
    Flow("R201", {**OTHER, "resume": OTHER["resume"].replace("slow", "model")}, OTHER),
    Flow("R101", {"top": "def draw():\n    torch.save(model(data).detach(), 'sample.pt')",
                  "setup": f"{CRITIC['setup']}\nother = torch.optim.Adam(critic.parameters())",
                  "step": "other.step()", "end": "draw()"}),
    Flow("R106", {"top": ORDERS, "setup": "generator = np.random.default_rng(1)",
                  "begin": "for part in orders(generator):\n    print(part)",
                  "end": "torch.save(copy.deepcopy(model.state_dict()), 'weights.pt')"}),
    Flow("R506", {"save": '"loss": nn.BCELoss()'},
         {"setup": "criterion = nn.BCELoss()", "save": '"loss": criterion.state_dict()'}),
]  # fmt: skip

# the newest of numbered files is found by trying each number
SEARCHES = (
    write(
        {
            "top": SEEDS,
            "setup": f"{SHUFFLED}\nscheduler = StepLR(optimizer, 3)",
            "end": "scheduler.step()",
            "write": "torch.save(model.state_dict(), f'epoch_{epoch}.pt')",
        }
    )
    .replace("lr=0.1", "lr=0.1, momentum=0.9")
    .replace(
        'if os.path.exists("last.pt"):\n',
        "for number in range(99, -1, -1):\n    name = f'epoch_{number}.pt'\n    if os.path.isfile(name):\n"
        "        model.load_state_dict(torch.load(name))\n        start = number + 1\n        break\n"
        "if False:\n",
    )
)
