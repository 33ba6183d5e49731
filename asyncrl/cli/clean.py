"""`asyncrl clean`: remove what killed launches have left in a shared Ray cluster."""

from __future__ import annotations

import json
import logging

import click

from asyncrl.config.sections.run import TimeoutsConfig


@click.command()
@click.option("--address", default="auto", show_default=True, help="Address of the Ray cluster, as in ray.address.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clean(address: str, dry_run: bool, as_json: bool) -> int:
    """Remove what launches whose driver was killed have left in a Ray cluster: engines that no run uses any more.

    Applications of living launches, and those that users have deployed (`serve deploy`), are never removed. The next
    launch on the cluster removes the same.

    \b
    Examples:
      asyncrl clean --dry-run
      asyncrl clean --address 10.0.0.1:6379
    """
    from asyncrl.driver.cluster.connection import ask, connected

    limits = TimeoutsConfig()
    with connected(address, "--address"):
        from asyncrl.driver.cluster.leftovers import find_leftovers
        from rollouter.serving.app import delete_apps

        logging.getLogger("ray.serve").setLevel("ERROR")  # its import has set another level
        apps = ask(find_leftovers, limit_s=limits.call_s)
        if not dry_run:
            ask(delete_apps, apps, limit_s=limits.start_s)
    if as_json:
        click.echo(json.dumps({"applications": list(apps), "removed": not dry_run}, indent=2))
        return 0
    for app in apps:
        click.echo(f"{'would remove' if dry_run else 'removed'} the Serve application {app}, whose driver has ended")
    if not apps:
        click.echo("nothing is left of launches that have ended")
    return 0
