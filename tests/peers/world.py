"""What the clients of tests.peers run against: a server, the models that were pushed to it, and what is compared."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from transformers import PreTrainedModel

from rollout.outputs import WeightVersionSpan
from tests.support import tiny_models
from tests.support.engine_utils import teacher_forced
from tests.support.push_reference import as_stamped

TOLERANCE = 1e-4
PROMPT = [5, 17, 99, 41, 8, 123, 64, 30]


class World:
    """A server; `models` are those of its epochs."""

    def __init__(self, url: str, path: Path) -> None:
        self.url, self.path = url, path
        self.models = {0: tiny_models.model("llama", 0)}
        self.pool = ThreadPoolExecutor(4)
        self.checked = 0

    def next_model(self) -> PreTrainedModel:
        """Weights unrelated to the others', to be pushed."""
        return tiny_models.model("llama", len(self.models))

    def pushed(self, model: PreTrainedModel) -> None:
        """They were committed."""
        epoch = httpx.get(f"{self.url}/weight_info").json()["epoch"]
        assert epoch == len(self.models), (epoch, len(self.models))
        self.models[epoch] = model

    @torch.inference_mode()
    def check(
        self, prompt: list[int], tokens: list[int], logprobs: list[float], supports: list[list[int]] | None = None
    ) -> None:
        """They are the newest weights', where `supports` are given among these tokens of each step alone."""
        logits = teacher_forced(self.models[max(self.models)], prompt, list(tokens))
        for row, kept in enumerate(supports or ()):
            assert tokens[row] in kept
            logits[row, [token for token in range(logits.shape[1]) if token not in set(kept)]] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)
        self.checked += len(tokens)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A long request runs meanwhile, which no push aborts; its tokens are those of all weights."""
        params = {"max_new_tokens": 15_000, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "rid": "beside"}
        request = self.pool.submit(httpx.post, f"{self.url}/generate", json=body, timeout=3600)
        try:
            yield
            assert not request.done(), request.result().text[:500]
        finally:
            httpx.post(f"{self.url}/abort_request", json={"rid": "beside"})
        meta = request.result().json()["meta_info"]
        told = meta["output_token_logprobs"]
        spans = [WeightVersionSpan(**span) for span in meta["weight_versions"]]
        expected = as_stamped(self.models, PROMPT, [token for _, token, _ in told], spans)
        torch.testing.assert_close(torch.tensor([lp for lp, _, _ in told]), expected, atol=TOLERANCE, rtol=0)
        print(f"beside: {len(told)} tokens of {len(spans)} spans, not aborted by any of {len(self.models) - 1} pushes")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
