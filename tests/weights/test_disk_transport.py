"""Folders of weights that somebody else writes, cuts off, or has filled with what are no files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.weights.bodies import Announcement
from rollout.weights.errors import WeightUpdateError
from rollout.weights.naming import Target
from rollout.weights.staging import DTYPES, Incoming
from rollout.weights.transport import disk
from rollout.weights.transport.disk import DiskTransport
from tests.support.weight_updates import UpdaterServer, llama, same_weights, saved_tensors


class Received:
    """Takes what a transport places, as a Staging does."""

    def __init__(self):
        self.tensors = {}

    def place(self, item, tensor):
        self.tensors[item.target.name] = tensor.clone()


def read(transport, folder, progress=lambda nbytes: None):
    """All tensors of the folder."""
    info = transport.describe(Announcement(path=str(folder)))
    targets = [
        Target(name, name, tuple(shape), (), 0, None, alias=False)
        for name, shape in zip(info.names, info.shapes, strict=True)
    ]
    plan = [
        Incoming(t.name, DTYPES[dtype], t.size, target=t) for t, dtype in zip(targets, info.dtype_names, strict=True)
    ]
    received = Received()
    transport.receive(info, plan, received, progress)
    return received.tensors


def mixed(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (0, 4), (), (7,), (2, 3, 4)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float8_e4m3fn]
    return {
        f"{seed}.{index}": torch.randn(shape, generator=generator).to(dtype)
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }


@pytest.mark.parametrize("read_bytes", [7, 1 << 24])
def test_what_is_read_is_what_safetensors_reads(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(disk, "_READ_BYTES", read_bytes)
    for seed in (0, 1):
        save_file(mixed(seed), tmp_path / f"{seed}.safetensors", metadata={"format": "pt", "dtype": "none"})
    counted = []
    found = read(DiskTransport(), tmp_path, counted.append)
    expected = load_file(tmp_path / "0.safetensors") | load_file(tmp_path / "1.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].view(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    assert sum(counted) == sum(t.nbytes for t in expected.values())


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_is_refused_and_nothing_waits_for_its_writer(tmp_path, name):
    saved_tensors(llama(1), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with UpdaterServer(llama(0)) as server:
        with pytest.raises(WeightUpdateError, match=f"{name} is not a regular file") as caught:
            server.call("update_weights", weight_dir=str(tmp_path))
        assert caught.value.status == 400
        assert server.call("weight_info")["weights"] == "valid"


@pytest.fixture
def hung_disk(monkeypatch):
    """Reads that don't return, as those of a mount whose server is gone; `set` brings it back."""
    back = threading.Event()
    preadv = os.preadv

    def hang(*arguments):
        back.wait()
        return preadv(*arguments)

    monkeypatch.setattr(disk.os, "preadv", hang)
    yield back
    back.set()


def test_a_hung_mount_is_a_503_after_the_timeout_and_the_next_push_is_served(tmp_path, hung_disk):
    saved_tensors(llama(1), tmp_path)
    with UpdaterServer(llama(0), timeout_s=0.2) as server:
        for _ in range(disk._MOST_READERS):
            with pytest.raises(WeightUpdateError, match=r"nothing for 0\.2 s: the disk hangs") as caught:
                server.call("update_weights", weight_dir=str(tmp_path))
            assert caught.value.status == 503
        with pytest.raises(WeightUpdateError, match="8 reads of weights from a disk hang already") as caught:
            server.call("update_weights", weight_dir=str(tmp_path))
        assert caught.value.status == 503
        assert same_weights(server.model, llama(0))
        hung_disk.set()
        for thread in threading.enumerate():
            if thread.name == "weights-read":
                thread.join(20)
    with UpdaterServer(llama(0)) as server:
        server.call("update_weights", weight_dir=str(tmp_path))
        assert same_weights(server.model, llama(1))


def test_an_abort_does_not_wait_for_a_hung_mount(tmp_path, hung_disk):
    saved_tensors(llama(1), tmp_path)
    before = threading.enumerate()  # other tests' engines keep the connections that they were given
    with UpdaterServer(llama(0), timeout_s=300.0) as server:
        answer = server.updater.call("update_weights", {"weight_dir": str(tmp_path)})
        server.call("abort_weight_update")
        with pytest.raises(WeightUpdateError, match="aborted by abort_weight_update"):
            answer.result(10)
        for thread in threading.enumerate():
            if thread.name == "weights-disk" and thread not in before:
                thread.join(20)
                assert not thread.is_alive()


