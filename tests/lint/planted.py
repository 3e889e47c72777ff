"""34 restart faults, each planted into a correct script by one edit or two.

    python -m tests.lint.planted    prints what lint finds in each

The scripts of correct/ continue exactly, as far as reading shows it: lint must find nothing in them.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bootfile.lint.engine import lint

CORRECT = Path(__file__).parent / "correct"


class Fault(NamedTuple):
    """One fault. script: a file of correct/. edits: pairs of texts, the old and the new one. rule: the one
    that should find it. others: rules that name the same fault."""

    script: str
    name: str
    edits: tuple[tuple[str, str], ...]
    rule: str
    others: tuple[str, ...] = ()


def leave_out(text: str) -> tuple[str, str]:
    """Return the edit that deletes a line."""
    return text + "\n", ""


FAULTS = [
    Fault("plain", "scheduler is not saved", (leave_out('        "scheduler": scheduler.state_dict(),'),
          leave_out('    scheduler.load_state_dict(checkpoint["scheduler"])')), "R103"),
    Fault("plain", "scaler is not saved", (leave_out('        "scaler": scaler.state_dict(),'),
          leave_out('    scaler.load_state_dict(checkpoint["scaler"])')), "R104"),
    Fault("plain", "average is not saved", (leave_out('        "ema": ema.state_dict(),'),
          leave_out('    ema.load_state_dict(checkpoint["ema"])')), "R105"),
    Fault("plain", "average is not loaded", (leave_out('    ema.load_state_dict(checkpoint["ema"])'),),
        "R201"),
    Fault("plain", "generator is not saved", (leave_out('        "generator": generator.get_state(),'),
          leave_out('    generator.set_state(checkpoint["generator"].cpu())')), "R106"),
    Fault("plain", "NumPy's numbers are not restored",
          (leave_out('    np.random.set_state(checkpoint["numpy"])'),), "R401"),
    Fault("plain", "the last epoch again", (('checkpoint["epoch"] + 1', 'checkpoint["epoch"]'),), "R301"),
    Fault("plain", "best result is not restored",
          (leave_out('    best_count = checkpoint["best_count"]'),), "R108"),
    Fault("plain", "patience is not saved", (leave_out('        "patience": patience,'),
          leave_out('    patience = checkpoint["patience"]')), "R107"),
    Fault("plain", "written in place", (("last.pt.new", "last.pt"), leave_out(
          '    os.replace(os.path.join(args.out, "last.pt"), os.path.join(args.out, "last.pt"))'),
          leave_out('        torch.save(model.state_dict(), os.path.join(args.out, "best.pt"))')), "R501"),
    Fault("trainer", "optimizer is not saved",
        (leave_out('            "optimizer": self.optimizer.state_dict(),'),
          leave_out('        self.optimizer.load_state_dict(saved["optimizer"])')), "R101"),
    Fault("trainer", "second optimizer is not loaded",
          (leave_out('        self.head_optimizer.load_state_dict(saved["head_optimizer"])'),), "R201"),
    Fault("trainer", "scheduler is not saved",
        (leave_out('            "scheduler": self.scheduler.state_dict(),'),
          leave_out('        self.scheduler.load_state_dict(saved["scheduler"])')), "R103"),
    Fault("trainer", "head is not saved", (leave_out('            "head": self.head.state_dict(),'),
          leave_out('        self.head.load_state_dict(saved["head"])')), "R109"),
    Fault("trainer", "step of the warm-up is not saved", (leave_out('            "step": self.step,'),
          leave_out('        self.step = saved["step"]')), "R107"),
    Fault("trainer", "order of the folder", (("sorted(os.listdir(folder))", "os.listdir(folder)"),
          ("sorted({name.split", "list({name.split")), "R402"),
    Fault("trainer", "newest by name", ((
          r'max(paths, key=lambda path: int(re.findall(r"\d+", path)[-1]), default=None)',
              "sorted(paths)[-1]"),
          ('        paths = glob.glob(os.path.join(self.args.out, "epoch_*.pt"))\n'
           "        return sorted(paths)[-1]",
           '        return sorted(glob.glob(os.path.join(self.args.out, "epoch_*.pt")))[-1]')), "R502"),
    Fault("trainer", "generator is not seeded in the loop",
          (("torch.Generator()\n", "torch.Generator().manual_seed(0)\n"),
           leave_out("            self.generator.manual_seed(epoch)")), "R106"),
    Fault("trainer", "an epoch is skipped", (('self.epoch = saved["epoch"]',
        'self.epoch = saved["epoch"] + 1'),),
          "R301"),
    Fault("trainer", "best result is not restored", (leave_out('            "best": self.best,'),
          leave_out('        self.best = saved["best"]')), "R108"),
    Fault("accelerated", "set_epoch is missing", (leave_out("        loader.set_epoch(epoch)"),), "R305"),
    Fault("accelerated", "scheduler is not prepared",
          (("model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),), "R103"),
    Fault("accelerated", "average is not registered", (("(model_ema, progress)", "(progress)"),), "R105"),
    Fault("accelerated", "the place is not registered", (("(model_ema, progress)", "(model_ema)"),), "R302"),
    Fault("fabric", "scheduler is not in the state", (leave_out('        "scheduler": scheduler,'),), "R103"),
    Fault("fabric", "optimizer is not in the state", (leave_out('        "optimizer": optimizer,'),), "R101"),
    Fault("fabric", "set_epoch is missing", (leave_out("        sampler.set_epoch(epoch)"),), "R307"),
    Fault("fabric", "set_epoch is constant", (("sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),), "R308"),
    Fault("fabric", "the epoch is not used", (('range(state["epoch"], 10)', "range(10)"),), "R302"),
    Fault("fabric", "written in place", (leave_out(
          "        if fabric.global_rank == 0:\n            os.replace(path + \".new\", path)"),
          ('fabric.save(path + ".new", state)', "fabric.save(path, state)")), "R501"),
    Fault("ddp", "all ranks write one file", (("    if rank == 0:\n        state",
        "    if True:\n        state"),), "R503"),
    Fault("ddp", "names of the wrapped model", (("model.module.state_dict()", "model.state_dict()"),),
        "R601"),
    Fault("ddp", "saves between two steps", ((
          "                if step % 10 == 0:\n                    save_checkpoint",
          "            if (number + 1) % 10 == 0:\n                save_checkpoint"),), "R602"),
    Fault("ddp", "arguments as an object", (("vars(args)", "args"),), "R506"),
]  # fmt: skip


def plant(fault: Fault) -> str:
    """Return the text of a script with a fault. Raises ValueError if an edit does not fit."""
    text = (CORRECT / f"{fault.script}.py").read_text(encoding="utf-8")
    for old, new in fault.edits:
        if old not in text:
            raise ValueError(f"{fault.script}, {fault.name}: the script does not have {old!r}")
        text = text.replace(old, new)
    compile(text, fault.name, "exec")
    return text


def find(fault: Fault) -> tuple[bool, list[str]]:
    """Return (whether lint names a fault, the rules of all that it reports; "R602h" is a hint)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{fault.script}.py"
        path.write_text(plant(fault), encoding="utf-8")
        found = lint(str(path))
    named = {finding.rule for finding in found}
    rules = [f"{finding.rule}h" if finding.is_hint else finding.rule for finding in found]
    return fault.rule in named or any(rule in rules for rule in fault.others), rules


def main() -> int:
    """Print a line for each fault, and how many were found."""
    count = 0
    hints = 0
    for fault in FAULTS:
        is_found, rules = find(fault)
        count += is_found
        hints += is_found and fault.rule not in rules and not set(fault.others) & set(rules)
        mark = "found " if is_found else "MISSED"
        print(f"{mark} {fault.rule} {fault.script:12}{fault.name} {rules}")
    print(f"{count} of {len(FAULTS)} found, {hints} of them by a hint")
    return 0


if __name__ == "__main__":
    sys.exit(main())
