"""Engines as actors of a Ray cluster behind Ray Serve.

`rollout serve --data-parallel-backend ray` does all of it. Who holds a cluster already, with other applications on it,
deploys this one beside them: `ray.serve.run(rollout.server.ray.build(EngineConfig(model=…), ServerConfig(…)))`.
"""

from __future__ import annotations

from rollout.server.ray.ingress import build
from rollout.server.ray.main import serve

__all__ = ["build", "serve"]
