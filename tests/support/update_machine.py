"""An engine under weight updates, and a model of what must be true of it whatever call comes next."""

from __future__ import annotations

import copy
import functools
import hashlib
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.messages import AbortRequests, AddRequest
from rollout.model.parameters import CommitMethod
from rollout.outputs import TokenOutput
from rollout.weights.bodies import Announcement
from rollout.weights.errors import WeightUpdateError
from rollout.weights.receiver import MOST_RECEIVERS
from rollout.weights.staging import Incoming, Staging
from rollout.weights.store import MOST_ABANDONED
from rollout.weights.transport import Transport
from rollout.weights.transport.broadcast import unpack
from rollout.weights.update import REMEMBERED
from tests.support import tiny_models
from tests.support.engine_utils import engine, ids, logprobs, prompt, request, spans
from tests.support.push_reference import as_stamped
from tests.support.wait import eventually

Tensors = dict[str, torch.Tensor]
Fault = str | None


@functools.cache
def folder() -> Path:
    return tiny_models.build("llama", Path(tempfile.mkdtemp()) / "model")


@functools.cache
def tensors_of(seed: int) -> Tensors:
    return {name: p.detach() for name, p in tiny_models.model("llama", seed).named_parameters()}


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


class Wire(Transport):
    """A transport from the test's own memory, received as broadcasts are: straight into staging where that is allowed.

    `pieces` are what the trainer sends next; it dies before piece `dies_at`, and stalls before `stalls_at` until `go`.
    """

    name, peer, timeout_s = "memory", "the machine", 60.0
    spent_by_failure = True

    def __init__(self) -> None:
        self.pieces: list[torch.Tensor] = []
        self.dies_at = self.stalls_at = -1
        self.go, self.stalled = threading.Event(), threading.Event()

    def describe(self, info: Announcement) -> Announcement:
        return info

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        for index, (item, piece) in enumerate(zip(plan, self.pieces, strict=True)):
            if index == self.stalls_at:
                self.stalled.set()
                assert self.go.wait(60)
            if index == self.dies_at:
                raise WeightUpdateError(503, "the trainer is gone")
            if item.count is None:
                landing = staging.direct(item, piece.device)
                landing = torch.empty_like(piece) if landing is None else landing
                landing.copy_(piece)
                staging.place(item, landing)
            else:
                unpack(piece, [item], staging)
            progress(item.nbytes)

    def interrupt(self) -> None:
        pass


@dataclass
class Session:
    """What the model knows of the open update. `coming`: the whole new set, of which `sent` has been received."""

    kind: str
    in_place: bool
    policy: str | None
    verify: bool
    coming: Tensors
    wire: Wire
    id: str
    sent: Tensors = field(default_factory=dict)
    state: str = "open"
    label: str | None = None
    written: bool = False
    answer: Future[dict[str, Any]] | None = None


