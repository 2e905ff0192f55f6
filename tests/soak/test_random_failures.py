"""Failures at random calls of torch, in steps of all methods: nothing is left changed, and a retry is a clean step."""

import os
import random
from collections import Counter

import pytest
import torch

import llqr

from .failures import FORMS, REFRESHES, Pair, quiet

CASES = [
    (method, form, refresh)
    for method in llqr.method_names()
    for form in FORMS
    for refresh in (REFRESHES if "llqr" in method else REFRESHES[:1])
]


def soak(count, seed=0):
    """So many failures, shared among all methods, both forms of a step and both kinds of refreshes."""
    draw, found, pairs = random.Random(seed), Counter(), {}
    generator = torch.Generator().manual_seed(seed)
    with quiet():
        while found["failures"] < count:
            case = draw.choice(CASES)
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


@pytest.mark.slow
def test_many():
    """`LLQR_SOAK` of them, 10^5 by default."""
    check(soak(int(os.environ.get("LLQR_SOAK", 100_000)), seed=1))
