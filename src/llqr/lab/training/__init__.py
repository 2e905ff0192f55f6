"""The training loop, its checkpoints, and planned runs carried out one after the other.

In reading order: `carry_out` (one run after the other), `loop` (a run) and `checkpoint`; `log_results`, `spectrum` and
`tensorboard` (what is reported about it).
"""
