"""Weight versions from trainer GPUs into engines, beside the limit of NCCL and a broadcast per tensor.

    python3 benchmarks/gpu/sync.py sync.json [--cpu] [--answers]

Engines (SGLang) run on the first GPU, their trainer rank on the second. An engine of two ranks receives from
two trainer ranks on the same GPUs by CUDA IPC and, with four GPUs, another one from two ranks on other GPUs.
With one GPU, engine and trainer rank share it, and the limit is a copy of the same bytes within its memory.
ENGINE_PYTHONPATH: packages of the engines.
small: a mixture of experts of more than 2 000 tensors; wide: matrices of DeepSeek-V3's size; fp8: the same in
blocks of 128 x 128. ``--cpu``: a tiny model over gloo, to see that everything runs. ``--answers``: also
compare what engines generate, for which their kernels compile for minutes.
A case whose engine ends with other weights than it should, or fails in another way, is named under ``failed``
in the result; then the exit status is 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_process import EngineProcess
from sync_figures import check_equal, figures, same_answer
from sync_ranks import Processes
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.sglang_plugin.wave_receiver import WaveReceiver
from grpo_worker.weightsync.transport.rendezvous import connect

ROUNDS = 12  # an even number
PATIENCE = 120.0  # seconds that a member waits for a wave
_SHORT = {"max_position_embeddings": 4096, "num_nextn_predict_layers": 0, "vocab_size": 32768}
SMALL = architecture("deepseek-v3") | _SHORT | {
    "num_hidden_layers": 13, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 8192,
    "moe_intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 768, "n_routed_experts": 64, "n_group": 4, "topk_group": 2,
}  # fmt: skip
WIDE = architecture("deepseek-v3") | _SHORT | {
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 32, "n_group": 4, "topk_group": 2,
}  # fmt: skip
TINY = architecture("tiny-moe")


@dataclass(frozen=True)
class Case:
    """``engine``, ``trainers``: GPUs of the ranks; ``baselines``: measure the broadcast per tensor too."""

    name: str
    model: dict[str, Any]
    fp8: bool
    engine: tuple[int, ...]
    trainers: tuple[int, ...]
    baselines: bool
    port: int
    backend: Backend = Backend.NCCL


def cases(gpus: int) -> list[Case]:
    """Return the cases that a machine with this number of GPUs can run."""
    if gpus == 1:
        shared = (0,), (0,), False
        return [
            Case("small, shared GPU", SMALL, False, *shared, 31000, Backend.CUDA_IPC),
            Case("wide, shared GPU", WIDE, False, *shared, 32000, Backend.CUDA_IPC),
            Case("fp8, shared GPU", WIDE, True, *shared, 33000, Backend.CUDA_IPC),
        ]
    selected = [
        Case("small", SMALL, False, (0,), (1,), True, 31000),
        Case("wide", WIDE, False, (0,), (1,), True, 32000),
        Case("fp8", WIDE, True, (0,), (1,), False, 33000),
        Case("small 2 to 2, shared GPUs", SMALL, False, (0, 1), (0, 1), False, 35000, Backend.CUDA_IPC),
    ]
    if gpus >= 4:
        selected.append(Case("small 2 to 2", SMALL, False, (2, 3), (0, 1), False, 34000))
    return selected


TINY_CASES = [
    Case("tiny", TINY, False, (0,), (1,), True, 31000),
    Case("tiny 2 to 1", TINY, False, (0,), (1, 2), False, 32000),
]


def measure(case: Case, server: EngineProcess, bucket: int, cpu: bool, compared: bool) -> dict[str, Any]:
    """Measure one case. Raises AssertionError if an engine ends with other weights than it should."""
    devices = ["cpu" if cpu else f"cuda:{gpu}" for gpu in case.trainers]
    ranks = Processes(len(case.trainers), devices, case.model, case.fp8)
    try:
        engine = server.control(20)
        agent = Agent("engine-0", engine, len(case.engine), bucket, 120, "bench")
        agent.watch()
        link = Link(case, agent, ranks, bucket)
        # First, because it leaves no process group behind.
        found = {"raw": _raw(ranks, case, bucket, cpu)} | link.all_versions(engine)
        ours = engine.checksum()
        if case.fp8:
            found["same_quantisation"] = ranks.ask(0, "same_quantisation").result()
        if case.baselines:
            answers = link.answers(server) if compared else None
            versions = list(range(ROUNDS, 2 * ROUNDS))
            plain = ranks.ask(0, "per_tensor", server.url, str(server.key), bucket, versions).result()
            found["per_tensor"] = plain
            # Its last version has the weights of our last one.
            found["same_weights"] = engine.checksum() == ours
            if answers is not None:
                # They also depend on what the model computes from its parameters after a load.
                found["same_answer"] = same_answer(server.log_probabilities(), *answers)
            found["stall"] = link.stall(server, 8)
        check_equal(found)
        return found
    finally:
        ranks.end()


@dataclass
class Link:
    """Trainer ranks and the engine of a case, which form links one after the other.

    ``name``: of the open link, or "". ``plan``: of the transfers over it.
    """

    case: Case
    agent: Agent
    ranks: Processes
    bucket: int
    name: str = ""
    plan: dict[str, Any] = field(default_factory=dict)

    def open(self) -> float:
        """Form a link in place of an open one, and return the seconds."""
        started = time.monotonic()
        if self.name:
            self.ranks.all("close", self.name)
        if not self.ranks.ask(0, "known").result():
            self.ranks.ask(0, "know", self.ranks.all("layout")).result()
        self.name = f"{LINK}{uuid.uuid4().hex[:12]}"
        port = self.ranks.ask(0, "listen", self.name).result()
        offer = LinkOffer(
            self.name, "bench", "127.0.0.1", port, len(self.case.trainers), len(self.case.engine), 1,
            self.case.backend if torch.cuda.is_available() else Backend.GLOO, self.bucket, 1, self.case.fp8,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(self.agent.join, "bench", offer)
            problems = self.ranks.all("open", offer)
            joining.result()
        assert not any(problems), problems
        seconds = time.monotonic() - started
        self.plan = planned(offer)
        return seconds

    def version(self, version: int) -> dict[str, float]:
        """Send one version and return the seconds of the parts."""
        started = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            taking = thread.submit(self.agent.receive, "bench", version, self.name, PATIENCE)
            told = self.ranks.all("send", self.name, version, PATIENCE)
            seconds: dict[str, float] = taking.result()["seconds"]
        assert not any(problem for problem, _ in told), told
        return seconds | {"whole": time.monotonic() - started, "trainer": max(s for _, s in told)}

    def all_versions(self, engine: Engine) -> dict[str, Any]:
        """Send the versions; return the seconds of each and the sizes.

        The first version includes the connections of the link. The last one over it, and the one after the
        engine has joined again, have the same weights.
        """
        found: dict[str, Any] = {"join": self.open(), "rounds": [self.version(1)]}
        first = engine.checksum()
        found["rounds"] += [self.version(version) for version in range(2, ROUNDS + 2)]
        found["same_as_first"] = engine.checksum() == first
        found["trainer_extra_bytes"] = max(self.ranks.all("extra_bytes"))
        found |= {"bytes": sum(self.ranks.all("nbytes")), "told": self.agent._installer.load_report}
        found |= self.plan
        found["rejoin"] = {"join": self.open()} | self.version(ROUNDS + 3)
        found["same_after_rejoin"] = engine.checksum() == first
        self.agent._receiver.double_buffer = True
        found["buffered"] = [self.version(version) for version in range(ROUNDS + 4, 2 * ROUNDS + 4)]
        self.agent._receiver.double_buffer = False
        found["same_when_buffered"] = engine.checksum() == first
        return found

    def answers(self, server: EngineProcess) -> tuple[list[float], list[float]]:
        """Return what the engine answers with its weights, and with those of the other version."""
        mine = server.log_probabilities()
        self.version(2 * ROUNDS + 4)
        other = server.log_probabilities()
        self.version(2 * ROUNDS + 5)
        return mine, other

    def stall(self, server: EngineProcess, patience: float) -> dict[str, Any]:
        """Stop the engine during an update; return how long the ranks wait and the state afterwards."""
        os.killpg(server.process.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            taking = thread.submit(self.agent.receive, "bench", 100, self.name, patience)
            try:
                told = self.ranks.all("send", self.name, 100, patience)
                self.ranks.all("close", self.name)
            finally:
                os.killpg(server.process.pid, signal.SIGCONT)
            failure = str(taking.exception())
        deadline = time.monotonic() + 90
        while self.agent.status()["state"] != "STALE" and time.monotonic() < deadline:
            self.agent.watch()
            time.sleep(0.2)
        self.open()
        self.version(101)
        state = self.agent.status()["state"]
        return {
            "waited": max(s for _, s in told),
            "told": [p for p, _ in told],
            "agent": failure,
            "then": state,
        }


def planned(offer: LinkOffer) -> dict[str, Any]:
    """Return the sizes of the plan that is at a link's store: ``buffer_bytes`` of the fullest engine rank."""
    exchange = LinkExchange(PrefixStore(offer.name, connect(offer.address, offer.port)))
    rows = exchange.tensors()
    assert rows is not None
    # The link is open, so the parts are there.
    made = [exchange.receives(rank, lambda *_: None) for rank in range(offer.ranks)]
    group: Any = None  # nothing is received here
    receivers = [
        WaveReceiver(part, rank, group, offer.trainers, (), torch.device("cpu"))
        for rank, part in enumerate(made)
    ]
    return {
        "tensors": len(rows),
        "waves": len(made[0].waves),
        "buffer_bytes": max(receiver.buffer_bytes for receiver in receivers),
        "received_bytes": [receiver.nbytes for receiver in receivers],
    }


