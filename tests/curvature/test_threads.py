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


class Meeting(torch.nn.Linear):
    """Says when it is called for the first time, and then waits for something."""

    def __init__(self, called: threading.Event, awaited: threading.Event) -> None:
        super().__init__(5, 3)
        self.events = called, awaited

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called, awaited = self.events
        called.set()
        assert awaited.wait(60)
        return super().forward(x)


def test_threads_that_begin_together_leave_compilation_on():
    """torch's switch is one for all of them: one that begins second and ends last must not put back what it found."""
    from torch._dynamo import eval_frame

    (batch,) = batches(1)
    first_inside, second_inside, first_done = (threading.Event() for _ in range(3))
    first, second = Meeting(first_inside, second_inside), Meeting(second_inside, first_done)

    def learn(model):
        flat_geometry(model, cross_entropy, steps=2, engine="double-backward").refresh(batch)

    threads = [threading.Thread(target=learn, args=(model,)) for model in (first, second)]
    threads[0].start()
    assert first_inside.wait(60)
    threads[1].start()
    threads[0].join()
    first_done.set()
    threads[1].join()
    assert eval_frame._stance.stance == "default"
