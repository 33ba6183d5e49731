"""docs/architecture.md shows what a run does: one sample and one weights version pass through the real modules.

`make docs` writes the page; `make lint` fails when it is stale.
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path

import anyio

from asyncrl.config.compose import load_config
from tests.fakes.one_run import run
from tests.fakes.walks import INSTRUMENTATION, NOT_ON_THE_WAY, Walk, WalkStep, find_returns, package_of, recording

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
TWO_STEPS = (
    "trainer.total_training_steps=2", "trainer.ppo_mini_batch_size=1", "trainer.device=cpu", "trainer.save_last=false",
    "async_training=mode_a", "weight_sync.max_mismatch_kl=null", "rollout.n=2", "data.val_files=[]",
)  # fmt: skip

SAMPLE = [
    WalkStep("permit", "asyncrl.queue.operations:PermitsGranted.apply",
             "If pacing allows it, the queue grants a permit with a sample id."),
    WalkStep("ask", "rollouter.sample_runner:ask_for", "The runner builds the request for the sample's trajectories."),
    WalkStep("generate", "rollouter.group:TrajectoryGroup.running",
             "The group generates its trajectories as single turns or as conversations."),
    WalkStep("call", "rollouter.serving.client:generate",
             "The client calls replicas, again after an abort or a crash, until every turn is complete."),
    WalkStep("replica", "rollouter.serving.fleet:ServeFleet._call",
             "Ray Serve routes the call to the replica that has the sample's KV cache."),
    WalkStep("engine", "rollouter.serving.replica.generation:TokenGeneration._in_engine",
             "vLLM's engine samples one turn on the replica."),
    WalkStep("score", "rollouter.rewards.scorer:FunctionScorer.score",
             "The reward function scores each trajectory as soon as it has ended."),
    WalkStep("pack", "rollouter.sample_runner:pack_sample", "Trajectories and scores become the rows of one sample."),
    WalkStep("payload", "asyncrl.storage.sample_bytes:pack", "The sample's arrays are written to a payload file."),
    WalkStep("offer", "asyncrl.queue.operations:OfferSamples.apply",
             "The sample goes from RUNNING to READY once the transition is on disk."),
    WalkStep("lease", "asyncrl.queue.operations:LeaseGranted.apply",
             "Samples go from READY to LEASED in completion order."),
    WalkStep("rows", "trainer.batches:prepare_sample",
             "A sample becomes rows with staleness masks, and is checked and filtered."),
    WalkStep("experience", "trainer.experience:ExperienceBuilder.make",
             "Roles compute log-probs; then token rewards and corrections are computed."),
    WalkStep("advantages", "trainer.algorithms.advantages:advantage_estimator",
             "The configured estimator turns rewards into advantages."),
    WalkStep("ranks", "trainer.workers.group:WorkerGroup._put",
             "The Trainer puts each rank's rows of the batch into the object store."),
    WalkStep("train", "trainer.engines.torch_engine:TorchEngine.forward_backward",
             "Each rank runs its share of a mini-batch forward and backward."),
    WalkStep("loss", "trainer.algorithms.objective:PolicyLoss.__call__",
             "The loss computes the policy's objective for each token."),
    WalkStep("step", "trainer.engines.torch_engine:TorchEngine.optim_step",
             "If loss and gradient are finite on all ranks, each rank takes the optimizer step."),
    WalkStep("commit", "asyncrl.queue.operations:CommitSamples.apply",
             "The sample goes from LEASED to TRAINED, because the weights contain its gradient."),
]  # fmt: skip
TO_THE_ENGINE = [
    WalkStep("step", "trainer.engines.torch_engine:TorchEngine.optim_step", "Each rank takes the optimizer step."),
    WalkStep("publish", "trainer.loop:TrainLoop._publish",
             "After the steps of a version, the loop publishes the weights."),
    WalkStep("ranks", "trainer.workers.group:WorkerGroup.publish", "Every rank takes part in gathering the weights."),
    WalkStep("gather", "trainer.workers.rank:BucketSender.send",
             "Rank 0 sends the full weights, under their Hugging Face names, in buckets while they are gathered."),
    WalkStep("store", "asyncrl.weights.object_store:ObjectStorePublisher.put",
             "The publisher copies each bucket once into Ray's object store."),
    WalkStep("announce", "asyncrl.weights.object_store:ObjectStorePublisher.announce",
             "After the last bucket, the publisher notifies the weight store of the version."),
    WalkStep("take", "rollouter.weight_updates:WeightUpdateLoop._apply",
             "The Rollouter brings every replica to the new version."),
    WalkStep("apply", "rollouter.serving.replica.weights:WeightUpdates.apply",
             "A replica fetches the weights, pauses generation, loads them, resumes and verifies them."),
    WalkStep("fetch", "rollouter.serving.replica.worker:StoreTransfer.fetch",
             "vLLM's workers map the version while they decode."),
    WalkStep("pause", "rollouter.serving.replica.weights:WeightUpdates._begin_pause",
             "The replica holds new requests back and pauses the engine."),
    WalkStep("load", "rollouter.serving.replica.worker:StoreTransfer.update_weights",
             "Inside the pause, the weights are loaded in place."),
    WalkStep("resume", "rollouter.serving.replica.weights:WeightUpdates._end_pause",
             "The engine continues under the new version number, and new requests enter it."),
    WalkStep("verify", "rollouter.serving.replica.worker:WorkerExtension.group_checksums",
             "The checksums of the loaded weights are compared with those of the published ones."),
]  # fmt: skip
TO_THE_TRAINER = [
    WalkStep("turn", "rollouter.serving.replica.generation:TokenGeneration._in_engine",
             "The engine samples a turn of the next sample from the new weights."),
    WalkStep("spans", "rollouter.serving.client:cut_delta",
             "Spans of the turn name the version that sampled each token."),
    WalkStep("staleness", "asyncrl.core.staleness:staleness",
             "At the lease, the version of the oldest token is compared with the Trainer's version."),
]  # fmt: skip
VERSION = [*TO_THE_ENGINE, *TO_THE_TRAINER]

MOST_FILES_OF_A_SAMPLE, MOST_FILES_OF_A_VERSION = 26, 11
MOST_RETURNS_OF_A_SAMPLE, MOST_RETURNS_OF_A_VERSION = 2, 1

HEAD = """\
# Architecture

