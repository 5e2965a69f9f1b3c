"""The messages between the server process and an engine process: msgpack over ZeroMQ, plain types only."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from rollout.outputs import RoutingShape, TokenOutput
from rollout.sampling.params import SamplingParams, Thinking

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Of the histograms of whole requests, in seconds: vLLM's."""

SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: tuple[SleepTag, ...] = get_args(SleepTag)
"""What an engine gives the memory of back while it sleeps."""


class AddRequest(msgspec.Struct, tag=True, kw_only=True):
    """Generate `sampling_params.n` choices after `prompt_token_ids`. Validated by the server before it is sent.

    `bad_words_token_ids` are the token sequences that `sampling_params.bad_words` stand for. `return_sampling_mask`
    asks for the support of every filtered step. `session_id` names the dialogue that the request belongs to: the fleet
    sends it where the one before went. `grammar` is what `sampling_params.structured_outputs` ask for, as
    `sampling.grammar.as_grammar` has it, in the tokens of `tokenizer`, a folder or hub id, or the model's own; it holds
    after the `thinking`, where there may be any.
    `adapter` is the label of a loaded adapter; on its way to the fleet, a name that stands for its newest version.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    bad_words_token_ids: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None
    return_sampling_mask: bool = False
    session_id: str | None = None
    grammar: str | None = None
    tokenizer: str | None = None
    thinking: Thinking | None = None
    adapter: str | None = None


class AbortRequests(msgspec.Struct, tag=True):
    """End these requests with finish_reason "abort"; all of them where `request_ids` is None. Unknown ids are ignored.

    `index`, where given, ends only that choice of them: its text has completed a stop string. No output follows for
    what is aborted when `silent`.
    """

    request_ids: list[str] | None
    index: int | None = None
    silent: bool = False


class Call(msgspec.Struct, tag=True):
    """A control call of the engine process, by name, with its JSON body; answered by one Reply of the same id."""

    call_id: int
    method: str
    params: dict[str, Any] = {}


class CallError(msgspec.Struct):
    """Why a control call failed: an HTTP status the server passes on, and a sentence with the value and the remedy."""

    status: int
    message: str
    param: str | None = None


class Reply(msgspec.Struct, tag=True):
    """The answer to a Call: a result, or an error."""

    call_id: int
    result: dict[str, Any] = {}
    error: CallError | None = None


class Outputs(msgspec.Struct, tag=True):
    """What one engine step produced."""

    outputs: list[TokenOutput]


class EngineReady(msgspec.Struct, tag=True, kw_only=True):
    """The engine serves: the facts about the model that the server needs to validate requests.

    `routing` is set where outputs carry routed experts. `world_size` is how many ranks of a trainer's group it takes.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    device: str
    model_type: str
    num_blocks: int
    block_size: int
    seconds: dict[str, float]
    eos_token_ids: list[int] = []
    routing: RoutingShape | None = None
    world_size: int = 1


class EngineState(msgspec.Struct, tag=True, kw_only=True):
    """What an engine that takes over must go on from; sent before the first message that was made in this state."""

    epoch: int
    version: str
    paused: bool


class Progress(msgspec.Struct, tag=True):
    """A step that takes long is under way and gets on: sent beside it, from another thread, each time it has.

    `step` counts the steps, `seconds` is how long this one has been under way.
    """

    step: int
    seconds: float


class EngineDied(msgspec.Struct, tag=True):
    """The engine process ends for this reason; every request in flight fails with it."""

    reason: str


ToEngine = AddRequest | AbortRequests | Call
FromEngine = Outputs | Reply | EngineState | EngineReady | Progress | EngineDied
