"""verl's rollout and checkpoint engine `rollout`: generation by running `rollout serve`s, weights by `WeightSender`.

verl (0.9) finds this module by its entry point (group `verl.plugins`) when it is imported itself, so its configuration
is all there is to say:

    actor_rollout_ref.rollout.name=rollout
    actor_rollout_ref.rollout.checkpoint_engine.backend=rollout
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollout.urls=[http://host:8000,http://host:8001]

A replica is one of these servers. Rank 0 of the trainer pushes to all of them as one transaction, beside what they
generate: nothing is paused, aborted or put to sleep for it, and each answer says which steps' weights sampled it. With
the backend `naive` (trainer and rollout in one worker group) the trainer's ranks push by the same means.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from trainer_bridge.client import AsyncRolloutClient, Choice, RolloutError
from trainer_bridge.push.sender import WeightSender
from trainer_bridge.push.sources import StreamSource

__all__ = ["NAME", "CheckpointEngineOfServers", "Replica", "ServerAdapter", "ServerHandle"]

NAME = "rollout"
_READY_S = 600.0
_RETRY_S = 60.0


def _settings(config: Any) -> dict[str, Any]:
    """The arguments of `CheckpointEngineOfServers` in verl's RolloutConfig. Raises ValueError without addresses."""
    given = dict(config.checkpoint_engine.engine_kwargs.get(NAME) or {})
    if not given.get("urls"):
        raise ValueError(
            f"rollout.name={NAME} needs the addresses of its servers: set "
            f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}.urls=[http://host:port, …]"
        )
    return given


class _Pusher:
    """The push of one trainer to all servers; rank 0 sends, the others take part in its gathers."""

    def __init__(
        self,
        leads: bool,
        urls: Sequence[str],
        api_key: str | None = None,
        timeout_s: float = 300.0,
        kv_policy: Literal["keep", "recompute"] | None = None,
    ) -> None:
        self._leads, self._urls, self._api_key, self._timeout_s = leads, list(urls), api_key, timeout_s
        self._kv_policy = kv_policy
        self._source = StreamSource()
        self._sender: WeightSender | None = None

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], step: int | None) -> dict[str, float]:
        """Send them all, labelled with the trainer's step. Raises WeightPushError; the old weights serve on."""
        try:
            if not self._leads:
                return {}
            self._source.begin((name, tensor) for name, tensor in weights if tensor.is_floating_point())
            if self._sender is None:
                key, limit = self._api_key, self._timeout_s
                self._sender = WeightSender.connect(self._urls, self._source, api_key=key, timeout_s=limit)
            pushed = self._sender.push(None if step is None else str(step), kv_policy=self._kv_policy)
            return {"rollout/push_seconds": pushed.seconds, "rollout/push_bytes": float(pushed.bytes)}
        finally:
            for _ in weights:  # each step of it is a collective of the trainer's ranks, also after a failure here
                pass