class Machine:
    """`models` are transformers' own with each epoch's weights; `linked`: a group that an update can come over.

    Two trainers make the calls, `owner` the one that joined last. `stuck` are the updates that were dropped while their
    trainers sent, and `committed` the epochs of those that weren't.
    """

    def __init__(self, policy: Any, chunk: int, method: CommitMethod) -> None:
        config = {"num_gpu_blocks_override": 36, "max_model_len": 80, "max_num_seqs": 5}
        self.engine = engine(folder(), kv_policy=policy, max_num_batched_tokens=chunk, **config)
        self.engine.runner.parameters.method = method
        self.engine.weights._trainer.transport_for = lambda info: self.wire  # type: ignore[method-assign]
        self.wire = Wire()
        self.wires = [self.wire]
        self.models: dict[int, PreTrainedModel] = {}
        self.seeds, self.epoch, self.label = 0, 0, "default"
        self.live = tensors_of(0)
        self.remember()
        self.session: Session | None = None
        self.linked = self.paused = False
        self.owner = "a"
        self.stuck: list[Session] = []
        self.ids: list[str] = []
        self.committed: dict[str, int] = {}
        self.valid = self.was_valid = True
        self.state = "idle"
        self.requests: list[AddRequest] = []
        self.outputs: dict[tuple[str, int], list[TokenOutput]] = {}
        self.init(force=False, by="a")
        self.add(length=20, n=2, tokens=44, shared=True)
        self.step(4)

    # -- helpers

    def remember(self) -> None:
        model = copy.deepcopy(tiny_models.model("llama", 0))
        model.set_attn_implementation("eager")
        model.load_state_dict(self.live, strict=False)
        self.models[self.epoch] = model

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        return self.engine.weights.call(method, params).result(20)

    def receivers(self) -> int:
        """How many connections to trainers have a thread."""
        return sum(receiver.alive for receiver in self.engine.weights._trainer._all)

    def own(self, method: str, /, **params: Any) -> Future[dict[str, Any]]:
        """A call of the owner's, of the update that is open."""
        ids = {"owner": self.owner, "update_id": self.session.id if self.session else None}
        return self.engine.weights.call(method, ids | params)

    def refused(self, method: str, /, *statuses: int, **params: Any) -> None:
        with pytest.raises(WeightUpdateError) as error:
            self.own(method, **params).result(20)
        assert error.value.status in statuses, error.value.message

    def drop(self, *, spent: bool) -> None:
        """The update is over without a commit."""
        assert self.session is not None
        if self.session.answer is not None:
            with pytest.raises(WeightUpdateError):
                self.session.answer.result(20)
        if self.session.in_place:
            self.valid = not self.session.written and self.was_valid
        if self.session.state == "stalled":
            self.stuck.append(self.session)
        self.session, self.state = None, "aborted"
        self.linked = self.linked and not spent

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.token_id is not None:
                assert (output.epoch, output.version) == (self.epoch, self.label)
            self.outputs[output.request_id, output.index].append(output)

    # -- requests

    def add(self, length: int, n: int, tokens: int, shared: bool) -> None:
        name = f"r{len(self.requests)}"
        ids_ = prompt(21)[:length] if shared else prompt(length, seed=len(self.requests))
        item = request(name, ids_, n=n, max_tokens=tokens, ignore_eos=True)
        self.engine.add_request(item)
        self.requests.append(item)
        self.outputs |= {(name, index): [] for index in range(n)}

    def abort_request(self, which: int, index: int | None) -> None:
        if self.requests:
            name = self.requests[which % len(self.requests)].request_id
            self.take(self.engine.abort(AbortRequests([name], index=index)))

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.session is not None and self.session.state == "committing":
                self.commit()
            outputs = self.engine.step()
            if self.paused or not self.valid:
                assert outputs == []
            self.take(outputs)

    def commit(self) -> None:
        session = self.session
        assert session is not None
        assert session.answer is not None
        assert not session.answer.done()
        self.live = {**self.live, **session.sent}
        self.epoch, self.label = self.epoch + 1, session.label or self.label
        self.committed[session.id] = self.epoch
        self.remember()
        self.session, self.state, self.valid = None, "committed", True
        answer, paused = session.answer, self.engine.paused
        self.engine.paused = True  # the flip alone
        assert self.engine.step() == []
        self.engine.paused = paused
        assert answer.result(0)["epoch"] == self.epoch

    def pause(self, how: str) -> None:
        if how == "abort":
            self.take(self.engine.abort(AbortRequests(None)))
        self.engine.paused = self.paused = how != "resume"

    # -- the session's calls

    def init(self, force: bool, by: str) -> None:
        wire, self.wire = self.wire, Wire()
        info = {"init_info": {"backend": "gloo", "force": force}, "owner": by}
        full = len(self.stuck) + 2 > MOST_RECEIVERS  # as many, the one that is connected, and the new one
        if full or (self.session is not None and not force and by != self.owner):
            self.wire = wire
            self.refused("init_weight_transfer_engine", 409, 503, **info)
            return
        self.wires.append(self.wire)
        self.call("init_weight_transfer_engine", **info)
        self.owner = by
        self.linked = True
        if self.session is not None:
            self.drop(spent=False)

    def start(self, kind: str, in_place: bool, policy: str | None, verify: bool, stale_base: bool) -> None:
        body: dict[str, Any] = {"partial": kind == "partial", "kv_policy": policy, "verify": verify}
        body["weight_staging"] = "in_place" if in_place else "full"
        if kind == "sparse":
            body["base_epoch"] = self.epoch - stale_base
        wrong = (stale_base and kind == "sparse") or (not self.valid and kind != "whole")
        if self.session is not None or not self.linked or wrong or (in_place and not self.paused):
            self.refused("start_weight_update", 400, 409, **body)
            return
        if not in_place and sum(not session.in_place for session in self.stuck) > MOST_ABANDONED:
            self.refused("start_weight_update", 503, **body)
            return
        self.ids.append(f"update {len(self.ids)}")
        self.own("start_weight_update", update_id=self.ids[-1], **body).result(20)
        self.seeds += 1
        coming = dict(tensors_of(self.seeds % 7))
        if kind == "sparse":
            coming = {name: tensor.clone() for name, tensor in self.live.items()}
            for tensor in coming.values():
                tensor.view(-1)[:: 7 + self.seeds % 5] *= -2.5
        self.session, self.state = Session(kind, in_place, policy, verify, coming, self.wire, self.ids[-1]), "open"
        self.was_valid = self.valid
        if in_place:
            self.valid = False

    def announce(self, session: Session, names: list[str], fault: Fault) -> dict[str, Any]:
        tensors = {name: session.coming[name].clone() for name in names}
        if fault == "nan":
            tensors[names[0]].view(-1)[0] = torch.nan
        shapes, counts, pieces = [list(t.shape) for t in tensors.values()], [], []
        for name, tensor in tensors.items():
            if session.kind == "sparse":
                bits, base = (t.view(-1).view(torch.int32) for t in (tensor, self.live[name]))  # -0.0 is not 0.0
                where = (bits != base).nonzero().view(-1)
                counts.append(len(where))
                parts = (where.to(torch.int32), tensor.view(-1)[where])
                pieces.append(torch.cat([part.view(torch.uint8) for part in parts]))
            else:
                pieces.append(tensor)
        if fault == "shape":
            shapes[-1] = [*shapes[-1], 1]
        self.wire.pieces, self.wire.dies_at = pieces, len(names) - 1 if fault == "dies" else -1
        told = [*names[:-1], "no.such.weight"] if fault == "unknown" else names
        info = {"names": told, "dtype_names": ["float32"] * len(names), "shapes": shapes}
        session.sent |= tensors
        return info | ({"counts": counts} if session.kind == "sparse" else {})

    def update(self, share: int, fault: Fault, stalls: bool) -> None:
        """Send a third, two thirds or all of what is left."""
        session = self.session
        if session is None or session.state == "prepared":
            self.refused("update_weights", 400, 409, update_info={})
            if session is not None:
                self.drop(spent=True)
            self.linked = False  # what the trainer sends now must not be taken for the next update
            return
        left = [name for name in session.coming if name not in session.sent]
        if session.answer is not None or not left:
            return
        names = left[: max(1, len(left) * share // 3)]
        if fault == "missing" and session.kind == "whole":
            session.coming = {n: t for n, t in session.coming.items() if n != names[-1]}
            names = names[:-1] or [left[-1]]
            if names == [left[-1]] and names[0] not in session.coming:
                return
        if session.kind == "partial" and share < 3:
            session.coming = {n: t for n, t in session.coming.items() if n in session.sent or n in names}
        info = self.announce(session, names, fault)
        self.wire.stalls_at = len(names) // 2 if stalls else -1
        refused = fault in ("shape", "unknown")
        session.written = session.written or (not refused and (fault != "dies" or len(names) > 1))
        session.answer = self.own("update_weights", update_info=info)
        self.state = session.state = "receiving"
        if stalls and not refused:
            assert self.wire.stalled.wait(20)
            session.written = session.written and (len(names) // 2 > 0 or len(session.sent) > len(names))
            session.state = "stalled"
            self.fate = (fault, len(names))
            return
        self.settle(fault)

    def settle(self, fault: Fault) -> None:
        session = self.session
        assert session is not None
        assert session.answer is not None
        if fault in ("shape", "unknown", "dies"):
            with pytest.raises(WeightUpdateError) as error:
                session.answer.result(20)
            assert error.value.status == (503 if fault == "dies" else 400)
            session.answer = None
            self.drop(spent=True)
            return
        session.answer.result(20)
        session.answer, session.state = None, "receiving"

    def go_on(self) -> None:
        """The stalled trainer goes on with what it sends."""
        if self.session is None or self.session.state != "stalled":
            return
        fault, count = self.fate
        assert self.session is not None
        self.session.written = self.session.written or fault != "dies" or count > 1
        self.wire.stalled.clear()
        self.wire.go.set()
        self.settle(fault)
        self.wire.go.clear()

    def finish(self, prepare: bool, label: str | None, wrong_sum: bool) -> None:
        session = self.session
        if session is None or session.state in ("open", "stalled", "committing"):
            self.refused("finish_weight_update", 400, 409)
            return
        body: dict[str, Any] = {"prepare": prepare, "weight_version": label}
        session.label = label or session.label
        checked = session.state == "prepared"
        if session.verify and not checked:
            body["checksums"] = {name: sha256(tensor) for name, tensor in session.sent.items()}
            if wrong_sum:
                body["checksums"][next(iter(session.sent))] = "0" * 64
        finite = all(tensor.isfinite().all() for tensor in session.sent.values())
        whole = session.kind == "partial" or session.sent.keys() == self.live.keys()
        answer = self.own("finish_weight_update", **body)
        if not checked and not (finite and whole and not (session.verify and wrong_sum)):
            with pytest.raises(WeightUpdateError) as error:
                answer.result(20)
            assert error.value.status == 400
            self.drop(spent=False)
            return
        self.state = "ready"
        if prepare:
            answer.result(20)
            session.state = "prepared"
            return
        session.answer, session.state = answer, "committing"
        eventually(lambda: self.call("weight_info")["state"] == "ready")

    def push(self, kind: str, in_place: bool, policy: str | None, verify: bool, fault: Fault) -> None:
        """The calls in their order, as far as the fault lets them come; in half of the cases in place, paused."""
        if self.session is not None:
            return
        if not self.linked:
            self.init(force=False, by=self.owner)
        if in_place:
            self.pause("keep")
        self.start(kind, in_place, policy, verify, stale_base=False)
        if self.session is not None:
            self.update(3, fault, stalls=False)
        if self.session is not None:
            self.finish(prepare=False, label=None, wrong_sum=False)
        self.step(1)
        self.pause("resume")

    def abort_update(self) -> None:
        if self.session is None:
            self.refused("abort_weight_update", 409)
            return
        self.own("abort_weight_update").result(20)
        self.drop(spent=self.session.state == "stalled")

    def late(self, method: str, by: str) -> None:
        """A call of the trainer that was taken over, of nobody in particular, or of an earlier update: no effect."""
        ids: dict[str, Any] = {"other": {"owner": "ab".replace(self.owner, "")}, "nobody": {}}.get(by, {})
        if by == "earlier":
            if method not in ("finish_weight_update", "abort_weight_update") or len(self.ids) < 2:
                return
            ids = {"owner": self.owner, "update_id": self.ids[-2]}
        if method == "init_weight_transfer_engine":
            ids |= {"owner": "ab".replace(self.owner, ""), "rejoin": True, "init_info": {"force": True}}
        with pytest.raises(WeightUpdateError) as error:
            self.call(method, update_info={"names": []}, weight_version="evil", **ids)
        assert error.value.status in (400, 409)

    def aside(self, what: str) -> None:
        """What may come at any time. Zombies: trainers whose update was dropped while they sent go on sending."""
        match what:
            case "relabel":
                self.label = f"label {len(self.requests)}"
                self.call("update_weight_version", new_version=self.label)
            case "zombies":
                for wire in self.wires:
                    if wire is not self.wire:
                        wire.go.set()
                stuck, self.stuck = self.stuck, [s for s in self.stuck if s.wire is self.wire]
                gone = [s for s in stuck if s not in self.stuck]
                eventually(
                    lambda: sum(r.alive for r in self.engine.weights._trainer._all) <= 1 + len(stuck) - len(gone)
                )
            case "checksums" if self.session is None and not self.valid:
                self.refused("weight_checker", 409, action="checksum")
            case "checksums" if self.valid:
                sums = self.call("weight_checker", action="checksum")["checksums"]
                assert sums == {name: sha256(tensor) for name, tensor in self.live.items()}

    def says_what_is(self) -> None:
        info = self.call("weight_info")
        assert (info["epoch"], info["weight_version"]) == (self.epoch, self.label)
        assert (info["state"], info["weights"]) == (self.state, "valid" if self.valid else "invalid")
        assert info["update_id"] == (self.session.id if self.session else None)
        assert info["committed_updates"] == dict(list(self.committed.items())[-REMEMBERED:])  # whatever answer was lost

    # -- the end: nothing is lost

    def end(self) -> None:
        for wire in self.wires:
            wire.go.set()
        if self.session is not None:
            self.own("abort_weight_update").result(20)
            self.drop(spent=False)
        eventually(lambda: self.receivers() <= 1)
        self.stuck = []
        self.pause("resume")
        self.add(length=21, n=1, tokens=12, shared=True)
        self.step(5)
        self.push("whole", in_place=not self.valid, policy=None, verify=True, fault=None)  # works whatever came before
        assert self.state == "committed"
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert self.engine.stats["free_blocks"] == self.engine.stats["num_blocks"]
        for item in self.requests:
            for index in range(item.sampling_params.n):
                self.check(item, self.outputs[item.request_id, index])
        self.engine.weights.close()

    def check(self, item: AddRequest, outputs: list[TokenOutput]) -> None:
        assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
        tokens = ids(outputs)
        if outputs[-1].finish_reason == "length":
            assert len(tokens) == item.sampling_params.max_tokens
        if tokens:
            expected = as_stamped(self.models, item.prompt_token_ids, tokens, spans(outputs))
            torch.testing.assert_close(logprobs(outputs), expected, atol=1e-3, rtol=0)
