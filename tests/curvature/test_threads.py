"""Two threads that learn in forward mode, of which the process has one."""

import threading

import pytest
import torch

from geometries import flat_geometry
from traps.training import assert_same_bits, batches, cross_entropy, mlp


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
def test_two_threads_in_forward_mode_do_not_disturb_one_another(divergence):
    (batch,) = batches(1)
    settings = {"engine": "forward", "steps": 20, "lr": 0.01, "divergence": divergence}
    alone = flat_geometry(mlp(), cross_entropy, **settings)
    for _ in range(3):
        alone.refresh(batch)
    expected = alone.metric.named_factors()
    geometries = [flat_geometry(mlp(), cross_entropy, **settings) for _ in range(3)]
    errors = []

    def learn(geometry):
        try:
            for _ in range(3):
                geometry.refresh(batch)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=learn, args=(geometry,)) for geometry in geometries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for geometry in geometries:
        assert_same_bits(geometry.metric.named_factors(), expected)
    assert torch.is_grad_enabled()
