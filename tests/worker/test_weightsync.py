"""Weight updates of a real SGLang server: commit, versions, failure, reload."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.data.prompts import Prompt
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.roles.expert_store import fetch
from grpo_worker.rollout.stream import chunk_of
from grpo_worker.rollout.unfinished import Unfinished
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.writer_guard import WriterError
from support.engine_server import JOB, URL, Server, cpu_seconds, generate, serve, serve_app, watch_until
from support.ranks.launcher import run as run_on_ranks

LAYOUT = {"tensor": 2, "expert": 2, "expert_tensor": 1}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """Publish version 3 from two real trainer ranks; return it with their log-probs of a batch."""
    root = tmp_path_factory.mktemp("weights")
    log_probs, ids = run_on_ranks("policy_cases:publish", 2, root=str(root), layout=LAYOUT)[0]
    return root, log_probs, ids


@pytest.fixture(scope="module")
def sources(published: tuple[Path, torch.Tensor, torch.Tensor]) -> dict[int, str]:
    return serve(published[0])


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    agent = Agent("engine-0", server.control(), 1, bucket_bytes=64 << 10, timeout=30, writer=JOB)
    watch_until(agent, "STALE", server)
    return agent


def test_a_missing_version_leaves_the_engine_unchanged(agent: Agent, sources: dict[int, str]) -> None:
    with pytest.raises(UpdateError, match=r"engine-0: version 9, plan: .*404"):
        agent.sync(JOB, 9, sources)
    assert agent.status()["state"] == "STALE"


@pytest.mark.fault(
    row="15",
    point="a byte of a published version changes",
    witness="the message names the digest",
    bound="in the same update",
    partial="no repair, nothing compared",
)
def test_flipped_bytes_are_refused_and_never_served(
    agent: Agent, sources: dict[int, str], published: tuple[Path, torch.Tensor, torch.Tensor]
) -> None:
    blob = published[0] / "v3" / "rank-1.bin"
    good = blob.read_bytes()
    blob.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(UpdateError, match=r"version 3, .*another digest"):
        agent.sync(JOB, 3, sources)
    blob.write_bytes(good)
    assert agent.status()["state"] == "STALE"


def test_after_a_sync_log_probs_of_engine_and_trainer_agree(
    agent: Agent, sources: dict[int, str], published: tuple[Path, torch.Tensor, torch.Tensor]
) -> None:
    """Weights in several buckets, from a TP2 x EP2 trainer; log-probs equal to 1e-5."""
    status = agent.sync(JOB, 3, sources)
    assert (status["state"], status["weightVersion"]) == ("SERVING", 3)
    assert "engine_receive_and_load" in status["seconds"], "the engine does not take direct loads"
    _, log_probs, ids = published
    for row in range(4):
        meta = generate(ids[row].tolist())["meta_info"]
        assert meta["weight_version"] == "3"
        engine = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]])
        assert torch.allclose(engine, log_probs[row, 1:], atol=1e-5)


def test_router_replay_of_the_engines_experts_keeps_log_probs(
    agent: Agent, published: tuple[Path, torch.Tensor, torch.Tensor], server: Server, tmp_path: Path
) -> None:
    """Replayed in the trainer, the engine's experts give the log-probs of the routers' own choice."""
    _, log_probs, ids = published
    url = serve_app(rollout_application(agent, experts=server.experts))
    layers, rows, tokens = expert_layers(architecture("tiny-moe")), 4, ids.shape[1]
    experts = np.zeros((rows, tokens, len(layers.moe), layers.topk), dtype=np.int16)
    for row in range(rows):
        answer = generate(ids[row].tolist(), experts=True)
        ran = tokens + len(answer["output_ids"]) - 1  # the last token is sampled, not computed with
        reference = replace(layers.reference(answer["meta_info"], ran), location=url)
        assert len(answer["meta_info"]["routed_experts"]) < 400, "the response has no experts"
        ((_, found),) = fetch([reference], layers.moe, lambda tokens: [(0, tokens)])
        assert found is not None and found.dtype == np.uint8
        experts[row, : tokens - 1] = found.transpose(1, 0, 2)[: tokens - 1]
    assert len(np.unique(experts[:, : tokens - 1])) == 8, "all experts take part"
    arguments = {"layout": LAYOUT, "ids": ids[:rows].tolist(), "experts": experts.tolist()}
    replayed = run_on_ranks("policy_cases:replay", 2, **arguments)[0]
    assert torch.allclose(replayed[:, 1:], log_probs[:rows, 1:], atol=1e-5)


class Flattened(Engine):
    """The engine as one that cannot load directly, such as one with speculative decoding."""

    def join_group(self, *place: Any, **more: Any) -> str:
        super().join_group(*place, **more)
        return ""


def test_an_engine_that_cannot_load_directly_gets_the_same_weights_in_flattened_buckets(
    agent: Agent, sources: dict[int, str], server: Server
) -> None:
    agent.sync(JOB, 3, sources)
    before = server.control().checksum()
    other = Agent("engine-0", Flattened(server.url, 30, server.key), 1, 64 << 10, 30, JOB)
    watch_until(other, "STALE", server)
    status = other.sync(JOB, 3, sources)
    assert status["state"] == "SERVING" and "engine_receive_and_load" not in status["seconds"]
    assert server.control().checksum() == before


def test_a_second_sync_of_the_same_bytes_does_not_touch_the_engine(
    agent: Agent, sources: dict[int, str]
) -> None:
    before = agent.status()
    after = agent.sync(JOB, 3, sources)
    assert after["since"] == before["since"] and "send" not in after["seconds"]


def test_seeds_make_samples_reproducible_in_any_batch(agent: Agent) -> None:
    """The same seed draws the same tokens alone and in a batch with others."""
    ids = list(range(10, 30))
    alone = generate(ids, temperature=1.0, sampling_seed=11)["output_ids"]
    body = {
        "input_ids": [ids, list(range(40, 60)), ids],
        "sampling_params": [
            {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": seed} for seed in (5, 6, 11)
        ],
    }
    together = httpx.post(f"{URL}/generate", json=body, timeout=60).json()
    assert together[2]["output_ids"] == alone != together[0]["output_ids"]


def test_a_running_answer_continues_with_new_weights_and_token_spans(
    agent: Agent, sources: dict[int, str], tmp_path: Path
) -> None:
    agent.sync(JOB, 3, sources)
    run_on_ranks("policy_cases:publish", 2, root=str(tmp_path), layout=LAYOUT, version=4, steps=3)
    newer = serve(tmp_path)
    prompt, length = list(range(10, 26)), 200
    generate_all = partial(
        generate, prompt, max_new_tokens=length, ignore_eos=True, sampling_seed=11, temperature=1.0
    )
    alone = generate_all()["output_ids"]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(generate_all)
        time.sleep(0.4)
        agent.sync(JOB, 4, newer)
        mixed = answer.result(120)
    spans = mixed["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["3", "4"], "the weights did not change on the way"
    cut = spans[0]["end"]
    assert 0 < cut < length == spans[1]["end"]
    assert mixed["output_ids"][:cut] == alone[:cut] and mixed["output_ids"] != alone
    work = Unfinished(Prompt(0, tuple(prompt)), 0, 0, {"max_new_tokens": length, "stop_token_ids": []})
    work.request()
    with pytest.raises(ValueError, match="sampled with version 4, expected 3"):
        work.take(chunk_of(mixed), 3, 3)
    work.take(chunk_of(mixed), 3, None)
    sample = work.sample("engine-0")
    assert sample.version == 3 and sample.spans == ((3, cut), (4, length))
    agent.sync(JOB, 3, sources)


def test_a_stream_has_the_routed_experts_in_its_last_part_only(agent: Agent, sources: dict[int, str]) -> None:
    agent.sync(JOB, 3, sources)
    params = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0, "stream_interval": 8}
    body = {
        "input_ids": list(range(10, 26)), "sampling_params": params | {"sampling_seed": 3},
        "return_logprob": True, "return_routed_experts": True, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{URL}/generate", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    parts = [chunk_of(json.loads(line)) for line in lines if line.startswith("{")]
    assert [len(part.ids) for part in parts] == [1, 8, 8, 3]
    assert [bool(part.meta.get("routed_experts")) for part in parts] == [False, False, False, True]


def test_a_paused_engine_uses_no_cpu(agent: Agent, server: Server) -> None:
    """An engine stays paused after an aborted update, until it gets a complete version."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    processes = [server.process.pid, *(child.pid for child in children)]
    server.control().pause()
    before = cpu_seconds(processes)
    time.sleep(4)
    used = cpu_seconds(processes) - before
    server.control().resume()
    assert used < 2, "it polls without a rest"
    assert generate([5, 6, 7])["output_ids"]


