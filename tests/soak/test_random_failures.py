"""Failures at random calls of torch, in steps of all methods: nothing is left changed, and a retry is a clean step."""

import os
import random
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist

import llqr
from counts import show
from processes import on_ranks

from .failures import CAPTURED, FORMS, REFRESHES, Pair, quiet

MANY = int(os.environ.get("LLQR_SOAK", 1_000))
LEARNED = [method for method in llqr.method_names() if "llqr" in method]
PLAIN = [method for method in llqr.method_names() if method not in LEARNED]


def cases(methods, refreshes):
    return [(method, form, refresh) for method in methods for form in FORMS for refresh in refreshes]


ON_ONE_DEVICE = cases(PLAIN, REFRESHES[:1]) + cases(LEARNED, REFRESHES)


def soak(count, cases, seed):
    """So many failures, shared among these methods, forms of a step and kinds of refreshes."""
    draw, found, pairs = random.Random(seed), Counter(), {}
    ranks = dist.is_initialized()
    generator = torch.Generator().manual_seed(seed + (dist.get_rank() if ranks else 0))
    with quiet():
        while _on_all_ranks(found["failures"]) < count:
            case = draw.choice(cases)
            if case not in pairs or pairs[case].steps > 200 or pairs[case].spent:
                pairs[case] = Pair(*case)
            batch = torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator)
            pairs[case].step(batch, draw, found, lonely=ranks and draw.random() < 0.5)
            if found["retries that differ"] or found["failures that did not come"]:
                raise AssertionError(f"{case}: {dict(found)}")
    return found


def _on_all_ranks(number):
    if not dist.is_initialized():
        return number
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def check(what, found, record_property):
    show(what, found, record_property)
    wrong = found.keys() - {"failures", "retries compared", "refreshes without a product"}
    assert not any(found[what] for what in wrong)


def test_a_few(record_property):
    check("a few random failures", soak(150, ON_ONE_DEVICE, seed=0), record_property)


@pytest.mark.slow
def test_many(record_property):
    """`LLQR_SOAK` of them: 10^3 by default, 10^5 before a release."""
    check("random failures", soak(MANY, ON_ONE_DEVICE, seed=1), record_property)


@pytest.mark.slow
def test_captured(record_property):
    count = MANY // 20
    if not torch.cuda.is_available():
        pytest.skip(f"{count} failures in captured refreshes: CUDA graphs need a GPU")
    check("random failures in captured refreshes", soak(count, cases(LEARNED, CAPTURED), seed=2), record_property)


def on_each_rank(rank, world, count):
    """At the same call on all ranks, whose geometries learn one metric, or in the network of one rank."""
    return dict(soak(count, cases(LEARNED, REFRESHES), seed=3))


@pytest.mark.slow
def test_two_ranks(tmp_path, record_property):
    found = on_ranks(2, tmp_path, partial(on_each_rank, count=MANY // 20), seconds=1800 + MANY // 10)
    both = {name: sum(counts.get(name, 0) for counts in found) for name in found[0] | found[1]}
    check("random failures on two ranks", both, record_property)
