"""/metrics of a real server, against what the client and the trainer saw themselves."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import prompt
from tests.support.fake_engine import WAITED_S
from tests.support.text_server import events, ok, text_server
from tests.support.wait import eventually
from trainer_bridge.client import RolloutClient, RolloutError
from trainer_bridge.push.sender import WeightPushError, WeightSender

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--served-model-name", "tiny"]
FLAGS += ["--num-gpu-blocks-override", "101", "--api-key", "secret"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_models.build("llama", folder / "model")
    with (
        serve(path, folder / "log", *FLAGS) as url,
        RolloutClient(url, api_key="secret", timeout_s=60) as client,
    ):
        yield client


def scrape(client: RolloutClient) -> dict[tuple[str, ...], float]:
    """(name, label values but the model's) → value."""
    answer = httpx.get(f"{client.base_url}/metrics", headers={"Authorization": "Bearer secret"}, timeout=20)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            assert sample.labels.pop("engine", "0") == "0"
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_without_the_key_there_are_no_metrics(client: RolloutClient) -> None:
    assert httpx.get(f"{client.base_url}/metrics", timeout=20).status_code == 401


class Growth:
    """By how much each metric has grown since it was made; 0 for one that wasn't there."""

    def __init__(self, client: RolloutClient) -> None:
        self._client, self._before = client, scrape(client)

    def read(self) -> Counter[tuple[str, ...]]:
        """Name and labels → growth."""
        return Counter({key: value - self._before.get(key, 0) for key, value in scrape(self._client).items()})


def test_what_was_generated_is_what_is_counted(client: RolloutClient) -> None:
    growth = Growth(client)
    for n in (2, 2, 1):  # the second finds two whole blocks of the prompt, and so does the third
        client.generate(prompt(40), {"max_tokens": 6, "ignore_eos": True}, n=n)
    grown = growth.read()
    assert grown["vllm:prefix_cache_hits_total",] == 64
    assert grown["vllm:prefix_cache_queries_total",] == grown["vllm:prompt_tokens_total",] == 120
    assert grown["vllm:request_prompt_tokens_sum",] == 120
    assert grown["vllm:generation_tokens_total",] == grown["vllm:request_generation_tokens_sum",] == 30
    assert grown["vllm:request_success_total", "length"] == 5
    assert grown["vllm:time_to_first_token_seconds_count",] == grown["vllm:e2e_request_latency_seconds_count",] == 3
    assert grown["vllm:request_queue_time_seconds_count",] == grown["vllm:request_params_n_count",] == 3
    assert grown["vllm:inter_token_latency_seconds_count",] == 30 - 5  # but for each choice's first
    assert grown["vllm:request_params_n_bucket", "1.0"] == 1
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        counts = [value for key, value in grown.items() if key[0] == f"vllm:{name}_seconds_bucket"]
        assert counts == sorted(counts)
        assert counts[-1] == grown[f"vllm:{name}_seconds_count",]
    assert 0 < grown["vllm:time_to_first_token_seconds_sum",] < grown["vllm:e2e_request_latency_seconds_sum",]
    now = scrape(client)
    assert now["vllm:num_requests_running",] == now["vllm:kv_cache_usage_perc",] == 0
    (cache,) = [key[1:] for key in now if key[0] == "vllm:cache_config_info"]
    concurrency, tokens, blocks = map(float, cache[3:])  # labels come in the order of their names
    assert cache[:3] == ("16", "True", "0.9")
    assert blocks == 101
    assert (tokens, concurrency) == (16 * blocks, 16 * blocks / client.models()[0]["max_model_len"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_says_how_long_it_took_where_the_server_is_told_to(path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with text_server(enable_per_request_metrics=True) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        began = time.monotonic()
        whole = ok(http.post(path, json=body))["metrics"]
        took_ms = 1000 * (time.monotonic() - began)
        assert ok(http.post(path, json={**body, "n": 2}))["metrics"] is None
        *pieces, last = events(http.post(path, json=streamed))
        *_, short = events(http.post(path, json={**streamed, "max_tokens": 1}))
    assert whole["queue_time_ms"] == pytest.approx(1000 * WAITED_S)
    assert whole["mean_itl_ms"] == pytest.approx(whole["generation_time_ms"] / 3)
    parts = [whole[name] for name in ("time_to_first_token_ms", "queue_time_ms", "generation_time_ms")]
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) < took_ms
    assert whole["tokens_per_second"] == pytest.approx(4000 / (sum(parts) - whole["queue_time_ms"]))
    assert not any("metrics" in piece for piece in pieces)
    assert last["metrics"].keys() == whole.keys()
    assert short["metrics"].keys() == whole.keys() - {"mean_itl_ms"}


def test_pushes_and_the_staleness_of_tokens_are_counted(client: RolloutClient) -> None:
    growth, began = Growth(client), client.weight_info()["epoch"]
    events = client.stream(prompt(30), {"max_tokens": 900, "ignore_eos": True})
    pieces = [next(events)]
    client.pause("keep")
    frozen = scrape(client)
    assert (frozen["vllm:num_requests_running",], frozen["vllm:num_requests_waiting",]) == (1, 0)
    assert frozen["vllm:kv_cache_usage_perc",] >= 2 / 101
    nbytes, seconds = 0, 0.0
    for seed in (1, 2):
        model = tiny_models.model("llama", seed)
        with WeightSender.connect(client, model, timeout_s=20) as sender:
            nbytes += sender.push().bytes
        seconds += client.weight_info()["seconds"]
        client.resume()
        before_push = len(pieces)
        while len(pieces) < before_push + 4:
            pieces.append(next(events))
        client.pause("keep")
    client.abort([pieces[0].request_id])
    pieces += events
    client.resume()
    spans = pieces[-1].choices[-1].spans
    assert [span.epoch for span in spans] == [began, began + 1, began + 2]
    stale = {2 - behind: span.end - span.start for behind, span in enumerate(spans)}

    bad = {name: p.detach().clone() for name, p in tiny_models.model("llama", 3).named_parameters()}
    bad["model.norm.weight"][0] = torch.nan
    with WeightSender.connect(client, bad, timeout_s=20) as sender, pytest.raises(WeightPushError, match="finite"):
        sender.push()
    with pytest.raises(RolloutError, match="409"):
        client.post("/finish_weight_update", {})

    grown = growth.read()
    assert scrape(client)["rollout:weight_epoch",] == began + 2
    assert grown["vllm:request_success_total", "abort"] == 1
    assert grown["rollout:weight_updates_total", "committed"] == 2
    assert grown["rollout:weight_updates_total", "aborted"] == 1
    assert grown["rollout:weight_update_bytes_total", "committed"] == nbytes
    assert grown["rollout:weight_update_seconds_total", "committed"] == pytest.approx(seconds)
    assert grown["rollout:weight_call_refusals_total", "finish_weight_update", "400"] == 1
    assert grown["rollout:weight_call_refusals_total", "finish_weight_update", "409"] == 1
    assert grown["rollout:token_staleness_count",] == grown["vllm:generation_tokens_total",] == sum(stale.values())
    assert grown["rollout:token_staleness_sum",] == sum(behind * n for behind, n in stale.items()) > 0
    for top in (0, 1, 2):
        assert grown["rollout:token_staleness_bucket", f"{top}.0"] == sum(n for b, n in stale.items() if b <= top)


def test_requests_that_wait_are_counted(client: RolloutClient) -> None:
    client.pause("keep")
    events = client.stream(prompt(20), {"max_tokens": 2})
    reader = threading.Thread(target=lambda: list(events))
    reader.start()
    eventually(lambda: scrape(client)["vllm:num_requests_waiting",] == 1)
    paused = scrape(client)
    assert paused["vllm:num_requests_waiting_by_reason", "deferred"] == 1
    assert paused["vllm:num_requests_waiting_by_reason", "capacity"] == 0
    client.resume()
    reader.join(20)
    assert scrape(client)["vllm:num_requests_waiting",] == 0


def test_every_metric_of_the_dashboard_is_scraped(client: RolloutClient) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"]]
    names = {name for expression in asked for name in re.findall(r"\b(?:vllm|rollout):\w+", expression)}
    assert len(names) >= 15
    latencies = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time")
    assert {f"vllm:{name}_seconds_bucket" for name in latencies} <= names
    text = httpx.get(f"{client.base_url}/metrics", headers={"Authorization": "Bearer secret"}, timeout=20).text
    there = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        there |= {family.name + suffix for suffix in suffixes}
    assert names - there == set()
