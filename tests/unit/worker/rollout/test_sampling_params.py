"""Sampling parameters, and requests that engines refuse."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout import client as module
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sampling import UnfitEngineError, sampling_params
from grpo_worker.rollout.sglang.sampling_plugin import _min_p_first


def test_defaults_send_no_optional_parameter() -> None:
    params = sampling_params(AlgorithmSpec(), 64, (5, 3))
    assert params == {"max_new_tokens": 64, "temperature": 1.0, "stop_token_ids": [5, 3]}


def test_filters_and_stop_strings_are_sent() -> None:
    spec = AlgorithmSpec(top_p=0.9, top_k=20, min_p=0.05, stop=["####"], temperature=0.7)
    params = sampling_params(spec, 64, (5,))
    assert (params["top_p"], params["top_k"], params["min_p"]) == (0.9, 20, 0.05)
    assert params["stop"] == ["####"] and params["no_stop_trim"], "sampled tokens stay in the answer"


def test_min_p_beside_a_seed_is_applied_beforehand() -> None:
    seen: dict[str, Any] = {}

    def original(probs: torch.Tensor, *_: Any, **__: Any) -> None:
        seen.update(probs=probs, need=_[3])

    probs = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]])
    min_ps, seed = torch.tensor([0.4, 0.9]), torch.tensor([1, 2])
    _min_p_first(original, probs, None, None, min_ps, True, seed, None)
    assert seen["need"] is False
    assert seen["probs"].tolist() == [[pytest.approx(0.6), pytest.approx(0.3), 0], [pytest.approx(0.4), 0, 0]]
    _min_p_first(original, probs, None, None, min_ps, True, None, None)
    assert seen["need"] is True and seen["probs"] is probs, "without a seed SGLang does it"


class _Engine(BaseHTTPRequestHandler):
    """Refuses at the addresses in ``refusing``; answers one token elsewhere."""

    refusing: frozenset[str] = frozenset()
    requests: list[str] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        host = self.headers["host"].split(":")[0]
        self.requests.append(host)
        refuses = host in self.refusing
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 7]],
            "weight_version": "1",
        }
        answer: Any = [{"output_ids": [7], "meta_info": meta} for _ in body["input_ids"]]
        data = json.dumps({"error": {"message": "too long"}} if refuses else answer).encode()
        self.send_response(400 if refuses else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineTable]:
    """Four addresses behind one real server."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), _Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(module, "ENGINE_PORT", server.server_port)
    monkeypatch.setattr(_Engine, "requests", [])
    table = EngineTable()
    table.replace([EngineEntry(host, host, EngineState.SERVING, 1) for host in HOSTS])
    yield table
    server.shutdown()
    server.server_close()


def _client(table: EngineTable) -> RolloutClient:
    client = RolloutClient(table, seed=0, n=2, timeout=5)
    client.set_sampling(sampling_params(AlgorithmSpec(), 4, (2,)))
    return client


def test_a_request_that_one_engine_refuses_goes_to_another(
    engines: EngineTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Engine, "refusing", frozenset(HOSTS[:2]))
    samples = _client(engines).generate([Prompt(0, (1,))], 1)
    assert [sample.engine for sample in samples] == [HOSTS[2]] * 2
    assert _Engine.requests == list(HOSTS[:3])
    assert len(engines.serving(1)) == 4, "an engine that refuses a request is well"


@pytest.mark.parametrize("count", [1, 4])
def test_a_request_that_every_engine_refuses_fails_the_job(
    engines: EngineTable, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(_Engine, "refusing", frozenset(HOSTS))
    engines.replace(engines.entries()[:count])
    with pytest.raises(UnfitEngineError, match=r"refuses to sample: HTTP 400: too long \(3 times\)"):
        _client(engines).generate([Prompt(0, (1,))], 1)
    assert len(_Engine.requests) == 3
