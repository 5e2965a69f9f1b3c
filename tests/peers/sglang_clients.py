"""Trainers' own clients, unmodified, against `rollout serve`: cycles of generation and of weights over gloo.

    python -m tests.peers.sglang_clients areal | slime | atropos | skyrl | nemo_rl [--cycles 20]

Run it with a Python that has the client (areal 1.0.4, atroposlib 0.4.0, skyrl 0.3.0 from PyPI, installed with
--no-deps and what they then miss) beside this project's environment; of slime its repository on PYTHONPATH. In each
cycle a tiny model's logprobs are checked against transformers' forward; beside the cycles one request runs all along,
and must not be aborted by any push.

What is no client's: slime's Ray actor and SGLang's argument class are stand-ins (only their names are imported), and
SkyRL's sender calls vLLM's NCCL engine, for which there is a stand-in over gloo here. Atropos pushes no weights, and
NeMo-RL only pickles (its generation is run from its repository, without the servers that it would start): the trainer
of our tests does.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
import tempfile
import threading
import types
import typing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
import typing_extensions

from rollout.launch import serve
from tests.peers.world import PROMPT, World, free_port
from tests.support import text_server, tiny_models
from tests.support.sglang_trainer import SglangTrainer, lengthen, parts


def broadcast(tensors: Any, group: Any) -> None:
    for work in [dist.broadcast(tensor.detach(), 0, group=group, async_op=True) for tensor in tensors]:
        work.wait()


def areal(world: World, cycles: int) -> None:
    """AReaL's SGLang backend, its update helpers and its process group."""
    from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta
    from areal.api.cli_args import GenerationHyperparameters
    from areal.engine.core.distributed import init_custom_process_group
    from areal.engine.sglang_remote import SGLangBackend
    from areal.infra import remote_inf_engine as remote

    backend, address = SGLangBackend(), world.url.removeprefix("http://")
    meta = WeightUpdateMeta(
        type="xccl",
        gen_allocation=ModelAllocation.from_str("sglang:d1", name="rollout"),
        nccl_master_address="127.0.0.1",
        nccl_master_port=free_port(),
        nccl_group_name="update_weight_group",
    )
    joining = world.pool.submit(remote._init_weights_update_group_remote, backend, meta, [address], 120)
    group = init_custom_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{meta.nccl_master_port}",
        timeout=timedelta(seconds=120),
        world_size=2,
        rank=0,
        group_name="update_weight_group",
    )
    joining.result(120)

    def ask(request: Any) -> Any:
        url = f"{world.url}{request.endpoint}"
        answer = httpx.request(request.method, url, json=request.payload or {}, timeout=300)
        return answer.raise_for_status().json()

    for _ in range(cycles):
        model = world.next_model()
        ask(backend.get_pause_request())
        for tensors in parts(model):
            specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).split(".")[1]) for name, t in tensors.items()]
            update = remote._update_weights_from_distributed
            call = world.pool.submit(update, backend, meta, specs, [address], 120)
            broadcast(tensors.values(), group)
            call.result(120)
        ask(backend.get_resume_request())
        world.pushed(model)
        wanted = GenerationHyperparameters(max_new_tokens=8, temperature=1.0)
        request = ModelRequest(input_ids=list(PROMPT), gconfig=wanted)
        got = backend.parse_generation_response(ask(backend.build_generation_request(request, False, 0)))
        world.check(PROMPT, got.output_tokens, got.output_logprobs)
        score = backend.build_score_request(list(PROMPT), 3, False, 0)
        world.check(PROMPT[:-3], PROMPT[-3:], backend.parse_score_response(ask(score), 3))


def _module(name: str, **names: Any) -> None:
    made: Any = types.ModuleType(name)
    made.__dict__.update(names)
    made.__path__ = []
    sys.modules[name] = made


def _slime_engine(world: World) -> Any:
    """slime's engine class on a pre-launched engine."""

    @dataclasses.dataclass
    class ServerArgs:
        """Only its name is imported."""

    for name in ("sglang", "sglang.srt"):
        _module(name)
    _module("sglang.srt.server_args", ServerArgs=ServerArgs)
    _module("sglang.srt.utils", kill_process_tree=None)
    _module("slime.ray.ray_actor", RayActor=object)
    _module("slime.utils.accelerator", initialize_accelerator=lambda: None)
    from slime.backends.sglang_utils.external import discover_external_engines
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    (info,) = discover_external_engines([world.url])
    assert (info.worker_type, info.num_gpus, info.parallel_config["tp_size"]) == ("regular", 1, 1)
    engine = SGLangEngine(argparse.Namespace(rollout_external=True), 0)
    engine.node_rank, engine.server_host, engine.server_port = 0, info.host, info.port
    engine.router_ip = engine.router_port = None
    fields = ["enable_memory_saver", "enable_return_routed_experts"]
    engine._init_external(dict.fromkeys(fields, False), fields)
    assert engine.health_generate(timeout=60)
    return engine


