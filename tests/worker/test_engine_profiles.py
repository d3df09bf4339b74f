"""A trace of a real SGLang engine, ordered over its agent and fetched into the job's store."""

import gzip
import json
import threading
from pathlib import Path

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.rollout.engine_profiles import EngineProfiles as OrderedProfiles
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_profiles import EngineProfiles
from grpo_worker.weightsync.agent.http import rollout_application
from support.engine_server import JOB, Server, generate, serve_app


def test_the_next_forward_passes_of_an_engine_are_traced(server: Server, tmp_path: Path) -> None:
    server.await_answer()
    profiles = EngineProfiles(server.control(), 1, tmp_path / "profile")
    agent = Agent("engine-0", server.control(), 1, bucket_bytes=64 << 10, timeout=60, writer=JOB)
    port = int(serve_app(rollout_application(agent, profiles=profiles)).rpartition(":")[2])
    table = EngineTable()
    table.update(EngineEntry("engine-0", "127.0.0.1", EngineState.SERVING, 0))
    ordered = OrderedProfiles(table, JOB, lambda: 1, port=port)
    stopped = threading.Event()

    def generate_until_stopped() -> None:
        while not stopped.is_set():
            generate([5, 6, 7], ignore_eos=True)

    requests = threading.Thread(target=generate_until_stopped)
    requests.start()
    try:
        names = ordered.record("a1b2c3d4", (), 3, tmp_path / "store")
    finally:
        stopped.set()
        requests.join()
    assert names == ["engine-engine-0-TP-0.trace.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "store" / names[0]).read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::embedding" for event in events) == 3, "one for each forward pass"
    assert len(generate([5, 6, 7], ignore_eos=True)["output_ids"]) == 8, "the engine goes on"
