"""What surrounds a step: loss scaling, snapshots, owning modules, gradients, random state, checks of a saved state."""
