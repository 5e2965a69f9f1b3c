"""What a trainer recomputes for tokens that a server sampled: their logprobs, ratios, versions and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.sampling.filters import add_logit_bias, apply_penalties, divide_by_temperature, without_nan
from rollout.sampling.params import SamplingParams, check_names
from rollout.sampling.rows import RequestFilters, Rows, SamplingRow
from trainer_bridge.client import Span

_BLOCK_ROWS = 256


def token_logprobs(logits: Tensor, token_ids: Tensor | Sequence[int]) -> Tensor:
    """Float32 logprobs (T,) of `token_ids` (T,) under log_softmax(logits) (T, vocab; any float dtype).

    These are a server's `raw_logprobs`. Differentiable.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=logits.device)
    return logits.float().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    *,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    sampling_mask: Sequence[Sequence[int] | None] | None = None,
    prompt_token_ids: Sequence[int] | None = None,
) -> Tensor:
    """Float32 logprobs (T,) that a server in `processed_logprobs` mode reports for a choice, from the trainer's logits.

    `logits` (T, vocab; any float dtype): row t predicts `token_ids[t]`. `sampling_params` are those of the request (a
    dict as sent, or SamplingParams), `sampling_mask` and `token_ids` those of the answer, `prompt_token_ids` the
    request's. Differentiable with respect to `logits`; for equal logits equal to the server's in every bit.

    What moves logits (logit_bias, penalties, temperature) is applied again, by the engine's own definitions: it is a
    smooth function of the policy's logits, part of the distribution that was sampled. What drops tokens (structured
    outputs, allowed ids, min_tokens, bad words, min-p, top-k, top-p) is not: recomputed from new weights it could drop
    the sampled token and make the ratio 0 or undefined, so the recorded support stands for it and is held constant. A
    step whose mask is None was not filtered. A greedy step's support is its token: its logprob is 0.

    Memory grows with T, not with its square. Raises ValueError where lengths differ, for a name that no sampling
    parameter has, where a sampled token is outside its mask, and where `sampling_params` drop
    tokens (bad words aside, which seldom do) but no mask is given: run the server with --return-sampling-mask, or pass
    `[None] * T` if no step was filtered. Also where a repetition penalty lacks `prompt_token_ids`.
    """
    params = _as_params(sampling_params)
    length, vocab_size = logits.shape
    ids = list(token_ids)
    if len(ids) != length or (sampling_mask is not None and len(sampling_mask) != length):
        got = f"{len(ids)} token_ids" + ("" if sampling_mask is None else f" and {len(sampling_mask)} masks")
        raise ValueError(f"{length} rows of logits need as many token_ids and masks, got {got}")
    if sampling_mask is None and not params.greedy and (dropping := _dropping(params, vocab_size)):
        raise ValueError(
            f"{', '.join(dropping)} dropped tokens, but there is no sampling_mask: run the server with "
            "--return-sampling-mask, or pass a list of None if no step was filtered"
        )
    if params.repetition_penalty != 1 and prompt_token_ids is None:
        raise ValueError(f"repetition_penalty={params.repetition_penalty} looks at the prompt: pass prompt_token_ids")
    masks: Sequence[Sequence[int] | None] = [[i] for i in ids] if params.greedy else sampling_mask or [None] * length
    blocks = logits.split(_BLOCK_ROWS) if length else [logits]
    starts = range(0, length or 1, _BLOCK_ROWS)
    found = [
        _block_logprobs(block, start, ids, masks[start : start + len(block)], params, prompt_token_ids or ())
        for start, block in zip(starts, blocks, strict=True)
    ]
    return torch.cat(found)


def _block_logprobs(
    logits: Tensor,
    start: int,
    ids: Sequence[int],
    masks: Sequence[Sequence[int] | None],
    params: SamplingParams,
    prompt: Sequence[int],
) -> Tensor:
    """Those of `logits` (rows, vocab), whose first row predicts `ids[start]`."""
    moved = without_nan(logits)
    sampled = ids[start : start + len(logits)]
    filters = RequestFilters(params, prompt)
    row = SamplingRow(filters, 0, 0, ids[:start])
    rows = Rows([row] * len(logits))
    add_logit_bias(moved, rows)
    if filters.penalizes:
        parts = [part.clone() for part in moved.split(1)]
        for part, token_id in zip(parts, sampled, strict=True):
            apply_penalties(part, Rows([row]))
            row.append(token_id)
        moved = torch.cat(parts)
    divide_by_temperature(moved, rows)
    if any(mask is not None for mask in masks):
        moved = moved.masked_fill(_dropped(masks, sampled, moved, start), -math.inf)
    return token_logprobs(moved, sampled)


