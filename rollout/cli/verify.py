"""The command `rollout verify`: are a server's logprobs those of a trainer's own forward pass, bit for bit?

Imported with the command line, so it imports nothing slow at the top.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from trainer_bridge.client import Generation, RolloutClient

PROMPT_LENGTHS = (1, 9, 40, 140, 300)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.9, "temperature": 1.1},
    {"top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
)
RESTRICTED = ("top_p", "top_k", "min_p")

UrlOption = Annotated[str, typer.Option(help="The server.")]
ModelOption = Annotated[str, typer.Option(help="The trainer's weights: a transformers folder, or a hub id.")]
RequestsOption = Annotated[int, typer.Option(min=1, help="Requests, all posted at once; every third asks for n = 4.")]
TokensOption = Annotated[int, typer.Option(min=1, help="Tokens to sample for each choice.")]
DtypeOption = Annotated[str | None, typer.Option(help="Of the trainer's module. Default: what the server states.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the prompts (random token ids) and of the sampling.")]
KeyOption = Annotated[str | None, typer.Option(help="Bearer key of the server.")]


class VerifyError(Exception):
    """What was asked can't be verified; the message says why and what to do."""


@dataclass(frozen=True)
class Report:
    """How many sampled tokens were scored again, how many logprobs have other bits, and by how much (nats)."""

    tokens: int
    differing: int
    largest_gap: float
    mean_gap: float


def verify(
    url: UrlOption,
    model: ModelOption,
    requests: RequestsOption = 16,
    max_tokens: TokensOption = 64,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    api_key: KeyOption = None,
) -> None:
    """Sample from a server, score the tokens again by a trainer's forward pass, and report the bits that differ.

    Exit code 0 if none does, 1 if some do, 2 if it can't be told.
    """
    from trainer_bridge.client import RolloutClient, RolloutError

    try:
        with RolloutClient(url, api_key=api_key) as client:
            info = client.weight_info()
            trainer = load(client, model, dtype or info.get("dtype"))
            answers = sample(client, info, requests, max_tokens, seed)
            report = compare(trainer, answers, info)
    except (RolloutError, VerifyError) as error:
        typer.echo(f"can't verify: {error}", err=True)
        raise typer.Exit(2) from None
    exact = bool(info.get("batch_invariant"))
    typer.echo(
        f"{report.tokens} sampled tokens scored again: {report.differing} differing logprobs, largest |Δ| "
        f"{report.largest_gap:.3g}, mean |Δ| {report.mean_gap:.3g}"
    )
    if not exact:
        typer.echo(
            "The server doesn't state batch_invariant: this gap is to be expected. Serve with --batch-invariant."
        )
    elif report.differing:
        typer.echo(
            "The server states batch_invariant, yet bits differ: is this the same kind of CPU or GPU, and torch?"
        )
    raise typer.Exit(int(report.differing > 0))


def load(client: RolloutClient, path: str, dtype: str | None) -> PreTrainedModel:
    """The trainer's model with the exact arithmetic. Raises VerifyError where the server has other weights."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from rollout.model.parameters import ModelParameters
    from rollout.weights.store import WeightStore
    from trainer_bridge.score import exact

    if dtype not in ("float32", "bfloat16", "float16"):
        raise VerifyError(f"the server states the dtype {dtype!r}: name it with --dtype")
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    baseline = WeightStore(ModelParameters(model)).checksums()
    compared = client.post("/weight_checker", {"action": "compare", "baseline": baseline})
    if not compared["match"]:
        names = compared["mismatches"]
        raise VerifyError(
            f"the server's weights are not those of {path} in {dtype}: {len(names)} of {len(baseline)} tensors differ "
            f"({', '.join(names[:3])}, …). Push them, or name the folder of the weights that serve"
        )
    return exact.install(model)


def sample(
    client: RolloutClient, info: dict[str, Any], requests: int, max_tokens: int, seed: int
) -> list[tuple[dict[str, Any], Generation]]:
    """(sampling_params, answer) of requests posted side by side. Raises VerifyError where weights arrived meanwhile."""
    limit = client.models()[0]["max_model_len"]
    rng = random.Random(seed)
    (probe,) = client.generate([2, 3], {"max_tokens": 1, "top_k": 2, "logprobs": 0}).choices
    filters = [f for f in FILTERS if probe.sampling_mask is not None or not f.keys() & set(RESTRICTED)]
    posts = []
    for number in range(requests):
        length = max(1, min(PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)], limit - max_tokens))
        prompt = rng.choices(range(2, 200), k=length)
        params = {"max_tokens": max_tokens, "logprobs": 0, "seed": seed + number, "ignore_eos": True}
        posts.append((prompt, {**params, **filters[number % len(filters)], "n": 4 if number % 3 == 0 else 1}))
    with ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(lambda post: client.generate(*post), posts))
    epochs = {span.epoch for answer in answers for choice in answer.choices for span in choice.spans}
    if epochs - {info.get("epoch")}:
        raise VerifyError(f"weights were pushed meanwhile (epochs {sorted(map(str, epochs))}): verify again")
    return [(params, answer) for (_, params), answer in zip(posts, answers, strict=True)]


def compare(model: PreTrainedModel, answers: list[tuple[dict[str, Any], Generation]], info: dict[str, Any]) -> Report:
    """Score the answers' tokens by the trainer's model, a request at a time, and compare."""
    import torch

    old = torch.tensor([value for _, answer in answers for c in answer.choices for value in c.logprobs or ()])
    raw = info.get("logprobs_mode", "raw_logprobs") == "raw_logprobs"
    with torch.inference_mode():
        new = torch.cat([_scored(model, params, answer, raw=raw) for params, answer in answers])
    differing = old.view(torch.int32) != new.view(torch.int32)
    gap = (old - new).abs()
    return Report(len(old), int(differing.sum()), float(gap.max()), float(gap.mean()))


def _scored(model: PreTrainedModel, params: dict[str, Any], answer: Generation, *, raw: bool) -> Tensor:
    """Float32 logprobs of all the answer's tokens, from one forward pass over right-padded rows."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from trainer_bridge.score import replay

    prompt, choices = answer.prompt_token_ids, answer.choices
    rows = [torch.tensor(prompt + choice.token_ids) for choice in choices]
    ids = pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    keep = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    logits = model(input_ids=ids, attention_mask=mask.long(), logits_to_keep=keep).logits
    scored = []
    for table, choice in zip(logits, choices, strict=True):
        table = table[: len(choice.token_ids)]
        if raw:
            scored.append(replay.token_logprobs(table, choice.token_ids))
        else:
            masks = choice.sampling_mask or [None] * len(choice.token_ids)
            scored.append(
                replay.logprobs(
                    table, choice.token_ids, sampling_params=params, sampling_mask=masks, prompt_token_ids=prompt
                )
            )
    return torch.cat(scored)
