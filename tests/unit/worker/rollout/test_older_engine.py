"""SGLang before 0.5.23: no update sessions, one version per answer."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import UnfitEngineError
from grpo_worker.rollout.stream import chunk_of
from grpo_worker.rollout.unfinished import Unfinished
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError

PARAMS = {"max_new_tokens": 2, "stop_token_ids": []}
ANSWER: dict[str, Any] = {
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
        "weight_version": "3",
    },
}


class _NotThere(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"detail":"Not Found"}')

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = HTTPServer(("127.0.0.1", 0), _NotThere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Engine(f"http://127.0.0.1:{server.server_port}", 5)
    server.shutdown()
    server.server_close()


def test_an_engine_without_sessions_is_otherwise_complete(engine: Engine) -> None:
    engine.begin_update()
    engine.end_update()
    with pytest.raises(EngineError, match="/pause_generation: HTTP 404"):
        engine.pause()


def test_one_version_applies_to_a_whole_answer() -> None:
    work = Unfinished(Prompt(0, (1,)), 0, 0, PARAMS)
    work.request()
    work.take(chunk_of(ANSWER), 3, 3)
    sample = work.sample("engine-0")
    assert sample.version == 3 and sample.spans == () and tuple(sample.log_probs) == (-0.5, -0.25)
    with pytest.raises(ValueError, match="sampled with version 3, expected 4"):
        work.take(chunk_of(ANSWER), 4, 4)


def test_partial_rollouts_need_the_version_of_each_token() -> None:
    work = Unfinished(Prompt(0, (1,)), 0, 0, PARAMS)
    work.request()
    with pytest.raises(UnfitEngineError, match="does not report the weight version of each token"):
        work.take(chunk_of(ANSWER), 3, None)


def test_a_log_prob_that_json_cannot_express_is_no_number() -> None:
    meta = ANSWER["meta_info"] | {"output_token_logprobs": [[None, 5, None], [-0.25, 6, None]]}
    assert repr(chunk_of(ANSWER | {"meta_info": meta}).log_probs) == "[nan, -0.25]"
