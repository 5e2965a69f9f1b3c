"""Who meets a trainer, on which interface, and what becomes of the one that waits when the other doesn't come."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rollout.model.parameters import ModelParameters
from rollout.rendezvous import DEFAULT_BUFFER_BYTES, host_store
from rollout.tensor_parallel.group import open_store
from rollout.weights.bodies import InitInfo
from rollout.weights.errors import AbandonedError, WeightUpdateError
from rollout.weights.offer import offer_weights
from rollout.weights.store import WeightStore
from rollout.weights.transport import broadcast
from tests.support.wait import eventually
from tests.support.weight_updates import UpdaterServer, llama, update_info
from trainer_bridge.push.group import TrainerGroup, store_address
from trainer_bridge.push.sender import WeightSender


def vllm_store(port, world_size, listens):
    """The store of vLLM's `StatelessProcessGroup.create` at rank 0 (vllm/distributed/utils.py), with the constructor
    called as there: with a listening socket, as since 0.8, or without one.

    It waits until all ranks have registered. TRL's server mode (`VLLMClient.init_communicator`) comes here as well, by
    `trainer_init`.
    """
    listener = None
    if listens:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    return dist.TCPStore(
        host_name="127.0.0.1",
        port=port,
        world_size=world_size,
        is_master=True,
        timeout=timedelta(seconds=20),
        use_libuv=False,
        **({"master_listen_fd": listener.detach()} if listener is not None else {}),
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_with_vllms_classes_does_not_wait_for_an_engine_that_has_come(listens, ranks):
    port, raw = free_port(), bytes(range(128))
    with ThreadPoolExecutor(1 + ranks) as pool:
        trainer = pool.submit(vllm_store, port, 1 + ranks, listens)
        found = [
            pool.submit(
                broadcast._unique_id,
                InitInfo(master_address="127.0.0.1", master_port=port, rank_offset=1 + i, world_size=1 + ranks),
                20.0,
            )
            for i in range(ranks)
        ]
        trainer.result(30).set("broadcast_from/0/0", pickle.dumps(raw))
        assert [f.result(30) for f in found] == [raw] * ranks


def refuses_others(port):
    """Whether nobody listens on another address of this machine."""
    with socket.socket() as other:
        return other.connect_ex(("127.0.0.2", port)) != 0


def test_stores_listen_on_the_interface_of_their_peers_only():
    with UpdaterServer(llama(0)) as server, WeightSender.connect(server.url, llama(1), timeout_s=20):
        (info,) = [body["init_info"] for method, body in server.bodies if method.startswith("init")]
        assert info["master_address"] == "127.0.0.1"
        assert refuses_others(info["master_port"])
    ranks = open_store(2)
    assert refuses_others(ranks.port)
    offered = offer_weights(WeightStore(ModelParameters(llama(0))), 0.2, 2, "127.0.0.1")
    assert refuses_others(offered["port"])


def test_a_store_takes_the_interface_that_is_asked_for():
    for host in ("127.0.0.2", "localhost"):
        store = host_store(host, 2, 5.0)
        client = dist.TCPStore(host, store.port, 2, False, timedelta(seconds=5), wait_for_workers=False)
        client.set("key", "value")
        assert store.get("key") == b"value"
    with pytest.raises(OSError, match="assign"):
        host_store("192.0.2.1", 2, 5.0)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["10.0.0.5", "10.0.0.5"], "10.0.0.5"),
        (["127.0.0.1", "10.0.0.5"], "10.0.0.5"),
        (["10.0.0.5", "192.168.1.1"], "0.0.0.0"),
        (["10.0.0.5", "fd00::1"], "::"),
        (["::1"], "::1"),
    ],
)
def test_servers_on_several_networks_alone_need_all_interfaces(addresses, expected):
    assert store_address(addresses) == expected


def joined(server, timeout_s):
    """A trainer in torch alone, in the server's group; it sends nothing."""
    store = host_store("127.0.0.1", 2, timeout_s)
    info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": store.port, "timeout_s": timeout_s}
    answer = server.updater.call("init_weight_transfer_engine", {"init_info": info})
    group = dist.ProcessGroupGloo(dist.PrefixStore("rollout", store), 0, 2, timedelta(seconds=timeout_s))
    answer.result(20)
    return group


def test_an_aborted_receive_gives_its_set_back_before_its_timeout():
    """It used to hold a whole set of parameters until then. What the trainer sends late reaches none of it."""
    before = threading.enumerate()
    with UpdaterServer(llama(0)) as server:
        group = joined(server, 60.0)
        server.call("start_weight_update")
        tensors = {n: p.detach() for n, p in llama(1).named_parameters()}
        answer = server.updater.call("update_weights", {"update_info": update_info(tensors)})
        eventually(lambda: server.updater._update.staging is not None)
        server.call("abort_weight_update")
        with pytest.raises(WeightUpdateError, match="aborted"):
            answer.result(10)
        eventually(lambda: server.store._spare is not None)
        for tensor in server.store._spare.tensors.values():
            tensor.fill_(7.0)
        group.broadcast(next(iter(tensors.values())).contiguous(), 0).wait()
        receivers = [t for t in threading.enumerate() if t.name == "weights-gloo" and t not in before]
        eventually(lambda: not any(thread.is_alive() for thread in receivers))
        assert all(bool((tensor == 7.0).all()) for tensor in server.store._spare.tensors.values())


class Work:
    """A broadcast that waits for a peer."""

    def is_completed(self):
        return False


