"""`asyncrl sft`: check the whole configuration and the first rows, then start. Only the driver loads Ray."""

from __future__ import annotations

import click

from asyncrl.cli.launch import changes, checked
from asyncrl.cli.preflight import preflight
from asyncrl.config.compose import check_config, split_arguments


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | GROUP=OPTION]...")
@click.option("--dry-run", is_flag=True, help="Check everything, print what differs from the defaults; start nothing.")
def sft(config: str, overrides: tuple[str, ...], dry_run: bool) -> int:
    """Train a model on demonstrations: supervised, before a launch continues with reinforcement learning.

    \b
    Examples:
      asyncrl sft my.yaml
      asyncrl sft my.yaml trainer.total_epochs=3 trainer.optim.lr=1e-5 trainer.test_freq=50
      asyncrl sft my.yaml run_dir=runs/warm
      asyncrl launch fully_async my_rl.yaml model.path=runs/warm/checkpoints/step_000100/hf
      asyncrl sft my.yaml run_dir=runs/warm resume=auto

    \b
    A row of data.train_files (JSONL or Parquet) is a conversation or a pair:
      {"messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "#3"}]}
      {"prompt": "1+2=", "response": "#3"}

    \b
    The keys that matter, with examples:
      model.path=DIR                      the model to start from
      data.train_files=[train.jsonl]      rows to learn; data.val_files for the validation loss
      sft.max_length=4096                 longer conversations are left out
      sft.turns=last                      learn the last turn only, instead of all turns of the assistant
      trainer.ppo_mini_batch_size=32      rows of a step; trainer.ppo_max_token_len bounds a packed micro-batch
      trainer.total_epochs=2              or trainer.total_training_steps
      trainer.strategy=fsdp2 trainer.num_workers=8

    Only the assistant's turns are trained, each up to its end-of-turn token; sequences are packed. Press Ctrl-C once to
    stop with a checkpoint, which resume=auto continues from, twice to stop at once; the exit code is then 130. Sections
    that only a launch uses (rollout, algorithm, reward, ...) may be in the file and have no effect. More: docs/sft.md.
    """
    source, given = split_arguments((config, *overrides))
    if source is None:
        raise click.UsageError("the configuration comes first: asyncrl sft my.yaml key=value ...")
    outcome = preflight(check_config(source, given, mode="sft"))
    settings = checked(outcome)
    if dry_run:
        click.echo(changes(source, given, settings, "sft"))
        return 0
    from asyncrl.driver import sft as driver

    return driver.sft(settings)
