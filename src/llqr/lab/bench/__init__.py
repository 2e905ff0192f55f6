"""Measure speed and memory: ``llqr bench``. Ratios come from one run whose repeats are interleaved.

In reading order: `timing`, `workload` (what is measured), `refresh`, the other commands.
"""
