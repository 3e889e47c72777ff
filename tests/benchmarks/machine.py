"""Describe the conditions of a figure: machine, versions, load."""

import os
import platform

import numpy
import torch


def describe() -> str:
    """Return one line: processor or GPU, cores, versions, load average."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            processor = next((line.split(":")[1].strip() for line in file if "model name" in line), processor)
    device = f"{torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    return (
        f"{device}{processor} ({os.cpu_count()} cores), Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {numpy.__version__}, load average {os.getloadavg()[0]:.2f}"
    )
