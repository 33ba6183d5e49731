"""Which GPU a rank takes. That processes start and end is tested with the groups."""

from __future__ import annotations

import pytest

from trainer.processes import Place, local_ranks, own_gpu


@pytest.mark.parametrize(
    ("assigned", "visible", "gpu"),
    [
        ([], None, 0),
        (["3"], "3", 0),
        (["3"], None, 3),
        (["3"], "1,3", 1),
        (["GPU-b"], "GPU-a,GPU-b", 1),
    ],
    ids=["on CPU", "Ray shows only its own", "Ray leaves all", "all of those the machine gives", "by UUID"],
)
def test_the_gpu_that_ray_has_assigned(assigned: list[str], visible: str | None, gpu: int) -> None:
    assert own_gpu(assigned, visible) == gpu


def test_local_ranks() -> None:
    """On CPU as torchrun counts them; on GPUs they say which one to take, wherever the ranks are."""
    places = [Place(node, "10.0.0.1", 1, gpu) for node, gpu in [("a", 2), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]]
    assert local_ranks(places, "cpu") == [0, 0, 1, 2, 1]
    assert local_ranks(places, "cuda") == [2, 0, 0, 1, 1]
