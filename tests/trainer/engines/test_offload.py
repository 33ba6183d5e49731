"""Activations offloaded to CPU: the gradient is unchanged, and weights are not offloaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.engines.compute import micro_batches


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(inputs))).square().sum()


def gradient(min_bytes: int | None) -> tuple[list[Tensor], Net]:
    net, inputs = Net(), torch.randn((16, 8), generator=torch.Generator().manual_seed(1))
    if min_bytes is None:
        net(inputs).backward()
    else:
        with micro_batches.activations_on_cpu(min_bytes=min_bytes):
            loss = net(inputs)
        loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], net


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A list of the shapes of tensors that `copy_` reads."""
    shapes: list[tuple[int, ...]] = []
    copy = Tensor.copy_

    def recording(target: Tensor, source: Tensor) -> Tensor:
        shapes.append(tuple(source.shape))
        return copy(target, source)

    monkeypatch.setattr(Tensor, "copy_", recording)
    return shapes


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_offloading_does_not_change_the_gradient(min_bytes: int) -> None:
    for got, expected in zip(gradient(min_bytes)[0], gradient(None)[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_only_large_activations_are_copied(copied: list[tuple[int, ...]]) -> None:
    gradient(None)
    copied.clear()  # ignore the copies of a backward pass without offloading
    gradient(0)
    assert set(copied) == {(16, 8), (16, 32)}, (
        "only inputs of layers are copied, and not weights of shape (32, 8) or (8, 32)"
    )
    copied.clear()
    gradient(16 * 32 * 4)
    assert set(copied) == {(16, 32)}


def test_copies_of_weights_that_autocast_makes_are_not_offloaded(copied: list[tuple[int, ...]]) -> None:
    def run(shapes: frozenset[torch.Size], *, frozen: bool = False) -> set[tuple[int, ...]]:
        net, inputs = Net(), torch.randn((1, 16, 8), requires_grad=True)
        net.requires_grad_(not frozen)
        copied.clear()
        with torch.autocast("cpu", torch.bfloat16), micro_batches.activations_on_cpu(shapes, min_bytes=200):
            loss = net(inputs)
        loss.backward()
        return set(copied)

    weights = {(32, 8), (8, 32)}
    shapes = frozenset(torch.Size(shape) for shape in weights)
    assert run(frozenset()) & weights, "copies of weights count as activations if their shapes are unknown"
    for frozen in (False, True):
        found = run(shapes, frozen=frozen)
        assert found
        assert not found & weights