async def _slime_sample(world: World, filtered: bool) -> Any:
    """What slime's own `generate` makes of a sample of PROMPT; `filtered`: with top_p, whose supports it reads."""
    from slime.rollout.sglang_rollout import GenerateState, generate
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    host, _, port = world.url.removeprefix("http://").partition(":")
    settings = {"rollout_temperature": 1.0, "rollout_top_p": 0.9 if filtered else 1.0, "rollout_top_k": -1}
    settings |= {"rollout_max_response_len": 8, "rollout_stop": None, "rollout_stop_token_ids": None}
    settings |= {"rollout_skip_special_tokens": False, "rollout_num_engines": 1, "sglang_server_concurrency": 8}
    settings |= {"sglang_dp_size": 1, "sglang_router_ip": host, "sglang_router_port": port, "ci_test": False}
    settings |= {"use_rollout_routing_replay": False, "use_distributed_post": False, "hf_checkpoint": str(world.path)}
    args = argparse.Namespace(**settings)
    init_http_client(args)
    type(GenerateState)._instances.clear()  # it keeps the first settings
    sample = Sample(tokens=list(PROMPT))
    return await generate(args, sample, GenerateState(args).sampling_params)


def slime(world: World, cycles: int) -> None:
    """slime's external discovery, its engine's calls and its process group, in the order of its update."""
    engine = _slime_engine(world)
    from slime.utils.distributed_utils import init_process_group

    loop = asyncio.new_event_loop()  # slime's HTTP client belongs to one
    threading.Thread(target=loop.run_forever, daemon=True).start()
    port = free_port()
    joining = world.pool.submit(engine.init_weights_update_group, "127.0.0.1", port, 1, 2, "slime-pp_0", "gloo")
    group = init_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="slime-pp_0"
    )
    joining.result(120)
    for version in range(1, cycles + 1):
        model = world.next_model()
        engine.pause_generation()
        engine.flush_cache()
        for tensors in parts(model):
            values = list(tensors.values())
            described = list(tensors), [t.dtype for t in values], [t.shape for t in values]
            send = engine.update_weights_from_distributed
            call = world.pool.submit(send, *described, "slime-pp_0", weight_version=str(version))
            broadcast(values, group)
            call.result(120)
        engine.continue_generation()
        world.pushed(model)
        assert engine.get_weight_version() == str(version)
        sample = asyncio.run_coroutine_threadsafe(_slime_sample(world, version % 2 == 0), loop).result(120)
        supports = None
        if version % 2 == 0:
            ids = torch.as_tensor(sample.rollout_top_p_token_ids).tolist()
            offsets = torch.as_tensor(sample.rollout_top_p_token_offsets).tolist()
            supports = [ids[start:end] for start, end in itertools.pairwise(offsets)]
        world.check(PROMPT, sample.tokens[len(PROMPT) :], sample.rollout_log_probs, supports)
        assert sample.weight_versions == [str(version)]
        assert len(sample.loss_mask) == sample.response_length
    engine.destroy_weights_update_group("slime-pp_0")


def atropos(world: World, cycles: int) -> None:
    """Atropos' SGLang server class; the pushes between are slime's calls."""
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.sglang_server import SGLangServer

    trainer = SglangTrainer(world.url)
    trainer.join()

    async def run() -> None:
        settings = {"model_name": str(world.path), "tokenizer_name": str(world.path), "health_check": False}
        server = SGLangServer(APIServerConfig(base_url=f"{world.url}/v1", api_key="x", timeout=300, **settings))
        for version in range(1, cycles + 1):
            model = world.next_model()
            await asyncio.to_thread(trainer.push, model, str(version))
            world.pushed(model)
            told = await server._tokens_and_logprobs_completion_wrapper(
                model=str(world.path), input_ids=list(PROMPT), n=2, max_tokens=8, temperature=1.0, top_p=1.0
            )
            prompt, tokens, logprobs, reasons = told
            assert len(tokens) == 2
            assert {reason["type"] for reason in reasons} <= {"length", "stop"}
            for ids, values in zip(tokens, logprobs, strict=True):
                world.check(prompt, ids, values)

    asyncio.run(run())


