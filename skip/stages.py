"""Stages other than generation: the roles `reward`, `ref_log_prob` and `tool`."""

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

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.reward import JUDGE_PROMPT, has_conversations
from asyncrl.core.ports import Score
from asyncrl.core.text import encodable
from asyncrl.core.trajectory import CallStatus, Trajectory, TurnInfo
from asyncrl.core.types import Prompt
from skip.fingerprint import Fingerprint, field, model_identity, tokenizer_identity
from skip.generation import step_of_sample
from skip.record import Content
from skip.record_role import Call, RecordSkip, Served
from skip.role import SkipAction, register_skip

if TYPE_CHECKING:
    from torch import Tensor

CODE = "1"
"""Version of the code that computes rewards; it is incremented when rewards would differ from earlier records."""


@register_skip("reward")
class RewardSkip(RecordSkip):
    """The role of a function or method that takes arguments of these names:

        async def score(sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]

    The step is the sample's feed index. `repeat` searches other steps for the scores of exactly these responses,
    because generation may be repeated from those steps. Scores of other responses would be wrong, and nothing would
    show it.
    """

    support_online_step = True

    def extract_step(self, call: Call) -> int:
        return step_of_sample(call["sample_id"], self.active.key)

    @functools.cached_property
    def _scorer(self) -> Fingerprint:
        """Return the fingerprint of all scorers: the digests of functions' files, without imports, and of models."""
        values = self.run.identity_values()
        reward, model = values["reward"], self.run.reward_model
        # With `worker` the Trainer runs the model; here, the placement only decides whether `Score.extra` is filled.
        served_model = []
        if model.placement == "serve" and model.path is not None:
            its = ModelConfig(path=model.path)
            served_model = [model_identity(its), tokenizer_identity(its), model.weight]
        return {
            "function": field(reward["function"]),
            "source": _source_digest(self.run.reward.function),
            "kwargs": _any_field(reward["kwargs"]),
            "batch": field(reward["batch"]),
            "weight": field(reward["weight"]),
            **_other_sources(self.run, reward),
            "reward_model": field([model.placement, *served_model]),
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
            "response_ids": field([_row_tokens(trajectory) for trajectory in trajectories]),
            **_conversations(trajectories),
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

    def to_result(self, call: Call, served: Served) -> list[Score]:
        data, trajectories = served.record.content.data, call["trajectories"]
        rewards, extras = data["rewards"], data["extras"]
        turns = data["turn_rewards"] if "turn_rewards" in data else [[] for _ in rewards]
        if not len(rewards) == len(extras) == len(turns) == len(trajectories):
            lengths = f"{len(rewards)} rewards, {len(extras)} extras and {len(turns)} lists of turn rewards"
            raise ValueError(f"it has {lengths}, and {len(trajectories)} trajectories are scored")
        return [
            _score(reward, extra, own, num_turns=len(trajectory.turns))
            for reward, extra, own, trajectory in zip(rewards, extras, turns, trajectories, strict=True)
        ]


@register_skip("ref_log_prob")
class RefLogProbSkip(RecordSkip):
    """The role of `async _ref_log_probs(self, request: TensorDict) -> Tensor`.

    The result is float32 and has the shape of `request["response_mask"]`. The step is the one of
    `SkipManager.set_step`, the first optimizer step that the Trainer takes with these rows.
    """

    # Log-probs belong to their tokens, so those of another step are useless.
    support_actions = (SkipAction.CACHE,)

    @functools.cached_property
    def _reference(self) -> Fingerprint:
        config = self.run
        # With LoRA the reference may be the policy without its adapters, in the policy's engine.
        is_actor = config.model.lora_rank > 0 and config.ref.placement == "actor"
        own = config.trainer if is_actor else config.ref
        return {
            "model": model_identity(config.model),
            "dtype": own.dtype or config.trainer.dtype,
            "strategy": own.strategy or config.trainer.strategy,
            "temperature": field(config.rollout.sampling.temperature),
        }

    def fingerprint(self, call: Call) -> Fingerprint:
        request = call["request"]
        # A forward pass does not depend on the loss mask.
        names = sorted(request.keys() - {"loss_mask"})
        tensors = {name: field(request[name].numpy(force=True)) for name in names}
        return {**tensors, **self._reference}

    def to_content(self, call: Call, result: Tensor) -> Content:
        log_probs, mask = result.numpy(force=True), call["request"]["response_mask"].numpy(force=True)
        if log_probs.shape != mask.shape or log_probs.dtype != np.float32:
            raise ValueError(
                f"log-probs are {log_probs.dtype} {list(log_probs.shape)}, and float32 {list(mask.shape)} are requested"
            )
        if not np.isfinite(log_probs[mask]).all():
            raise ValueError("log-probs of the reference are not all finite, which stops the run")
        return Content({"ref_log_probs": log_probs.ravel()}, {"shape": list(log_probs.shape)})

    def to_result(self, call: Call, served: Served) -> Tensor:
        import torch

        content, shape = served.record.content, list(call["request"]["response_mask"].shape)
        log_probs = content.arrays["ref_log_probs"]
        if content.data["shape"] != shape or log_probs.dtype != np.float32:
            raise ValueError(
                f"it has {log_probs.dtype} log-probs {content.data['shape']}, and float32 {shape} are requested"
            )
        return torch.from_numpy(log_probs.reshape(shape).copy())  # the record's array is read-only


class ToolOutcome(NamedTuple):
    """The result of a call to a tool."""

    text: str = ""
    """Text for the model."""
    reward: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})
    status: CallStatus = "ok"
    done: bool = False
    """The trajectory ends with this call."""
    duration_s: float = 0.0
    """Time in the tool. Not recorded, because a replay takes no time."""
    wait_s: float = 0.0
    """Time waiting for a free slot or the tool's rate limit. Not recorded."""
    replayed: bool = False


