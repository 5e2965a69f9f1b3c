"""Tiny models, and a server that is no more than a WeightUpdater behind HTTP, for the tests of weight updates."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout.model.parameters import ModelParameters
from rollout.weights.errors import WeightUpdateError
from rollout.weights.store import WeightStore
from rollout.weights.update import Commit
from rollout.weights.updater import WeightUpdater

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def llama(seed: int, *, tied: bool = False, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**_SIZES | sizes, tie_word_embeddings=tied))
    made: PreTrainedModel = model.to(dtype)
    return made


def qwen3_moe(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))


def mixtral(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


MOE = {"qwen3_moe": qwen3_moe, "mixtral": mixtral}


def saved_tensors(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """What save_pretrained writes: the reference for checkpoint names and their contents."""
    model.save_pretrained(folder)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def same_weights(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    """Whether every entry of the state dicts is equal, bit for bit."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def fill(store: WeightStore, tensors: dict[str, torch.Tensor], **stage: Any) -> Any:
    """A staging that has received these tensors."""
    staging = store.stage(**stage)
    plan = staging.resolve(
        list(tensors), [str(t.dtype) for t in tensors.values()], [list(t.shape) for t in tensors.values()]
    )
    for item in plan:
        staging.place(item, tensors[item.target.name])
    return staging


def update_info(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


class UpdaterServer:
    """An updater, the engine loop that commits for it, and the HTTP routes of the weight endpoints."""

    def __init__(self, model: PreTrainedModel, *, timeout_s: float = 20.0, **options: Any) -> None:
        store_options = {n: options.pop(n) for n in ("allow_partial", "weight_staging") if n in options}
        self.model = model
        self.paused = False
        self.store = WeightStore(ModelParameters(model), **store_options)
        self.updater = WeightUpdater(self.store, timeout_s=timeout_s, paused=lambda: self.paused, **options)
        self.commits: list[Commit] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.lose_answer_of: str | None = None
        self._over = threading.Event()
        self._engine = threading.Thread(target=self._loop, daemon=True)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._listener = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> UpdaterServer:
        self._engine.start()
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.updater.close()
        self._over.set()
        self._engine.join(5)
        self._http.shutdown()
        self._http.server_close()

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        return self.updater.call(method, params).result(30)

    def _loop(self) -> None:
        while not self._over.wait(0.001):
            commit = self.updater.commit_if_ready()
            if commit is not None:
                self.commits.append(commit)

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

            def _answer(self, params: dict[str, Any]) -> None:
                method = self.path.strip("/")
                server.bodies.append((method, params))
                status = 200
                body: dict[str, Any] = {"world_size": 1}
                if method != "get_world_size":
                    try:
                        body = server.updater.call(method, params).result(60)
                    except WeightUpdateError as error:
                        said = {"message": error.message, "param": error.param, "code": error.status}
                        status, body = error.status, {"error": said}
                if server.lose_answer_of == method:
                    server.lose_answer_of = None
                    self.close_connection = True
                    return
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler
