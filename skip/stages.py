"""The stages beside generation: the roles `reward`, `ref_log_prob` and `tool`. No torch, but to make a tensor."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from asyncrl.config.reward_rules import has_conversations
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.ports import Score
from asyncrl.trajectory import CallStatus, Trajectory, TurnInfo
from asyncrl.types import Prompt
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
    """Around a function or method with these arguments by name:

        async def score(sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]

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
            **_other_sources(self.run),
            "reward_model": field([model.placement, *model_asked]),
            "tokenizer": tokenizer_identity(self.run.model),
            "code": CODE,
        }

    def may_serve(self, served: Served) -> bool:
        return not served.differs

    def fingerprint(self, call: Call) -> Fingerprint:
        prompt: Prompt = call["prompt"]
        trajectories: Sequence[Trajectory] = call["trajectories"]
        return {
            "prompt_ids": field(prompt.prompt_ids),
            "response_ids": field([_each_row(trajectory) for trajectory in trajectories]),
            **_courses(trajectories),
            "messages": _any_field(prompt.messages),
            "data_source": _any_field(prompt.data_source),
            "ground_truth": _any_field(prompt.ground_truth),
            "extra_info": _any_field(prompt.extra_info),
            **self._scorer,
        }

    def to_content(self, call: Call, result: Sequence[Score]) -> Content:
        rewards = [float(score.reward) for score in result]
        extras = [{name: float(value) for name, value in score.extra.items()} for score in result]
        turns = [[float(value) for value in score.turn_rewards] for score in result]
        return Content(data={"rewards": rewards, "extras": extras, **({"turn_rewards": turns} if any(turns) else {})})

    def prepare_data(self, call: Call, served: Served) -> list[Score]:
        data, trajectories = served.record.content.data, call["trajectories"]
        rewards, extras = data["rewards"], data["extras"]
        turns = data["turn_rewards"] if "turn_rewards" in data else [[] for _ in rewards]
        if not len(rewards) == len(extras) == len(turns) == len(trajectories):
            told = f"{len(rewards)} rewards, {len(extras)} extras and rewards of turns for {len(turns)}"
            raise ValueError(f"it has {told}, and {len(trajectories)} trajectories are scored")
        return [
            _score(reward, extra, own, num_turns=len(trajectory.turns))
            for reward, extra, own, trajectory in zip(rewards, extras, turns, trajectories, strict=True)
        ]


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


class ToolOutcome(NamedTuple):
    """What a call to a tool comes to."""

    text: str = ""
    """For the model."""
    reward: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})
    status: CallStatus = "ok"
    done: bool = False
    """The trajectory ends with this call."""
    duration_s: float = 0.0
    """In the tool. Not recorded: what is replayed takes no time."""
    wait_s: float = 0.0
    """For a place, or the tool's rate. Not recorded."""
    replayed: bool = False


@register_skip("tool")
class ToolSkip(BaseSkip):
    """Around one call to a tool, a function or method with these arguments by name:

        async def call(
            sample_id: SampleId, trajectory: int, turn: int, name: str, arguments: Any, background: Mapping[str, Any]
        ) -> ToolOutcome

    `background`, by name, is what the outcome depends on besides: the prompt, and the calls before, which made the
    tool's state. It may be left out where there is nothing. The step is the last part of the sample's id. Each call of
    a sample has a record of its own, but that the same call made twice in one turn has one.
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

    @functools.cached_property
    def _tools(self) -> str:
        """What the tools are made of; not the limits of their calls, nor what a server is told in its environment."""
        told = []
        for tool in self.run.rollout.multi_turn.tools:
            server = None if tool.mcp is None else [tool.mcp.command, tool.mcp.url]
            source = _source_digest(tool.class_name or tool.function or "")
            told.append([tool.class_name, tool.function, server, tool.config, tool.tool_schema, source])
        return _any_field(told)

    def fingerprint(self, call: Call) -> Fingerprint:
        background = call.arguments.get("background", {})
        return {
            **{name: _any_field(value) for name, value in background.items()},
            "name": _any_field(call["name"]),
            "arguments": _any_field(call["arguments"]),
            "tools": self._tools,
        }

    def to_content(self, call: Call, result: ToolOutcome) -> Content:
        if not isinstance(result, ToolOutcome):
            raise TypeError(f"a call to a tool gives a ToolOutcome, not {type(result).__name__}")
        metrics = {name: float(value) for name, value in result.metrics.items()}
        told = {"text": result.text, "status": result.status, "done": result.done}
        return Content(data={**told, "reward": float(result.reward), "metrics": metrics})

    def prepare_data(self, call: Call, served: Served) -> ToolOutcome:
        return _outcome(**served.record.content.data)


def _outcome(text: Any, reward: Any, metrics: Any, status: Any, done: Any) -> ToolOutcome:
    sound = isinstance(text, str) and isinstance(done, bool) and status in get_args(CallStatus)
    if not (sound and isinstance(metrics, dict) and all(isinstance(n, float) for n in (reward, *metrics.values()))):
        raise ValueError(f"{text!r} with {status!r}, {reward!r}, {metrics!r} and {done!r} is no outcome of a call")
    return ToolOutcome(text, reward, metrics, status, done, replayed=True)


def _each_row(trajectory: Trajectory) -> Any:
    """Response tokens; of a trajectory with several rows, prompts too: the later ones are no part of the sample's."""
    if len(trajectory.rows) == 1:
        return trajectory.rows[0].response_ids
    return [[row.prompt_ids, row.response_ids] for row in trajectory.rows]


def _courses(trajectories: Sequence[Trajectory]) -> Fingerprint:
    """What else rewards are made from, of conversations; how long anything took is none of it."""
    if not any(trajectory.messages for trajectory in trajectories):
        return {}
    each = [
        {
            "messages": trajectory.messages,
            "turns": [_turn(turn) for turn in trajectory.turns],
            "scores": trajectory.scores,
            "finish_reason": str(trajectory.finish_reason),
        }
        for trajectory in trajectories
    ]
    return {"conversations": _any_field(each)}


def _turn(turn: TurnInfo) -> list[Any]:
    calls = [[call.name, call.arguments, call.result, call.status, call.reward] for call in turn.calls]
    return [turn.row, turn.first_token, turn.num_tokens, str(turn.finish_reason), turn.reward, calls]


def _other_sources(config: Config) -> Fingerprint:
    """Those beside the function and the reward model, where a run has any."""
    reward, judge, told = config.reward, config.reward.judge, {}
    if reward.functions:
        each = [[_source_digest(entry.function), entry.model_dump()] for entry in reward.functions]
        told["functions"] = _any_field(each)
    if has_conversations(config):
        told["conversation_weights"] = field([reward.tool_weight, reward.turn_weight])
    if judge.model is not None:
        asked = [judge.model, judge.base_url, judge.template, judge.pattern, judge.min, judge.max, judge.weight]
        told["judge"] = _any_field([*asked, judge.params])
    return told


def _score(reward: Any, extra: Any, turns: Any, *, num_turns: int) -> Score:
    if not (isinstance(extra, dict) and isinstance(turns, list) and len(turns) in (0, num_turns)):
        raise ValueError(f"{extra!r} and {turns!r} are no extras and rewards of {num_turns} turns")
    if not all(isinstance(number, float) for number in (reward, *extra.values(), *turns)):
        raise ValueError(f"{reward!r} with {extra!r} and {turns!r} is no score")
    return Score(reward, extra, tuple(turns))


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
