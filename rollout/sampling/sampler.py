"""From logits to tokens: filter, draw, and say from what: logprobs, ranks and the support."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.config import LogprobsMode
from rollout.kernels.native import address, library
from rollout.outputs import NOTHING_LEFT, FinishReason, TokenLogprob, TokenOutput
from rollout.sampling.filters import filter_logits, is_filtered, only_scales
from rollout.sampling.logprobs import as_entries, logprob_table, logprobs_of
from rollout.sampling.rows import Rows, SamplingRow

NOT_FINITE = "the logits hold NaN or infinity: the weights are broken; push sound ones"
NO_TOKEN_LEFT = f"{NOTHING_LEFT}: structured_outputs, allowed_token_ids, bad_words, logit_bias and the like ban all"
BLOCK = 256  # tokens in one block of the two-level draw; a power of two
PROMPT_ROWS = 128  # rows of prompt logits that are worked on at once, which bounds the memory it takes
UNIFORM_STEPS = 16  # steps whose uniform numbers are made at once
MASK_ENTRIES = 1 << 22  # logits whose support is read at once, likewise


@dataclass(frozen=True)
class Drawn:
    """The tokens of a step, on their way to the host: (rows,) of any dtype, on the device they were drawn on.

    `write` waits for them, and for nothing that was launched after them, and completes one output a row. `look_back`:
    a row must be told its token before the next is drawn.
    """

    tokens: Tensor
    look_back: bool
    write: Callable[[Sequence[TokenOutput]], None]


class Sampler:
    """Draws one token a row. What it draws depends on the row's logits and its `SamplingRow` only, not on the batch.

    `logprobs_mode`: "raw_logprobs" reports the log-softmax of the float32 logits as they came, "processed_logprobs"
    that of the filtered tensor the token was drawn from. `exact`: logprobs have the bits of torch's log_softmax, which
    a trainer computes; else they may be summed in another order.
    """

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs", *, exact: bool = False) -> None:
        self.logprobs_mode, self.exact = logprobs_mode, exact
        self._rows = Rows()

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[TokenOutput]:
        """One token for each row of `logits` (rows, vocab; any float dtype, any device). `logits` is left as it is.

        The outputs have the row's request, its token, its logprobs and its sampling mask; nothing of the weights yet.

        A row whose filters leave no token, or whose logits hold NaN or an infinity, gives no token: its output
        ends the choice with FinishReason.ERROR and a `stop_reason` that says why.
        Raises ValueError where `rows` and `logits` differ in number.
        """
        if len(rows) != len(logits):
            raise ValueError(f"logits of {len(logits)} rows can't be sampled for {len(rows)} requests: pass one a row")
        outputs = [TokenOutput(row.request_id, row.index) for row in rows]
        if outputs:
            self.launch(logits, rows).write(outputs)
        return outputs

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SamplingRow], ahead: Sequence[int] = ()) -> Drawn:
        """The first part of `sample`, for at least one row: `Drawn.write` is the second.

        `ahead[i]`, 0 by default, is how many tokens were drawn for row i that it wasn't told yet: none where it must
        be told each before the next (`Rows.look_back`).
        """
        if rows != self._rows:
            self._rows = Rows(rows)
        rows = self._rows
        rows.ahead = np.array(ahead if any(ahead) else [0], np.uint64)
        if not self.exact and _drawn_by_triton(logits) and rows.want_one_logprob:
            if rows.only_draw or _only_scale(rows, logits):
                return self._launch_plain(logits, rows, narrow=False)
            if rows.only_narrow:
                return self._launch_plain(logits, rows, narrow=True)
        filtered = self._needed_filtered(logits, rows)
        tokens = _draw_scaled(logits, rows) if filtered is None else _choose(filtered, rows)
        source = logits if filtered is None or self.logprobs_mode == "raw_logprobs" else filtered
        groups: dict[int, list[int]] = defaultdict(list)  # rows by the number of logprobs they ask for
        masked, tracked = [], []
        for r, row in enumerate(rows):
            params = row.filters.params
            if params.logprob_token_ids:
                tracked.append(r)
            elif params.logprobs is not None:
                groups[params.logprobs].append(r)
            if row.filters.want_mask and is_filtered(row, logits.shape[-1]):
                masked.append(r)
        finite = _are_finite(logits)
        left = finite if filtered is None else filtered.amax(-1) > -math.inf
        tensors = [tokens, finite, left]
        for k, members in groups.items():
            tensors += logprob_table(_take(source, members), _take(tokens, members), k)

        read = _send(tensors)
        # These read the device themselves, and the logits, which the next step may overwrite.
        masks = [mask.tobytes() for mask in _masks(filtered, masked)] if filtered is not None and masked else []
        entries_of = {r: logprobs_of(source[r], rows[r].filters.params.logprob_token_ids, tokens[r]) for r in tracked}

        def write(outputs: Sequence[TokenOutput]) -> None:
            arrays = iter(read())
            ids = next(arrays).astype(int).tolist()
            numbers, some = next(arrays), next(arrays)
            for output, token in zip(outputs, ids, strict=True):
                output.token_id = token
            for members in groups.values():
                for r, entries in zip(members, as_entries([ids[r] for r in members], *islice(arrays, 4)), strict=True):
                    outputs[r].logprobs = entries
            for r, entries in entries_of.items():
                outputs[r].logprobs = entries
            for r, mask in zip(masked, masks, strict=True):
                outputs[r].sampling_mask = mask
            for r in np.flatnonzero((numbers == 0) | (some == 0)).tolist():
                end_without_token(outputs[r], (rows[r].grammar_error or NO_TOKEN_LEFT) if numbers[r] else NOT_FINITE)

        return Drawn(tokens, rows.look_back, write)

    def _launch_plain(self, logits: Tensor, rows: Rows, *, narrow: bool) -> Drawn:
        """`launch` where no row asks for more than a token, its logprob and its rank: a copy, a launch (another to
        `narrow` rows to their likeliest tokens) and a read."""
        temperatures, *narrowed = rows.asked
        asked = _asked(logits, rows, temperatures, *(narrowed if narrow else ()))
        limits = {"limits": _triton().limits(logits, asked)} if narrow else {}
        table = _triton().sample(logits, asked, processed=self.logprobs_mode == "processed_logprobs", **limits)
        read = _send([table])

        def write(outputs: Sequence[TokenOutput]) -> None:
            (read_table,) = read()
            ids = read_table[:, 0].astype(int).tolist()
            for output, token in zip(outputs, ids, strict=True):
                output.token_id = token
            for r in rows.scored:
                _, logprob, rank, _ = read_table[r].tolist()
                outputs[r].logprobs = [TokenLogprob(ids[r], logprob, int(rank))]
            for r in rows.greedy:
                if rows[r].filters.want_mask:
                    outputs[r].sampling_mask = np.int32(ids[r]).tobytes()
            for r in np.flatnonzero(read_table[:, 3] == 0).tolist():
                end_without_token(outputs[r], NOT_FINITE)

        return Drawn(table[:, 0], rows.look_back, write)

    def _needed_filtered(self, logits: Tensor, rows: Rows) -> Tensor | None:
        """What the tokens are drawn from; None where they come from `logits` in one pass, and nothing else needs it."""
        reported = self.logprobs_mode == "processed_logprobs" and any(
            row.filters.params.logprobs is not None for row in rows
        )
        if reported or not (_drawn_natively(logits) or _drawn_by_triton(logits)) or not _only_scale(rows, logits):
            return filter_logits(logits, rows)
        return None

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, targets: Tensor | Sequence[int], k: int
    ) -> list[list[TokenLogprob] | None]:
        """Logprobs of prompt tokens: row i of `logits` (n, vocab) predicts `targets[i]` (n ids).

        Each list has the target first, then the top `k` by rank (the whole vocabulary where k is -1). They are raw in
        either mode: nothing was sampled here. None stands for a row that `sample` gives no token for, as NOT_FINITE.
        """
        targets = torch.as_tensor(targets, dtype=torch.long, device=logits.device)
        result: list[list[TokenLogprob] | None] = []
        for part, ids in zip(logits.split(PROMPT_ROWS), targets.split(PROMPT_ROWS), strict=True):
            *table, finite = _to_host([*logprob_table(part, ids, k), _are_finite(part)])
            result += [row if ok else None for row, ok in zip(as_entries(ids.tolist(), *table), finite, strict=True)]
        return result


def end_without_token(output: TokenOutput, why: str) -> None:
    """Let it end a choice for which there is no token."""
    output.token_id = output.logprobs = output.sampling_mask = None
    output.finish_reason, output.stop_reason = FinishReason.ERROR, why


def _are_finite(logits: Tensor) -> Tensor:
    """Bool (rows,): whether these logits are numbers, and not so large that even their sum in float32 is none.

    One pass, and a model gives no -inf of its own accord: it is an overflow, as +inf is.
    """
    return logits.sum(-1, dtype=torch.float32).isfinite()


def _only_scale(rows: Rows, logits: Tensor) -> bool:
    """True where the filters of all rows do nothing in this step but divide by temperatures."""
    return rows.only_scale or all(only_scales(row, logits.shape[-1]) for row in rows)


def _asked(logits: Tensor, rows: Rows, temperatures: np.ndarray, *more: np.ndarray) -> Tensor:
    """Temperatures, the rows' uniform numbers, and `more`: (2 or more, rows) float64, on the device of `logits`."""
    asked = torch.from_numpy(np.stack([temperatures, uniforms(rows), *more]))
    if _can_pin():
        asked = asked.pin_memory()  # else the copy would wait for the device
    return asked.to(logits.device, non_blocking=True)


