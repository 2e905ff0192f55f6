"""What is measured of a solution: sharpness, slices of the loss surface, the spectrum of the metric."""
