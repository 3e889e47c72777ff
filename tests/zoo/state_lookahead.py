"""pytorch-optimizer: Lookahead around SGD, saved with state_dict every 2 steps.

OPTIONS: none.
"""

from pytorch_optimizer import Lookahead
from start import batches, load, model, optimizer, receipt, save

outer = Lookahead(optimizer, k=5)
if (state := load()) is not None:
    outer.load_state_dict(state)
for batch in batches(24):
    outer.zero_grad()
    model(batch)["loss"].backward()
    outer.step()
    if receipt.step % 2 == 0:
        save(outer.state_dict())
