"""Activations kept on CPU: the same gradient, and weights are not among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.engine import offload


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
        with offload.activations_on_cpu(min_bytes):
            loss = net(inputs)
        loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], net


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_the_gradient_is_the_same(min_bytes: int) -> None:
    for got, expected in zip(gradient(min_bytes)[0], gradient(None)[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_only_large_activations_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []
    copy = Tensor.copy_

    def counting(target: Tensor, source: Tensor) -> Tensor:
        copied.append(tuple(source.shape))
        return copy(target, source)

    gradient(None)  # nothing of a backward pass itself is counted
    monkeypatch.setattr(Tensor, "copy_", counting)
    gradient(0)
    assert set(copied) == {(16, 8), (16, 32)}, "inputs of layers, and no weights of shape (32, 8) or (8, 32)"
    copied.clear()
    gradient(16 * 32 * 4)
    assert set(copied) == {(16, 32)}