class StandInNccl:
    """For ProcessGroupNCCL, which a CPU build of torch lacks: what it was made with, and what was called."""

    class Options:
        def __init__(self):
            self.config = type("NCCLConfig", (), {"max_ctas": None})()

    def __init__(self, store, rank, size, options):
        self.made_with = os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), options.config.max_ctas, rank, size
        self.connected = None
        self.aborted = 0

    def eager_connect_single_device(self, device):
        self.connected = device

    def broadcast(self, tensor, root):
        return Work()

    def abort(self):
        self.aborted += 1


@pytest.fixture
def nccl(monkeypatch):
    """Stands in for ProcessGroupNCCL; no CUDA call is made."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandInNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")


DEVICE = torch.device("cuda", 3)


def test_nccl_groups_have_no_watchdog_few_ctas_and_their_communicator_at_once(nccl):
    """torch's watchdog, which blocking waits keep from starting, ends the process whose peer was lost."""
    store = host_store("127.0.0.1", 2, 5.0)
    sending = TrainerGroup("nccl", store, 2, 5.0, DEVICE)._group
    info = InitInfo(master_address="127.0.0.1", master_port=store.port)
    receiving = broadcast.NcclGroup(info, 5.0, DEVICE)._group
    for rank, group in enumerate((sending, receiving)):
        assert group.made_with == ("1", 4, rank, 2)
        assert group.connected == DEVICE
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


def test_an_nccl_receive_that_nobody_sends_to_is_aborted(nccl):
    store = host_store("127.0.0.1", 2, 5.0)
    info = InitInfo(master_address="127.0.0.1", master_port=store.port)
    group = broadcast.NcclGroup(info, 0.1, DEVICE)
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        group.broadcast(torch.zeros(1), lambda: None)
    assert group._group.aborted == 1

    def abandoned():
        raise AbandonedError

    with pytest.raises(AbandonedError):
        group.broadcast(torch.zeros(1), abandoned)
    assert group._group.aborted == 2


def test_a_raw_nccl_receive_is_aborted_once(monkeypatch):
    """Stands in for libnccl and for the stream that never gets there."""
    calls = []

    class Library:
        def ncclBroadcast(self, *arguments):
            return 0

        def ncclCommAbort(self, comm):
            calls.append(comm.value)

    class Stream:
        cuda_stream = 0

        def query(self):
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    group = object.__new__(broadcast.VllmNcclGroup)
    group._timeout_s, group._nccl, group._comm = 60.0, Library(), ctypes.c_void_p(7)
    stop = threading.Event()

    def check():
        if stop.is_set():
            raise AbandonedError
        stop.set()

    with pytest.raises(AbandonedError):
        group.broadcast(torch.zeros(1), check)
    group.close()
    assert calls == [7]


def test_a_receiver_that_closes_lets_go_of_the_trainers_store():
    with socket.create_server(("127.0.0.1", 0)) as store:
        info = InitInfo(backend="gloo", master_address="127.0.0.1", master_port=store.getsockname()[1], world_size=2)
        receiver = broadcast.BroadcastTransport(info, 5.0, torch.device("cpu"))
        receiver._kind = lambda *_: SimpleNamespace(close=lambda: None)
        receiver.connect()
        theirs, _ = store.accept()
        with theirs:
            theirs.settimeout(10)
            assert not receiver.gone()
            receiver.close()
            assert theirs.recv(1) == b""


def test_gloo_receives_for_another_device_in_host_memory():
    """The engine's device is "meta" here, on which nothing could be received."""
    sent, placed = torch.arange(6.0).view(2, 3), []

    class Group:
        def broadcast(self, landing, check):
            landing.copy_(sent)

    class Staging:
        def direct(self, item, device):
            assert device.type == "cpu"

        def place(self, item, landing):
            placed.append(landing)

    info = InitInfo(backend="gloo", master_address="127.0.0.1", master_port=1, world_size=2)
    receiver = broadcast.BroadcastTransport(info, 5.0, torch.device("meta"))
    receiver._group = Group()
    item = SimpleNamespace(target=SimpleNamespace(size=(2, 3)), dtype=torch.float32, nbytes=24)
    receiver._receive_one(item, Staging(), as_bytes=False)
    assert torch.equal(*placed, sent)


def test_a_body_that_names_no_buffer_means_the_size_of_both_ends():
    assert InitInfo(backend="disk").packed_buffer_size_bytes == DEFAULT_BUFFER_BYTES


def test_a_raw_nccl_communicator_is_made_as_vllms_is(monkeypatch):
    """Rank, size, the trainer's id, and the sum of one float that `PyNcclCommunicator` begins with; then bytes."""
    calls = []

    class Library:
        def ncclCommInitRank(self, comm, size, unique_id, rank):
            calls.append(("init", size.value, bytes(unique_id), rank.value))
            return 0

        def ncclAllReduce(self, sent, received, count, dtype, operation, comm, stream):
            calls.append(("sum", count.value, dtype.value, operation.value))
            return 0

        def ncclBroadcast(self, sent, received, count, dtype, root, comm, stream):
            calls.append(("broadcast", count.value, dtype.value, root.value))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    stream = SimpleNamespace(cuda_stream=0, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    unique_id = bytes(range(128))
    info = InitInfo(nccl_unique_id_b64=base64.b64encode(unique_id).decode(), world_size=3, rank_offset=2)
    group = broadcast.VllmNcclGroup(info, 5.0, torch.device("cpu"))
    group.broadcast(torch.zeros(5), lambda: None)
    assert calls == [("init", 3, unique_id, 2), ("sum", 1, 7, 0), ("broadcast", 20, 0, 0)]
