"""/weight_checker: the checksums of the weights that serve, on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from rollout.weights.bodies import CheckerBody
from rollout.weights.errors import WeightUpdateError, as_update_error
from rollout.weights.receiver import Answer
from rollout.weights.store import WeightStore


def start_check(
    store: WeightStore, body: CheckerBody, answer: Answer, on_device: Callable[[], AbstractContextManager[None]]
) -> None:
    """Answer with the checksums of what serves now, or with how they differ from the body's baseline.

    Raises WeightUpdateError where it can't begin: 400 without a baseline to compare with, 409 while they are invalid.
    """
    if body.action == "compare" and body.baseline is None:
        raise WeightUpdateError(400, "weight_checker's action 'compare' needs a baseline: {name: sha256}")
    pinned = ExitStack()
    tensors = pinned.enter_context(store.snapshot())  # now: no commit may come between two ranks' calls

    def check() -> None:
        try:
            with pinned, on_device():
                sums = store.digest(tensors)
        except Exception as error:
            answer.set_exception(as_update_error(error))
            return
        baseline = body.baseline or {}
        differing = sorted(n for n in sums.keys() | baseline.keys() if sums.get(n) != baseline.get(n))
        compared = {"match": not differing, "mismatches": differing}
        answer.set_result(compared if body.action == "compare" else {"checksums": sums})

    threading.Thread(target=check, name="weights-checker", daemon=True).start()
