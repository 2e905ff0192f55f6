"""The training loop: `carry_out` (one run after the other), `loop` (a run), `checkpoint`, and `results`."""
