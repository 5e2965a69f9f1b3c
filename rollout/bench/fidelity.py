"""`rollout bench fidelity`: how far a server's logprobs are from transformers' on the tokens that it sampled."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout.demo.task import QUESTIONS, prompt_token_ids
from trainer_bridge.client import RolloutClient, RolloutError
from trainer_bridge.score import replay

REFERENCES = ("float32", "bfloat16", "bfloat16, float32 head")
RANDOM_PROMPT_LEN = 32


@dataclass(frozen=True)
class Sample:
    """A prompt, and an answer with the server's logprobs, one a token."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Gap:
    """|Δ| of logprobs over all tokens, and exp(Σ Δ) of each sequence, the importance ratio of an unchanged policy."""

    what: str
    mean: float
    p99: float
    max: float
    smallest_ratio: float
    largest_ratio: float


@dataclass(frozen=True)
class Fidelity:
    """`mode`: raw_logprobs or processed_logprobs, as the server says. At temperature 1, unfiltered, both are equal."""

    mode: str
    sequences: int
    tokens: int
    gaps: list[Gap]


def gap(what: str, new: Sequence[Tensor], old: Sequence[Tensor]) -> Gap:
    """Between two sets of logprobs of the same sequences; a ratio is exp(new - old)."""
    differences = [n.double() - o.double() for n, o in zip(new, old, strict=True)]
    every = torch.cat(differences).abs().sort().values
    ratios = [math.exp(difference.sum()) for difference in differences]
    p99 = every[math.ceil(0.99 * len(every)) - 1]
    return Gap(what, every.mean().item(), p99.item(), every[-1].item(), min(ratios), max(ratios))


def prompts(model: Path, count: int, seed: int) -> list[list[int]]:
    """The demo's questions in the model's chat template, or random tokens for a model without one."""
    if (model / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        if tokenizer.chat_template is not None:
            return [prompt_token_ids(tokenizer, QUESTIONS[i % len(QUESTIONS)]) for i in range(count)]
    draw = random.Random(seed)
    vocabulary = range(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    return [draw.choices(vocabulary, k=RANDOM_PROMPT_LEN) for _ in range(count)]


def sample(
    client: RolloutClient, prompts: Sequence[list[int]], params: dict[str, Any], on_answer: Callable[[], None]
) -> list[Sample]:
    """One request a prompt, one after another. Raises RolloutError, and ValueError where logprobs are missing."""
    samples = []
    for prompt in prompts:
        for choice in client.generate(prompt, params).choices:
            if choice.logprobs is None or len(choice.logprobs) != len(choice.token_ids):
                raise ValueError(f"{client.base_url} did not answer with one logprob a token, which the gap is made of")
            samples.append(Sample(prompt, choice.token_ids, choice.logprobs))
        on_answer()
    return samples


def references(model: Path) -> Iterator[tuple[str, PreTrainedModel]]:
    """The trainer's possible models, by name, one at a time."""
    for name in REFERENCES:
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().requires_grad_(False)
        if name.endswith("float32 head"):
            _widen_head(loaded)
        yield name, loaded


def _widen_head(model: PreTrainedModel) -> None:
    """Give the model a float32 copy of its head, and float32 rows to it."""
    head: nn.Module = copy.deepcopy(model.get_output_embeddings()).float()
    head.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
    model.set_output_embeddings(head)


@torch.inference_mode()
def score(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Float32 logprobs (T,) of the answer's tokens: one forward pass over prompt and answer, no cache."""
    ids = torch.tensor([sample.prompt + sample.token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(sample.token_ids) + 1).logits[0, :-1]
    return replay.token_logprobs(logits, sample.token_ids)


def logprobs_mode(client: RolloutClient) -> str:
    """What /weight_info says; raw where the server has no such endpoint or field."""
    try:
        return str(client.weight_info().get("logprobs_mode", "raw_logprobs"))
    except RolloutError as error:
        if error.status in (404, 405):
            return "raw_logprobs"
        raise


def measure(
    client: RolloutClient,
    model: Path,
    *,
    requests: int,
    n: int,
    max_tokens: int,
    seed: int,
    on_answer: Callable[[], None] = lambda: None,
    on_score: Callable[[], None] = lambda: None,
) -> Fidelity:
    """Sample at temperature 1, score the same tokens by each reference, and compare.

    The last two gaps are between the references themselves: what a trainer's own arithmetic costs.
    """
    mode = logprobs_mode(client)
    params = {"temperature": 1.0, "n": n, "max_tokens": max_tokens, "logprobs": 0, "seed": seed, "ignore_eos": True}
    samples = sample(client, prompts(model, requests, seed), params, on_answer)
    served = [torch.tensor(s.logprobs) for s in samples]
    scores: dict[str, list[Tensor]] = {}
    for name, reference in references(model):
        scores[name] = []
        for one in samples:
            scores[name].append(score(reference, one))
            on_score()
    gaps = [gap(f"server – transformers {name}", scores[name], served) for name in REFERENCES]
    exact, *rounded = REFERENCES
    gaps += [gap(f"transformers {name} – {exact}", scores[exact], scores[name]) for name in rounded]
    return Fidelity(mode, len(samples), sum(len(s.token_ids) for s in samples), gaps)


def table(fidelity: Fidelity) -> Table:
    """A row for each pair."""
    title = f"{fidelity.sequences} sequences, {fidelity.tokens} tokens, {fidelity.mode}"
    table = Table("logprobs", title=title)
    for column in ("mean |Δ|", "p99", "max", "sequence ratios"):
        table.add_column(column, justify="right")
    for g in fidelity.gaps:
        ratios = f"{g.smallest_ratio:.3g}–{g.largest_ratio:.3g}"
        table.add_row(g.what, f"{g.mean:.3g}", f"{g.p99:.3g}", f"{g.max:.3g}", ratios)
    return table
