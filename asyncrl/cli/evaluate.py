"""`asyncrl eval`: figures of a model on its validation sets. Only the driver loads Ray."""

from __future__ import annotations

from pathlib import Path

import click

from asyncrl.cli.launch import ARGUMENTS, changes, checked
from asyncrl.cli.preflight import preflight
from asyncrl.config.compose import check_config, split_arguments
from asyncrl.core.failures import ConfigError
from asyncrl.driver.cluster.connection import detect_machine
from asyncrl.storage.run_dir import SavedConfig

_CHECKPOINT = "checkpoint="
_NO_TRAINING = ("trainer.total_training_steps=0", "resume=none", "run_dir=null")


@click.command(name="eval")
@click.argument("arguments", nargs=-1, metavar=f"[checkpoint=RUN|PATH] {ARGUMENTS}")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Directory of the results."
)
@click.option("--json", "as_json", is_flag=True, help="Print evaluation.json instead of a table.")
@click.option("--dry-run", is_flag=True, help="Check everything, print what differs from the defaults; start nothing.")
@click.option("--fresh", is_flag=True, help="Answer every prompt again.")
def eval(arguments: tuple[str, ...], out: Path | None, as_json: bool, dry_run: bool, fresh: bool) -> int:
    """Evaluate a model on its validation sets: mean@n, pass@k, best@k, maj@k with intervals, lengths and ends.

    CONFIG is a YAML file or a shipped recipe. The checkpoint is a run or an experiment, whose newest checkpoint is
    taken, one checkpoint, or a model directory; without it, model.path is evaluated. Without CONFIG, the configuration
    is that of the checkpoint's run, with the code that it names; it has to be a run of yours.

    \b
    Examples:
      asyncrl eval checkpoint=quickstart
      asyncrl eval checkpoint=quickstart --dry-run
      asyncrl eval checkpoint=runs/quickstart/20260101-120000/checkpoints/step_000050
      asyncrl eval my.yaml model.path=Qwen/Qwen3-0.6B rollout.val.n=8 rollout.val.temperature=0.6
      asyncrl eval my.yaml checkpoint=/models/mine 'data.val_files=[aime.parquet,math.parquet]' --json | jq .sources

    Each prompt gets rollout.val.n answers, sampled as rollout.val says. Prompts are grouped by their data_source. The
    results are in evals/EXPERIMENT/: every answer in answers.jsonl, the figures in evaluation.json and index.html; they
    also go to logging.sinks (TensorBoard, wandb, ...). asyncrl status DIR shows how far a running evaluation is.
    Press Ctrl-C to stop: the same command continues with the answers that are missing, also after a crash.
    """
    given = [one for one in arguments if one.startswith(_CHECKPOINT)]
    source, overrides = split_arguments([one for one in arguments if not one.startswith(_CHECKPOINT)])
    if given:
        from asyncrl.driver.evaluate import check_owner, find_model

        model = find_model(given[-1].removeprefix(_CHECKPOINT))
        if source is None and model.run_dir is not None:
            source = str(model.run_dir / "config.yaml")
            check_owner(
                model.run_dir,
                "code that its configuration names would run. If you trust it, name it: asyncrl eval "
                f"{source} {given[-1]}; or give a configuration of your own in its place",
            )
            if SavedConfig(model.run_dir).value("mode") == "sft" and not any(map(_sets_reward, overrides)):
                raise ConfigError(
                    f"{given[-1]} is of a supervised run, whose configuration has no reward and no keys of rollout. "
                    "Give a reward and prompts with correct answers: reward.function=exact_match (or math_verify, or "
                    "your own), 'data.val_files=[FILE]', data.prompt_key and data.ground_truth_key if its columns have "
                    "other names, and rollout.response_length; or give the configuration of a launch: asyncrl eval "
                    f"my_rl.yaml {given[-1]}"
                )
        overrides = (*overrides, f"model.path={model.path}")
    overrides = (*overrides, *_NO_TRAINING)
    config = checked(preflight(check_config(source, overrides), detect_machine()))
    from asyncrl.driver.evaluate import evaluate, plan_text

    if dry_run:
        changed = changes(source, overrides, config, mode="fully_async")
        click.echo(f"{changed}\n\n{plan_text(config, out=out, fresh=fresh)}")
        return 0
    return evaluate(config, out=out, fresh=fresh, as_json=as_json)


def _sets_reward(override: str) -> bool:
    """Whether an override sets a reward or a reward model."""
    return override.lstrip("+").startswith("reward")
