"""What joins a loop of one's own: the norm of the gradients in each report: python plugin.py OUT"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from bootfile import Exact, Interval, Plugin, torch_loader, usual


class Norm(Plugin):
    def begin(self, parts, step):
        self.parts = parts

    def numbers(self):  # after each backward(), on every rank: what is sent to all
        norms = [p.grad.norm() for p in self.parts.model.parameters() if p.grad is not None]
        return torch.stack(norms).norm()[None]

    def judge(self, maxima):  # the largest of all ranks
        self.norm = maxima[0]

    def ended(self, step, due):
        if due.report:
            self.parts.say(f"step {step}: norm of the gradients {self.norm:.4f}")


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch_loader(DataLoader(data, 8, shuffle=True), torch.device("cpu"), epochs=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = Exact(
    sys.argv[1],
    loader,
    model=model,
    optimizer=optimizer,
    report_every=Interval(4, "step"),
    plugins=[*usual(), Norm()],
)
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if run.end_step().save:
            run.save()
run.close()
