"""One file per thing that users of SAM and of second-order optimizers trip over."""
