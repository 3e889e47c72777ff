"""A small training with a bug that is usual: the scheduler is not saved. python train.py [--resume]"""

import os
import sys

import torch

torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs.sum(1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

first = 0
if "--resume" in sys.argv and os.path.exists("out/last.pt"):
    saved = torch.load("out/last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1

os.makedirs("out", exist_ok=True)
for epoch in range(first, 8):
    order = torch.randperm(512, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(32):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "out/part.pt")
    os.replace("out/part.pt", "out/last.pt")
    print(f"epoch {epoch}: loss {loss.item():.4f}")
