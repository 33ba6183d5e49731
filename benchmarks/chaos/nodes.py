"""A Ray cluster of two nodes on this machine, whose second node can be lost and replaced."""

from __future__ import annotations

import os
import signal
from typing import Any

SYSTEM = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
"""Ray notices a lost node within seconds instead of a minute."""
STORE_BYTES = 300 << 20


class RayNodes:
    """The head and a second node. Create it before Ray is imported, because the import reads the environment."""

    def __init__(self, cpus: int) -> None:
        """`cpus`: logical CPUs of each node, one for each engine worker."""
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cpus,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_system_config": SYSTEM,
            },
        )
        self._second: Any = None
        self._lost: list[Any] = []
        self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def second_id(self) -> str:
        """Ray's id of the second node."""
        return str(self._second.node_id)

    def add(self) -> None:
        """Add another second node."""
        self._second = self._cluster.add_node(num_cpus=self._cpus, object_store_memory=STORE_BYTES)

    def lose(self, number: signal.Signals) -> None:
        """Send a signal to the second node's raylet, and start another second node. A killed raylet is reaped, so that
        its workers notice; a stopped one stays stopped until `remove_lost`.
        """
        raylet = self._second.all_processes["raylet"][0].process
        os.kill(raylet.pid, number)
        if number is signal.SIGKILL:
            raylet.wait(10)
        self._lost.append(self._second)
        self.add()

    def remove_lost(self) -> None:
        """Remove the remaining processes of lost nodes."""
        while self._lost:
            self._cluster.remove_node(self._lost.pop(), allow_graceful=False)

    def close(self) -> None:
        self.remove_lost()
        self._cluster.shutdown()
