"""An engine process without a model: it speaks the messages of the real one and samples by a rule.

The token after prompt p, at output position i of choice c, is (p[-1] + 1 + i + 10 c) mod VOCAB_SIZE; where the cache
salt begins with SAY, the answer is the bytes of what follows there, and EOS. Prompts whose
first id is one of the constants below make it misbehave. `stats` tells what it was asked.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rollout.config import EngineConfig
from rollout.messages import (
    LATENCY_BUCKETS,
    AbortRequests,
    AddRequest,
    Call,
    CallError,
    EngineDied,
    EngineReady,
    Outputs,
    Reply,
    ToEngine,
)
from rollout.outputs import FinishReason, TokenLogprob, TokenOutput

VOCAB_SIZE = 49152  # and the limit: those of the recorded answers
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 8
EOS = 999
SAY = "say:"
WAITED_S = 0.000001  # what it says of every request
SLOW = 990  # one token every 50 ms
NEVER = 991  # accepted, but no token ever comes
DIE = 992  # the process is killed after three tokens
DIE_SAYING_WHY = 993
HANG = 994  # the process stops reading and writing
RELABEL = 995  # epoch and label change after two tokens, the cache state after three
MASKED = 996  # every second step is filtered
UNSENDABLE = 997  # logprobs of -inf and NaN


class FakeEngine:
    """Running requests, and what was asked so far."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[AddRequest, list[int]]] = {}
        self.version, self.epoch, self.sampled = "default", 0, 0
        self.paused: str | None = None
        self.asleep: set[str] = set()
        self.seen: dict[str, Any] = {"added": [], "aborted": [], "silent": 0, "stopped": []}
        self.calls: list[dict[str, Any]] = []

    def add(self, request: AddRequest) -> None:
        self.seen["added"].append(msgspec.to_builtins(request))
        self.running[request.request_id] = (request, [0] * request.sampling_params.n)

    def abort(self, message: AbortRequests) -> list[TokenOutput]:
        outputs = []
        for request_id in list(self.running) if message.request_ids is None else message.request_ids:
            request, counts = self.running.get(request_id, (None, []))
            if request is None:
                continue
            if message.index is not None:
                self.seen["stopped"].append(message.index)
                counts[message.index] = -1
                continue
            del self.running[request_id]
            self.seen["aborted"].append(request_id)
            self.seen["silent"] += message.silent
            outputs += [
                TokenOutput(request_id, index, finish_reason=FinishReason.ABORT)
                for index, count in enumerate(counts)
                if count >= 0 and not message.silent
            ]
        return outputs

    def call(self, call: Call) -> tuple[Reply, list[TokenOutput]]:
        outputs: list[TokenOutput] = []
        result: dict[str, Any] = {"message": f"{call.method} done"}
        match call.method:
            case "stats":
                result = {**self.seen, "calls": self.calls, "running": len(self.running), "waiting": 0}
                result |= {
                    "epoch": self.epoch,
                    "sampled_tokens": self.sampled,
                    "free_blocks": 12,
                    "num_blocks": 16,
                }
                result |= {
                    "staleness": {"0": 3, "2": 1},
                    "weight_updates": {},
                    "halted": False,
                    "waits": [0] * (len(LATENCY_BUCKETS) + 1),
                    "waited_s": 0,
                }
            case "is_paused":
                result = {"is_paused": self.paused is not None}
            case "pause":
                self.paused = call.params["mode"]
                if self.paused == "abort":
                    outputs = self.abort(AbortRequests(None))
            case "resume":
                self.paused = None
            case "sleep":
                self.asleep = {"weights", "kv_cache"}
                if call.params["mode"] == "abort":
                    outputs = self.abort(AbortRequests(None))
            case "wake_up":
                self.asleep -= set(call.params["tags"])
            case "update_weight_version":
                self.version = call.params["new_version"]
                result = {"success": True, **call.params}
            case "weight_info":
                result = {"weight_version": self.version, "epoch": self.epoch, "state": "idle", "last_error": None}
                result |= {"weights": "valid", "bytes": 4096 * self.epoch, "seconds": 0.25}
            case "finish_weight_update":
                self.epoch += 1
                self.version = call.params.get("weight_version", self.version)
            case "update_weights":
                return Reply(call.call_id, error=CallError(409, "no update is open (state: idle)", "state")), []
            case "start_weight_update":
                time.sleep(0.01)
        if call.method not in ("stats", "is_paused"):
            self.calls.append({"method": call.method, "params": call.params})
        return Reply(call.call_id, result), outputs

    def step(self) -> list[TokenOutput]:
        outputs = []
        for request_id, (request, counts) in list(self.running.items()):
            if request.prompt_token_ids[0] == NEVER:
                continue
            for index, count in enumerate(counts):
                if count >= 0:
                    output = self.token(request, index, count)
                    outputs.append(output)
                    self.sampled += 1
                    counts[index] = count + 1 if output.finish_reason is None else -1
            if all(count < 0 for count in counts):
                del self.running[request_id]
        return outputs

    def token(self, request: AddRequest, index: int, position: int) -> TokenOutput:
        params, prompt = request.sampling_params, request.prompt_token_ids
        token = (prompt[-1] + 1 + position + 10 * index) % VOCAB_SIZE
        if request.cache_salt is not None and request.cache_salt.startswith(SAY):
            said = request.cache_salt.removeprefix(SAY).encode()
            token = said[position] if position < len(said) else EOS
        output = TokenOutput(request.request_id, index, token, version=self.version)
        if params.logprobs is not None:
            ids = [token, *range(params.logprobs)]  # the sampled token may be among the top k
            output.logprobs = [TokenLogprob(i, -0.5 * rank, rank) for rank, i in enumerate(ids, start=1)]
            if prompt[0] == UNSENDABLE:
                output.logprobs[0] = TokenLogprob(token, [float("-inf"), float("nan")][position % 2], 1)
        if position == index == 0:
            output.waited_s = WAITED_S
        if position == 0 and params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *([TokenLogprob(i, -1.0, 7), TokenLogprob(3, -0.5, 1)] for i in prompt[1:])]
        if prompt[0] == MASKED and request.return_sampling_mask and position % 2:
            output.sampling_mask = array("i", sorted({token, 5})).tobytes()
        if prompt[0] == RELABEL:
            output.epoch, output.version = (0, "v7") if position < 2 else (1, "v8")
            output.kv = "current" if position < 3 else "mixed"
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            output.finish_reason = FinishReason.STOP
            output.stop_reason = None if token == EOS else token
        elif position + 1 == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output