How one sample becomes a gradient, and how one optimizer step reaches the engines. This page is generated: a test runs
one sample and one weights version through the real modules, with Ray and engine replaced where the project calls them,
and records the steps in the order in which they run (`tests/test_architecture.py`). `make docs` writes this page, and
`make lint` fails when it is stale. [design.md](design.md) states the contracts behind the steps.

    prompts ─▶ Rollouter ──▶ vLLM replicas ──▶ rewards ──▶ SampleQueue ──▶ Trainer ──▶ ranks ──▶ checkpoints
                  ▲              ▲                              │                        │
                  └── permits ───┼──────────────────────────────┘                        │
                                 └───────────── WeightStore ◀──────── version v ─────────┘
"""

COUNTS = f"""\
## What is counted

The test runs two optimizer steps, so that the version of the first one generates the second one's sample. For each walk
the page has two numbers:

- The files of the numbered list are the modules on the call stacks of the steps, at the first call of each step. The
  test allows {MOST_FILES_OF_A_SAMPLE} for a sample, and {MOST_FILES_OF_A_VERSION} for a version up to `verify`.
  {", ".join(f"`{module}`" for module in NOT_ON_THE_WAY)} are left out: they only wrap
  calls or start the loops in which a walk takes place.
- The modules of the second table are all those of which a function runs during the walk, in any thread. They include
  the values and checks that the steps use, and the loops that run at the same time. `{INSTRUMENTATION}` is left out:
  almost every module records spans and events with it, and it decides nothing.

