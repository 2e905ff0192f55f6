"""The figures of the two-scale pothole model: one module per experiment, and the page that shows them."""