def _draw_scaled(logits: Tensor, rows: Rows) -> Tensor:
    """Token ids (rows,) int64, each from softmax(logits / temperature), without a copy of the logits."""
    if _drawn_by_triton(logits):
        return _draw_by_triton(logits, _asked(logits, rows, rows.temperatures))
    temperatures = torch.from_numpy(rows.temperatures).float()
    return _draw_natively(logits, temperatures, torch.from_numpy(uniforms(rows)))


def _choose(filtered: Tensor, rows: Rows) -> Tensor:
    """Token ids (rows,) int64: the one token that a greedy row's filters left, a draw for every other row."""
    noise = torch.from_numpy(uniforms(rows)).to(filtered.device)
    if not rows.greedy:
        return draw(filtered, noise)
    tokens = torch.empty(len(rows), dtype=torch.long, device=filtered.device)
    tokens[rows.greedy] = _take(filtered, rows.greedy).argmax(-1)
    if rows.drawing:
        tokens[rows.drawing] = draw(_take(filtered, rows.drawing), noise[rows.drawing])
    return tokens


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Token ids (rows,) int64, each from softmax(logits) (rows, vocab; float32) by inverse CDF at `uniform` (rows,),
    float64 in [0, 1): first a block of 256 tokens by the blocks' sums, then a token inside the block.

    Never picks a token whose probability is 0. A row without any probability gives 0. Native code, Triton and
    torch differ by how they round exp: a draw may differ from machine to machine where `uniform` is at a token's edge.
    """
    if _drawn_natively(logits):
        return _draw_natively(logits, torch.ones(len(logits)), uniform)
    if _drawn_by_triton(logits):
        return _draw_by_triton(logits, torch.stack([torch.ones_like(uniform), uniform]))
    return _draw_in_torch(logits, uniform)


def _drawn_natively(logits: Tensor) -> bool:
    known = logits.device.type == "cpu" and logits.dtype is torch.float32 and logits.stride(-1) == 1
    return known and library() is not None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _can_pin() -> bool:
    return torch.cuda.is_available()


def _triton() -> Any:
    """Imported where it is used: it compiles its kernels for the GPU at hand, and needs Triton."""
    return importlib.import_module("rollout.kernels.triton_sampling")


def _drawn_by_triton(logits: Tensor) -> bool:
    return logits.device.type == "cuda" and logits.stride(-1) == 1 and _has_triton()


def _draw_by_triton(logits: Tensor, asked: Tensor) -> Tensor:
    table: Tensor = _triton().sample(logits, asked, processed=True)
    return table[:, 0].long()


def _draw_natively(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> Tensor:
    """`draw` from softmax(logits / temperatures), NaN read as -inf and +inf as a large number: see `without_nan`."""
    kernels = library()
    assert kernels is not None
    tokens = torch.empty(len(logits), dtype=torch.long)
    kernels.draw_f32(
        address(logits),
        logits.stride(0),
        logits.shape[-1],
        address(temperatures),
        address(uniform),
        address(tokens),
        len(logits),
    )
    return tokens


def _draw_in_torch(logits: Tensor, uniform: Tensor) -> Tensor:
    spare = -logits.shape[-1] % BLOCK
    probs = (pad(logits, (0, spare), value=-math.inf) if spare else logits).softmax(-1).unflatten(-1, (-1, BLOCK))
    sums = probs
    while sums.shape[-1] > 1:  # element-wise additions only: one order of summation for every batch, thread and device
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    block, rest = _pick(sums.squeeze(-1), uniform)
    within, _ = _pick(probs[torch.arange(len(probs), device=probs.device), block], rest)
    return torch.where(logits.amax(-1) > -math.inf, block * BLOCK + within, 0)


def _pick(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (rows,) by inverse CDF over `weights` (rows, n), and where `uniform` fell inside the pick, in [0, 1).

    Weights are rounded to integers, the largest to 2^42: their sums are then exact in float64 for n up to 2048, an
    index of weight 0 spans no integer, and so it can't be picked.
    """
    share = weights.double() / weights.amax(-1, keepdim=True).double()
    share = share.mul_(2.0**42).round_()
    ends = share.cumsum(-1)
    target = (uniform[:, None] * ends[:, -1:]).floor_()
    index = torch.searchsorted(ends, target, right=True).clamp_(max=weights.shape[-1] - 1)
    size = share.gather(-1, index)
    rest = (target - (ends.gather(-1, index) - size)) / size
    return index.squeeze(-1), rest.squeeze(-1)


