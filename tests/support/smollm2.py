"""SmolLM2 behind a live server, and transformers' own greedy decoding of it to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.config import ServerConfig
from rollout.fleet.connection import run_engine
from tests.support.server_harness import RunningServer, running_server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@contextlib.contextmanager
def smollm2_server(model: Path) -> Iterator[RunningServer]:
    """Serve it as `smol`, in float32, masks on."""
    config = ServerConfig(served_model_name="smol", enable_scale_out=True, return_sampling_mask=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_threads": 1}
    with running_server(config, model=str(model), target=run_engine, **options) as running:
        yield running


@cache
def _loaded(model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(model)


def chat_prompt(model: Path, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a chat."""
    _, tokenizer = _loaded(model)
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


@torch.inference_mode()
def greedy(model: Path, prompt: list[int], max_tokens: int) -> tuple[list[int], str, list[float]]:
    """What transformers generates greedily: ids (EOS included), text, the logprob of each id."""
    network, tokenizer = _loaded(model)
    made = network.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
    )
    ids = made.sequences[0, len(prompt) :].tolist()
    logprobs = [scores[0].log_softmax(-1)[i].item() for scores, i in zip(made.scores, ids, strict=True)]
    return ids, tokenizer.decode(ids, skip_special_tokens=True), logprobs
