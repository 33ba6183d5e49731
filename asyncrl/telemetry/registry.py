"""Every metric name, with its unit and what it means. Pure.

A name that is not here cannot be recorded. `docs/metrics.md` is this file as a page:
`python -m asyncrl.telemetry.registry > docs/metrics.md`.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from asyncrl.failures import BugError
from asyncrl.types import DropReason


class Metric(NamedTuple):
    name: str
    """May hold placeholders, `<data_source>`: any non-empty text."""
    unit: str
    """`1` for a plain number or a share, else `s`, `tokens`, `samples`, `versions`, `nats`, …"""
    meaning: str


STEP = "On every `step` line: the Trainer's own"
LEASE = "On the first `step` line of each lease: what the lease gave, where it applies"
CORRECTION = "Off-policy correction: on the first `step` line of a lease, in bypass mode on every one"
DRIVER = "On every `step` line: the other parts, as last seen (at most about a second old)"
HEALTH = "On every `step` line: how well the run was, as last seen (some 2 s old, of ranks some 10 s)"
APPLY = "On every `apply` line: one version reached all replicas"
VALIDATION = "On every `validation` line: the validation set, answered by one version"

SKIP_COUNTS = {
    "replayed": "calls of that stage that its record answered, since its process began",
    "substituted": "calls that the record of another step, or of something else, answered",
    "recorded": "calls whose result was recorded",
    "mismatched": "calls at a step whose record something else had made",
    "damaged": "records that could not be used, and count as absent",
    "unrecorded": "results that could not be recorded",
}

SECTIONS: dict[str, tuple[Metric, ...]] = {
    STEP: (
        Metric("reward/mean", "1", "mean reward of the step's trajectories, as the Rollouter scored them"),
        Metric("reward/std", "1", "standard deviation of those rewards"),
        Metric("reward/extra/<name>", "1", "mean of what the reward tells besides, over the trajectories that have it"),
        Metric("actor/loss", "1", "what the optimizer minimized: policy loss, weighted KL loss, entropy bonus"),
        Metric("actor/pg_loss", "1", "policy loss"),
        Metric("actor/kl_loss", "nats", "estimated KL divergence from the reference policy, before its weight"),
        Metric("actor/entropy", "nats", "mean entropy of the current policy per trained token"),
        Metric("actor/grad_norm", "1", "global gradient norm before clipping"),
        Metric("actor/clip_fraction", "1", "share of trained tokens whose probability ratio was clipped"),
        Metric("actor/dual_clip_fraction", "1", "share of trained tokens whose loss `clip_ratio_c` bounded"),
        Metric("actor/ratio_mean", "1", "mean probability ratio, current over proximal policy"),
        Metric("actor/lr", "1", "learning rate of this step"),
        Metric("actor/mfu", "1", "model FLOPs utilization of rank 0's GPU in the update; absent where not known"),
        Metric("rollout/mismatch_kl", "nats", "estimated KL divergence per token, behaviour from current policy"),
        Metric("rollout/mismatch_kl_age_<n>", "nats", "the same, of tokens `<n>` versions old; 3: 3 and more"),
        Metric("rollout/token_share_age_<n>", "1", "share of trained tokens that are so old"),
        Metric("response_tokens/mean", "tokens", "mean response length of the step's trajectories, tools' tokens too"),
        Metric("response_tokens/max", "tokens", "longest response"),
        Metric("response_tokens/length_share", "1", "share of responses cut by the length limit"),
        Metric("sampled_tokens/mean", "tokens", "mean of them that the policy sampled; absent where it sampled all"),
        Metric("rows/per_trajectory", "1", "mean rows that a trajectory is trained as; absent where all are one"),
        Metric("staleness/mean", "versions", "mean over the samples: trainer version minus oldest token's version"),
        Metric("staleness/max", "versions", "the most stale of them"),
        Metric("staleness/share_<n>", "1", "share of the samples that are `<n>` versions stale; 3: 3 and more"),
        Metric("partial/count", "samples", "whose tokens more than one version sampled"),
        Metric("partial/ratio", "1", "share of the step's samples that these are"),
        Metric(
            "partial/max_span", "versions", "newest minus oldest version of one of them, at most; 0: there are none"
        ),
        Metric("processing_s/mean", "s", "generation and scoring of a sample: mean over the step's samples"),
        Metric("processing_s/min", "s", "the same: least"),
        Metric("processing_s/max", "s", "the same: greatest"),
        Metric("processing_s/p50", "s", "the same: median"),
        Metric("processing_s/p95", "s", "the same: 95 % of the samples took no longer"),
        Metric("processing_s/p99", "s", "the same: 99 %"),
        Metric("skip/replayed_share", "1", "share of the step's samples that came out of a record"),
        Metric("skip/substituted_share", "1", "share that came out of the record of another sample"),
        Metric("advantages/zero_share", "1", "share of samples with all advantages 0: nothing to learn from"),
        Metric("tokens/trained", "tokens", "response tokens with gradient in this step"),
        Metric("timing/wait_samples_s", "s", "wait for the lease this step opens; 0 for the later steps of a lease"),
        Metric("timing/update_s", "s", "forward, backward and optimizer of the policy, and the commit"),
        Metric("timing/commit_s", "s", "of it: telling queue and record which samples are trained"),
        Metric("timing/publish_s", "s", "publishing a version; 0 where none was due"),
        Metric("timing/gather_s", "s", "of it: collecting the weights on rank 0; absent where none was due"),
        Metric("timing/put_s", "s", "of it: handing them to the weight store; absent where none was due"),
        Metric("timing/step_s", "s", "the whole step, waits included"),
        Metric("time/monotonic_s", "s", "the Trainer's monotonic clock after the step; for use within one process"),
    ),
    LEASE: (
        Metric("reward/model_mean", "1", "mean score of the Trainer's reward model, before its weight"),
        Metric("reward/baseline_mean", "1", "mean score of the greedy responses (ReMax)"),
        Metric("reward/overlong_mean", "1", "mean punishment of overlong responses"),
        Metric("reward/kl", "nats", "KL divergence from the reference in the reward, before its weight, per response"),
        Metric("reward/kl_coef", "1", "its weight"),
        Metric("reward/shaped_mean", "1", "mean reward after all of these; absent where there are none"),
        Metric("advantages/mean", "1", "over the tokens that come in for training"),
        Metric("advantages/std", "1", "the same: standard deviation"),
        Metric("advantages/min", "1", "the same: least"),
        Metric("advantages/max", "1", "the same: greatest"),
        Metric("critic/loss", "1", "mean over the critic's steps"),
        Metric("critic/grad_norm", "1", "global gradient norm before clipping, mean over the critic's steps"),
        Metric("critic/lr", "1", "learning rate, mean over the critic's steps"),
        Metric("critic/mfu", "1", "as `actor/mfu`, mean over the critic's steps"),
        Metric("critic/value_mean", "1", "mean value, as the critic learns"),
        Metric("critic/return_mean", "1", "mean of what the values should have been"),
        Metric("critic/clip_fraction", "1", "share of values whose loss was clipped"),
        Metric("critic/explained_variance", "1", "of the returns, by the values at lease; 1: perfect"),
        Metric("timing/experience_s", "s", "log-probs, values and scores of the lease, advantages, correction"),
        Metric("timing/update_critic_s", "s", "all of the critic's steps on the lease"),
    ),
    CORRECTION: (
        Metric("correction/mismatch_kl", "nats", "estimated KL divergence per token, behaviour from proximal policy"),
        Metric("correction/mismatch_kl_age_<n>", "nats", "the same, of tokens `<n>` versions old; 3: 3 and more"),
        Metric("correction/prob_gap_mean", "1", "mean absolute difference of a token's two probabilities"),
        Metric("correction/prob_gap_max", "1", "the greatest"),
        Metric("correction/is_weight_mean", "1", "mean importance weight of a token, as it multiplies the loss"),
        Metric("correction/effective_sample_size", "1", "mean(w)² / mean(w²) of those weights: 1 when all are equal"),
        Metric("correction/clipped_share", "1", "share of tokens whose weight was cut to the threshold"),
        Metric("correction/rejected_share", "1", "share of tokens that `rollout_rs` leaves out"),
        Metric("correction/masked_share", "1", "share of tokens that lose their gradient, by weight or rejection"),
    ),
    DRIVER: (
        Metric("queue/fed", "samples", "admitted since the start of the run"),
        Metric("queue/running", "samples", "admitted and not yet scored"),
        Metric("queue/ready", "samples", "scored, waiting for the Trainer"),
        Metric("queue/leased", "samples", "held by the Trainer"),
        Metric("queue/trained", "samples", "whose gradient is in a step"),
        Metric("queue/dropped", "samples", "dropped, for any reason"),
        *(Metric(f"queue/dropped/{reason}", "samples", f"dropped: {reason}") for reason in DropReason),
        Metric("queue/replayed", "samples", "finished out of a record, not by an engine (docs/skip.md)"),
        Metric("queue/substituted", "samples", "of these, out of the record of another sample"),
        Metric("queue/wait_permit_s", "s", "the Rollouter's waits for permits since the launch, added up"),
        Metric("queue/wait_samples_s", "s", "the Trainer's waits for samples since the launch, added up"),
        Metric("queue/applied_version", "versions", "newest version every replica serves: what pacing counts from"),
        Metric("queue/payload_bytes", "bytes", "finished samples on disk that no checkpoint covers yet"),
        Metric("recovery/restarts", "1", "parts that were replaced since the launch"),
        *(Metric(f"skip/<role>/{what}", "1", meaning) for what, meaning in SKIP_COUNTS.items()),
        Metric("rollouter/generated_tokens", "tokens", "response tokens made for training since the start of the run"),
        Metric("rollouter/samples_done", "samples", "generated and scored since the launch"),
        Metric("rollouter/turns", "1", "turns of the assistant completed since the launch"),
        Metric("rollouter/trajectories/<reason>", "1", "conversations ended since the launch, by finish reason"),
        Metric("rollouter/tool_calls", "1", "tool calls completed since the launch"),
        Metric("rollouter/tool_calls/<status>", "1", "of these, so many ended so: `ok`, `bad_json`, `timeout`, …"),
        Metric("rollouter/tool_s", "s", "time in tools since the launch, added up over all calls"),
        Metric("rollouter/tool_mean_s", "s", "of it, mean per call"),
        Metric("rollouter/rewrites", "1", "trajectories forked into rows because the template rewrote history"),
        Metric("rollouter/token_mismatches", "1", "trajectories whose tokens differ from a full re-tokenization"),
        Metric("rollouter/surplus_tokens", "tokens", "sampled for trajectories beyond what was needed, then aborted"),
        Metric("rollouter/in_flight", "samples", "in generation or scoring now"),
        Metric("rollouter/version", "versions", "that the replicas serve, as the Rollouter knows"),
        Metric("trainer/version", "versions", "newest published"),
        Metric("throughput/generated_tokens_per_s", "tokens/s", "over the last 20 s"),
        Metric("throughput/trained_tokens_per_s", "tokens/s", "over the last 20 s"),
        Metric("idle/trainer", "1", "share of the last 20 s in which the Trainer waited for samples"),
        Metric("idle/rollouter", "1", "share of the last 20 s in which nothing was in generation"),
        Metric("active/trainer", "1", "1 - `idle/trainer`"),
        Metric("active/rollouter", "1", "1 - `idle/rollouter`"),
        Metric("profiler/events", "1", "events that Rollouter and Trainer recorded or were sent since the launch"),
        Metric("profiler/dropped", "1", "events that did not fit into a buffer or onto the disk, of all processes"),
    ),
    HEALTH: (
        Metric("health/loop_lag_s/<process>", "s", "longest standstill of its event loop in the last 10 s"),
        Metric(
            "health/rss_bytes/<process>",
            "bytes",
            "resident memory: of `driver`, `queue`, `store`, `rollouter`, `trainer`, `rank-<group>-<number>`, "
            "`replica-<id>`, `engine-<id>`; what it has mapped from the object store counts too",
        ),
        Metric("health/cpu/<process>", "1", "CPUs that it kept busy"),
        Metric("health/kv_cache_usage", "1", "share of the KV cache that is taken, of the fullest replica"),
        Metric("health/kv_cache_usage/<replica>", "1", "the same, of one replica"),
        Metric("health/requests_running", "1", "requests being decoded, over all replicas"),
        Metric("health/requests_waiting", "1", "requests that the engines' schedulers hold back"),
        Metric("health/preemptions", "1", "running requests thrown out to make room, since the engines of now started"),
        Metric("health/object_store_share", "1", "of the node whose object store is fullest: share that is needed"),
        Metric("health/memory_available_bytes", "bytes", "of the driver's machine or container"),
        Metric("health/disk_free_bytes", "bytes", "of the disk of the run directory"),
        Metric("health/problems", "1", "warnings and hints that are not over"),
    ),
    APPLY: (
        Metric("weight_sync/pause_s", "s", "longest pause of a replica: from no token made to tokens flowing again"),
        Metric("weight_sync/load_s", "s", "longest load inside the pause"),
        Metric("weight_sync/fetch_s", "s", "longest fetch; generation goes on meanwhile"),
        Metric("weight_sync/drain_s", "s", "longest wait from the wish to pause until no token was made any more"),
        Metric("weight_sync/verify_s", "s", "longest comparison of checksums; generation goes on meanwhile"),
        Metric("weight_sync/publish_to_applied_s", "s", "from publication to the last replica serving it"),
        Metric("weight_sync/in_flight", "1", "requests in flight when the pause was asked for, over all replicas"),
        Metric(
            "weight_sync/verified", "1", "share of replicas whose weights were checked against the published checksums"
        ),
    ),
    VALIDATION: (
        Metric("validation/reward/mean", "1", "mean reward over the validation set"),
        Metric("validation/reward/mean/<data_source>", "1", "the same, of one data source"),
        Metric("validation/rule/mean", "1", "with a reward model: mean score of the function, before its weight"),
        Metric("validation/model/mean", "1", "mean score of a reward model behind Serve, before its weight"),
        Metric("validation/response_tokens/mean", "tokens", "mean response length"),
        Metric("validation/response_tokens/max", "tokens", "longest response"),
        Metric("validation/length_share", "1", "share of responses cut by the length limit"),
        Metric("validation/turns/mean", "1", "with conversations of several turns: mean number of turns"),
        Metric("validation/tool_calls/mean", "1", "the same: mean number of tool calls"),
        Metric("validation/tool_call_share", "1", "the same: share of trajectories that call a tool at least once"),
        Metric("validation/num_prompts", "1", "prompts in the validation set"),
        Metric("validation/duration_s", "s", "time it took"),
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
    """The registered metric behind `name`.

    Raises:
        BugError: there is none.
    """
    return find(name)[0]


@cache
def find(name: str) -> tuple[Metric, Mapping[str, str]]:
    """The registered metric behind `name`, and what `name` has in place of its placeholders.

    Raises:
        BugError: there is none.
    """
    if name in _EXACT:
        return _EXACT[name], {}
    for pattern, metric in _PATTERNS:
        if found := pattern.fullmatch(name):
            return metric, found.groupdict()
    near = difflib.get_close_matches(name, _EXACT, n=1)
    hint = f"; the nearest registered name is {near[0]!r}" if near else ""
    raise BugError(
        f"metric {name!r} is not registered{hint}. Nobody could look up what it means: "
        "add it to asyncrl/telemetry/registry.py with its unit and meaning."
    )


def check(names: Iterable[str]) -> None:
    """Raise `BugError` for the first name that is not registered."""
    for name in names:
        describe(name)


_HEAD = """\
# Metrics

Generated from `asyncrl/telemetry/registry.py` by `python -m asyncrl.telemetry.registry > docs/metrics.md`.

A run directory holds `metrics.jsonl`, one JSON object a line, and the same numbers as TensorBoard files;
`logging.sinks` chooses these and other places ([profiling.md](profiling.md)). Every line has

| key | meaning |
|---|---|
| `kind` | `step`, `apply` or `validation` |
| `step` | optimizer step, from 1; on an `apply` line, the newest step known when it came |
| `version` | published weights, 0 = the initial model |
| `lineage` | how often training had gone back to a checkpoint; lines beyond it are taken out |
| `time_s` | seconds since the run started; a resumed run counts on from its last kept line |

and the metrics below, flat. `step` lines also carry `rewards` (each trained sample's mean reward) and `staleness` (each
sample's, in versions); `validation` lines carry a few `examples`. A number that is not finite is written as null. What
is not known yet is absent.
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
