"""Checks that test_state runs on two ranks: `python -m tests.trainer.engines.state_ranks RANK DIRECTORY`.

DIRECTORY holds `model` and, for each rank N of LoRA adapters, a checkpoint of one process, `from_one_N`, and its
weights after one more step, `next_N.safetensors`. Each check writes its outcome to `outcomes_RANK.json`: null or a
traceback.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from asyncrl.core.failures import AsyncRLError, ConfigError
from tests.fakes.wrapped_model import Wrapper, wrap
from trainer.engines.base import EngineSpec
from trainer.engines.compute.lora import add_lora
from trainer.engines.compute.optim import adamw
from trainer.engines.models import load_model
from trainer.engines.state.adapters import adapter_weights
from trainer.engines.state.checkpoint import begin_save, load
from trainer.engines.state.weights import full_weights

KINDS: tuple[Wrapper, ...] = ("fsdp2", "fsdp", "ddp")
ADAPTER_RANKS = (0, 3)


def make_spec(model: Path, adapters: int = 0, *, lr: float = 1e-2) -> EngineSpec:
    config = ModelConfig(path=str(model), lora_rank=adapters)
    return EngineSpec("language_model", config, EngineConfig(), OptimConfig(lr=lr))


def make(spec: EngineSpec, kind: Wrapper = "local", *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = load_model(spec.model.path)
    model = wrap(kind, add_lora(model, spec.model).train())
    assert spec.optim is not None
    return model, adamw(model, spec.optim)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take the same step on every rank, so that the mean over ranks equals the step of one process."""
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_weights(model)}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def reshard(directory: Path, kind: Wrapper, adapters: int) -> None:
    """Load the checkpoint of one process, take the same next step, and save a checkpoint for one process."""
    spec = make_spec(directory / "model", adapters)
    model, optimizer = make(spec, kind, seed=1)
    assert load(directory / f"from_one_{adapters}", model, optimizer, spec) == 2
    target = directory / f"{kind}_{adapters}"
    begin_save(target, model, optimizer, 2, spec, hf=target / "hf").wait()
    step(model, optimizer)
    after, expected = snapshot(model), load_file(directory / f"next_{adapters}.safetensors")
    if dist.get_rank() == 0:  # not bit for bit, because the optimizer's kernel rounds the ends of a shard differently
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)


def between_backends(directory: Path, source: str, kind: Wrapper, adapters: int) -> None:
    spec = make_spec(directory / "model", adapters)
    model, optimizer = make(spec, kind, seed=1)
    assert load(directory / f"{source}_{adapters}", model, optimizer, spec) == 2
    saved = load_model(str(directory / f"{source}_{adapters}" / "hf")).named_parameters()
    if dist.get_rank() == 0:
        assert_same(snapshot(model), {name: parameter.detach() for name, parameter in saved})
    else:
        snapshot(model)


def export(directory: Path, kind: Wrapper, adapters: int) -> None:
    """Check that ranks export the whole model in another type, with adapters merged before rounding."""
    spec = make_spec(directory / "model", adapters)
    model, optimizer = make(spec, kind)
    step(model, optimizer)
    target = directory / f"export_{kind}_{adapters}"
    begin_save(target, model, optimizer, 1, spec, hf=target / "hf", hf_dtype="bfloat16").wait()
    expected = dict(full_weights(model, "bfloat16"))
    if dist.get_rank() == 0:
        saved = load_file(target / "hf" / "model.safetensors")
        assert_same({name: saved[name] for name in expected}, expected)
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def published_adapters(directory: Path, kind: Wrapper) -> None:
    """Check that the adapters of two ranks are those of the whole model, on rank 0 only."""
    spec = make_spec(directory / "model", adapters=3)
    model, optimizer = make(spec, kind)
    step(model, optimizer)
    published, merged = dict(adapter_weights(model)), dict(full_weights(model))
    assert {tensor.numel() > 0 for tensor in published.values()} == {dist.get_rank() == 0}
    if dist.get_rank() == 0:
        weights = {name: weight.detach().clone() for name, weight in load_model(spec.model.path).named_parameters()}
        for name in published:
            if ".lora_A." in name:
                plain = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                weights[plain] += published[name.replace("lora_A", "lora_B")] @ published[name]
        torch.testing.assert_close({name: weights[name] for name in merged}, merged, rtol=0, atol=1e-6)


def before_the_first_step(directory: Path, kind: Wrapper) -> None:
    """Check that loading a checkpoint without moments resets those of the optimizer."""
    spec = make_spec(directory / "model")
    model, optimizer = make(spec, kind)
    begin_save(directory / f"fresh_{kind}", model, optimizer, 0, spec).wait()
    start = snapshot(model)
    step(model, optimizer)
    first = snapshot(model)
    step(model, optimizer)
    assert load(directory / f"fresh_{kind}", model, optimizer, spec) == 0
    assert_same(snapshot(model), start)
    step(model, optimizer)
    assert_same(snapshot(model), first)


