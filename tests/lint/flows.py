"""Forms of one fault: the start value, the names and the helpers differ, the flow is the same.

Each row is a rule, parts of the script of examples.py in which it must find something, and parts in which it
must not. A row without the second one is a further form of the row before it.
"""

from typing import NamedTuple

from tests.lint.examples import BEST, SHUFFLED


class Flow(NamedTuple):
    """One form. bad, good: parts of the script with and without the fault; good may be left out."""

    rule: str
    bad: dict[str, str]
    good: dict[str, str] | None = None


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

FLOWS = [
    *[Flow("R108", bad, {**bad, **SAVED}) for bad in STARTED],
    Flow("R108", {"setup": "best = None", "end": FIRST}, {"setup": "best = None", "end": FIRST, **SAVED}),
    Flow("R108", {"setup": "best = {'loss': 9.0, 'epoch': 0}", "end": KEPT}),
    Flow(
        "R108",
        {"setup": "history = []", "end": SMALLEST + "history.append(loss)"},
        {
            "setup": "history = []",
            "end": "history.append(loss)\nif len(history) % 3 == 0:\n    torch.save(1, 'x')",
        },
    ),
    Flow("R108", {"top": "import shutil", "setup": "top = 0.0", "end": COPIED}),
    Flow("R108", {"top": VALIDATES, "setup": "low = 9.0", "end": "low = validate(low)"}),
    Flow("R108", {"top": SHARED, "setup": "low = 9.0", "end": "validate()"}),
    *[
        Flow(
            "R107",
            {"setup": f"best, {name} = 9.0, 0", "end": WAIT.format(name)},
            {"setup": f"{name} = 0", "end": WAIT.format(name), "resume": f'{name} = saved["bad"]'},
        )
        for name in WAITS
    ],
    Flow("R107", {"top": STOPPER, "setup": "stopper = Stopper()", "end": STOPS}),
    Flow("R108", {"top": STOPPER, "setup": "stopper = Stopper()", "end": STOPS}),
    Flow(
        "R107",
        {
            "setup": "best, place = 9.0, 0",
            "end": "if loss < best:\n    best, place = loss, epoch\nif epoch - place > 5:\n    break",
        },
        {"setup": "is_nan = False", "end": "if loss != loss:\n    is_nan = True\nif is_nan:\n    break"},
    ),
    Flow(
        "R107",
        {"setup": "rate = 0.1", "end": DROPS},
        {"setup": "rate = 0.1", "begin": "rate = 0.1", "end": DROPS},
    ),
    Flow(
        "R107",
        {"top": GLOBAL, "begin": "adjust(optimizer, epoch)"},
        {"top": LOCAL, "begin": "adjust(optimizer, epoch, 0.1)"},
    ),
    Flow(
        "R107",
        {"setup": "steps = 0", "step": "steps += 1\nif steps > 1000:\n    break"},
        {"begin": "steps = 0", "step": "steps += 1\nif steps > 1000:\n    break"},
    ),
    Flow("R107", {"setup": "steps = 0", "step": "steps += 1\ntorch.save(model.state_dict(), f'{steps}.pt')"}),
    Flow(
        "R107",
        {"setup": "losses = []", "end": "losses.append(loss.item())\nnp.save('losses.npy', losses)"},
        {"begin": "losses = []", "end": "losses.append(loss.item())\nnp.save('losses.npy', losses)"},
    ),
    Flow("R401", {**RANDOM, "before": SEEDS}, {**RANDOM, "setup": f"{SEEDS}\n{SHUFFLED}"}),
    Flow(
        "R501",
        {"write": NUMBERED, "file": "max(glob.glob('out/*.pt'), key=os.path.getmtime)"},
        {"write": NUMBERED},
    ),
    Flow("R501", {"write": "torch.save({'model': model.state_dict(), 'epoch': epoch}, 'last.pt')"}),
    Flow(
        "R506",
        {"save": '"loss": nn.BCELoss()'},
        {"setup": "criterion = nn.BCELoss()", "save": '"loss": criterion.state_dict()'},
    ),
]
