"""A version reaches another node of a Ray cluster once, whatever the number of engine workers there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from asyncrl.weights.object_store import ObjectStorePublisher, start_store
from benchmarks.running import publish_tensors

NAMESPACE = "nodes-test"
BUCKET_BYTES = 8 << 20
WEIGHTS = {f"model.layers.{layer}.w": np.full(1 << 20, layer, np.float32) for layer in range(6)}
NUM_BYTES = sum(array.nbytes for array in WEIGHTS.values())


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=2, resources={"engines": 2}, object_store_memory=200 << 20)
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote(num_cpus=1, resources={"engines": 1})
class EngineWorker:
    """Maps a version as vLLM's workers do, and keeps it mapped."""

    def fetch(self, refs: list[Any]) -> tuple[float, bool]:
        """Return the sum of the weights, and whether they are in shared memory."""
        self.chunks = [ray.get(ref) for ref in refs]
        arrays = [array for chunk in self.chunks for array in chunk.values()]
        return float(sum(array.sum() for array in arrays)), not any(array.flags.owndata for array in arrays)


async def test_a_node_has_one_copy_of_a_version(cluster: Cluster) -> None:
    store: Any = start_store(NAMESPACE)
    publisher = ObjectStorePublisher(store, call_s=60, bucket_bytes=BUCKET_BYTES)
    published = await publish_tensors(publisher, 1, 1, WEIGHTS)
    refs = await store.tensors.remote(published.weights_version)
    assert len(refs) == NUM_BYTES // BUCKET_BYTES
    workers = [EngineWorker.remote() for _ in range(2)]
    with anyio.fail_after(60):
        fetched = [await worker.fetch.remote(refs) for worker in workers]
    assert fetched == [(float(sum(array.sum() for array in WEIGHTS.values())), True)] * 2
    (node,) = [node for node in ray.nodes() if "engines" in node["Resources"]]
    stats = await anyio.to_thread.run_sync(node_stats, node["NodeManagerAddress"], node["NodeManagerPort"], False)
    assert NUM_BYTES <= stats.store_stats.object_store_bytes_used < 1.1 * NUM_BYTES
