"""A real SGLang server that serves an export, as a RolloutPool with ``serve`` starts it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.model_files.names import TINY_TOKENIZER
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from support.engine_server import Server, free_port, watch_until
from support.greedy import exported_model, greedy
from support.ranks.launcher import run as run_on_ranks

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
KEY = "key-of-users"
NEW_TOKENS = 24
# Lengths that end within and at the end of a page of the KV cache.
PROMPTS = [[5, 9, 31, 7, 44, 12, 60, 3], [17], list(range(20, 84))]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a tiny Qwen3 of two ranks, with tokenizer and chat template."""
    root = tmp_path_factory.mktemp("run")
    source = root / "source"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (source / "tokenizer_config.json").write_text(json.dumps(tokens))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    layout = {"tensor": 2, "expert_tensor": 2}
    run_on_ranks(
        "export_cases:round_trip", 2, root=str(root), model="qwen3", layout=layout, source=str(source)
    )
    return root / "first"


@pytest.fixture(scope="module")
def server(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(
        tmp_path_factory.mktemp("engine"), model=str(exported), port=free_port(), serve_key=KEY,
        return_routed_experts=False,
    )  # fmt: skip
    yield started
    started.kill()


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    """Return the engine's agent, once the engine serves."""
    made = Agent("engine-0", server.control(), 1, 1 << 20, 60, place=EnginePlace(own_weights=True))
    watch_until(made, "SERVING", server)
    return made


def _post(server: Server, path: str, key: str = KEY, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )


def _greedy(server: Server, ids: list[int]) -> list[int]:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = _post(server, "/generate", input_ids=ids, sampling_params=sampling)
    answer.raise_for_status()
    return list(answer.json()["output_ids"])


def test_greedy_answers_are_those_of_transformers_on_the_same_export(
    exported: Path, server: Server, agent: Agent
) -> None:
    model = exported_model(exported)
    answers = [_greedy(server, ids) for ids in PROMPTS]
    assert answers == [greedy(model, ids, NEW_TOKENS) for ids in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS), "the answers depend on the prompts"


def test_the_chat_api_uses_the_exports_template_and_tokenizer(
    exported: Path, server: Server, agent: Agent
) -> None:
    messages = [{"role": "user", "content": "what is 12 + 7?"}]
    answer = _post(
        server, "/v1/chat/completions", model="policy", messages=messages, max_tokens=8, temperature=0
    )
    assert answer.status_code == 200, answer.text
    ids = load_tokenizer(str(exported)).encode_chat(messages)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert answer.json()["model"] == "policy"
    headers = {"authorization": f"Bearer {KEY}"}
    models = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30).json()["data"]
    assert [each["id"] for each in models] == ["policy"]


def test_requests_without_a_seed_differ(server: Server, agent: Agent) -> None:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True, "n": 4}
    answers = _post(server, "/generate", input_ids=PROMPTS[0], sampling_params=sampling).json()
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4


def test_users_need_the_key_and_cannot_change_weights_with_it(server: Server, agent: Agent) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{server.url}/generate", json=body, timeout=30).status_code == 401
    for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
        assert _post(server, path, key="wrong", **body).status_code == 401, path
    for path in ("/pause_generation", "/update_weights_from_disk", "/init_weights_update_group"):
        assert _post(server, path, model_path="/elsewhere").status_code == 401, path
    headers = {"authorization": f"Bearer {KEY}"}
    for path in ("/server_info", "/get_server_info"):  # their answer has the key of the routes above
        assert httpx.get(f"{server.url}{path}", headers=headers, timeout=30).status_code == 401, path
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200, "the probes have no key"
    agent.watch()
    assert agent.status()["state"] == "SERVING"
