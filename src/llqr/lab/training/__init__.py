"""The training loop. In reading order: `carry_out` (run after run), `loop` (a run), `checkpoint`, `results`."""