def check_logprobs_mode(mode: str | None, sampling_params: SamplingParams | Mapping[str, Any] | None) -> None:
    """Raise ValueError where a server's logprobs can't be those of the distribution that it samples from.

    `mode` is /weight_info's `logprobs_mode`, None where a server doesn't say. `raw_logprobs` are those of the logits
    before bias, penalties, temperature and filters: π_old of a request that asks for none of them only.
    """
    if mode == "processed_logprobs":
        return
    params = _as_params(sampling_params)
    moving = {
        "temperature": params.temperature != 1,
        "logit_bias": bool(params.logit_bias),
        "repetition_penalty": params.repetition_penalty != 1,
        "frequency_penalty": params.frequency_penalty != 0,
        "presence_penalty": params.presence_penalty != 0,
        "bad_words": bool(params.bad_words),
    }
    if at_work := [name for name, moves in moving.items() if moves] + _dropping(params):
        said = f"its logprobs are {mode}" if mode else "it doesn't say what its logprobs are"
        settings = ", ".join(f"{name}={getattr(params, name)}" for name in at_work)
        raise ValueError(
            f"{settings}: tokens are drawn from another distribution than the server's logprobs are of ({said}), so "
            "ratios would be wrong: start it with --logprobs-mode processed_logprobs"
        )


def importance_ratios(new_logprobs: Tensor, old_logprobs: Tensor, *, cap: float | None = None) -> Tensor:
    """exp(new - old), of the shape of both; truncated at `cap` where given (Ionides 2008, truncated importance
    sampling: less variance for some bias). No gradient flows into `old_logprobs`."""
    ratios = (new_logprobs - old_logprobs.detach()).exp()
    return ratios if cap is None else ratios.clamp(max=cap)


def versions_per_token(spans: Sequence[Span | Mapping[str, Any]], length: int) -> list[str]:
    """The label of the weights that sampled each of `length` output tokens, from a choice's `weight_versions` (or the
    client's `Choice.spans`).

    Raises ValueError where the spans don't tile [0, length).
    """
    return _per_token(spans, length, "version")


def epochs_per_token(spans: Sequence[Span | Mapping[str, Any]], length: int) -> list[int]:
    """The weight epoch that sampled each of `length` output tokens. Raises as `versions_per_token` does."""
    return _per_token(spans, length, "epoch")


def staleness(spans: Sequence[Span | Mapping[str, Any]], length: int, current_epoch: int) -> list[int]:
    """How many commits each output token's weights are behind `current_epoch`. Raises as `versions_per_token` does."""
    return [current_epoch - epoch for epoch in epochs_per_token(spans, length)]


def _per_token(spans: Sequence[Span | Mapping[str, Any]], length: int, key: str) -> list[Any]:
    values: list[Any] = []
    for item in spans:
        span = vars(item) if isinstance(item, Span) else item
        if span["start"] != len(values) or span["end"] <= span["start"]:
            raise ValueError(f"weight version spans must tile [0, {length}) in order: {dict(span)} after {len(values)}")
        if span.get(key) is None:
            raise ValueError(f"a span has no {key!r}, this server doesn't report it: {dict(span)}")
        values += [span[key]] * (span["end"] - span["start"])
    if len(values) != length:
        raise ValueError(f"weight version spans must tile [0, {length}), they end at {len(values)}")
    return values


def _as_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    check_names(params or ())
    given = {name: value for name, value in (params or {}).items() if value is not None}
    if "logit_bias" in given:  # JSON has no integer keys
        given["logit_bias"] = {int(token): float(bias) for token, bias in given["logit_bias"].items()}
    return SamplingParams(**given)


def _dropping(params: SamplingParams, vocab_size: int | None = None) -> list[str]:
    """Names of the parameters at work that drop tokens at known steps (bad words aside)."""
    dropping = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "structured_outputs": params.structured_outputs is not None,
        "min_tokens": params.min_tokens > 0,
        "min_p": params.min_p > 0,
        "top_k": params.top_k > 0 and (vocab_size is None or params.top_k < vocab_size),
        "top_p": params.top_p < 1,
    }
    return [name for name, drops in dropping.items() if drops]


def _dropped(masks: Sequence[Sequence[int] | None], ids: Sequence[int], logits: Tensor, start: int) -> Tensor:
    """Bool (rows, vocab): True outside each step's mask. Raises ValueError where a sampled token is outside its own."""
    dropped = torch.zeros(logits.shape, dtype=torch.bool)
    for row, (mask, token) in enumerate(zip(masks, ids, strict=True)):
        if mask is not None:
            dropped[row] = True
            dropped[row, torch.as_tensor(mask, dtype=torch.long)] = False
            if dropped[row, token]:
                raise ValueError(
                    f"token {token} at step {start + row} is outside its sampling_mask of {len(mask)} tokens"
                )
    return dropped.to(logits.device)
