"""The forward and backward pass of a step: its precision, its compilation, its capture as CUDA graphs."""