def test_a_file_cut_off_while_it_is_read_ends_the_update_alone(tmp_path):
    """Mapped, it would end the process (SIGBUS)."""
    tensors = saved_tensors(llama(1, hidden_size=256), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()

    def cut(nbytes):
        os.truncate(file, 4096)

    with pytest.raises(WeightUpdateError, match=r"has no byte|was changed while it was read") as caught:
        read(DiskTransport(), tmp_path, cut)
    assert caught.value.status == 400
    file.write_bytes(whole)
    assert read(DiskTransport(), tmp_path).keys() == tensors.keys()


def test_a_file_replaced_between_its_header_and_its_data_is_refused(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    transport = DiskTransport()
    info = transport.describe(Announcement(path=str(tmp_path)))
    save_file({"a": torch.ones(4)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "model.safetensors")
    target = Target("a", "a", (4,), (), 0, None, alias=False)
    plan = [Incoming("a", torch.float32, (4,), target=target)]
    with pytest.raises(WeightUpdateError, match="was changed while it was read"):
        transport.receive(info, plan, Received(), lambda nbytes: None)


def with_header(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "a header of 8 EB": (with_header({}, length=2**63 - 1), "the header alone has 9223372036854775807"),
    "a header of 16 EB": (with_header({}, length=2**64 - 1), "the header alone has 18446744073709551615"),
    "an empty file": (b"", "has no byte 0"),
    "half a length": (b"\1\0\0", "has no byte 3"),
    "a nested header": (with_header(b"[" * 100_000), "is not a safetensors file"),
    "nested shapes": (with_header(b'{"a":{"shape":' + b"[" * 100_000), "is not a safetensors file"),
    "a nested value that nobody reads": (with_header(b'{"a":{"other":' + b"[" * 100_000), "is not a safetensors file"),
    "not UTF-8": (with_header(b'{"\xff":1}'), "is not a safetensors file"),
    "no object": (with_header([1]), "is not a safetensors file"),
    "a negative shape": (with_header({"a": entry(0, 8, (-2,))}, bytes(8)), "is not a safetensors file"),
    "a shape beyond all numbers": (with_header({"a": entry(0, 8, (2**64,))}, bytes(8)), "is not a safetensors file"),
    "a shape of too many sizes": (with_header({"a": entry(0, 8, [2**61] * 17)}, bytes(8)), "is not a safetensors file"),
    "a shape larger than its bytes": (with_header({"a": entry(0, 8, [2**61] * 16)}, bytes(8)), "has the bytes"),
    "tensors that overlap": (with_header({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "should begin at 8"),
    "a hole": (with_header({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "should begin at 8"),
    "a tensor that ends before it begins": (with_header({"a": entry(8, 0)}, bytes(8)), "should begin at 0"),
    "offsets beyond the file": (with_header({"a": entry(0, 8)}, bytes(4)), "has 4 bytes of tensors"),
    "bytes that belong to nothing": (with_header({"a": entry(0, 8)}, bytes(9)), "has 9 bytes of tensors"),
    "no dtype": (with_header({"a": {"shape": [0], "data_offsets": [0, 0]}}), "should begin at 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_a_400_that_says_what_is_wrong(tmp_path, case):
    content, named = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightUpdateError, match=named) as caught:
        DiskTransport().describe(Announcement(path=str(tmp_path)))
    assert caught.value.status == 400
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("dtype", ["I64", "F4", "Q8_0"])
def test_a_dtype_that_is_unknown_is_named(tmp_path, dtype):
    tensors = {"lm_head.weight": entry(0, 8, (96, 32), dtype)}
    (tmp_path / "model.safetensors").write_bytes(with_header(tensors, bytes(8)))
    with UpdaterServer(llama(0)) as server:
        with pytest.raises(WeightUpdateError, match=dtype) as caught:
            server.call("update_weights", weight_dir=str(tmp_path))
        assert caught.value.status == 400


@pytest.mark.parametrize("index", [b"[" * 100_000, b"{}", b"[]", b'{"weight_map": {"a": 1}}', b'{"weight_map": []}'])
def test_an_index_that_is_none_is_a_400(tmp_path, index):
    saved_tensors(llama(1), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(WeightUpdateError, match=r"index\.json is not a checkpoint's index") as caught:
        DiskTransport().describe(Announcement(path=str(tmp_path)))
    assert caught.value.status == 400


def test_headers_and_indexes_beyond_all_measure_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_JSON_BYTES", 1000)
    padded = with_header(json.dumps({"a": entry(0, 8)}).encode().ljust(600), bytes(8))
    for name in ("1.safetensors", "2.safetensors"):
        (tmp_path / name).write_bytes(padded)
    with pytest.raises(WeightUpdateError, match="more than 1000 bytes together"):
        DiskTransport().describe(Announcement(path=str(tmp_path)))
    (tmp_path / "model.safetensors.index.json").write_bytes(b" " * 1001)
    with pytest.raises(WeightUpdateError, match="has 1001 bytes, more than the 1000"):
        DiskTransport().describe(Announcement(path=str(tmp_path)))


def test_what_is_no_file_is_never_opened(tmp_path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(file)
    with pytest.raises(WeightUpdateError, match="symbolic links"):
        DiskTransport().describe(Announcement(path=str(tmp_path)))
    for target in (Path("/dev/zero"), tmp_path):
        file.unlink()
        file.symlink_to(target)
        with pytest.raises(WeightUpdateError, match="is not a regular file"):
            DiskTransport().describe(Announcement(path=str(tmp_path)))


@pytest.mark.parametrize("path", ["/nowhere\0", "/nowhere", "x" * 5000, "/dev/null", "\udcff"])
def test_a_path_that_is_no_folder_is_a_400(path):
    with pytest.raises(WeightUpdateError, match="can't be read") as caught:
        DiskTransport().describe(Announcement(path=path))
    assert caught.value.status == 400