@CheckpointEngineRegistry.register(NAME)
class CheckpointEngineOfServers(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """verl's backend `rollout`: what the trainer sends goes straight to the servers, so the rollout's side is idle.

    `urls`, `api_key`, `timeout_s` (of each wait) and `kv_policy` are the `engine_kwargs` of this name.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self._pusher = _Pusher(is_master, **settings)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """There is no group of workers: the sender makes its own, with the servers."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Push, on rank 0. On this thread, as verl's own backends: the ranks' collectives and devices belong to it."""
        return self._pusher.push(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Nothing."""
        for pair in list[tuple[str, torch.Tensor]]():
            yield pair


class ServerAdapter(base.BaseRollout):  # type: ignore[misc]
    """What a worker of verl has of its replica's server: its memory, and in verl's backend `naive` the push."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, cfg = int(os.environ["RANK"]), self.config
        size = cfg.tensor_model_parallel_size * cfg.data_parallel_size * cfg.pipeline_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        settings = _settings(cfg)
        self._url = _url_of(settings["urls"], self.replica_rank)
        self._api_key = settings.get("api_key")
        self._pusher = _Pusher(rank == 0, **settings)

    async def resume(self, tags: list[str]) -> None:
        """Have the server take the memory of these parts again, where `free_cache_engine` gave it back."""
        await self._memory("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def release(self) -> None:
        """Have the server give its memory back, with `free_cache_engine` (it needs --enable-sleep-mode)."""
        await self._memory("/sleep?level=1&mode=abort")

    async def _memory(self, path: str) -> None:
        if self.config.free_cache_engine and self.is_leader_rank:
            async with AsyncRolloutClient(self._url, api_key=self._api_key) as client:
                await client.post(path)

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Push (backend `naive`), or take note that the backend `rollout` has. Raises WeightPushError, ValueError."""
        backend = self.config.checkpoint_engine.backend
        if backend not in (NAME, "naive") or wire_format != "named_tensors":
            raise ValueError(
                f"checkpoint_engine.backend={backend!r} ({wire_format}) doesn't reach a rollout server: set {NAME!r}, "
                "or 'naive' where trainer and rollout share their workers"
            )
        if peft_config is not None:
            raise ValueError("this backend pushes no adapter: set actor_rollout_ref.model.lora.merge=True")
        if backend == NAME:
            async for _nothing in weights:
                pass
        else:
            self._pusher.push(iter(weights), global_steps)


class ServerHandle:
    """The Ray actor that verl's clients call in place of an inference engine; `url` is the server's."""

    def __init__(self, url: str, config: Any, api_key: str | None = None) -> None:
        self.config = config
        self._client = AsyncRolloutClient(url, api_key=api_key, timeout_s=3600.0, retry_s=_RETRY_S)
        self._rejects = False

    async def wait_until_ready(self) -> None:
        """Return once the server is healthy. Raises RolloutError after ten minutes."""
        await self._client.wait_until_ready(_READY_S)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """One answer. Raises ValueError for media, and for parameters that the server doesn't have."""
        if any(media for media in (image_data, video_data, audio_data)):
            raise ValueError("a rollout server takes text alone, and this prompt has images, videos or sounds")
        if self._rejects:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        params, extra = self._params(len(prompt_ids), dict(sampling_params)), {"priority": priority} if priority else {}
        try:
            answer = await self._client.generate(prompt_ids, params, request_id=request_id, extra=extra)
        except RolloutError as error:  # as an exception of one string, which Ray can carry
            raise RuntimeError(f"{self._client.base_url}: {error}") from None
        (choice,) = answer.choices
        if choice.finish_reason == "error":
            raise RuntimeError(f"{self._client.base_url}: the answer failed: {choice.stop_reason}")
        experts = answer.raw["choices"][0].get("routed_experts")
        return TokenOutput(
            token_ids=choice.token_ids,
            log_probs=choice.logprobs,
            routed_experts=_array(experts) if experts and self.config.enable_rollout_routing_replay else None,
            stop_reason="aborted" if choice.finish_reason == "abort" else "completed",
            extra_fields=_steps(choice),
        )

    def _params(self, prompt_length: int, params: dict[str, Any]) -> dict[str, Any]:
        """verl's sampling parameters as the server has them."""
        config = self.config
        longest = min(config.response_length, config.prompt_length + config.response_length - prompt_length)
        asked = [params.pop(name) for name in ("max_tokens", "max_new_tokens") if name in params]
        params["max_tokens"] = max(1, asked[0] if asked else longest)
        params["logprobs"] = 0 if params.pop("logprobs", False) else None
        params.setdefault("repetition_penalty", config.repetition_penalty)
        params.setdefault("ignore_eos", config.ignore_eos)
        if config.full_determinism:
            params.setdefault("seed", config.seed)
        return params

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Of a replica that leaves (`reject_request`) end what runs, and refuse what comes until `resume_generation`.

        verl also calls this before each push, without that: nothing ends then, since the weights come beside.
        """
        if not reject_request:
            return {"aborted_count": 0, "request_ids": []}
        self._rejects = True
        return {"aborted_count": await self._client.abort_all(), "request_ids": []}

    async def resume_generation(self) -> None:
        """Take requests again."""
        self._rejects = False

    async def sleep(self) -> None:
        """Have the server give its memory back, with `free_cache_engine`."""
        if self.config.free_cache_engine:
            await self._client.sleep()

    async def wake_up(self, tags: Sequence[Literal["weights", "kv_cache"]] | None = None) -> None:
        """Have it take that again."""
        if self.config.free_cache_engine:
            await self._client.wake_up(tags or ("weights", "kv_cache"))

    async def clear_kv_cache(self) -> None:
        """Forget every cached prefix."""
        await self._client.post("/reset_prefix_cache")

    async def release_kv_cache(self) -> None:
        """Nothing: a push needs none of the cache's memory."""

    async def resume_kv_cache(self) -> None:
        """Nothing."""

    async def start_profile(self, **_: Any) -> None:
        """Nothing: `rollout bench profile` measures a server."""

    async def stop_profile(self) -> None:
        """Nothing."""


class Replica(RolloutReplica):  # type: ignore[misc]
    """A server that runs already: the one of `urls` that has this replica's number. It takes no GPU of verl's."""

    async def init_standalone(self) -> None:
        """As the base class, but the one worker, which only takes verl's calls, waits for no GPU."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"{NAME}_standalone_{self.replica_rank}{self.name_suffix}"
        self.resource_pool = RayResourcePool([1], use_gpu=False, name_prefix=name, max_colocate_count=1)
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=name,
            use_gpu=False,
            device_name=get_device_name(),
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Wait for the server, and make the actor that stands for it."""
        settings = _settings(self.config)
        url = _url_of(settings["urls"], self.replica_rank)
        options = {"name": f"{NAME}_server_{self.replica_rank}_0{self.name_suffix}", "num_cpus": 0}
        actor: Any = ray.remote(ServerHandle)
        made = actor.options(**options, max_concurrency=self.max_concurrency)
        server = made.remote(url, self.config, settings.get("api_key"))
        await server.wait_until_ready.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = url.partition("://")[2].rstrip("/")

    def rollout_worker_use_gpu(self) -> bool:
        return False


def _url_of(urls: Sequence[str], replica_rank: int) -> str:
    return str(urls[replica_rank % len(urls)])


def _steps(choice: Choice) -> dict[str, Any]:
    """The trainer's steps whose weights sampled the answer, by its labels; none of weights that weren't pushed."""
    labels = [span.version for span in choice.spans]
    steps = [int(label) for label in labels if label.isdecimal()]
    if not steps or len(steps) != len(labels):
        return {"global_steps": steps[-1] if steps else None}
    return {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}


def _array(encoded: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)  # type: ignore[no-any-return]


RolloutReplicaRegistry.register(NAME, lambda: Replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"
