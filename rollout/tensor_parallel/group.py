"""The process group of one engine's ranks, and what they must agree on."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rollout.config import EngineConfig
from rollout.model.model_config import resolve_device
from rollout.rendezvous import host_store

HOST = "127.0.0.1"
COLLECTIVE_TIMEOUT_S = 300.0
"""Longest wait of one rank for the others, in a collective or while they load the model."""


def open_store(size: int) -> dist.TCPStore:
    """Where the ranks meet: a store on localhost, on a port of its own."""
    return host_store(HOST, size, COLLECTIVE_TIMEOUT_S)


def find_store(port: int, size: int) -> dist.TCPStore:
    """The leader's store. Raises torch's own error where it doesn't answer in time."""
    return dist.TCPStore(HOST, port, size, False, timedelta(seconds=COLLECTIVE_TIMEOUT_S), wait_for_workers=False)


def check_devices(config: EngineConfig) -> None:
    """Raise ValueError where there are too few CUDA devices, or where the ranks can't be kept off those that there are.

    Rank i takes the i-th one that this process sees.
    """
    size, seen = config.tensor_parallel_size, torch.cuda.device_count()
    if resolve_device(config).type == "cuda" and seen < size:
        raise ValueError(f"tensor_parallel_size {size} needs as many CUDA devices, torch sees {seen}")
    if resolve_device(config).type == "cpu" and seen:
        raise ValueError(
            f"tensor_parallel_size {size} with device 'cpu': transformers takes the {seen} CUDA devices that it sees; "
            "hide them (CUDA_VISIBLE_DEVICES=)"
        )


def join(config: EngineConfig, store: dist.TCPStore, rank: int) -> DeviceMesh:
    """Meet the other ranks: NCCL between CUDA devices, gloo between CPUs. Returns the mesh of `weights.shares`.

    That one has a gloo group of its own: checksums are gathered while the model computes. On a CPU the ranks share the
    threads that torch would take for one.
    """
    size, timeout = config.tensor_parallel_size, timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    where = resolve_device(config)
    os.environ["LOCAL_RANK"] = str(rank)  # transformers puts this rank's share on that device
    if where.type == "cuda":
        where = torch.device("cuda", rank)
        torch.cuda.set_device(where)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=where)
    else:
        torch.set_num_threads(config.num_threads or max(1, torch.get_num_threads() // size))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    gathering = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.weight_update_timeout_s))
    return DeviceMesh.from_group(gathering, "cpu")


def leave() -> None:
    """Leave the group, so that this process can join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
