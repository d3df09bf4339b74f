"""Sampling parameters of a job on a real SGLang server, with a model saved by transformers 5."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_load import rank_loads
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sampling import PromptRefusedError, Sample, sampling_params, sampling_seed
from grpo_worker.rollout.stream import chunk_of
from grpo_worker.rollout.unfinished import STREAM_INTERVAL, Unfinished
from support.breaking_streams import BreakingStreams
from support.engine_server import Server, free_port
from support.published_models import directory as published
from support.stored_samples import assert_texts_are_the_engines

PORT = free_port()
VERSION = 7
CONTEXT = 512
TOKENS = 24
EOS = 1
SHARP = 0.1  # a temperature at which a random model prefers some tokens
PROMPT = Prompt(0, tuple(range(10, 26)))
OTHERS = [Prompt(index, tuple(range(30 * index, 30 * index + 8 + index))) for index in range(1, 6)]

every_filter = pytest.mark.parametrize(
    "filters",
    [{"topP": 0.1}, {"topK": 4}, {"minP": 0.2}, {"topP": 0.2, "topK": 7, "minP": 0.4}],
    ids=["topP", "topK", "minP", "all"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model as transformers saves it from a configuration built in code."""
    folder = published.write("DeepSeek-V3", "transformers-5", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("moe_layer_freq", "topk_method", "scoring_func"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start an engine with a tokenizer and the model's weights, beside the engine of the other modules."""
    directory = tmp_path_factory.mktemp("engine")
    running = Server(
        directory, str(model), PORT, tokenizer=True, return_routed_experts=False, context_length=CONTEXT
    )
    try:
        running.await_answer()
        weights = {"model_path": str(model), "load_format": "safetensors", "weight_version": str(VERSION)}
        answer = running.admin("/update_weights_from_disk", **weights).json()
        assert answer["success"], answer
        yield running
    finally:
        running.kill()


@pytest.fixture
def table(engine: Server) -> EngineTable:
    table = EngineTable()
    table.replace([EngineEntry("engine-0", "127.0.0.1", EngineState.SERVING, VERSION)])
    return table


Ask = Callable[..., list[Sample]]


@pytest.fixture
def ask(table: EngineTable) -> Ask:
    """Draw samples as a job does: ``ask(prompts, n, end, **fields of the algorithm)``."""

    def drawn(
        prompts: list[Prompt], n: int = 1, end: tuple[int, ...] = (EOS,), **fields: Any
    ) -> list[Sample]:
        client = _client(table, n, end, **fields)
        samples = client.generate(prompts, VERSION)
        assert client.counts.retries == 0
        client.close()
        assert all(len(sample.ids) == len(sample.log_probs) for sample in samples)
        return samples

    return drawn


def _client(
    table: EngineTable, n: int = 1, end: tuple[int, ...] = (EOS,), tokens: int = TOKENS, **fields: Any
) -> RolloutClient:
    client = RolloutClient(table, seed=3, n=n, timeout=120, port=PORT)
    client.set_sampling(sampling_params(AlgorithmSpec(**fields), tokens, end))
    return client


@pytest.mark.slow
def test_a_model_saved_by_transformers_5_is_served_with_its_log_probs(model: Path, ask: Ask) -> None:
    (sample,) = ask([PROMPT])
    assert (sample.version, sample.engine, len(sample.ids)) == (VERSION, "engine-0", TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor([[*PROMPT.ids, *sample.ids]])).logits[0, len(PROMPT.ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(list(sample.ids))[:, None])[:, 0]
    assert torch.allclose(torch.tensor(list(sample.log_probs)), expected, atol=1e-5)


# The tests of min_p need the plugin grpo_sampling: without it, the scheduler of SGLang 0.5.23 dies when a
# request has both a seed and min_p.


@every_filter
def test_a_seed_draws_the_same_tokens_alone_and_in_a_batch(ask: Ask, filters: dict[str, Any]) -> None:
    (alone,) = ask([PROMPT], temperature=SHARP, **filters)
    together = ask([*OTHERS[:3], PROMPT, *OTHERS[3:]], n=4, temperature=SHARP, **filters)
    mine = [sample for sample in together if sample.prompt_index == PROMPT.index]
    assert mine[0].ids == alone.ids
    assert np.allclose(mine[0].log_probs, alone.log_probs, atol=1e-4)
    assert len({tuple(sample.ids) for sample in mine}) == 4, "every sample has a seed of its own"


@every_filter
def test_only_tokens_allowed_by_the_filters_are_sampled(engine: Server, filters: dict[str, Any]) -> None:
    asked = sampling_params(AlgorithmSpec(temperature=SHARP, **filters), 1, [EOS])
    seeds = [asked | {"sampling_seed": seed} for seed in range(256)]
    answers = engine.answers(PROMPT.ids, seeds, return_logprob=True, top_logprobs_num=50)
    likeliest = answers[0]["meta_info"]["output_top_logprobs"][0]
    probs = np.exp([log_prob for log_prob, _, _ in likeliest])
    kept = {token for _, token, _ in likeliest[: _kept(probs, **filters)]}
    assert 2 <= len(kept) <= 12, "the case shows nothing"
    assert {answer["output_ids"][0] for answer in answers} == kept


def _kept(probs: np.ndarray, topP: float = 1.0, topK: int = 50, minP: float = 0.0) -> int:  # noqa: N803
    """Return how many of the likeliest tokens may be sampled. ``probs``: of all tokens, descending."""
    before = np.cumsum(probs) - probs
    return min(int((before <= topP).sum()), topK, int((probs >= minP * probs[0]).sum()))


def test_the_highest_min_p_leaves_only_the_likeliest_token(engine: Server, ask: Ask) -> None:
    greedy = engine.answers(PROMPT.ids, [{"temperature": 0, "max_new_tokens": TOKENS}])
    answers = ask([PROMPT], n=4, temperature=SHARP, minP=0.9999)
    assert {tuple(answer.ids) for answer in answers} == {tuple(greedy[0]["output_ids"])}


def test_the_text_of_tokens_is_the_engines_own(engine: Server, model: Path, tmp_path: Path) -> None:
    whole = {"skip_special_tokens": False, "no_stop_trim": True}
    params = [sampling_params(AlgorithmSpec(), 12, [EOS]) | whole | {"sampling_seed": n} for n in range(256)]
    drawn = engine.answers(PROMPT.ids, params, return_logprob=True)
    assert_texts_are_the_engines(PROMPT, drawn, model, tmp_path)


def test_an_answer_ends_with_a_stop_string_and_keeps_its_tokens(model: Path, ask: Ask) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    (free,) = ask([PROMPT])
    text, end = _text_within(tokenizer, tuple(free.ids))
    (stopped,) = ask([PROMPT], stop=["never in it", text])
    assert list(stopped.ids) == list(free.ids[:end]) and tokenizer.decode(list(stopped.ids)).endswith(text)
    assert np.allclose(stopped.log_probs, free.log_probs[:end], atol=1e-5)


def _text_within(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[str, int]:
    """Return a text of two tokens that occurs once in an answer, and its end."""
    for end in range(4, len(ids) - 4):
        text, before = tokenizer.decode(ids[end - 2 : end]), tokenizer.decode(ids[: end - 1])
        if len(text) >= 3 and text.isprintable() and "\ufffd" not in text and text not in before:
            return text, end
    raise AssertionError(f"no text in {tokenizer.decode(ids)!r}")


def test_each_of_several_tokens_ends_an_answer(ask: Ask) -> None:
    free = ask([PROMPT], n=3)
    end = (free[0].ids[9], free[1].ids[5])
    stopped = ask([PROMPT], n=3, end=(EOS, *end))
    assert [tuple(sample.ids) for sample in stopped] == [_until(tuple(s.ids), end) for s in free]
    assert [len(sample.ids) for sample in stopped] == [10, 6, TOKENS], "by its own token, or by none"


def _until(ids: tuple[int, ...], end: tuple[int, ...]) -> tuple[int, ...]:
    """Return an answer up to and including its first token of ``end``."""
    places = [place for place, token in enumerate(ids) if token in end]
    return ids[: places[0] + 1] if places else ids


def test_a_refused_request_fails_and_the_engine_stays_in_use(table: EngineTable) -> None:
    """Another answer of the same engine is awaited meanwhile, and arrives whole."""
    client = _client(table, tokens=240)
    too_long = Prompt(9, (5,) * (CONTEXT + 1))
    reason = rf"HTTP 400: .*The input \({CONTEXT + 1} tokens\) is longer than the model's context"
    with ThreadPoolExecutor(1) as thread:
        awaited = thread.submit(client.generate, [PROMPT], VERSION)
        while not client.stalled(0):
            assert not awaited.done()
            time.sleep(0.01)
        with pytest.raises(PromptRefusedError, match=rf"engine-0 refuses .* {reason} .* \(3 times\)"):
            client.generate([too_long], VERSION)
        (sample,) = awaited.result(120)
    assert len(sample.ids) == 240
    assert client.counts.retries == 0 and client.stalled(0) == ""
    assert [entry.name for entry in table.serving(VERSION)] == ["engine-0"]


def _revived(table: EngineTable) -> None:
    """Report an engine as its agent does in each poll."""
    table.replace([EngineEntry("engine-0", "127.0.0.1", EngineState.SERVING, VERSION)])


@pytest.mark.parametrize("temperature", [SHARP, 1.0])
def test_a_sample_that_goes_on_elsewhere_equals_an_undisturbed_one(
    table: EngineTable, ask: Ask, temperature: float
) -> None:
    (undisturbed,) = ask([PROMPT], tokens=200, temperature=temperature)
    transport = BreakingStreams(streams=1, parts=2)
    client = RolloutClient(table, seed=3, n=1, timeout=120, port=PORT, transport=transport)
    client.set_sampling(sampling_params(AlgorithmSpec(temperature=temperature), 200, [EOS]))
    with ThreadPoolExecutor(1) as thread:
        awaited = thread.submit(client.generate, [PROMPT], VERSION)
        while not awaited.done():
            time.sleep(0.2)
            _revived(table)
        (sample,) = awaited.result()
    client.close()
    first, second = transport.bodies
    kept = len(second["input_ids"]) - len(first["input_ids"])
    assert kept == 1 + STREAM_INTERVAL and client.counts.continued == client.counts.retries == 1
    assert tuple(second["input_ids"]) == PROMPT.ids + tuple(undisturbed.ids[:kept])
    assert sample.ids == undisturbed.ids, "the seed draws by position"
    assert np.allclose(sample.log_probs, undisturbed.log_probs, atol=1e-4)
    assert client.counts.tokens == len(sample.ids), "no token twice"
    assert sample.version == VERSION and sample.spans == ()


def test_each_part_of_a_stream_has_its_own_tokens_only(engine: Server) -> None:
    params = sampling_params(AlgorithmSpec(), 150, [EOS])
    work = Unfinished(PROMPT, 0, sampling_seed(3, PROMPT.index, 0), params)
    with httpx.stream("POST", f"{engine.url}/generate", json=work.request(), timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    parts = [chunk_of(json.loads(line)) for line in lines if line.startswith("{")]
    assert [len(part.ids) for part in parts] == [1, STREAM_INTERVAL, STREAM_INTERVAL, 150 - 129]
    assert [part.start for part in parts] == [0, 1, 65, 129]
    assert [part.finished for part in parts] == [False, False, False, True]
    assert {part.meta["weight_version"] for part in parts} == {str(VERSION)}
    assert ["weight_versions" in part.meta for part in parts] == [False, False, False, True]


def test_a_cancelled_sample_ends_in_its_engine(engine: Server, table: EngineTable) -> None:
    client, stop = _client(table, n=4, tokens=400), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        awaited = thread.submit(client.generate, [PROMPT], VERSION, stop)
        while client.counts.tokens < 4:
            time.sleep(0.01)
        stop.set()
        with pytest.raises(CancelledError):
            awaited.result(60)
    deadline = time.monotonic() + 60
    while _load(engine) != (0, 0):
        assert time.monotonic() < deadline, _load(engine)
        time.sleep(0.2)
    assert client.counts.tokens < 4 * 400, "all were generated"
    client.close()


def _load(engine: Server) -> tuple[int, int]:
    """Return the engine's running and waiting requests."""
    (rank,) = rank_loads(httpx.get(f"{engine.url}/v1/loads?include=core", timeout=30).json())
    return rank.running, rank.waiting


def test_an_engine_reports_its_load(engine: Server) -> None:
    (rank,) = rank_loads(httpx.get(f"{engine.url}/v1/loads?include=core", timeout=30).json())
    assert rank.max_running > 0 and rank.max_tokens >= 8000 and rank.running == rank.waiting == 0


def test_the_server_ends_after_its_scheduler_was_killed(engine: Server) -> None:
    """The last test of this module: without a scheduler the server would stay and answer nothing."""
    children = psutil.Process(engine.process.pid).children(recursive=True)
    (scheduler,) = [child for child in children if child.cmdline()[0].startswith("sglang::scheduler")]
    scheduler.kill()
    assert engine.process.wait(60) != 0, engine.last_words()