def nemo_rl(world: World, cycles: int) -> None:
    """NeMo-RL's SGLang generation; its own push carries pickles, so those between are slime's calls."""
    import nemo_rl as package

    _module("nemo_rl.models.policy", PolicyConfig=dict)  # refuses newer versions of transformers than its own
    sys.modules["nemo_rl.models.policy"].__path__ = [f"{package.__path__[0]}/models/policy"]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # it marks its ranges without a GPU, too
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
    from nemo_rl.models.generation.sglang.utils.async_utils import AsyncLoopThread
    from nemo_rl.models.generation.sglang.utils.http_utils import HttpClient

    servers = {"num_gpus": 1, "num_gpus_per_engine": 1, "sglang_server_concurrency": 8}
    generation = SGLangGeneration.__new__(SGLangGeneration)  # without the servers and the router that it would start
    generation.sglang_cfg = {
        "sglang_cfg": {"context_length": 100, "sglang_server_config": servers},
        "max_new_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "_pad_token_id": 0,
    }
    generation.all_engines, generation.num_gpus_per_engine, generation._router_actor = [], 1, None
    generation.router_ip, _, generation.router_port = world.url.removeprefix("http://").partition(":")
    generation._async_loop, generation._http_client = AsyncLoopThread(), HttpClient(generation.sglang_cfg)
    trainer = SglangTrainer(world.url)
    trainer.join()
    prompts = [PROMPT, PROMPT[:5]]
    padded = torch.tensor([[*ids, *[0] * (8 - len(ids))] for ids in prompts])
    for version in range(1, cycles + 1):
        model = world.next_model()
        trainer.push(model, str(version))
        world.pushed(model)
        asked = BatchedDataDict({"input_ids": padded, "input_lengths": torch.tensor([len(ids) for ids in prompts])})
        got = generation.generate(asked)
        for row, ids in enumerate(prompts):
            end = int(got["unpadded_sequence_lengths"][row])
            assert len(ids) < end <= len(ids) + 8
            tokens, logprobs = got["output_ids"][row, :end].tolist(), got["logprobs"][row, len(ids) : end].tolist()
            assert tokens[: len(ids)] == ids
            world.check(ids, tokens[len(ids) :], logprobs)


class GlooEngine:
    """vLLM's NCCLWeightTransferEngine as SkyRL's sender calls it, over gloo: one packed buffer."""

    @staticmethod
    def trainer_init(info: dict[str, Any]) -> Any:
        """Rank 0 of the group that the server joins."""
        limit = timedelta(seconds=120)
        size = info["world_size"]
        store = dist.TCPStore(info["master_address"], info["master_port"], size, True, limit, wait_for_workers=False)
        return dist.ProcessGroupGloo(dist.PrefixStore("rollout", store), 0, size, limit)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: dict[str, Any]) -> None:
        """All of it is below the size at which a buffer is cut."""
        pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in iterator]
        trainer_args["group"].broadcast(torch.cat(pieces), 0).wait()


def skyrl(world: World, cycles: int) -> None:
    """SkyRL's remote client, and its broadcast sender over /collective_rpc."""
    typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it so for SkyRL's types before Python 3.12
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        _module(name)
    _module("vllm.distributed.weight_transfer.nccl_engine", NCCLWeightTransferEngine=GlooEngine)
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk
    from skyrl.backends.skyrl_train.weight_sync.broadcast_strategy import (
        BroadcastInitInfo,
        BroadcastTransferStrategy,
    )

    alone = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=alone, rank=0, world_size=1)

    async def run() -> None:
        client = RemoteInferenceClient(
            proxy_url=world.url, server_urls=[world.url], data_parallel_size=1, model_name=str(world.path)
        )
        total, _ = await client.get_world_size()
        init = BroadcastInitInfo(
            master_addr="127.0.0.1",
            master_port=free_port(),
            rank_offset=1,
            world_size=total + 1,
            override_existing_receiver=True,
        )
        joining = asyncio.create_task(client.init_weight_update_communicator(init))
        sender = await asyncio.to_thread(BroadcastTransferStrategy.create_sender, init, client)
        await joining
        for _ in range(cycles):
            model = world.next_model()
            named = dict(model.named_parameters())
            shapes = [list(t.shape) for t in named.values()]
            dtypes = [str(t.dtype).removeprefix("torch.") for t in named.values()]
            about = {"names": list(named), "dtype_names": dtypes, "shapes": shapes}
            await client.pause_generation()
            chunk = WeightChunk(list(named), dtypes, shapes, list(named.values()))
            await sender.send_chunks([chunk], about)
            await client.resume_generation()
            world.pushed(model)
            params = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0}
            got = await client.generate({"prompt_token_ids": [PROMPT], "sampling_params": params})
            assert got["response_logprobs"] is not None
            world.check(PROMPT, got["response_ids"][0], got["response_logprobs"][0])
        await client.teardown()

    asyncio.run(run())


CLIENTS: dict[str, Callable[[World, int], None]] = {
    "areal": areal,
    "slime": slime,
    "atropos": atropos,
    "skyrl": skyrl,
    "nemo_rl": nemo_rl,
}


def main() -> None:
    """Run one client's cycles; ends with an error at the first that isn't as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--cycles", type=int, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = lengthen(tiny_models.build("llama", Path(folder) / "model"))
        text_server.tokenizer().save_pretrained(path)
        flags = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--kv-policy", "recompute"]
        flags += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--no-pause-generation-aborts"]
        flags += ["--num-gpu-blocks-override", "1200"]
        with serve(path, Path(folder) / "log", *flags) as url:
            world = World(url, path)
            if chosen.client == "skyrl":  # it pauses for real, and aborts nothing either
                CLIENTS["skyrl"](world, chosen.cycles)
            else:
                with world.beside():
                    CLIENTS[chosen.client](world, chosen.cycles)
            print(f"{chosen.client}: {chosen.cycles} cycles, {world.checked} logprobs are transformers'")


if __name__ == "__main__":
    main()
