"""The command `rollout verify`: are a server's logprobs those of a trainer's own forward pass, bit for bit?

Imported with the command line, so it imports nothing slow at the top.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.bench.fidelity import Gap
    from trainer_bridge.client import Generation, RolloutClient

    Answers = list[tuple[dict[str, Any], Generation]]

PROMPT_LENGTHS = (1, 9, 40, 140, 300)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.9, "temperature": 1.1},
    {"top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
)
RESTRICTED = ("top_p", "top_k", "min_p")


class VerifyError(Exception):
    """What was asked can't be verified; the message says why and what to do."""


def verify(
    url: Annotated[str, typer.Option(help="Verify the server at this address.")],
    model: Annotated[str, typer.Option(help="Load the trainer's weights from this transformers folder or hub id.")],
    requests: Annotated[
        int, typer.Option(min=1, help="Send this many requests, all at once; every third asks for n = 4.")
    ] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Sample this many tokens for each choice.")] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="Compute the trainer's forward pass in this dtype. Default: the server's.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed the prompts (random token ids) and the sampling with this.")
    ] = 0,
    api_key: Annotated[str | None, typer.Option(help="Send this bearer key to the server.")] = None,
) -> None:
    """Compare a server's logprobs with a trainer's, bit by bit.

    Samples from the server, and scores the tokens again by the trainer's forward pass. Exit code 0 if no bit differs, 1
    if some do, 2 if it can't be told.
    """
    from trainer_bridge.client import RolloutClient, RolloutError

    try:
        with RolloutClient(url, api_key=api_key) as client:
            info = client.weight_info()
            trainer = load(client, model, dtype or info.get("dtype"))
            answers = sample(client, info, requests, max_tokens, seed)
            found = compare(trainer, client, answers, info)
    except (RolloutError, VerifyError, ValueError) as error:
        typer.echo(f"can't verify: {error}", err=True)
        raise typer.Exit(2) from None
    exact = bool(info.get("batch_invariant"))
    typer.echo(
        f"{found.tokens} sampled tokens scored again: {found.differing} differing logprobs, largest |Δ| "
        f"{found.max:.3g}, mean |Δ| {found.mean:.3g}"
    )
    if not exact:
        typer.echo(
            "The server doesn't state batch_invariant: this gap is to be expected. Serve with --batch-invariant."
        )
    elif found.differing:
        typer.echo(
            "The server states batch_invariant, yet bits differ: is this the same kind of CPU or GPU, and torch?"
        )
    raise typer.Exit(int(found.differing > 0))


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


def sample(client: RolloutClient, info: dict[str, Any], requests: int, max_tokens: int, seed: int) -> Answers:
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


def compare(model: PreTrainedModel, client: RolloutClient, answers: Answers, info: dict[str, Any]) -> Gap:
    """The gap between the server's logprobs and the trainer's, over all tokens."""
    from rollout.bench.fidelity import gap, score, served

    raw = info.get("logprobs_mode", "raw_logprobs") == "raw_logprobs"
    old = [served(client, choice) for _, answer in answers for choice in answer.choices]
    new = [
        scored
        for params, answer in answers
        for scored in score(model, answer.prompt_token_ids, answer.choices, None if raw else params)
    ]
    return gap("server – trainer", new, old)
