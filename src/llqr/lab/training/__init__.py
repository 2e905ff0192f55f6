"""The training loop, its checkpoints, and planned runs carried out one after the other."""