def _raw(ranks: Processes, case: Case, bucket: int, cpu: bool) -> float:
    """Return the seconds of a bare broadcast of the same bytes between the same GPUs.

    Of a copy in the memory of the GPU if there is only one.
    """
    nbytes = sum(ranks.all("nbytes"))
    others = [gpu for gpu in case.engine if cpu or gpu != case.trainers[0]]
    if not others:
        return float(ranks.ask(0, "copied", nbytes, bucket).result())
    world = 1 + len(others)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    peers = []
    for rank, gpu in enumerate(others, start=1):
        device = "cpu" if cpu else f"cuda:{gpu}"
        arguments = f"{store.port}, {rank}, {world}, {device!r}, {nbytes}, {bucket}"
        code = f"import sync_ranks; sync_ranks.broadcast({arguments})"
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        peers.append(subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}))
    try:
        return float(ranks.ask(0, "raw", store.port, world, nbytes, bucket).result())
    finally:
        for peer in peers:
            peer.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    selected = TINY_CASES if args.cpu else cases(torch.cuda.device_count())
    bucket = (256 << 10) if args.cpu else (512 << 20)
    where = "" if args.cpu else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    origin, results, failed = stamp(where), {}, []
    with tempfile.TemporaryDirectory() as name:
        servers = [
            EngineProcess(Path(name) / str(c.port), c.model, c.port, () if args.cpu else c.engine, c.fp8)
            for c in selected
        ]
        deadline = time.monotonic() + 300
        try:
            for case, server in zip(selected, servers, strict=True):
                try:
                    server.await_alive(deadline)
                    found = measure(case, server, bucket, args.cpu, args.answers)
                    results[case.name] = {"figures": figures(found, bucket), "bucket": bucket} | found
                    print(case.name, json.dumps(results[case.name]), flush=True)
                except Exception as error:  # noqa: BLE001 - the other cases run all the same
                    failed.append(case.name)
                    traceback.print_exc()
                    print(f"--- {case.name}: {str(error)[-500:]}\n{server.log_tail()}", flush=True)
                server.stop()  # its second copy of the weights is memory that the next case may need
                write_raw(args.result, origin, cases=results, failed=failed)
        finally:
            for server in servers:
                server.stop()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