def beside_training(directory: Path) -> None:
    """Check that a checkpoint has the state at its call, and that waiting for it does not disturb training's
    collectives."""
    spec = make_spec(directory / "model")
    model, optimizer = make(spec, "fsdp2")
    step(model, optimizer)
    begun = snapshot(model)
    pending = begin_save(directory / "beside", model, optimizer, 1, spec)
    if dist.get_rank() == 0:
        time.sleep(0.05)  # the threads of the two ranks run at different times
    waiter = threading.Thread(target=pending.wait)
    waiter.start()
    for _ in range(20):
        step(model, optimizer)
    waiter.join()
    load(directory / "beside", model, optimizer, spec)
    assert_same(snapshot(model), begun)


def one_rank_cannot_write(directory: Path) -> None:
    target = directory / "unwritable"
    if dist.get_rank() == 1:
        (target / "rng_1.safetensors").mkdir()  # a directory takes the place of the file
    dist.barrier()
    spec = make_spec(directory / "model")
    model, optimizer = make(spec, "fsdp2")
    pending = begin_save(target, model, optimizer, 0, spec)
    assert "rng_1.safetensors" in str(_failure(pending.wait))


def one_rank_cannot_read(directory: Path, damage: str, words: str) -> None:
    spec = make_spec(directory / "model")
    model, optimizer = make(spec, "fsdp2", seed=1)
    before, generator = snapshot(model), torch.get_rng_state()
    error = _failure(lambda: load(directory / damage, model, optimizer, spec))
    assert isinstance(error, ConfigError)
    assert words in str(error)
    assert_same(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state


def gathered_layer_by_layer(directory: Path) -> None:
    """Check that the export yields the first decoder layer before it gathers the second one."""
    model, _ = make(make_spec(directory / "model", adapters=3), "fsdp2")
    gathered = 0
    original = DTensor.full_tensor

    def counting(self: DTensor, **kwargs: object) -> Tensor:
        nonlocal gathered
        gathered += 1
        return original(self, **kwargs)  # type: ignore[arg-type]

    DTensor.full_tensor = counting  # type: ignore[method-assign]
    try:
        names = [(name, gathered) for name, _ in full_weights(model)]
    finally:
        DTensor.full_tensor = original  # type: ignore[method-assign]
    # 1 embedding; 7 matrices of the layer, each with 2 adapters; 2 norms; 1 matrix of the next layer with 2 adapters.
    assert max(count for name, count in names if ".layers.0." in name) <= 1 + 7 * 3 + 2 + 3


def _failure(call: Callable[[], object]) -> AsyncRLError:
    try:
        call()
    except AsyncRLError as error:
        return error
    raise AssertionError("the call raised no error")


def checks(directory: Path) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for adapters in ADAPTER_RANKS:
        for kind in KINDS:
            found[f"reshard {kind} {adapters}"] = lambda k=kind, a=adapters: reshard(directory, k, a)  # type: ignore[misc]
        for source, kind in zip(("ddp", "fsdp2", "fsdp"), KINDS, strict=True):
            found[f"{source} to {kind} {adapters}"] = partial(between_backends, directory, source, kind, adapters)
            found[f"export {kind} {adapters}"] = partial(export, directory, kind, adapters)
    for kind in KINDS:
        found[f"adapters {kind}"] = partial(published_adapters, directory, kind)
        found[f"fresh {kind}"] = lambda k=kind: before_the_first_step(directory, k)  # type: ignore[misc]
    found["beside training"] = lambda: beside_training(directory)
    found["unwritable"] = lambda: one_rank_cannot_write(directory)
    for damage, words in DAMAGES.items():
        found[damage] = lambda d=damage, w=words: one_rank_cannot_read(directory, d, w)  # type: ignore[misc]
    found["layer by layer"] = lambda: gathered_layer_by_layer(directory)
    return found


DAMAGES = {"torn": "rank_00001.safetensors", "without_rng": "rng_1.safetensors"}
"""Checkpoints that only the second rank cannot read, and the file that its error names."""
DIRECTORIES = (
    "beside",
    "unwritable",
    *(f"fresh_{k}" for k in KINDS),
    *(f"{k}_{a}" for k in KINDS for a in ADAPTER_RANKS),
    *(f"export_{k}_{a}" for k in KINDS for a in ADAPTER_RANKS),
)


def damage(directory: Path) -> None:
    """Write checkpoints on two ranks and damage the second rank's file."""
    spec = make_spec(directory / "model")
    for name in DAMAGES:
        model, optimizer = make(spec, "fsdp2")
        step(model, optimizer)
        begin_save(directory / name, model, optimizer, 1, spec).wait()
        if dist.get_rank() == 1:
            path = next((directory / name).rglob(DAMAGES[name]))
            content = path.read_bytes()
            path.unlink()
            if name == "torn":
                path.write_bytes(content[: len(content) // 2])
        dist.barrier()


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    damage(directory)
    outcomes: dict[str, str | None] = {}
    for name, check in checks(directory).items():
        try:
            check()
            outcomes[name] = None
        except Exception:  # noqa: BLE001 - reported by the test of that name
            outcomes[name] = traceback.format_exc()
        (directory / f"outcomes_{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
