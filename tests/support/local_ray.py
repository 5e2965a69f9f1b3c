"""A Ray cluster of several nodes on this machine, and what runs where on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

# A node that is gone counts as dead after some 5 s, in place of 20. What else fills this machine kills no engine.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
}
_NODE: dict[str, Any] = {"object_store_memory": 80 << 20}


class RayCluster:
    """A head node without room for an engine, and nodes with room for one each."""

    def __init__(self, nodes: int) -> None:
        head = {**_NODE, "num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes):
            self.add_node()
        self.address: str = self._cluster.address

    def add_node(self) -> None:
        self._cluster.add_node(num_cpus=1, **_NODE)

    def placed(self) -> dict[int, str]:
        """The node of each rank that has a place."""
        groups = [g for g in placement_group_table().values() if g["name"].startswith("rollout engine")]
        return {
            int(group["name"].rpartition(" ")[2]): group["bundles_to_node_id"][0]
            for group in groups
            if group["state"] == "CREATED"
        }

    def remove_node_of(self, rank: int) -> None:
        """Kill everything on the node of this rank at once, the engine as well."""
        (node,) = [node for node in self._cluster.worker_nodes if node.node_id == self.placed()[rank]]
        for raylet in node.all_processes["raylet"]:
            for process in psutil.Process(raylet.process.pid).children(recursive=True):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def cpus_taken(self) -> int:
        """How many of the node's CPUs are taken."""
        return int(ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0))

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """A cluster, to which this process is connected, and to which `rollout serve` connects."""
    with mock.patch.dict(os.environ, _SETTINGS):
        cluster = RayCluster(nodes)
        try:
            ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            with mock.patch.dict(os.environ, {"RAY_ADDRESS": cluster.address}):
                yield cluster
        finally:
            ray.shutdown()
            cluster.close()
