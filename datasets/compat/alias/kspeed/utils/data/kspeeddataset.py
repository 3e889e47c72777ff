from datasets.compat.kspeed import KSpeedCallable, KSpeedFolder, KSpeedImageFolder

__all__ = ["KSpeedCallable", "KSpeedFolder", "KSpeedImageFolder"]
