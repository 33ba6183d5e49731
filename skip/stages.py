"""The stages beside generation: the roles `reward`, `ref_log_prob` and `tool`. No torch, but to make a tensor."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.config.schema import ModelConfig
from asyncrl.ports import Score
from asyncrl.types import Prompt, Turn
from skip.base import Action, BaseSkip, Call, Served
from skip.fingerprint import Fingerprint, field
from skip.generation import step_of_sample
from skip.identity import model_identity, tokenizer_identity
from skip.record import Content
from skip.registry import register_skip

if TYPE_CHECKING:
    from torch import Tensor

CODE = "1"
"""Raised when the rewards recorded before would not be what this version gives."""


@register_skip("reward")
class RewardSkip(BaseSkip):
    """Around `async score(self, sample_id: SampleId, prompt: Prompt, turns: Sequence[Turn]) -> list[Score]`.

    The step is the last part of the sample's id. `repeat` looks at other steps for the scores of the very same
    responses, where generation is repeated from the same steps: scores of others would be wrong, and unmarked.
    """

    support_online_step = True

    def extract_step(self, call: Call) -> int:
        """
        Raises:
            BugError: the id is none.
        """
        return step_of_sample(call["sample_id"], self.role)

    @functools.cached_property
    def _scorer(self) -> Fingerprint:
        """What scores, whatever it is given. Of a function, the file it is in; not what that imports."""
        reward, model = self.run.reward, self.run.reward_model
        # A worker scores for the Trainer; here it only makes `Score.extra` tell the parts.
        model_asked = []
        if model.placement == "serve" and model.path is not None:
            its = ModelConfig(path=model.path)
            model_asked = [model_identity(its), tokenizer_identity(its), model.weight]
        return {
            "function": field(reward.function),
            "source": _source_digest(reward.function),
            "kwargs": _any_field(reward.kwargs),
            "batch": field(reward.batch),
            "weight": field(reward.weight),
            "reward_model": field([model.placement, *model_asked]),
            "tokenizer": tokenizer_identity(self.run.model),
            "code": CODE,
        }

    def may_serve(self, served: Served) -> bool:
        return not served.differs

    def fingerprint(self, call: Call) -> Fingerprint:
        prompt: Prompt = call["prompt"]
        turns: Sequence[Turn] = call["turns"]
        return {
            "prompt_ids": field(prompt.prompt_ids),
            "response_ids": field([turn.response_ids for turn in turns]),
            "messages": _any_field(prompt.messages),
            "data_source": _any_field(prompt.data_source),
            "ground_truth": _any_field(prompt.ground_truth),
            "extra_info": _any_field(prompt.extra_info),
            **self._scorer,
        }

    def to_content(self, call: Call, result: Sequence[Score]) -> Content:
        rewards = [float(score.reward) for score in result]
        extras = [{name: float(value) for name, value in score.extra.items()} for score in result]
        return Content(data={"rewards": rewards, "extras": extras})

    def prepare_data(self, call: Call, served: Served) -> list[Score]:
        data = served.record.content.data
        rewards, extras, wanted = data["rewards"], data["extras"], len(call["turns"])
        if not len(rewards) == len(extras) == wanted:
            raise ValueError(f"it has {len(rewards)} rewards and {len(extras)} extras, and {wanted} turns are scored")
        return [_score(reward, extra) for reward, extra in zip(rewards, extras, strict=True)]


@register_skip("ref_log_prob")
class RefLogProbSkip(BaseSkip):
    """Around `async _ref_log_probs(self, asked: TensorDict) -> Tensor`, float32, of `asked["response_mask"]`'s shape.

    The step is `SkipManager.set_step`'s: the first optimizer step that the Trainer takes with what it asks.
    """

    # Log-probs are of their tokens: those of another step's are log-probs of nothing here.
    support_actions = frozenset({Action.CACHE})

    @functools.cached_property
    def _reference(self) -> Fingerprint:
        config = self.run
        # Without a model of its own it is the policy without its adapters, in the policy's engine.
        is_actor = config.model.lora_rank > 0 and config.ref.placement == "actor"
        own = config.trainer if is_actor else config.ref
        return {
            "model": model_identity(config.model),
            "dtype": own.dtype or config.trainer.dtype,
            "strategy": own.strategy or config.trainer.strategy,
            "temperature": field(config.rollout.sampling.temperature),
        }

    def fingerprint(self, call: Call) -> Fingerprint:
        asked = call["asked"]
        # The loss mask is no matter of a forward pass.
        names = sorted(asked.keys() - {"loss_mask"})
        tensors = {name: field(asked[name].numpy(force=True)) for name in names}
        return {**tensors, **self._reference}

    def to_content(self, call: Call, result: Tensor) -> Content:
        log_probs, mask = result.numpy(force=True), call["asked"]["response_mask"].numpy(force=True)
        if log_probs.shape != mask.shape or log_probs.dtype != np.float32:
            told = f"{log_probs.dtype} {list(log_probs.shape)}"
            raise ValueError(f"log-probs are {told}, and float32 {list(mask.shape)} are asked for")
        if not np.isfinite(log_probs[mask]).all():
            raise ValueError("log-probs of the reference are not all finite, which stops the run")
        return Content({"ref_log_probs": log_probs.ravel()}, {"shape": list(log_probs.shape)})

    def prepare_data(self, call: Call, served: Served) -> Tensor:
        import torch

        content, wanted = served.record.content, list(call["asked"]["response_mask"].shape)
        log_probs = content.arrays["ref_log_probs"]
        if content.data["shape"] != wanted or log_probs.dtype != np.float32:
            raise ValueError(
                f"it has {log_probs.dtype} log-probs {content.data['shape']}, and float32 {wanted} are asked for"
            )
        return torch.from_numpy(log_probs.reshape(wanted).copy())  # the record's own array cannot be written to


@register_skip("tool")
class ToolSkip(BaseSkip):
    """Around one call to a tool, a function or method with these arguments by name:

        async def call(sample_id: SampleId, trajectory: int, turn: int, name: str, arguments: Mapping[str, Any]) -> str

    The step is the last part of the sample's id. Each call of a sample has a record of its own, but that the same call
    made twice in one turn has one.
    """

    support_online_step = True
    # `repeat` could only find the same call in another sample, whose conversation and state are not this one's.
    support_actions = frozenset({Action.CACHE})

    def extract_step(self, call: Call) -> int:
        """
        Raises:
            BugError: the id is none.
        """
        return step_of_sample(call["sample_id"], self.role)

    def call_name(self, call: Call) -> str:
        text = _text([call[name] for name in ("trajectory", "turn", "name", "arguments")])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self, call: Call) -> Fingerprint:
        return {"name": _any_field(call["name"]), "arguments": _any_field(call["arguments"])}

    def to_content(self, call: Call, result: str) -> Content:
        return Content(data={"result": _checked_result(result)})

    def prepare_data(self, call: Call, served: Served) -> str:
        return _checked_result(served.record.content.data["result"])


def _score(reward: Any, extra: Any) -> Score:
    if not (isinstance(extra, dict) and all(isinstance(number, float) for number in (reward, *extra.values()))):
        raise ValueError(f"{reward!r} with {extra!r} is no score")
    return Score(reward, extra)


def _checked_result(result: Any) -> str:
    if not isinstance(result, str):
        raise TypeError(f"a tool's result is text, not {type(result).__name__}")
    return result


# ------------------------------------------------------------------------------------------------ the user's own


def _source_digest(function: str) -> str:
    """Of the file with `function`, `module:name` or `path/file.py:name`; empty for a built-in, or if there is none."""
    location = function.rpartition(":")[0]
    if not location:
        return ""
    file = Path(location).expanduser() if location.endswith(".py") else _module_file(location)
    try:
        return "" if file is None else "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def _module_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def _any_field(value: Any) -> str:
    """`field` of a value of any type: a data set's columns hold what they like, and that must not fail a sample.

    What has no meaning in JSON counts by what it prints. Where that is another text in each process, nothing matches.
    """
    return field(_text(value))


def _text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:  # its bytes are addresses
            return _plain(value.tolist())
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.bool_ | np.integer | np.floating) and not isinstance(value, np.longdouble):
        return value.item()
    return f"{type(value).__qualname__} {value!r}"
