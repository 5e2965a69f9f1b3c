"""verl's own classes on `rollout serve`, through the plugin: cycles of its agent loop and of its weight updates.

    python -m tests.peers.verl_client [--cycles 20] [--ranks 2]

Run it with a Python that has verl 0.9.1 (installed with --no-deps and what it then misses) and this project, installed
so that its entry point is found. verl's, unmodified: its configuration (composed by hydra), plugins, LLMServerManager
with its load balancer, replica base class, CheckpointEngineWorker, CheckpointEngineManager, RayWorkerGroup,
AgentLoopManager with its workers and single-turn loop, and of its actor's worker the methods that send weights. What
stands in: the training engine, a tiny model for each step on every rank. In each cycle the tokens that the agent loop
returns are checked against transformers' forward; beside them one request runs all along, which no push may abort.
"""

from __future__ import annotations

import argparse
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerManager

from rollout.launch import serve
from tests.peers.world import World
from tests.support import text_server, tiny_models
from tests.support.sglang_trainer import lengthen

PROMPTS = ["Say something.", "Another prompt, which is longer.", "A third"]
LENGTH = 16
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}me: {% endif %}"
)


class Engine:
    """The training engine: with each call the next model's parameters, as every rank has them."""

    def __init__(self) -> None:
        self.step = 0

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """In verl's form, without an adapter."""
        self.step += 1
        return iter(tiny_models.model("llama", self.step).named_parameters()), None


class Actor(Worker):
    """A rank of the trainer, with the methods of verl's actor that send weights."""

    def __init__(self, rollout: Any) -> None:
        super().__init__()
        engine = rollout.checkpoint_engine
        self.config = types.SimpleNamespace(rollout=rollout)
        self.actor = types.SimpleNamespace(engine=Engine())
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=self.rank == 0,
            bucket_size=engine.update_weights_bucket_megabytes << 20,
            **engine.engine_kwargs[engine.backend],
        )

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine


def config_of(path: Path, url: str) -> Any:
    """verl's configuration of a trainer on this server."""
    ours = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={path}",
                f"{ours}.name=rollout",
                f"{ours}.checkpoint_engine.backend=rollout",
                f"+{ours}.checkpoint_engine.engine_kwargs.rollout.urls=[{url}]",
                f"+{ours}.checkpoint_engine.engine_kwargs.rollout.kv_policy=recompute",
                f"{ours}.nnodes=1",
                f"{ours}.n_gpus_per_node=1",
                f"{ours}.tensor_model_parallel_size=1",
                f"{ours}.calculate_log_probs=True",
                f"{ours}.prompt_length=256",
                f"{ours}.response_length={LENGTH}",
                f"{ours}.agent.num_workers=1",
            ],
        )


def workers(config: Any, ranks: int) -> RayWorkerGroup:
    """The trainer."""
    return RayWorkerGroup(
        resource_pool=RayResourcePool([ranks], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Actor), config.actor_rollout_ref.rollout),
        use_gpu=False,
        device_name="cpu",
    )


def check(world: World, answers: DataProto, step: int) -> None:
    """Every answer is the newest weights', and says so."""
    batch = answers.batch
    for row in range(len(answers)):
        prompt_mask = batch["attention_mask"][row, : batch["prompts"].shape[1]].bool()
        mask = batch["response_mask"][row].bool()
        prompt = batch["prompts"][row][prompt_mask].tolist()
        tokens = batch["responses"][row][mask].tolist()
        assert tokens
        world.check(prompt, tokens, batch["rollout_log_probs"][row][mask].tolist())
    for name in ("global_steps", "min_global_steps", "max_global_steps"):
        assert answers.non_tensor_batch[name].tolist() == [step or None] * len(answers), name


def run(world: World, cycles: int, ranks: int) -> None:
    """The cycles."""
    config = config_of(world.path, world.url)
    servers = LLMServerManager.create(config)
    (replica,) = servers.get_replicas()
    assert type(replica).__module__ == "trainer_bridge.integrations.verl"
    loops = AgentLoopManager.create(config, servers.get_client())
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    manager = CheckpointEngineManager(engine, workers(config, ranks), servers.get_replicas())
    asked = np.array([[{"role": "user", "content": text}] for text in PROMPTS] + [None], dtype=object)[:-1]

    def generate(step: int) -> None:
        prompts = DataProto(non_tensor_batch={"raw_prompt": asked.copy()}, meta_info={"global_steps": step})
        check(world, loops.generate_sequences(prompts), step)

    generate(0)
    with world.beside():
        for step in range(1, cycles + 1):
            metrics = manager.update_weights(global_steps=step)
            world.pushed(tiny_models.model("llama", step))
            assert metrics["rollout/push_bytes"] > 0
            generate(step)


def main() -> None:
    """Run it; ends with an error at the first thing that isn't as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    chosen = parser.parse_args()
    flags = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--kv-policy", "recompute"]
    flags += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--num-gpu-blocks-override", "1200"]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    with tempfile.TemporaryDirectory() as folder:
        path = lengthen(tiny_models.build("llama", Path(folder) / "model"))
        tokenizer = text_server.tokenizer()
        tokenizer.chat_template = TEMPLATE  # without special tokens, which this model hasn't
        tokenizer.save_pretrained(path)
        with serve(path, Path(folder) / "log", *flags) as url:
            world = World(url, path)
            run(world, chosen.cycles, chosen.ranks)
            print(f"verl: {chosen.cycles} cycles, {world.checked} logprobs are transformers'")
    ray.shutdown()


if __name__ == "__main__":
    main()
