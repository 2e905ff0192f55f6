"""What all tests share: reproducible random numbers, one thread, and hypothesis without a clock."""

import gc
import os

# Some virtual machines announce AMX and then refuse its instructions, which ends a bfloat16 product and the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from hypothesis import HealthCheck, settings

from counts import PROPERTY

settings.register_profile(
    "llqr", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("llqr")


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)


def pytest_collection_finish(session):
    """What was imported is no garbage: the runs of many tests collect after themselves, which takes its time to see."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """What the long tests counted, which a test that passes could not print."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == PROPERTY:
                terminalreporter.write_line(value)
