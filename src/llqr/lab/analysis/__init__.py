"""What is measured of a solution: its sharpness."""
