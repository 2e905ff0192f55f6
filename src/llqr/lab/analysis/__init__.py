"""What is measured of a solution: sharpness and slices of the loss surface."""
