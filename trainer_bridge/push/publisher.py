"""Keeps a server on the trainer's weights, whichever of the two was restarted in between."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

from trainer_bridge.client import Choice, RolloutClient, RolloutError
from trainer_bridge.push.control import DisplacedError, RefusedError, WeightPushError
from trainer_bridge.push.sender import PushResult, WeightSender
from trainer_bridge.score import replay

_RETRY_S = 0.5


class Publisher:
    """Pushes a model as `step-N` after each training step, and again where the server has lost it.

    A trainer that has been restarted publishes its checkpoint before anything else: both sides then hold the same
    weights, whatever the server had. Tokens are told apart by the labels of this publisher's own pushes (`lags`): a
    server that was restarted counts its epochs from 0 again, and what it samples before the next push is unknown.

    `timeout_s` bounds every single wait of a push, `outage_s` how long a server may be away.
    """

    def __init__(
        self, client: RolloutClient, model: nn.Module, *, timeout_s: float = 60.0, outage_s: float = 120.0
    ) -> None:
        self._client = client
        self._model = model
        self._timeout_s, self._outage_s = timeout_s, outage_s
        self._sender: WeightSender | None = None
        self._steps: dict[str, int] = {}
        self._step, self._epoch = 0, 0
        self.lost = 0
        """How many times the server had lost the weights."""

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._sender.close()

    def publish(self, step: int) -> PushResult:
        """Push the weights as they are now, as those of `step`; returns once the server samples from them.

        Tried again while the server is away. Raises WeightPushError for a refusal, and for an outage of more than
        `outage_s`.
        """
        deadline = time.monotonic() + self._outage_s
        while True:
            try:
                if self._sender is None:
                    # A predecessor that was killed in the middle of a push may still look alive to the server.
                    self._sender = WeightSender.connect(
                        self._client, self._model, timeout_s=self._timeout_s, force=True
                    )
                pushed = self._sender.push(version=f"step-{step}")
                self._step, self._epoch, self._steps[pushed.version] = step, pushed.epoch, step
                return pushed
            except WeightPushError as error:
                refused = isinstance(error, RefusedError) and error.status < 500 and error.status != 409
                refused |= isinstance(error, DisplacedError)
                if refused or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def restore(self) -> bool:
        """Push again if the server is there but has other weights than those published last; whether it had."""
        try:
            info = self._client.weight_info()
        except RolloutError:
            return False  # it is away: there is nothing to do but wait
        served = (info["weight_version"], info["epoch"], info.get("weights", "valid"))
        if served == (f"step-{self._step}", self._epoch, "valid"):
            return False
        self.lost += 1
        self.publish(self._step)
        return True

    def lags(self, choice: Choice) -> Tensor:
        """How many steps each token's weights are behind the last ones published, (T,) float32; inf for weights that
        this publisher did not push."""
        labels = replay.versions_per_token(choice.spans, len(choice.token_ids))
        lags = [self._step - self._steps.get(label, -math.inf) for label in labels]
        return torch.tensor(lags, dtype=torch.float32)
