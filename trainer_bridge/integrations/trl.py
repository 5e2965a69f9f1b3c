"""TRL's `AsyncGRPOTrainer` on a rollout server: its weight-transfer and rollout-worker interfaces. No vLLM is imported.

    args = AsyncGRPOConfig(folder, vllm_server_base_url=url, num_generations=8, max_completion_length=64)
    trainer = AsyncGRPOTrainer(
        model,
        args=args,
        train_dataset=dataset,
        weight_transfer=WeightTransfer(args),
        rollout_worker=RolloutWorker(args, dataset, reward_funcs, tokenizer),
    )

Both read TRL's own configuration. Weights are pushed without a pause into requests that are running, under labels that
count the pushes as TRL counts its model versions, so that each token says which version sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer_bridge.client import RolloutClient
from trainer_bridge.integrations.trl_compat import AsyncGRPOConfig, AsyncGRPOTrainer, replace_cuda_functions
from trainer_bridge.integrations.trl_worker import LABEL, RolloutWorker
from trainer_bridge.push.sender import PushResult, WeightSender
from trainer_bridge.push.sources import StreamSource

__all__ = ["RolloutWorker", "WeightTransfer", "log_gap"]


class WeightTransfer:
    """TRL's `WeightTransferProtocol` by `WeightSender`: the server at `args.vllm_server_base_url` is never paused.

    The n-th push is labelled `trl-<n>`, n being TRL's model version after it. `partial` is for models with frozen
    parameters, which TRL doesn't send. `pushes` holds what each push was.
    """

    def __init__(self, args: AsyncGRPOConfig, *, api_key: str | None = None, partial: bool = False) -> None:
        if args.device.type == "cpu":
            replace_cuda_functions()
        self.pushes: list[PushResult] = []
        self._args = args
        self._api_key = api_key
        self._partial = partial
        self._stream = StreamSource(args.device)
        self._sender: WeightSender | None = None

    def init_weight_transfer(self) -> None:
        """Wait for the server and join a group with it. Raises RolloutError, WeightPushError."""
        args = self._args
        with RolloutClient(args.vllm_server_base_url, api_key=self._api_key) as client:
            client.wait_until_ready(args.vllm_server_timeout)
        self._sender = WeightSender.connect(
            args.vllm_server_base_url, self._stream, timeout_s=args.weight_sync_timeout, api_key=self._api_key
        )

    def pause(self) -> None:
        """Nothing: the server generates on while it receives."""

    def resume(self) -> None:
        """Nothing."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push; returns once the server samples from these weights. Raises WeightPushError; the old ones serve on."""
        if self._sender is None:
            raise RuntimeError("send_weights before init_weight_transfer: TRL calls that when training begins")
        try:
            self._stream.begin(iterator)
            self.pushes.append(self._sender.push(f"{LABEL}{len(self.pushes) + 1}", partial=self._partial))
        finally:
            for _ in iterator:  # each step of it is a collective of TRL's ranks, also after a failure here
                pass

    def destroy(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def log_gap(trainer: AsyncGRPOTrainer) -> None:
    """Have TRL log |log π_θ - log π_old| of the tokens that it trains on, under the names that GRPOTrainer has for it.

    `sampling/sampling_logp_difference/mean` and `.../max`: rank 0's, π_θ from the trainer's own forward pass.
    """
    latest: list[torch.Tensor] = []
    assert trainer.model is not None
    trainer.model.register_forward_hook(lambda module, inputs, output: latest.append(output.log_probs.detach()))
    compute_loss: Callable[..., Any] = trainer.compute_loss

    def measured(model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        latest.clear()
        loss = compute_loss(model, inputs, *args, **kwargs)
        chosen = inputs["token_index"] >= 0
        new = latest[-1].flatten()[inputs["token_index"][chosen]]
        gap = (new - inputs["old_log_probs"][chosen]).abs()
        name, metrics = "sampling/sampling_logp_difference", trainer._metrics["train"]
        metrics[f"{name}/mean"].append((float(gap.sum()), float(gap.numel())))
        metrics[f"{name}/max"].append(float(gap.max()))
        return loss

    trainer.compute_loss = measured  # type: ignore[method-assign]
