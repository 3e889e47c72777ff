"""lightly-train: the average of the weights (ModelEMA) of its trainer for detection, saved every 2 steps.

OPTIONS: none.
"""

from lightly_train._task_models.object_detection_components.ema import ModelEMA
from start import batches, load, model, receipt, save, train

average = ModelEMA(model, decay=0.9, warmups=8)
if (state := load()) is not None:
    average.load_state_dict(state)
for batch in batches(24):
    train(batch)
    average.update(model)
    if receipt.step % 2 == 0:
        save(average.state_dict())
