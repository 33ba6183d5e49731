"""docs/architecture.md shows what a run does: one sample and one weights version pass through the real modules.

`make docs` writes the page; `make lint` fails when it is stale.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from asyncrl.config.compose import load_config
from tests.fakes.one_run import run
from tests.fakes.walks import WalkRecorder, WalkStep

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
ONE_SAMPLE = (
    "trainer.total_training_steps=1", "trainer.ppo_mini_batch_size=1", "trainer.device=cpu", "trainer.save_last=false",
    "async_training=mode_a", "rollout.n=2", "data.val_files=[]",
)  # fmt: skip

SAMPLE = [
    WalkStep(
        "permit",
        "asyncrl.queue.operations:PermitsGranted.apply",
        "If pacing allows it, the queue grants a permit with a sample id.",
    ),
    WalkStep("ask", "rollouter.sample_runner:ask_for", "The runner builds the request for the sample's trajectories."),
    WalkStep(
        "generate",
        "rollouter.group:generate_group",
        "The group generates its trajectories as single turns or as conversations.",
    ),
    WalkStep(
        "call",
        "rollouter.serving.client:generate",
        "The client calls replicas, again after an abort or a crash, until every turn is complete.",
    ),
    WalkStep(
        "replica",
        "rollouter.serving.fleet:ServeFleet._call",
        "Ray Serve routes the call to the replica that has the sample's KV cache.",
    ),
    WalkStep(
        "engine",
        "rollouter.serving.replica.generation:TokenGeneration._in_engine",
        "vLLM's engine samples one turn on the replica.",
    ),
    WalkStep(
        "score",
        "rollouter.rewards.scorer:FunctionScorer.score",
        "The reward function scores each trajectory as soon as it has ended.",
    ),
    WalkStep("pack", "rollouter.sample_runner:pack_sample", "Trajectories and scores become the rows of one sample."),
    WalkStep("payload", "asyncrl.storage.sample_bytes:pack", "The sample's arrays are written to a payload file."),
    WalkStep(
        "offer",
        "asyncrl.queue.operations:OfferSamples.apply",
        "The sample goes from RUNNING to READY once the transition is on disk.",
    ),
    WalkStep(
        "lease",
        "asyncrl.queue.operations:LeaseGranted.apply",
        "Samples go from READY to LEASED in completion order.",
    ),
    WalkStep(
        "rows",
        "trainer.batches:prepare_sample",
        "A sample becomes rows with staleness masks, and is checked and filtered.",
    ),
    WalkStep(
        "experience",
        "trainer.experience:ExperienceBuilder.make",
        "Roles compute log-probs; then token rewards and corrections are computed.",
    ),
    WalkStep(
        "advantages",
        "trainer.algorithms.advantages:advantage_estimator",
        "The configured estimator turns rewards into advantages.",
    ),
    WalkStep(
        "ranks",
        "trainer.workers.group:WorkerGroup._put",
        "The Trainer puts each rank's rows of the batch into the object store.",
    ),
    WalkStep(
        "train",
        "trainer.engines.torch_engine:TorchEngine.forward_backward",
        "Each rank runs its share of a mini-batch forward and backward.",
    ),
    WalkStep(
        "loss",
        "trainer.algorithms.objective:PolicyLoss.__call__",
        "The loss computes the policy's objective for each token.",
    ),
    WalkStep(
        "step",
        "trainer.engines.torch_engine:TorchEngine.optim_step",
        "If loss and gradient are finite on all ranks, each rank takes the optimizer step.",
    ),
    WalkStep(
        "commit",
        "asyncrl.queue.operations:CommitSamples.apply",
        "The sample goes from LEASED to TRAINED, because the weights contain its gradient.",
    ),
]
VERSION = [
    WalkStep(
        "publish", "trainer.loop:TrainLoop._publish", "After the steps of a version, the loop publishes the weights."
    ),
    WalkStep("ranks", "trainer.workers.group:WorkerGroup.publish", "Every rank takes part in gathering the weights."),
    WalkStep(
        "gather",
        "trainer.workers.rank:Rank._offer",
        "Rank 0 publishes the full weights under their Hugging Face names.",
    ),
    WalkStep(
        "store",
        "asyncrl.weights.object_store:ObjectStorePublisher.publish",
        "The publisher copies the weights once into Ray's object store and notifies the weight store.",
    ),
    WalkStep(
        "take",
        "rollouter.weight_updates:WeightUpdateLoop._apply",
        "The Rollouter brings every replica to the new version.",
    ),
    WalkStep(
        "apply",
        "rollouter.serving.replica.weights:WeightUpdates.apply",
        "A replica fetches the weights, pauses generation, loads them, resumes and verifies them.",
    ),
    WalkStep(
        "fetch",
        "rollouter.serving.replica.worker:WeightLoader.fetch_version",
        "vLLM's workers map the version while they decode.",
    ),
    WalkStep(
        "load",
        "rollouter.serving.replica.worker:WeightLoader.load_version",
        "Inside the pause, the weights are loaded in place.",
    ),
    WalkStep(
        "verify",
        "rollouter.serving.replica.worker:WeightLoader.group_checksums",
        "The checksums of the loaded weights are compared with those of the published ones.",
    ),
]

MOST_FILES_OF_A_SAMPLE, MOST_FILES_OF_A_VERSION = 26, 11

HEAD = """\
# Architecture