The test checks in two ways that a walk does not go back and forth. All steps in `rollouter` follow one another, and so
do all steps in `trainer`; only `asyncrl`, which hands over samples and weights, comes more than once. And "again" marks
a file of a numbered list whose package the list has left before; the test allows {MOST_RETURNS_OF_A_SAMPLE} such files
for a sample, and {MOST_RETURNS_OF_A_VERSION} for a version up to `verify`.
"""


async def record(directory: Path) -> tuple[Walk, Walk]:
    """Record the first sample of a run, and the version that it leads to."""
    sample, version = Walk(*SAMPLE), Walk(*VERSION)
    with anyio.fail_after(60), recording(sample, version):
        _, steps = await run(load_config(None, TWO_STEPS), directory)
    assert [step.staleness for step in steps] == [(0,), (0,)]
    return sample, version


def parts(walk: Walk) -> list[str]:
    """Return the top-level packages of the steps, each as often as the walk enters it."""
    return [part for part, _ in groupby(function.partition(".")[0] for function in walk.stacks)]


def page(sample: Walk, version: Walk) -> str:
    way, update = sample.modules(SAMPLE), version.modules(TO_THE_ENGINE)
    rest = [module for module in version.modules(TO_THE_TRAINER) if module not in update]
    return "\n".join(
        [
            HEAD,
            "## A sample, from permit to optimizer step\n",
            *table(sample),
            f"The calls that lead to these steps pass through {len(way)} files:\n",
            *numbered(way),
            *packages(sample),
            "## A version, from optimizer step to engine, and to the staleness of a sample\n",
            *table(version),
            f"The calls that lead to the steps from `step` to `verify` pass through {len(update)} files:\n",
            *numbered(update),
            f"The last {len(TO_THE_TRAINER)} steps are on the next sample's way, and add {len(rest)} files:\n",
            *numbered(rest, first=len(update) + 1),
            *packages(version),
            COUNTS,
        ]
    )


def table(walk: Walk) -> list[str]:
    rows = [f"| {step.name} | `{step.function}` | {step.text} |" for step in walk.steps]
    return ["| step | function | what it does |", "|---|---|---|", *rows, ""]


def numbered(modules: list[str], first: int = 1) -> list[str]:
    returns = find_returns(modules)
    return [
        *(
            f"{number}. `{module}`" + f" (again `{package_of(module)}`)" * (module in returns)
            for number, module in enumerate(modules, first)
        ),
        "",
    ]


def packages(walk: Walk) -> list[str]:
    """Return the paragraphs about the order of packages and about all modules that ran."""
    found = groupby(sorted(walk.entered, key=lambda module: (package_of(module), module)), package_of)
    return [
        f"The steps lead through {' → '.join(f'`{part}`' for part in parts(walk))}.\n",
        f"Between the first and the last step, functions of {len(walk.entered)} modules run:\n",
        "| package | modules |",
        "|---|---|",
        *(f"| `{name}` | {', '.join(module.rpartition('.')[2] for module in modules)} |" for name, modules in found),
        "",
    ]


async def test_the_page_shows_the_steps_of_a_sample_and_a_version_in_the_order_in_which_they_run(
    tmp_path: Path,
) -> None:
    sample, version = await record(tmp_path)
    for walk in (sample, version):
        assert list(walk.stacks) == [step.function for step in walk.steps]
    found = page(sample, version)
    if "WRITE_DOCS" in os.environ:
        PAGE.write_text(found, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == found, "docs/architecture.md is stale: run `make docs`"

    way, update = sample.modules(SAMPLE), version.modules(TO_THE_ENGINE)
    assert len(way) <= MOST_FILES_OF_A_SAMPLE and len(find_returns(way)) <= MOST_RETURNS_OF_A_SAMPLE
    assert len(update) <= MOST_FILES_OF_A_VERSION and len(find_returns(update)) <= MOST_RETURNS_OF_A_VERSION
    assert set(version.modules(TO_THE_TRAINER)) <= sample.entered
    assert parts(sample) == ["asyncrl", "rollouter", "asyncrl", "trainer", "asyncrl"]
    assert parts(version) == ["trainer", "asyncrl", "rollouter", "asyncrl"]
