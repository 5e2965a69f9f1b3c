"""What the engine says of the tokens it sampled."""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

# A type at run time too: msgspec looks it up in the fields of answers, and Python 3.11 can't subscript it.
if TYPE_CHECKING:
    IdArray = array[int]
else:
    IdArray = array

NOTHING_LEFT = "no token is left"
"""How the `stop_reason` of a choice begins whose own filters have left it no token: its request is at fault."""

KVState = Literal["current", "mixed"]


class FinishReason(StrEnum):
    """Why a choice ended. ABORT covers aborts by the client, by a pause, and by a dying server.

    ERROR: there was no token to sample, as the filters left none or the logits weren't finite; `stop_reason` tells.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One candidate token: its id, its logprob (float32 value, natural log), its rank among all tokens (from 1)."""

    token_id: int
    logprob: float
    rank: int


def mask_ids(mask: bytes) -> IdArray:
    """The token ids of a `TokenOutput.sampling_mask`. As Python ints a wide mask would take nine times the memory."""
    return array("i", mask)


class RoutingShape(msgspec.Struct, frozen=True):
    """How a row of `TokenOutput.routed_experts` is laid out: (num_layers, num_experts_per_tok) of the NumPy `dtype`."""

    num_layers: int
    num_experts_per_tok: int
    dtype: str


class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """One step of one choice of one request: at most one new token, and the truth about it.

    `token_id` is None where a choice ended without a new token (an abort or an error). `logprobs` holds the sampled
    token first, then the top k by rank, where asked for. `sampling_mask` is the support that the token was drawn from:
    ascending ids, int32 in the machine's byte order (`mask_ids` reads them), None where the step was unfiltered.
    `epoch` and `version` are those of the weights whose forward pass sampled the token; `kv` is "mixed" where the keys
    and values it attended to were computed by more than one epoch. `routed_experts` are the rows
    (`EngineReady.routing` has their layout) of the tokens that were computed for this one and that no output before it
    brought: of the whole prompt with the first token, then one row a token. After n tokens that makes prompt + n - 1
    rows. `waited_s` comes with the first output of a request: the seconds until it was first scheduled.
    """

    request_id: str
    index: int
    token_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    sampling_mask: bytes | None = None
    epoch: int = 0
    version: str = ""
    kv: KVState = "current"
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    routed_experts: bytes | None = None
    waited_s: float | None = None


class WeightVersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were all sampled by weights of this label and epoch, under this state of the cache."""

    version: str
    start: int
    end: int
    epoch: int
    kv: KVState