@register_skip("tool")
class ToolSkip(RecordSkip):
    """The role of a function or method that makes one call to a tool and takes arguments of these names:

        async def call(
            sample_id: SampleId, trajectory: int, turn: int, name: str, arguments: Any, background: Mapping[str, Any]
        ) -> ToolOutcome

    The optional `background` contains, by name, further values that the outcome depends on: the prompt, and the earlier
    calls, which determine the tool's state. The step is the sample's feed index. Each call of a sample has a
    separate record, but equal calls in one turn share one.
    """

    support_online_step = True
    # `repeat` would find the call in another sample, with another conversation and state.
    support_actions = (SkipAction.CACHE,)

    def extract_step(self, call: Call) -> int:
        return step_of_sample(call["sample_id"], self.active.key)

    def call_name(self, call: Call) -> str:
        text = _text([call[name] for name in ("trajectory", "turn", "name", "arguments")])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def _tools(self) -> str:
        """The fingerprint of the tools' code and configuration, except call limits and the `env` of servers."""
        tools = []
        values = self.run.identity_values()["rollout"]["multi_turn"]["tools"]
        for tool, value in zip(self.run.rollout.multi_turn.tools, values, strict=True):
            server = None if tool.mcp is None else [value["mcp"]["command"], value["mcp"]["url"]]
            source = _source_digest(tool.class_name or tool.function or "")
            given = [value[name] for name in ("config", "tool_schema")]
            tools.append([value["class_name"], value["function"], server, *given, source])
        return _any_field(tools)

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
            raise TypeError(f"a call to a tool returns a ToolOutcome, not {type(result).__name__}")
        metrics = {name: float(value) for name, value in result.metrics.items()}
        values = {"text": result.text, "status": result.status, "done": result.done}
        return Content(data={**values, "reward": float(result.reward), "metrics": metrics})

    def to_result(self, call: Call, served: Served) -> ToolOutcome:
        return _outcome(**served.record.content.data)


def _outcome(text: Any, reward: Any, metrics: Any, status: Any, done: Any) -> ToolOutcome:
    is_valid = isinstance(text, str) and isinstance(done, bool) and status in get_args(CallStatus)
    if not (is_valid and isinstance(metrics, dict) and all(isinstance(n, float) for n in (reward, *metrics.values()))):
        raise ValueError(f"{text!r} with {status!r}, {reward!r}, {metrics!r} and {done!r} is not the outcome of a call")
    return ToolOutcome(encodable(text), reward, metrics, status, done, replayed=True)


def _row_tokens(trajectory: Trajectory) -> Any:
    """Return the response tokens; if there are several rows, also their prompts, which differ from the sample's."""
    if len(trajectory.rows) == 1:
        return trajectory.rows[0].response_ids
    return [[row.prompt_ids, row.response_ids] for row in trajectory.rows]


def _conversations(trajectories: Sequence[Trajectory]) -> Fingerprint:
    """Return the further values that rewards of conversations depend on, without durations."""
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


def _other_sources(config: Config, reward: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of the run's reward sources other than the function and the reward model; `reward` has the
    `identity_values` of the section."""
    judge, sources = reward["judge"], {}
    if reward["functions"]:
        entries = zip(config.reward.functions, reward["functions"], strict=True)
        sources["functions"] = _any_field([[_source_digest(entry.function), value] for entry, value in entries])
    if has_conversations(config):
        sources["conversation_weights"] = field([reward["tool_weight"], reward["turn_weight"]])
    if config.reward.judge.model is not None:
        settings = judge | {"prompt": JUDGE_PROMPT if judge["prompt"] is None else judge["prompt"]}
        names = ("model", "base_url", "prompt", "pattern", "min", "max", "weight", "params")
        sources["judge"] = _any_field([settings[name] for name in names])
    return sources


def _score(reward: Any, extra: Any, turns: Any, *, num_turns: int) -> Score:
    if not (isinstance(extra, dict) and isinstance(turns, list) and len(turns) in (0, num_turns)):
        raise ValueError(f"{extra!r} and {turns!r} are not extras and rewards of {num_turns} turns")
    if not all(isinstance(number, float) for number in (reward, *extra.values(), *turns)):
        raise ValueError(f"{reward!r} with {extra!r} and {turns!r} is not a score")
    return Score(reward, extra, tuple(turns))


# ------------------------------------------------------------------------------------------------ user code and data


def _source_digest(function: str) -> str:
    """Return the digest of the file of `function` (`module:name` or `path/file.py:name`); empty: there is no file."""
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
    """Return the `field` of a value of any type, as the columns of a dataset may contain anything.

    Values without a JSON form are represented by their `repr`; if it differs between processes, no record matches.
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
        if value.dtype.hasobject:  # its bytes are memory addresses
            return _plain(value.tolist())
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.bool_ | np.integer | np.floating) and not isinstance(value, np.longdouble):
        return value.item()
    return f"{type(value).__qualname__} {value!r}"