How one sample becomes a gradient, and how one optimizer step reaches the engines. Both tables are generated: a test
runs one sample and one weights version through the real modules, with Ray and engine replaced where the project calls
them, and records the steps in the order in which they run (`tests/test_architecture.py`). `make docs` writes this page,
and `make lint` fails when it is stale. [design.md](design.md) states the contracts behind the steps.

    prompts ─▶ Rollouter ──▶ vLLM replicas ──▶ rewards ──▶ SampleQueue ──▶ Trainer ──▶ ranks ──▶ checkpoints
                  ▲              ▲                              │                        │
                  └── permits ───┼──────────────────────────────┘                        │
                                 └───────────── WeightStore ◀──────── version v ─────────┘
"""


async def walk(directory: Path) -> WalkRecorder:
    """Run one sample and one version."""
    recorder = WalkRecorder([*SAMPLE, *VERSION])
    with anyio.fail_after(60), recorder.recording():
        await run(load_config(None, ONE_SAMPLE), directory)
    return recorder


def page(recorder: WalkRecorder) -> str:
    parts = [HEAD]
    for title, steps in (
        ("A sample, from permit to optimizer step", SAMPLE),
        ("A version, from optimizer step to engine", VERSION),
    ):
        modules = recorder.modules(steps)
        rows = [f"| {step.name} | `{step.function}` | {step.text} |" for step in steps]
        parts += [f"## {title}\n", "| step | function | what it does |", "|---|---|---|", *rows, ""]
        parts += [
            f"The calls that lead to these steps pass through {len(modules)} files:",
            "",
            *(f"{n}. `{module}`" for n, module in enumerate(modules, 1)),
            "",
        ]
    return "\n".join(parts)


async def test_the_page_shows_the_steps_of_a_sample_and_a_version_in_the_order_in_which_they_run(
    tmp_path: Path,
) -> None:
    recorder = await walk(tmp_path)
    for steps in (SAMPLE, VERSION):
        order = [name for name in recorder.called if name in {step.function for step in steps}]
        assert order == [step.function for step in steps]
    assert len(recorder.modules(SAMPLE)) <= MOST_FILES_OF_A_SAMPLE
    assert len(recorder.modules(VERSION)) <= MOST_FILES_OF_A_VERSION
    found = page(recorder)
    if "WRITE_DOCS" in os.environ:
        PAGE.write_text(found, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == found, "docs/architecture.md is stale: run `make docs`"