def uniforms(rows: Sequence[SamplingRow]) -> np.ndarray:
    """One float64 of 53 random bits in [0, 1) a row: word 0 and 1 of Philox, keyed by the row's seed, at the counter
    (position in the output, sample index).

    Rows that stay for a second step get those of UNIFORM_STEPS steps at once, which cost little more than one's.
    """
    if not isinstance(rows, Rows):
        rows = Rows(rows)
    positions = np.array([row.position for row in rows], dtype=np.uint64) + rows.ahead
    since = positions - rows.uniforms_from
    if since[0] >= len(rows.uniforms) or (since != since[0]).any():
        steps = np.arange(UNIFORM_STEPS if len(rows.uniforms) else 1, dtype=np.uint64)
        seeds, samples = np.tile(rows.noise, len(steps))
        counters = (steps[:, None] + positions).reshape(-1)
        zero = np.zeros_like(seeds)
        words = philox4x32(np.stack([counters, zero, samples, zero]), np.stack([seeds & 0xFFFFFFFF, seeds >> 32]))
        mantissas = (words[1] << 32 | words[0]) >> 11
        rows.uniforms_from, rows.uniforms = positions, mantissas.reshape(len(steps), -1).astype(np.float64) * 2.0**-53
    drawn: np.ndarray = rows.uniforms[int(positions[0] - rows.uniforms_from[0])]
    return drawn


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10: four random 32-bit words for each counter (4, n) and key (2, n), all in uint64 arrays.

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    factors, weyl = np.array([[[0xD2511F53], [0xCD9E8D57]], [[0x9E3779B9], [0xBB67AE85]]], np.uint64)
    keys = (key + np.arange(10, dtype=np.uint64)[:, None, None] * weyl) & low
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = factors * even
        even, odd = (product >> shift)[::-1] ^ odd ^ round_key, (product & low)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _masks(filtered: Tensor, rows: list[int]) -> Iterator[np.ndarray]:
    """The support of each of these rows of `filtered` (all rows, vocab): int32 ids, ascending."""
    size = max(1, MASK_ENTRIES // filtered.shape[-1])
    for start in range(0, len(rows), size):
        support = _take(filtered, rows[start : start + size]) > -math.inf
        ids = support.nonzero()[:, 1].int().cpu().numpy()
        yield from np.split(ids, support.sum(-1).cumsum(0)[:-1].cpu().numpy())


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """`tensor[rows]`, without a copy where that is all of it."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The tensors as arrays."""
    return _send(tensors)()


def _send(tensors: Sequence[Tensor]) -> Callable[[], list[np.ndarray]]:
    """Begin one copy of the tensors to the host, in float64, which holds ids, counts and float32 values exactly. The
    function returned waits for it, and for nothing that was launched later."""
    parts = [t.reshape(-1).double() for t in tensors]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    shapes, ends = [t.shape for t in tensors], np.cumsum([t.numel() for t in tensors])[:-1]
    copied = torch.cuda.Event() if flat.device.type == "cuda" else None
    if copied is not None:
        flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
        copied.record()

    def read() -> list[np.ndarray]:
        if copied is not None:
            copied.synchronize()
        return [part.reshape(shape) for part, shape in zip(np.split(flat.numpy(), ends), shapes, strict=True)]

    return read
