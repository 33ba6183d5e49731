"""The `asyncrl` command. Exit codes: 0 ok, 1 failed, 2 bad configuration or usage, 130 interrupted.

A command's module is imported when the command is called, so that a bad configuration is reported before torch, Ray or
vLLM is loaded, and commands that only read a run do not load the configuration's schema either.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import click

import asyncrl
from asyncrl.core.failures import AsyncRLError, ConfigError

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, 130

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_COMMANDS = {
    "clean": ("clean", "Remove what killed launches left in a Ray cluster."),
    "eval": ("evaluate", "Evaluate a model or a checkpoint, without training."),
    "launch": ("launch", "Train a model."),
    "migrate": ("migrate", "Translate a configuration of verl."),
    "report": ("report", "Show where a run's time went, as a page."),
    "serve": ("launch", "Serve a model over HTTP, without training."),
    "sft": ("sft", "Train a model on demonstrations."),
    "show": ("show", "Print one conversation of a run."),
    "simulate": ("simulate", "Predict how long a run takes, without starting it."),
    "skip": ("skip", "Show, check and remove recorded stages."),
    "status": ("status", "Show the state of a run, live or dead."),
    "timeline": ("timeline", "Show the requests and steps of a run over time."),
    "why": ("status", "Explain what a run is blocked on, down to the cause."),
}
"""The module and the summary of each command."""


class _LazyGroup(click.Group):
    """Imports the module of a command only when the command is called; listing the commands imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"asyncrl.cli.{_COMMANDS[cmd_name][0]}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and (close := get_close_matches(args[0], _COMMANDS, n=1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings=_SETTINGS,
    epilog="All keys: docs/config.md. Exit codes: 0 ok, 1 failed, 2 bad configuration or usage, 130 interrupted.",
)
@click.version_option(asyncrl.__version__, prog_name="asyncrl")
def cli() -> None:
    """Train language models by reinforcement learning, with fully asynchronous generation and training.

    \b
    asyncrl launch fully_async                      train the shipped model, as a first look
    asyncrl launch fully_async my.yaml              train your model
    asyncrl launch sync my.yaml                     the same run with a barrier: the baseline to compare with
    asyncrl eval checkpoint=quickstart              figures of the newest checkpoint of a run, without training
    asyncrl sft my.yaml                             supervised training on demonstrations, before a launch
    asyncrl migrate verl.yaml                       a configuration of verl as one of asyncrl
    asyncrl serve my.yaml                           serve the model without training, OpenAI-compatible
    asyncrl status                                  the state of the newest run, live or dead
    asyncrl why                                     what the newest run is blocked on, down to the cause
    asyncrl show quickstart sample_0_42             a conversation, with versions, tool calls and rewards
    asyncrl report                                  where the time of the newest run went, and what cost the most
    asyncrl timeline quickstart                     the requests of a run over time, in the browser
    asyncrl simulate my.yaml --trace quickstart     how long it would take with the speeds of that run, and what waits
    asyncrl skip ls ~/.asyncrl/skip                 the records of skipped stages
    asyncrl clean --dry-run                         what killed launches left in a Ray cluster
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        return int(cli.main(args=arguments, prog_name="asyncrl", standalone_mode=False) or 0)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        click.echo(f"error: {error.brief}", err=True)
        return BAD_CONFIG
    except AsyncRLError as error:
        click.echo(f"error: {error}", err=True)
        return FAILED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        click.echo(f"error: {error.filename}"[:200] + f"…: {error.strerror}; shorten this path", err=True)
        return BAD_CONFIG


def entry() -> NoReturn:
    """Run the console script. It exits without waiting for threads, which may be stuck in a call to a dead Ray."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