def test_a_session_left_open_by_a_dead_agent_does_not_block_the_next(
    agent: Agent, server: Server, sources: dict[int, str]
) -> None:
    server.control().begin_update()
    fresh = Agent("engine-0", server.control(), 1, 1 << 20, 30, JOB)
    watch_until(fresh, "STALE", server)
    with pytest.raises(UpdateError, match="version 3, prepare: /begin_weight_update"):
        fresh.sync(JOB, 3, sources)
    assert fresh.status()["state"] == "STALE"
    assert fresh.sync(JOB, 3, sources)["state"] == "SERVING"


@pytest.mark.parametrize(
    "path", ["begin_weight_update", "pause_generation", "flush_cache", "weights_checker"]
)
def test_control_routes_need_the_key(agent: Agent, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer guessed"}):
        assert httpx.post(f"{URL}/{path}", json={}, headers=headers, timeout=10).status_code in (401, 403)
    assert generate([5, 6, 7])["output_ids"], "what samples needs no key"


def test_only_the_bound_job_writes_and_the_next_one_starts_stale(
    agent: Agent, sources: dict[int, str]
) -> None:
    before = agent.status()
    with pytest.raises(WriterError, match=f"job other may not write: this engine is bound to {JOB}"):
        agent.sync("other", 3, sources)
    assert agent.status() == before
    agent.bind("other")
    assert agent.status()["state"] == "STALE" and agent.status()["stagedVersion"] is None
    agent.watch()
    assert agent.status()["state"] == "STALE", "the other job's weights came back"
    assert agent.sync("other", 3, sources)["state"] == "SERVING"
    agent.bind(JOB)
    assert agent.sync(JOB, 3, sources)["state"] == "SERVING"


@pytest.mark.fault(
    row="10",
    point="SIGKILL of a real engine's server",
    witness="state RESTARTING, a restart counted",
    compared="checksum before the death",
    partial="no answers under way",
)
@pytest.mark.slow  # the server starts again; tests/e2e/test_faults.py kills one too
def test_a_killed_engine_is_loaded_again_from_the_trainers_memory(
    agent: Agent, server: Server, published: tuple[Path, torch.Tensor, torch.Tensor]
) -> None:
    before = agent.status()
    server.kill()
    watch_until(agent, "RESTARTING", server)
    assert agent.status()["weightVersion"] is None
    server.start()
    watch_until(agent, "SERVING", server)
    after = agent.status()
    assert after["weightVersion"] == 3 and after["restarts"] == before["restarts"] + 1
    assert after["checksum"] == before["checksum"]
    assert generate(published[2][0].tolist())["meta_info"]["weight_version"] == "3"
