"""Write the figures of a run as events for TensorBoard."""

from collections.abc import Mapping

from common.ground.exits import import_optional


class TensorBoard:
    """TensorBoard's events in the folder of a run. Those of an earlier start after `step` are deleted."""

    def __init__(self, folder: str, step: int):
        events = import_optional("torch.utils.tensorboard", "no TensorBoard events", "tensorboard")
        self._events = events.SummaryWriter(folder, purge_step=step + 1 if step else 0)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()  # the job may be killed at any time

    def finish(self) -> None:
        self._events.close()
