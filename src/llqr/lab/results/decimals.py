"""How many decimals a measured number is printed with."""


def decimals(value: float) -> int:
    """Two from 10 on, as for accuracies and BLEU; more for smaller numbers, which would look alike otherwise."""
    size = abs(value)
    return 2 if size >= 10 or not size else 3 if size >= 1 else 4 if size >= 0.01 else 6


def spread(mean: float, std: float | None = None) -> str:
    """A mean, with its standard deviation if there is one."""
    digits = decimals(mean)
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"
