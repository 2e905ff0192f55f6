"""Failures at random calls of torch, in steps of all methods: nothing is left changed, and a retry is a clean step."""

import os
import random
from collections import Counter

import pytest
import torch

import llqr
from processes import on_ranks

from .failures import FORMS, REFRESHES, Pair, quiet

CASES = [
    (method, form, refresh)
    for method in llqr.method_names()
    for form in FORMS
    for refresh in (REFRESHES if "llqr" in method else REFRESHES[:1])
]


def soak(count, seed=0, learned=False):
    """So many failures, shared among all methods (with a geometry), both forms of a step and kinds of refreshes."""
    cases = [case for case in CASES if "llqr" in case[0] or not learned]
    draw, found, pairs = random.Random(seed), Counter(), {}
    generator = torch.Generator().manual_seed(seed)
    with quiet():
        while found["failures"] < count:
            case = draw.choice(cases)
            if case not in pairs or pairs[case].steps > 200:
                pairs[case] = Pair(*case)
            batch = torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator)
            pairs[case].step(batch, draw, found)
            if found["retries that differ"] or found["failures that did not come"]:
                raise AssertionError(f"{case}: {dict(found)}")
    return found


def check(found):
    print(", ".join(f"{count} {what}" for what, count in sorted(found.items())))
    assert {what for what, count in found.items() if count} == {"failures"}


def test_a_few():
    check(soak(150))


MANY = int(os.environ.get("LLQR_SOAK", 100_000))


@pytest.mark.slow
def test_many():
    """`LLQR_SOAK` of them, 10^5 by default."""
    check(soak(MANY, seed=1))


def on_each_rank(rank, world):
    """The same failures on all ranks, whose geometries learn from the mean of their curvatures."""
    return dict(soak(max(20, MANY // 100), seed=2, learned=True))


@pytest.mark.slow
def test_two_ranks(tmp_path):
    first, second = on_ranks(2, tmp_path, on_each_rank)
    assert first == second
    check(first)
