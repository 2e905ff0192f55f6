"""One's own experiment as a recipe of the laboratory, and methods compared on it."""
