"""Measurements of tests are short: what they come to does not matter here."""

import pytest

from llqr.lab.bench import cadence, host, peers, refresh


@pytest.fixture(autouse=True)
def _short_bursts(monkeypatch):
    """Seconds of consecutive steps that are timed together."""
    for module in (cadence, host, peers, refresh):
        monkeypatch.setattr(module, "BURST", 1e-3)
