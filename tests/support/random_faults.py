"""Random faults against `rollout serve`: two trainers that take it from each other, and a model of what is true.

Trainers are processes behind proxies; they are killed and stopped, lose answers and connections, and have full disks.
Engines are killed and stopped, and can't write their snapshots. Clients sample throughout. Of every token that they
get, `Truth` says which weights must have sampled it, and transformers what its logprob is then.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout.launch import launch, serve_command
from tests.support.engine_utils import TOLERANCE, prompt
from tests.support.fault_truth import Account, Figures
from tests.support.faulty_trainer import TIMEOUT_S, Driver, Fault, Outcome, Push, Spec, made
from tests.support.lossy_proxy import LossyProxy
from tests.support.push_reference import as_stamped
from tests.support.server_faults import ServerFaults
from tests.support.wait import eventually
from trainer_bridge.client import Choice, RolloutClient, RolloutError
from trainer_bridge.push.sender import WeightSender

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--max-model-len", "256"]
FLAGS += ["--engine-restarts", "9999", "--weight-update-timeout-s", "10"]
HANGS_S = 360.0
"""For a thread of the run to end, which may have to wait for an engine's restart and for a push."""


class RandomFaults:
    """One run of `seconds` on `engines` engines; longer, up to tenfold, until `commits` pushes have committed.

    `run` returns its figures, or raises AssertionError with the seed, all violations and the list of operations.
    """

    def __init__(
        self, folder: Path, *, seed: int, engines: int, seconds: float, commits: int = 0, kills_engines: bool = True
    ) -> None:
        self._account = Account(seed, engines, seconds)
        self._commits = commits
        self._kills_engines = kills_engines
        self._folder = folder
        self._answers: queue.Queue[tuple[list[int], Choice] | None] = queue.Queue(200)
        self._models: OrderedDict[Spec, PreTrainedModel] = OrderedDict()

    def run(self) -> Figures:
        """Start a server and let everything happen to it."""
        account, log = self._account, self._folder / "log"
        made(Spec(0)).save_pretrained(self._folder / "model")
        (self._folder / "snapshots").mkdir()
        options = ["--keep-weight-snapshot", str(self._folder / "snapshots")]
        options += ["--data-parallel-size", str(account.engines)]
        command = serve_command(self._folder / "model", *FLAGS, *options)
        with launch(command, log) as server, RolloutClient(server.url, timeout_s=60) as self._client:
            Driver.warm_up()
            faults = ServerFaults(account, self._client, server.pid, self._folder, kills_engines=self._kills_engines)
            threads = [account.thread(faults.go_on)]
            threads += [account.thread(partial(self._train, name)) for name in ("ann", "bob")]
            threads += [account.thread(partial(self._sample, index)) for index in range(3)]
            checking = account.thread(self._check_answers)
            account.over.wait(account.seconds)
            latest = time.monotonic() + 9 * account.seconds
            while account.figures.pushes["committed"] < self._commits and time.monotonic() < latest:
                if account.over.wait(0.1):
                    break
            account.over.set()
            for thread in threads:
                thread.join(HANGS_S)
                if thread.is_alive():
                    account.truth.violated("a thread of the run hangs")
            account.guard(self._push_after_all_faults)
            self._answers.put(None)
            checking.join(HANGS_S)
        account.truth.end(log.read_text(errors="replace"))
        account.figures.sampled_successes = account.truth.sampled_successes
        if account.truth.violations:
            raise AssertionError(account.text())
        return account.figures

    # Trainers.

    def _train(self, name: str) -> None:
        choose, driver = random.Random(f"{self._account.seed} {name}"), Driver(self._folder / name)
        with LossyProxy(self._client.base_url) as proxy, contextlib.closing(driver):
            spec, backend, joined = Spec(self._account.new_seed()), "gloo", False
            for number in range(1 << 30):
                if self._account.over.wait(choose.uniform(0, 0.6)):
                    return
                joins: dict[str, Any] | None = None
                if not (joined and driver.alive) or choose.random() < 0.1:
                    backend = choose.choice(["gloo", "gloo", "gloo", "disk"])
                    joins = {"backend": backend, "force": choose.random() < 0.5, "packed": choose.random() < 0.7}
                    joins["timeout_s"] = TIMEOUT_S
                options: dict[str, Any] = {"verify": choose.random() < 0.2, "sparse": False}
                options["kv_policy"] = choose.choice([None, "keep", "recompute"])
                options["sparse"] = backend == "gloo" and choose.random() < 0.5
                small = options["sparse"] and driver.alive and choose.random() < 0.8
                spec = Spec(spec.seed, spec.changes + 1) if small else Spec(self._account.new_seed())
                push = Push(f"{name} {number}", spec, joins, options, self._fault_of(choose, backend))
                joined = self._push(name, push, driver, proxy, choose).joined

    @staticmethod
    def _fault_of(choose: random.Random, backend: str) -> Fault | None:
        if choose.random() < 0.5:
            return None
        if backend == "disk" and choose.random() < 0.5:
            return Fault("full")
        return Fault(choose.choice(["kill", "stop", "cut"]), choose.randrange(45 if choose.random() < 0.3 else 18))

    def _push(self, name: str, push: Push, driver: Driver, proxy: LossyProxy, choose: random.Random) -> Outcome:
        lossy = None
        if push.fault is None and choose.random() < 0.4:
            lossy = choose.choice(["request", "answer", "answer", "cut"])
        cutting: threading.Timer | None = None
        if lossy == "cut":
            cutting = threading.Timer(choose.uniform(0, 0.3), proxy.cut)
            cutting.start()
        elif lossy is not None:
            proxy.lose = lossy  # type: ignore[assignment]
        self._account.did(name, f"{push}{'' if lossy is None else ', through the proxy: ' + lossy}")
        self._account.truth.pushes(push.label, push.spec)
        lost, began = proxy.lost, time.monotonic()
        outcome = driver.push(push, proxy.url, choose)
        if cutting is not None:
            cutting.cancel()
        proxy.lose = None
        struck = push.fault is not None and (driver.struck or push.fault.kind in ("full", "cut"))
        if struck or proxy.lost > lost or lossy == "cut":
            what = f"trainer {push.fault.kind}" if push.fault is not None else f"finish's {lossy} lost"
            self._account.figures.faults["connections cut by the proxy" if lossy == "cut" else what] += 1
        self._account.did(
            name, f"{push.label}: {outcome.how} {outcome.epoch if outcome.how == 'committed' else outcome.text}"
        )
        self._judge(push, outcome, began)
        return outcome

    def _judge(self, push: Push, outcome: Outcome, began: float) -> None:
        engine_died = any(killed >= began - 1 for killed in self._account.engine_kills)
        self._account.figures.pushes[outcome.how] += 1
        if outcome.how == "committed":
            self._account.truth.succeeded(push.label, outcome.epoch)
            self._probe()
        elif outcome.how == "bug":
            self._account.truth.violated(f"{push.label}: {outcome.text}")
        elif outcome.how == "died":
            if push.fault is None or push.fault.kind != "kill":
                self._account.truth.violated(f"the trainer of {push.label!r} has ended by itself: {outcome.text}")
        elif "got no answer" not in outcome.text and not engine_died:
            self._account.truth.failed(push.label, outcome.text)

    def _probe(self) -> None:
        """Sample from every engine at once."""
        for rank in range(self._account.engines):
            headers = {"X-data-parallel-rank": str(rank)} if self._account.engines > 1 else {}
            with RolloutClient(self._client.base_url, timeout_s=60, headers=headers) as client:
                self._ask(partial(self._answer_of, client, prompt(20), {"max_tokens": 3, "logprobs": 0}), prompt(20))

    # Clients.

    @staticmethod
    def _answer_of(client: RolloutClient, asked: list[int], params: dict[str, Any]) -> list[Choice]:
        return client.generate(asked, params).choices

    def _ask(self, work: Callable[[], list[Choice]], asked: list[int]) -> bool:
        """Have the choices of this prompt checked. Whether the server took the request."""
        try:
            choices = work()
        except RolloutError as error:
            self._account.figures.requests[f"refused or lost ({error.status})"] += 1
            return False
        for choice in choices:
            self._account.figures.requests[str(choice.finish_reason)] += 1
            self._answers.put((asked, choice))
        return True

    def _sample(self, index: int) -> None:
        choose = random.Random(f"{self._account.seed} client {index}")
        while not self._account.over.is_set():
            asked = prompt(choose.choice([3, 20, 70]), choose.randrange(3))
            params = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "n": choose.choice([1, 1, 2])}
            params["max_tokens"] = choose.choice([2, 30, 80, 150])
            if choose.random() < 0.2:
                pieces = choose.randrange(4)
                taken = self._ask(partial(self._leave, asked, params, pieces), asked)
            else:
                taken = self._ask(partial(self._answer_of, self._client, asked, params), asked)
            if not taken:
                self._account.over.wait(0.2)

    def _leave(self, asked: list[int], params: dict[str, Any], pieces: int) -> list[Choice]:
        with contextlib.closing(self._client.stream(asked, params)) as stream:
            for _, _ in zip(range(pieces), stream, strict=False):
                pass
        self._account.figures.requests["left by the client"] += 1
        return []

    # What must hold.

    def _check_answers(self) -> None:
        doubtful: list[tuple[list[int], Choice]] = []
        while (answer := self._answers.get()) is not None:
            try:
                self._check(*answer)
            except AssertionError:  # a folder's answer may come after tokens of its weights
                doubtful.append(answer)
        for answer in doubtful:
            try:
                self._check(*answer)
            except AssertionError:
                self._account.truth.violated(
                    f"{answer[1].spans} of the prompt {answer[0]}: {traceback.format_exc(limit=1)}"
                )

    def _check(self, asked: list[int], choice: Choice) -> None:
        if not choice.token_ids:
            return
        models: dict[int, PreTrainedModel] = {}
        for span in choice.spans:
            assert span.epoch is not None
            models[span.epoch] = self._model(self._account.truth.sampled(span.version, span.epoch))
        expected = as_stamped(models, asked, choice.token_ids, choice.spans)
        got = torch.tensor(choice.logprobs)
        assert got.shape == expected.shape
        deviation = float((got - expected).abs().max())
        assert deviation <= TOLERANCE, f"{deviation} off"
        self._account.figures.largest_deviation = max(self._account.figures.largest_deviation, deviation)
        self._account.figures.tokens += len(choice.token_ids)
        self._account.figures.choices += 1
        self._account.figures.spans += len(choice.spans)
        self._account.figures.mixed_spans += sum(span.kv == "mixed" for span in choice.spans)

    def _model(self, spec: Spec) -> PreTrainedModel:
        if spec not in self._models:
            self._models[spec] = made(spec)
            if len(self._models) > 60:
                self._models.popitem(last=False)
        self._models.move_to_end(spec)
        return self._models[spec]

    def _push_after_all_faults(self) -> None:
        """Without faults: the next trainer's push works, and every engine samples from it."""
        spec = Spec(self._account.new_seed())
        model = made(spec)
        self._account.truth.pushes("last", spec)
        eventually(lambda: self._client.weight_info()["takeover_s"] == 0, 60)
        with WeightSender.connect(self._client, model, timeout_s=60, force=True) as sender:
            epoch = sender.push("last").epoch
        self._account.did("server", f"the last push is epoch {epoch}")
        self._account.truth.succeeded("last", epoch)
        for info in self._client.weight_info()["ranks"]:
            if (info["epoch"], info["weight_version"], info["weights"]) != (epoch, "last", "valid"):
                self._account.truth.violated(f"after the last push, epoch {epoch}, an engine serves {info}")
        self._probe()
        if not self._client.health():
            self._account.truth.violated("the server is not healthy after all faults are over")