def run_engine(config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """The process function. `config.model` "dies" ends before it is ready, "stalls" never gets ready; a file
    `eos_token_id` in it is what the server is told, for grammars."""
    eos = Path(config.model) / "eos_token_id"
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(to_engine)
    sender.connect(from_engine)
    encode, decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ToEngine)
    if config.model == "stalls":
        time.sleep(600)
    if config.model == "dies":
        sender.send(encode(EngineDied("no such model: dies")))
        context.destroy(linger=1000)
        return
    sender.send(
        encode(
            EngineReady(
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_SEQS,
                dtype="float32",
                device="cpu",
                model_type="fake",
                num_blocks=16,
                block_size=16,
                seconds={},
                eos_token_ids=[int(eos.read_text())] if eos.is_file() else [],
            )
        )
    )
    engine = FakeEngine()
    parent = os.getppid()
    while os.getppid() == parent:
        waiting = not engine.running or engine.paused is not None or bool(engine.asleep)
        slow = any(request.prompt_token_ids[0] in (SLOW, NEVER) for request, _ in engine.running.values())
        outputs: list[TokenOutput] = []
        while receiver.poll(200 if waiting else 50 if slow else 1):
            waiting = slow = False
            match decoder.decode(receiver.recv()):
                case AddRequest() as request:
                    misbehave(request, sender, encode)
                    engine.add(request)
                case AbortRequests() as message:
                    outputs += engine.abort(message)
                case Call() as call:
                    reply, aborted = engine.call(call)
                    outputs += aborted
                    sender.send(encode(reply))
        if engine.paused is None and not engine.asleep:
            outputs += engine.step()
        if outputs:
            sender.send(encode(Outputs(outputs)))
        doomed = [c for r, c in engine.running.values() if r.prompt_token_ids[0] == DIE]
        if any(count >= 3 for counts in doomed for count in counts):
            time.sleep(0.1)  # the tokens leave first
            os.kill(os.getpid(), signal.SIGKILL)


def misbehave(request: AddRequest, sender: zmq.Socket[bytes], encode: Any) -> None:
    """Die with a reason, or hang, where the prompt says so."""
    if request.prompt_token_ids[0] == DIE_SAYING_WHY:
        sender.send(encode(EngineDied("out of memory")))
        time.sleep(600)
    if request.prompt_token_ids[0] == HANG:
        time.sleep(600)
