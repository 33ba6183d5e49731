"""What a killed driver leaves in a shared cluster.

Ray ends the actors of a dead driver, and frees its placement groups and objects. Serve's applications stay, and with
them the engines and their GPUs. Each of them is marked with the job id of its driver, so an application that a user has
deployed is never taken for one, whatever its name is. All functions block, and need a connection to the cluster.
"""

from __future__ import annotations

from rollouter.serving.app import marked_apps
from rollouter.serving.ray_internals import living_drivers


def find_leftovers() -> tuple[str, ...]:
    """Return the Serve applications whose driver has ended without deleting them."""
    drivers = marked_apps()
    living = living_drivers()
    return tuple(sorted(app for app, driver in drivers.items() if driver not in living))
