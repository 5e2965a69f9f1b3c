"""`rollout bench fidelity`: how far a server's logprobs are from transformers' on the tokens that it sampled."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout.bench import report
from rollout.demo.task import QUESTIONS, prompt_token_ids
from trainer_bridge.client import Choice, RolloutClient, RolloutError
from trainer_bridge.score import replay

REFERENCES = ("float32", "bfloat16", "bfloat16, float32 head")
RANDOM_PROMPT_LEN = 32


@dataclass(frozen=True)
class Gap:
    """|Δ| of logprobs over all tokens, in nats, how many of them have other bits (in float32), and the extremes of
    exp(Σ Δ) over sequences, the importance ratio of an unchanged policy."""

    what: str
    tokens: int
    differing: int
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
    """Between two sets of logprobs of the same sequences, (T,) each; a ratio is exp(new - old)."""
    differences = [n.double() - o.double() for n, o in zip(new, old, strict=True)]
    every = torch.cat(differences).abs().sort().values
    bits, other_bits = (torch.cat([x.float() for x in side]).view(torch.int32) for side in (new, old))
    ratios = [math.exp(difference.sum()) for difference in differences]
    p99 = every[math.ceil(0.99 * len(every)) - 1].item()
    differing = int((bits != other_bits).sum())
    return Gap(what, len(every), differing, every.mean().item(), p99, every[-1].item(), min(ratios), max(ratios))


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt: list[int], choices: Sequence[Choice], params: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """Float32 logprobs (T,) of each choice's tokens: one forward pass over right-padded rows, without a cache.

    Of the distribution under these sampling parameters and the recorded masks; of the raw one where there are none.
    """
    rows = [torch.tensor(prompt + choice.token_ids) for choice in choices]
    ids = pad_sequence(rows, batch_first=True).to(model.device)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    keep = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=model.device)
    attention = mask.long().to(model.device)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=keep).logits
    scored = []
    for table, choice in zip(logits, choices, strict=True):
        table = table[: len(choice.token_ids)]
        if params is None:
            scored.append(replay.token_logprobs(table, choice.token_ids))
        else:
            masks = choice.sampling_mask or [None] * len(choice.token_ids)
            options: dict[str, Any] = {"sampling_params": params, "prompt_token_ids": prompt, "sampling_mask": masks}
            scored.append(replay.logprobs(table, choice.token_ids, **options))
    return scored


def served(client: RolloutClient, choice: Choice) -> Tensor:
    """The server's logprobs (T,) of a choice. Raises ValueError where they are missing."""
    if choice.logprobs is None or len(choice.logprobs) != len(choice.token_ids):
        raise ValueError(f"{client.base_url} did not answer with one logprob a token, which the gap is made of")
    return torch.tensor(choice.logprobs)


def prompts(model: Path, count: int, seed: int) -> list[list[int]]:
    """The demo's questions in the model's chat template, or random tokens for a model without one."""
    if (model / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        if tokenizer.chat_template is not None:
            return [prompt_token_ids(tokenizer, QUESTIONS[i % len(QUESTIONS)]) for i in range(count)]
    draw = random.Random(seed)
    vocabulary = range(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    return [draw.choices(vocabulary, k=RANDOM_PROMPT_LEN) for _ in range(count)]


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
    samples: list[tuple[list[int], Choice]] = []
    old: list[Tensor] = []
    for prompt in prompts(model, requests, seed):
        choices = client.generate(prompt, params).choices
        samples += [(prompt, choice) for choice in choices]
        old += [served(client, choice) for choice in choices]
        on_answer()
    scores: dict[str, list[Tensor]] = {}
    for name, reference in references(model):
        scores[name] = []
        for prompt, choice in samples:
            scores[name] += score(reference, prompt, [choice])
            on_score()
    gaps = [gap(f"server – transformers {name}", scores[name], old) for name in REFERENCES]
    exact, *rounded = REFERENCES
    gaps += [gap(f"transformers {name} – {exact}", scores[exact], scores[name]) for name in rounded]
    return Fidelity(mode, len(samples), gaps[0].tokens, gaps)


def table(fidelity: Fidelity) -> Table:
    """A row for each pair."""
    rows = [
        (g.what, f"{g.mean:.3g}", f"{g.p99:.3g}", f"{g.max:.3g}", f"{g.smallest_ratio:.3g}–{g.largest_ratio:.3g}")
        for g in fidelity.gaps
    ]
    title = f"{fidelity.sequences} sequences, {fidelity.tokens} tokens, {fidelity.mode}"
    return report.table(title, ("logprobs", "mean |Δ|", "p99", "max", "sequence ratios"), rows)
