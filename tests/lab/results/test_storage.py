"""`llqr storage`: the paper's table of storage, to the last digit."""

import pytest

from llqr.lab.results import storage

# model, structure, shards, model parameters, preconditioner scalars, preconditioner MiB, total MiB.
PAPER = [
    ("ViT-Ti/16", "e-kfac", 1, 5427080, 24235082, 92.45, 113.15),
    ("ViT-Ti/16", "e-kfac", 4, 5427080, 24235082, 23.11, 43.82),
    ("ViT-Ti/16", "diag-kfac", 1, 5427080, 73426, 0.28, 20.98),
    ("ViT-Ti/16", "diag-kfac", 4, 5427080, 73426, 0.07, 20.77),
    ("ViT-B/16", "e-kfac", 1, 86567656, 387826882, 1479.44, 1809.67),
    ("ViT-B/16", "e-kfac", 4, 86567656, 387826882, 369.86, 700.09),
    ("ViT-B/16", "diag-kfac", 1, 86567656, 294038, 1.12, 331.35),
    ("ViT-B/16", "diag-kfac", 4, 86567656, 294038, 0.28, 330.51),
    ("ViT-L/16", "e-kfac", 1, 304326632, 1367114178, 5215.13, 6376.04),
    ("ViT-L/16", "e-kfac", 4, 304326632, 1367114178, 1303.78, 2464.7),
    ("ViT-L/16", "diag-kfac", 1, 304326632, 771990, 2.94, 1163.86),
    ("ViT-L/16", "diag-kfac", 4, 304326632, 771990, 0.74, 1161.65),
]
KEYS = ("model", "structure", "shards", "model_params", "precond_params", "precond_mib", "total_mib")


@pytest.fixture(scope="module")
def rows():
    return [row.to_dict() for row in storage.rows()]


def test_the_table_has_the_papers_rows_in_its_order(rows):
    assert [tuple(row[key] for key in KEYS[:3]) for row in rows] == [row[:3] for row in PAPER]


@pytest.mark.parametrize("number", range(len(PAPER)))
def test_every_number_is_the_papers(rows, number):
    assert rows[number] == dict(zip(KEYS, PAPER[number], strict=True))
