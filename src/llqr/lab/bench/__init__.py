"""Measurements of speed and memory: ``llqr bench``. Ratios come from one run whose repeats are interleaved.

In reading order: `workload` (what is measured), `timing` and `measured_refresh`; then one file per command, such as
`step`; `record` (a measurement as a file) and `plots`.
"""
