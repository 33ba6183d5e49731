"""A Ray cluster of two nodes on this machine, the second of which can be lost and replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SYSTEM = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
"""A lost node is noticed within seconds, not a minute."""
STORE_BYTES = 300 << 20


class Nodes:
    """The head and a second node. Ray must not be imported before this is made: it reads the environment then."""

    def __init__(self, cpus: int) -> None:
        """`cpus`: logical ones of each node, one engine worker each."""
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
        """Another second node."""
        self._second = self._cluster.add_node(num_cpus=self._cpus, object_store_memory=STORE_BYTES)

    def lose(self, number: signal.Signals) -> None:
        """Strike the second node's raylet, and bring up another second node. A raylet that is killed is reaped, or its
        workers would not notice; one that is stopped stays as it is, until `sweep`.
        """
        raylet = self._second.all_processes["raylet"][0].process
        os.kill(raylet.pid, number)
        if number is signal.SIGKILL:
            raylet.wait(10)
        self._lost.append(self._second)
        self.add()

    def sweep(self) -> None:
        """Take away what is left of lost nodes."""
        while self._lost:
            self._cluster.remove_node(self._lost.pop(), allow_graceful=False)

    def close(self) -> None:
        self.sweep()
        self._cluster.shutdown()


@contextmanager
def nodes(cpus: int) -> Iterator[Nodes]:
    """A `Nodes` for the time of the block."""
    both = Nodes(cpus)
    try:
        yield both
    finally:
        both.close()
