"""The classes of KSpeed, by the printed path of their module."""

from datasets.compat.kspeed import KSpeedCallable, KSpeedFolder, KSpeedImageFolder

__all__ = ["KSpeedCallable", "KSpeedFolder", "KSpeedImageFolder"]
