"""Your own experiment: a model, a loss and data, compared by the methods of the laboratory.

In reading order: `experiment` (what a user gives, and where it comes from), `task` (how the training loop sees it),
`recipe` (its settings over defaults), `comparison` (`llqr.lab.compare`).
"""


def is_file(name: str) -> bool:
    """Whether a name on the command line is that of a Python file, or of one of its functions."""
    return name.endswith(".py") or ".py:" in name
