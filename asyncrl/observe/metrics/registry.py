"""The registry of all metric names with units and meanings; other names cannot be recorded. Pure.

`python -m asyncrl.observe.metrics.registry > docs/metrics.md` writes it as a page.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from asyncrl.core.failures import BugError
from asyncrl.core.types import DropReason


class Metric(NamedTuple):
    name: str
    """May contain placeholders such as `<data_source>`, which stand for any non-empty text."""
    unit: str
    """`1` for a plain number or a share; otherwise `s`, `tokens`, `samples`, `versions`, `nats`, …"""
    meaning: str


STEP = "On every `step` line: metrics of the Trainer"
LEASE = "On the first `step` line of each lease: metrics of the lease, if they apply"
CORRECTION = "Off-policy correction: on the first `step` line of a lease, or on every `step` line in bypass mode"
DRIVER = "On every `step` line: metrics of the other parts, as last reported (about a second ago at most)"
HEALTH = "On every `step` line: health of the run, as last measured (about 2 s ago; about 10 s ago for ranks)"
APPLY = "On every `apply` line: a version that all replicas have applied"
VALIDATION = "On every `validation` line: results of one version on the validation set"

SKIP_COUNTS = {
    "replayed": (
        "calls of the stage that were answered from the record of the same step or sample, since its process started"
    ),
    "substituted": "calls of the stage that were answered from a record of another step or sample",
    "recorded": "calls of the stage whose result was recorded",
    "mismatched": "calls of the stage whose record has a different origin",
    "damaged": "records that could not be used and are treated as missing",
    "unrecorded": "results that could not be recorded",
}

SECTIONS: dict[str, tuple[Metric, ...]] = {
    STEP: (
        Metric("reward/mean", "1", "mean reward of the step's trajectories, as the Rollouter scored them"),
        Metric("reward/std", "1", "standard deviation of the rewards of the step's trajectories"),
        Metric(
            "reward/extra/<name>",
            "1",
            "mean of an extra value that the reward function returns, over the trajectories that have it",
        ),
        Metric("actor/loss", "1", "the minimized loss: policy loss, plus weighted KL loss, minus weighted entropy"),
        Metric("actor/pg_loss", "1", "policy loss"),
        Metric(
            "actor/kl_loss",
            "nats",
            "estimated KL divergence of the current policy from the reference policy, unweighted",
        ),
        Metric("actor/entropy", "nats", "mean entropy of the current policy per trained token"),
        Metric("actor/grad_norm", "1", "global gradient norm before clipping"),
        Metric("actor/clip_fraction", "1", "share of trained tokens whose probability ratio was clipped"),
        Metric("actor/dual_clip_fraction", "1", "share of trained tokens whose loss was bounded by `clip_ratio_c`"),
        Metric(
            "actor/ratio_mean",
            "1",
            "mean ratio of a token's probability under the current policy to that under the proximal policy",
        ),
        Metric("actor/lr", "1", "learning rate of this step"),
        Metric("actor/mfu", "1", "model FLOPs utilization of rank 0's GPU during the update; absent if it is unknown"),
        Metric(
            "rollout/mismatch_kl",
            "nats",
            "estimated KL divergence of the behaviour policy from the current policy, per token",
        ),
        Metric(
            "rollout/mismatch_kl_age_<n>",
            "nats",
            "`rollout/mismatch_kl` of the tokens that are `<n>` versions old; `age_3`: 3 or more versions",
        ),
        Metric(
            "rollout/token_share_age_<n>",
            "1",
            "share of trained tokens that are `<n>` versions old; `age_3`: 3 or more versions",
        ),
        Metric(
            "response_tokens/mean",
            "tokens",
            "mean length of the step's responses, including tool results",
        ),
        Metric("response_tokens/max", "tokens", "length of the longest response"),
        Metric("response_tokens/length_share", "1", "share of responses that were cut by the length limit"),
        Metric(
            "sampled_tokens/mean",
            "tokens",
            "mean number of response tokens that the policy sampled; absent if it sampled all of them",
        ),
        Metric(
            "rows/per_trajectory", "1", "mean number of rows per trajectory; absent if every trajectory has one row"
        ),
        Metric(
            "staleness/mean",
            "versions",
            "mean staleness of the samples: the Trainer's version minus the version of a sample's oldest token",
        ),
        Metric("staleness/max", "versions", "staleness of the stalest sample"),
        Metric(
            "staleness/share_<n>",
            "1",
            "share of samples with a staleness of `<n>` versions; `share_3`: 3 or more versions",
        ),
        Metric("partial/count", "samples", "samples whose tokens come from more than one version"),
        Metric("partial/ratio", "1", "share of the step's samples whose tokens come from more than one version"),
        Metric(
            "partial/max_span",
            "versions",
            "largest difference between the newest and the oldest version within one sample",
        ),
        Metric("processing_s/mean", "s", "mean time to generate and score a sample"),
        Metric("processing_s/min", "s", "shortest time to generate and score a sample"),
        Metric("processing_s/max", "s", "longest time to generate and score a sample"),
        Metric("processing_s/p50", "s", "median time to generate and score a sample"),
        Metric("processing_s/p95", "s", "95th percentile of the time to generate and score a sample"),
        Metric("processing_s/p99", "s", "99th percentile of the time to generate and score a sample"),
        Metric("skip/replayed_share", "1", "share of the step's samples that were replayed from a record"),
        Metric(
            "skip/substituted_share",
            "1",
            "share of the step's samples that were replayed from the record of another sample",
        ),
        Metric(
            "advantages/zero_share",
            "1",
            "share of samples whose advantages are all 0, which therefore have no policy gradient",
        ),
        Metric("tokens/trained", "tokens", "response tokens that contribute to the gradient of this step"),
        Metric(
            "timing/wait_samples_s",
            "s",
            "time the Trainer waited for the lease that begins with this step; 0 for later steps of a lease",
        ),
        Metric(
            "timing/update_s",
            "s",
            "time of the policy's forward and backward passes, its optimizer step and the commit",
        ),
        Metric(
            "timing/commit_s",
            "s",
            "time to commit the trained samples to the queue and to the Trainer's log; part of `timing/update_s`",
        ),
        Metric("timing/publish_s", "s", "time to publish a version; 0 if the step published none"),
        Metric(
            "timing/gather_s",
            "s",
            (
                "time to collect the weights on rank 0, a part of `timing/publish_s`; absent if the step published "
                "no version"
            ),
        ),
        Metric(
            "timing/put_s",
            "s",
            (
                "time to transfer the weights to the weight store, a part of `timing/publish_s`; absent if the step "
                "published no version"
            ),
        ),
        Metric("timing/step_s", "s", "duration of the whole step, including waits"),
        Metric(
            "time/monotonic_s", "s", "the Trainer's monotonic clock after the step; comparable only within one process"
        ),
    ),
    LEASE: (
        Metric("reward/model_mean", "1", "mean score of the Trainer's reward model, unweighted"),
        Metric("reward/baseline_mean", "1", "mean score of the greedy responses (ReMax)"),
        Metric("reward/overlong_mean", "1", "mean penalty for overlong responses"),
        Metric(
            "reward/kl",
            "nats",
            (
                "estimated KL divergence from the reference policy that the reward is penalized for, per response, "
                "unweighted"
            ),
        ),
        Metric("reward/kl_coef", "1", "weight of the KL penalty in the reward"),
        Metric(
            "reward/shaped_mean",
            "1",
            ("mean reward including the reward model's score and all penalties; absent if none of them is configured"),
        ),
        Metric("advantages/mean", "1", "mean advantage of the tokens to be trained"),
        Metric("advantages/std", "1", "standard deviation of the advantages of the tokens to be trained"),
        Metric("advantages/min", "1", "smallest advantage of a token to be trained"),
        Metric("advantages/max", "1", "largest advantage of a token to be trained"),
        Metric("critic/loss", "1", "value loss, averaged over the critic's steps"),
        Metric("critic/grad_norm", "1", "global gradient norm before clipping, averaged over the critic's steps"),
        Metric("critic/lr", "1", "learning rate, averaged over the critic's steps"),
        Metric("critic/mfu", "1", "model FLOPs utilization as in `actor/mfu`, averaged over the critic's steps"),
        Metric("critic/value_mean", "1", "mean value that the critic predicts while it is trained"),
        Metric("critic/return_mean", "1", "mean return that the critic is trained to predict"),
        Metric("critic/clip_fraction", "1", "share of tokens whose value loss was clipped"),
        Metric(
            "critic/explained_variance",
            "1",
            "share of the returns' variance that the values before the update explain; 1 is a perfect critic",
        ),
        Metric(
            "timing/experience_s",
            "s",
            "time to compute the lease's log-probs, values, scores, advantages and off-policy correction",
        ),
        Metric("timing/update_critic_s", "s", "time of all critic steps on the lease"),
    ),
    CORRECTION: (
        Metric(
            "correction/mismatch_kl",
            "nats",
            "estimated KL divergence of the behaviour policy from the proximal policy, per token",
        ),
        Metric(
            "correction/mismatch_kl_age_<n>",
            "nats",
            "`correction/mismatch_kl` of the tokens that are `<n>` versions old; `age_3`: 3 or more versions",
        ),
        Metric(
            "correction/prob_gap_mean",
            "1",
            "mean absolute difference between a token's probabilities under the two policies",
        ),
        Metric(
            "correction/prob_gap_max",
            "1",
            "largest absolute difference between a token's probabilities under the two policies",
        ),
        Metric("correction/is_weight_mean", "1", "mean importance weight that multiplies a token's loss"),
        Metric(
            "correction/effective_sample_size",
            "1",
            "mean(w)² / mean(w²) of the importance weights w; 1 if all weights are equal",
        ),
        Metric(
            "correction/clipped_share", "1", "share of tokens whose importance weight was truncated to the threshold"
        ),
        Metric("correction/rejected_share", "1", "share of tokens that `rollout_rs` rejects"),
        Metric(
            "correction/masked_share",
            "1",
            "share of tokens that lose their gradient, through a weight of 0 or rejection",
        ),
    ),
    DRIVER: (
        Metric("queue/fed", "samples", "samples admitted since the start of the run"),
        Metric("queue/running", "samples", "samples that are admitted and not yet scored"),
        Metric("queue/ready", "samples", "scored samples that wait for the Trainer"),
        Metric("queue/leased", "samples", "samples that the Trainer has leased"),
        Metric("queue/trained", "samples", "samples whose gradient is part of an optimizer step"),
        Metric("queue/dropped", "samples", "samples dropped for any reason"),
        *(
            Metric(f"queue/dropped/{reason}", "samples", f"samples dropped with the reason `{reason}`")
            for reason in DropReason
        ),
        Metric("queue/replayed", "samples", "samples replayed from a record instead of generated (docs/skip.md)"),
        Metric("queue/substituted", "samples", "replayed samples that came from the record of another sample"),
        Metric("queue/wait_permit_s", "s", "total time the Rollouter has waited for permits since the launch"),
        Metric("queue/wait_samples_s", "s", "total time the Trainer has waited for samples since the launch"),
        Metric(
            "queue/applied_version",
            "versions",
            "newest version that every replica serves; the staleness bound counts from it",
        ),
        Metric("queue/payload_bytes", "bytes", "size of the finished samples on disk that no checkpoint covers yet"),
        Metric("recovery/restarts", "1", "number of parts that were replaced since the launch"),
        *(Metric(f"skip/<role>/{what}", "1", meaning) for what, meaning in SKIP_COUNTS.items()),
        Metric(
            "rollouter/generated_tokens", "tokens", "response tokens generated for training since the start of the run"
        ),
        Metric("rollouter/samples_done", "samples", "samples generated and scored since the launch"),
        Metric("rollouter/turns", "1", "assistant turns completed since the launch"),
        Metric(
            "rollouter/trajectories/<reason>", "1", "trajectories that ended since the launch with this finish reason"
        ),
        Metric("rollouter/tool_calls", "1", "tool calls completed since the launch"),
        Metric(
            "rollouter/tool_calls/<status>",
            "1",
            "tool calls that completed since the launch with this status: `ok`, `bad_json`, `timeout`, …",
        ),
        Metric("rollouter/tool_s", "s", "total time of all tool calls since the launch"),
        Metric("rollouter/tool_mean_s", "s", "mean time of a tool call"),
        Metric(
            "rollouter/rewrites", "1", "trajectories split into several rows because the chat template rewrote history"
        ),
        Metric(
            "rollouter/token_mismatches",
            "1",
            "trajectories whose tokens differ from a re-tokenization of the whole conversation",
        ),
        Metric(
            "rollouter/surplus_tokens",
            "tokens",
            "tokens sampled for surplus trajectories of over-sampling, which were then aborted",
        ),
        Metric("rollouter/in_flight", "samples", "samples that are being generated or scored"),
        Metric("rollouter/version", "versions", "version that the replicas serve, as far as the Rollouter knows"),
        Metric("trainer/version", "versions", "newest published version"),
        Metric(
            "throughput/generated_tokens_per_s", "tokens/s", "response tokens generated per second, over the last 20 s"
        ),
        Metric("throughput/trained_tokens_per_s", "tokens/s", "response tokens trained per second, over the last 20 s"),
        Metric("idle/trainer", "1", "share of the last 20 s in which the Trainer waited for samples"),
        Metric("idle/rollouter", "1", "share of the last 20 s in which no sample was in generation"),
        Metric(
            "active/trainer",
            "1",
            "share of the last 20 s in which the Trainer did not wait for samples: 1 - `idle/trainer`",
        ),
        Metric(
            "active/rollouter",
            "1",
            "share of the last 20 s in which at least one sample was in generation: 1 - `idle/rollouter`",
        ),
        Metric(
            "profiler/events",
            "1",
            "profiling events that the Rollouter and the Trainer have recorded or received since the launch",
        ),
        Metric(
            "profiler/dropped", "1", "profiling events of all processes that did not fit into a buffer or onto the disk"
        ),
    ),
    HEALTH: (
        Metric("health/loop_lag_s/<process>", "s", "longest delay of the process's event loop in the last 10 s"),
        Metric(
            "health/rss_bytes/<process>",
            "bytes",
            (
                "resident memory of the process, including mapped objects of the object store; processes are "
                "`driver`, `queue`, `store`, `rollouter`, `trainer`, `rank-<group>-<number>`, `replica-<id>` and "
                "`engine-<id>`"
            ),
        ),
        Metric("health/cpu/<process>", "1", "average number of CPUs that the process kept busy"),
        Metric("health/kv_cache_usage", "1", "used share of the KV cache of the fullest replica"),
        Metric("health/kv_cache_usage/<replica>", "1", "used share of the KV cache of this replica"),
        Metric("health/requests_running", "1", "requests that are being decoded, over all replicas"),
        Metric("health/requests_waiting", "1", "requests that wait in an engine's scheduler, over all replicas"),
        Metric("health/preemptions", "1", "requests preempted since the current engines started"),
        Metric(
            "health/object_store_share",
            "1",
            "share of Ray's object store that objects in use fill, on the fullest node",
        ),
        Metric("health/memory_available_bytes", "bytes", "available memory of the driver's machine or container"),
        Metric("health/disk_free_bytes", "bytes", "free space on the disk of the run directory"),
        Metric("health/problems", "1", "number of open warnings and hints"),
    ),
    APPLY: (
        Metric("weight_sync/pause_s", "s", "longest pause of a replica, during which it generates no tokens"),
        Metric("weight_sync/load_s", "s", "longest time a replica took to load the weights during its pause"),
        Metric(
            "weight_sync/fetch_s", "s", "longest time a replica took to fetch the weights, while generation continued"
        ),
        Metric(
            "weight_sync/drain_s", "s", "longest time between the pause request and the end of generation on a replica"
        ),
        Metric(
            "weight_sync/verify_s", "s", "longest time a replica took to compare checksums, while generation continued"
        ),
        Metric(
            "weight_sync/publish_to_applied_s",
            "s",
            "time between the publication of a version and the moment when the last replica serves it",
        ),
        Metric("weight_sync/in_flight", "1", "requests in flight at the pause requests, over all replicas"),
        Metric(
            "weight_sync/verified", "1", "share of replicas whose weights were compared with the published checksums"
        ),
    ),
    VALIDATION: (
        Metric("validation/reward/mean", "1", "mean reward over the validation set"),
        Metric(
            "validation/reward/mean/<data_source>", "1", "mean reward over the validation prompts of this data source"
        ),
        Metric(
            "validation/rule/mean",
            "1",
            "mean score of the reward function, unweighted; present only with a reward model",
        ),
        Metric("validation/model/mean", "1", "mean score of a reward model that runs in Ray Serve, unweighted"),
        Metric("validation/response_tokens/mean", "tokens", "mean response length"),
        Metric("validation/response_tokens/max", "tokens", "length of the longest response"),
        Metric("validation/length_share", "1", "share of responses that were cut by the length limit"),
        Metric(
            "validation/turns/mean",
            "1",
            "mean number of turns per conversation; present only for multi-turn conversations",
        ),
        Metric(
            "validation/tool_calls/mean",
            "1",
            "mean number of tool calls per conversation; present only for multi-turn conversations",
        ),
        Metric(
            "validation/tool_call_share",
            "1",
            "share of conversations with at least one tool call; present only for multi-turn conversations",
        ),
        Metric("validation/num_prompts", "1", "number of prompts in the validation set"),
        Metric("validation/duration_s", "s", "time to generate and score the answers to the validation set"),
    ),
}

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

PLACEHOLDER = re.compile(r"<([a-z_]+)>")
_EXACT = {metric.name: metric for metric in METRICS if "<" not in metric.name}
_PATTERNS = [
    (re.compile(PLACEHOLDER.sub(r"(?P<\1>.+)", re.escape(metric.name)), re.DOTALL), metric)
    for metric in METRICS
    if "<" in metric.name
]


def describe(name: str) -> Metric:
    """The registered metric of this name.

    Raises:
        BugError: `name` is not registered.
    """
    return find(name)[0]


@cache
def find(name: str) -> tuple[Metric, Mapping[str, str]]:
    """The registered metric of this name, and the values of its placeholders.

    Raises:
        BugError: `name` is not registered.
    """
    if name in _EXACT:
        return _EXACT[name], {}
    for pattern, metric in _PATTERNS:
        if found := pattern.fullmatch(name):
            return metric, found.groupdict()
    near = difflib.get_close_matches(name, _EXACT, n=1)
    hint = f"; the nearest registered name is {near[0]!r}" if near else ""
    raise BugError(
        f"metric {name!r} is not registered{hint}. Metrics without documentation cannot be "
        "recorded: add it to asyncrl/observe/metrics/registry.py with its unit and meaning."
    )


def check(names: Iterable[str]) -> None:
    """Raise `BugError` if a name is not registered."""
    for name in names:
        describe(name)


_HEAD = """\
# Metrics

Generated from `asyncrl/observe/metrics/registry.py` by `python -m asyncrl.observe.metrics.registry > docs/metrics.md`.

A run directory contains `metrics.jsonl`, with one JSON object per line, and the same numbers as TensorBoard files;
`logging.sinks` chooses these and other places ([profiling.md](profiling.md)). Every line has

| key | meaning |
|---|---|
| `kind` | `step`, `apply` or `validation` |
| `step` | optimizer step, from 1; on an `apply` line, the newest step at that time |
| `version` | version of the published weights; 0 is the initial model |
| `lineage` | how often the run has gone back to a checkpoint; lines after that checkpoint are removed |
| `time_s` | seconds since the run started; a resumed run continues from its last line |

and, as further keys, the metrics below. `step` lines also have `rewards` (the mean reward of each trained sample) and
`staleness` (of each sample, in versions); `validation` lines have a few `examples`. Numbers that are not finite are
written as null; unknown values are absent.
"""


def markdown() -> str:
    """The page `docs/metrics.md`."""
    lines = [_HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
