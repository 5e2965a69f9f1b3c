"""Pushes to an engine on the trainer's own device, by CUDA IPC; tests/support/fake_ipc.py says what is stood in."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.weights.bodies import InitInfo
from rollout.weights.errors import WeightUpdateError
from rollout.weights.staging import Staging
from rollout.weights.transport.broadcast import BroadcastTransport
from tests.support.fake_ipc import UUID, FakeIpc
from tests.support.wait import eventually
from tests.support.weight_updates import UpdaterServer, llama, same_weights, update_info
from tests.weights.test_faults import ZYGOTE
from trainer_bridge.push import transaction
from trainer_bridge.push.control import ServerControl, WeightPushError
from trainer_bridge.push.sender import WeightSender
from trainer_bridge.push.sources import ModuleSource
from trainer_bridge.push.transaction import ServerGroup

CPU = torch.device("cpu")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    made = FakeIpc(tmp_path)
    made.install(monkeypatch.setattr)
    monkeypatch.setattr(transaction, "PACKED_BUFFER_BYTES", 16 << 10)  # a push is several buffers
    return made


@pytest.fixture
def server(fake: FakeIpc) -> Iterator[UpdaterServer]:
    with UpdaterServer(llama(0), timeout_s=20, info=lambda: {"device_uuid": fake.engine_uuid}) as running:
        yield running


def connect(server: UpdaterServer, model: Any) -> WeightSender:
    return WeightSender.connect(server.url, model, backend="ipc", timeout_s=20)


def assert_all_closed(fake: FakeIpc) -> None:
    assert fake.opened
    assert fake.num_open == 0
    assert fake.counts == [0] * len(fake.counts)


@pytest.mark.parametrize("torch_of_the_trainer", [2, 3])
def test_the_engine_copies_the_very_bits(server: UpdaterServer, fake: FakeIpc, torch_of_the_trainer: int) -> None:
    fake.versions["trainer"] = torch_of_the_trainer  # its handles are the same, its torch writes another number
    with connect(server, llama(1)) as sender:
        pushed = sender.push("one")
        assert same_weights(server.model, llama(1))
        assert (pushed.epoch, pushed.bytes) == (1, sum(p.nbytes for p in llama(1).parameters()))
        assert server.call("weight_info")["transport"] == "ipc"
        assert len([method for method, _ in server.bodies if method == "update_weights"]) > 2
        assert_all_closed(fake)
    with connect(server, llama(2, dtype=torch.bfloat16)) as sender:
        sender.push("two", verify=True)
        assert same_weights(server.model, llama(2, dtype=torch.bfloat16).float())
        assert_all_closed(fake)


def test_a_sparse_push_brings_the_changes_only(server: UpdaterServer, fake: FakeIpc) -> None:
    trained = llama(1)
    with connect(server, trained) as sender:
        sender.push(sparse=True)
        with torch.no_grad():
            trained.model.layers[1].mlp.up_proj.weight[3, 5:9] += 1
        assert sender.push(sparse=True).bytes_saved > 0
        assert same_weights(server.model, trained)
    assert_all_closed(fake)


def test_nothing_on_the_wire_is_a_pickle_and_all_of_it_is_named(server: UpdaterServer, fake: FakeIpc) -> None:
    with connect(server, llama(1)) as sender:
        sender.push()
    (first, *_) = [body["update_info"] for method, body in server.bodies if method == "update_weights"]
    assert first.keys() == {"names", "dtype_names", "shapes", "ipc_handles"}
    assert len(first["ipc_handles"]) == len(first["names"]) > 1
    for handle in first["ipc_handles"]:
        assert handle.keys() == {UUID}
        fields = {"storage_handle", "storage_size_bytes", "storage_offset_bytes", "tensor_offset_bytes"}
        assert handle[UUID].keys() == fields
        assert len(base64.b64decode(handle[UUID]["storage_handle"])) == 64
    offsets = [handle[UUID]["tensor_offset_bytes"] for handle in first["ipc_handles"]]
    assert offsets == sorted(set(offsets))


SMALL = {"model.norm.weight": torch.ones(32)}
GARBAGE = base64.b64encode(bytes(range(64))).decode()
BAD: dict[str, tuple[dict[str, Any] | None, str]] = {
    "none": (None, "needs as many ipc_handles as names \\(1\\), got 0"),
    "another device": ({"uuid": "GPU-other"}, "model.norm.weight: its memory is on GPU-other, this engine is on GPU-1"),
    "beyond the storage": ({"tensor_offset_bytes": 8}, "its bytes end at 136 of a storage of 128 bytes"),
    "a smaller storage": ({"storage_size_bytes": 100}, "its bytes end at 128 of a storage of 100 bytes"),
    "before the storage": ({"tensor_offset_bytes": -8}, "Expected `int` >= 0"),
    "before the allocation": ({"storage_offset_bytes": -512}, "Expected `int` >= 0"),
    "no size": ({"storage_size_bytes": 0}, "Expected `int` >= 1"),
    "a number for a handle": ({"storage_handle": 7}, "Expected `str`, got `int`"),
    "no base64": ({"storage_handle": "*" * 88}, "a storage_handle is no base64"),
    "a short handle": ({"storage_handle": "AAAA"}, "a storage_handle has 3 bytes, not 64"),
    "a pickle's length": ({"storage_handle": "A" * 4000}, "length <= 128"),
    "garbage": ({"storage_handle": GARBAGE}, "can't be opened by CUDA IPC: CUDA error: invalid argument"),
}


@pytest.mark.parametrize("case", BAD)
def test_memory_that_is_not_there_is_refused_by_name(server: UpdaterServer, fake: FakeIpc, case: str) -> None:
    change, message = BAD[case]
    with connect(server, llama(1)) as sender:
        sender.push("one")
        owned = {"owner": sender._servers.servers[0]._ids["owner"]}
        server.call("start_weight_update", update_id="bad", **owned)
        storage: Any = torch.zeros(128, dtype=torch.uint8).untyped_storage()
        _, handle, *_ = storage._share_cuda_()
        place = {"storage_handle": base64.b64encode(handle[2:]).decode(), "storage_size_bytes": 128}
        place |= {"storage_offset_bytes": 512, "tensor_offset_bytes": 0} | (change or {})
        info = update_info(SMALL)
        if change is not None:
            info["ipc_handles"] = [{place.pop("uuid", UUID): place}]
        with pytest.raises(WeightUpdateError, match=message) as refused:
            server.call("update_weights", update_info=info, update_id="bad", **owned)
        assert refused.value.status == 400
        assert same_weights(server.model, llama(1))
        assert (server.call("weight_info")["state"], fake.num_open) == ("aborted", 0)
        del sender._servers.servers[0]._ids["update_id"]
        joins = sender._servers.joins
        sender.push("two")  # the connection is as good as before
        assert (server.store.epoch, sender._servers.joins) == (2, joins)


def test_memory_is_closed_where_a_copy_fails(
    server: UpdaterServer, fake: FakeIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[BaseException] = []
    place = Staging.place

    def fails(staging: Staging, item: Any, received: torch.Tensor) -> None:
        if item.target.name == "model.layers.1.mlp.up_proj.weight":
            assert fake.num_open > 0
            kept.append(RuntimeError("no memory"))
            raise kept[0]
        place(staging, item, received)

    with connect(server, llama(1)) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "place", fails)
            with pytest.raises(WeightPushError, match="no memory"):
                sender.push()
        assert kept[0].__traceback__ is not None  # somebody holds the error: it doesn't hold the memory
        assert_all_closed(fake)
        assert same_weights(server.model, llama(0))
        sender.push()
        assert same_weights(server.model, llama(1))
    assert_all_closed(fake)


def doomed(url: str, folder: Path, weights: Path) -> None:
    """A trainer that is killed when the server has copied the second of its buffers."""
    FakeIpc(folder).install(setattr)
    transaction.PACKED_BUFFER_BYTES = 16 << 10
    announce, calls = ServerControl.announce, []

    def dies(self: ServerControl, info: dict[str, Any], timeout_s: float) -> None:
        announce(self, info, timeout_s)
        calls.append(info)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    ServerControl.announce = dies  # type: ignore[method-assign]
    with WeightSender.connect(url, load_file(weights), backend="ipc", timeout_s=2) as sender:
        sender.push("doomed")


def test_a_trainer_killed_in_the_middle_leaves_the_old_weights(server: UpdaterServer, fake: FakeIpc) -> None:
    weights = fake.folder / "weights.safetensors"
    save_file({name: p.detach() for name, p in llama(1).named_parameters()}, weights)
    trainer = ZYGOTE.Process(target=doomed, args=(server.url, fake.folder, weights))
    trainer.start()
    trainer.join(120)
    assert trainer.exitcode == -signal.SIGKILL
    assert server.call("weight_info")["state"] in ("receiving", "aborted")
    eventually(lambda: server.call("weight_info")["state"] == "aborted", 60)
    assert len(fake.opened) > 2
    assert fake.num_open == 0
    assert same_weights(server.model, llama(0))
    with connect(server, llama(2)) as sender:
        sender.push()
    assert same_weights(server.model, llama(2))


# -- which way weights go


def group_of(server: UpdaterServer) -> ServerGroup:
    control = ServerControl(server.url, None, 20.0, "owner")
    return ServerGroup([control], backend="nccl", packed=True, timeout_s=20, device=CPU)


def refused(server: UpdaterServer, info: dict[str, Any]) -> str:
    with pytest.raises(WeightUpdateError) as error:
        server.call("init_weight_transfer_engine", init_info=info)
    assert error.value.status == 400
    return error.value.message


def test_the_devices_decide_at_init(server: UpdaterServer, fake: FakeIpc) -> None:
    asked = {"backend": "ipc", "device_uuid": "GPU-2"}
    assert f"the trainer's is GPU-2, this engine's is {UUID}" in refused(server, asked)
    assert "the trainer's is None" in refused(server, {"backend": "ipc"})
    nccl = InitInfo(master_address="127.0.0.1", master_port=9, backend="nccl", device_uuid=UUID)
    with pytest.raises(WeightUpdateError, match=f"share the device {UUID}, which NCCL refuses: use 'ipc' or 'gloo'"):
        BroadcastTransport(nccl, 1.0, torch.device("cuda"))
    fake.engine_uuid = None
    assert "needs a CUDA engine, this one is on cpu" in refused(server, asked)


@pytest.mark.parametrize(("trainer", "backend"), [(UUID, "ipc"), ("GPU-2", "nccl")])
def test_one_device_means_ipc_and_two_nccl(
    server: UpdaterServer, fake: FakeIpc, trainer: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.trainer_uuid = trainer
    joined: list[str] = []
    monkeypatch.setattr(ServerGroup, "join", lambda group, *, force: joined.append(group.backend))
    group_of(server).join_as_devices_allow(force=False)
    assert joined == [backend]


@pytest.mark.parametrize("why", ["expandable segments", "another container", "one engine of two"])
def test_gloo_with_a_warning_where_ipc_can_not_be(
    server: UpdaterServer, fake: FakeIpc, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "expandable segments":
        fake.kind = b"e"
    elif why == "another container":
        monkeypatch.setattr(
            torch.UntypedStorage, "_new_shared_cuda", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: peer"))
        )
    else:
        ranks = [{"device_uuid": uuid} for uuid in (UUID, "GPU-2")]
        server.updater._info = lambda: {"ranks": ranks}
    group = group_of(server)
    group.join_as_devices_allow(force=False)
    with WeightSender(group, ModuleSource(llama(1)), None) as sender:
        sender.push()
    assert same_weights(server.model, llama(1))
    assert server.call("weight_info")["transport"] == "gloo"
    assert "weights go over gloo" in caplog.text
    assert fake.counts == [0] * len(fake.counts)


def test_a_server_that_is_away_is_no_reason_for_gloo(fake: FakeIpc) -> None:
    control = ServerControl("http://127.0.0.1:9", None, 5.0, "owner")
    group = ServerGroup([control], backend="nccl", packed=True, timeout_s=5, device=CPU)
    with pytest.raises(WeightPushError, match="got no answer"):
        group.join_as_devices_allow(force=False)
