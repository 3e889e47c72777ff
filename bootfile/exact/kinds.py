"""The kinds of the parts of a state, by their names: possible causes of a difference before its effects."""

HYPERPARAMETER = 0  # a number in the parameter groups of an optimizer, or of a scheduler
COUNTER = 1  # a step, an epoch, the scale of a GradScaler
OTHER = 2  # a tensor, a loss, a text
RANDOM = 3  # a state of random numbers: after a restart it may differ without an effect

_RATES = {"lr", "_last_lr", "initial_lr", "base_lrs"}
_COUNTERS = {"step", "epoch", "last_epoch", "_step_count", "_growth_tracker", "scale"}
_WEIGHTS = ("model", "forward", "ema")  # their parts may have the names of counters


def find_kind(name: str) -> int:
    """Return HYPERPARAMETER, COUNTER or OTHER. name: of a part, such as "optimizer.param_groups.0.lr"."""
    words = name.split(".")
    if "param_groups" in words or not _RATES.isdisjoint(words):
        return HYPERPARAMETER
    return COUNTER if words[-1] in _COUNTERS and words[0] not in _WEIGHTS else OTHER
