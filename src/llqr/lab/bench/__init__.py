"""Measurements of speed and memory: `llqr bench`. Ratios come from one run whose repeats are interleaved."""
