"""What a researcher wants to see of a training step, as plain numbers by name: `section/quantity`.

Names and sections are those of the dashboard (`integrations.wandb.LAYOUT`).
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from trainer_bridge.client import RolloutClient
from trainer_bridge.rollouts import RolloutGroup
from trainer_bridge.score import losses

Metrics = dict[str, float]


def of_rollouts(groups: Sequence[RolloutGroup]) -> Metrics:
    """Reward and length of the step's answers. `no_signal` is the share of groups whose rewards are all the same."""
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
    choices = [choice for group in groups for choice in group.choices]
    lengths = torch.tensor([len(choice.token_ids) for choice in choices], dtype=torch.float32)
    same = [max(group.rewards) == min(group.rewards) for group in groups]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/no_signal": sum(same) / len(same),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/cut_off": sum(choice.finish_reason == "length" for choice in choices) / len(choices),
    }


def of_tokens(
    new: Tensor, old: Tensor, entropies: Tensor, lags: Tensor, *, cap: float, current_gap: float | None = None
) -> Metrics:
    """The step's tokens, all (T,), before the update: the gap between trainer (`new`) and server (`old`), in nats, the
    ratios as they are and truncated at `cap`, the policy's entropy, and the lags.

    `gap/current_max` is the largest gap of tokens that the very weights sampled which are trained (lag 0): the step's
    own, and what finished meanwhile (`groups.current_gap`). 0 in exact mode; absent where there is no such token.
    """
    gap = (new - old).abs()
    ratios = (new - old).exp()
    known = lags[lags.isfinite()]
    found = {
        "gap/mean": gap.mean(),
        "gap/p99": gap.quantile(0.99),
        "gap/max": gap.max(),
        "gap/k1": losses.k1(new, old).mean(),
        "gap/k3": losses.k3(new, old).mean(),
        "ratio/mean": ratios.mean(),
        "ratio/min": ratios.min(),
        "ratio/max": ratios.max(),
        "ratio/truncated_mean": ratios.clamp(max=cap).mean(),
        "ratio/truncated_max": ratios.clamp(max=cap).max(),
        "ratio/truncated_share": (ratios > cap).float().mean(),
        "policy/entropy": entropies.mean(),
        "staleness/unknown_share": 1 - len(known) / torch.tensor(len(lags)),
    }
    if len(known):
        found |= {"staleness/mean": known.mean(), "staleness/max": known.max()}
    current = [*gap[lags == 0].tolist(), *([] if current_gap is None else [current_gap])]
    if current:
        found["gap/current_max"] = torch.tensor(max(current))
    return {name: float(value) for name, value in found.items()}


def of_server(client: RolloutClient) -> Metrics:
    """The server's gauges from /metrics, as `server/…`, and how many prompt tokens, and which share, its cache gave.

    Of several engines: their sum, the mean of shares (`…_perc`), the largest epoch. Of a server that doesn't answer:
    nothing.
    """
    headers = {"Authorization": f"Bearer {client.api_key}"} if client.api_key else {}
    try:
        answer = httpx.get(f"{client.base_url}/metrics", headers=headers, timeout=10.0, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError:
        return {}
    gauges: dict[str, list[float]] = {}
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if family.type == "gauge":
                gauges.setdefault(sample.name.partition(":")[2] or sample.name, []).append(sample.value)
            elif family.type == "counter":
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    found = {f"server/{name}": _of_engines(name, values) for name, values in gauges.items()}
    hits, queries = (totals.get(f"vllm:prefix_cache_{what}_total", 0.0) for what in ("hits", "queries"))
    found["server/prefix_hit_tokens"] = hits
    if queries:
        found["server/prefix_hit_share"] = hits / queries
    return found


def _of_engines(name: str, values: list[float]) -> float:
    if name == "weight_epoch":
        return max(values)
    return sum(values) / len(values) if name.endswith("_perc") else sum(values)
