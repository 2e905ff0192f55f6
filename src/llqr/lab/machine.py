"""The device that a run uses, chosen and described."""

import os
import platform
import re
import shutil
import subprocess
from typing import Any

import torch

from llqr.lab.errors import ConfigurationError


def choose_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device if there is one, and the CPU otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise ConfigurationError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"--device is {name}, but PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are made on the current device
    return device


def share_gpu() -> str:
    """Start NVIDIA's MPS, by which processes use a GPU at the same time instead of in turns; return what was done."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        return "There is no nvidia-cuda-mps-control: the runs take turns on the GPU."
    asked = subprocess.run([program], input=b"get_server_list\n", capture_output=True)
    if asked.returncode == 0:
        return "MPS is running."
    nowhere = subprocess.DEVNULL  # a daemon would keep a pipe open
    # A daemon with this variable numbers the GPUs anew, and a process with it would choose among these numbers.
    every_gpu = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    started = subprocess.run([program, "-d"], stdin=nowhere, stdout=nowhere, stderr=nowhere, env=every_gpu)
    if started.returncode:
        return f"{program} -d failed: the runs take turns on the GPU."
    return f"Started MPS; `echo quit | {program}` ends it."


def describe(device: torch.device) -> dict[str, Any]:
    """What a measured time depends on."""
    facts: dict[str, Any] = {
        "device": str(device),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
