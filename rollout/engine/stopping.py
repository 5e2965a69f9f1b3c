"""Where a sequence ends, at the level of tokens. Stop strings are the server's business."""

from __future__ import annotations

from rollout.engine.request import Sequence
from rollout.outputs import FinishReason


def check_stop(
    sequence: Sequence, eos_token_ids: list[int], max_model_len: int
) -> tuple[FinishReason, int | None] | None:
    """(finish reason, stop reason) if the sequence's last token ends it, else None.

    Of several EOS ids the first gives stop reason None, another gives its id; so does a stop token. Length ends a
    sequence also before min_tokens (before which EOS and stop tokens are masked, so that none is sampled).
    """
    request = sequence.request
    if sequence.output_len >= request.params.min_tokens:
        token = sequence.token_ids[-1]
        if not request.params.ignore_eos and token in eos_token_ids:
            return FinishReason.STOP, None if token == eos_token_ids[0] else token
        if token in request.params.stop_token_ids:
            return FinishReason.STOP, token
    if sequence.output_len >= request.max_tokens or len(sequence.token_ids) >= max_model_len:
        return FinishReason.LENGTH, None
    return None
