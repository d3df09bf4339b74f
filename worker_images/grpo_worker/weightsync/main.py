"""Entry point of both sidecars: ``grpo-agent trainer`` and ``grpo-agent rollout``."""

import argparse
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from starlette.applications import Starlette

from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT
from grpo_operator.api.urls import pod_url
from grpo_worker.common import tls
from grpo_worker.common.listeners import Server
from grpo_worker.common.log_files import keep_agent_lines
from grpo_worker.common.log_lines import log_as
from grpo_worker.common.own_address import loopback
from grpo_worker.gpu_health.service import GpuWatch
from grpo_worker.weightsync.agent.engine_log import EngineLog

if TYPE_CHECKING:
    from grpo_worker.weightsync.agent.agent import Agent
    from grpo_worker.weightsync.agent.engine_client import Engine
    from grpo_worker.weightsync.agent.engine_profiles import EngineProfiles
    from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs

log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0
_SHUTDOWN_SECONDS = 3  # for answers under way when the pod ends


def main() -> None:
    """Run the sidecar of one pod until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["trainer", "rollout"])
    parser.add_argument("--host", help="address to listen on; default: all of the pod's")
    parser.add_argument("--port", type=int, default=AGENT_PORT)
    parser.add_argument("--name", default=os.environ.get("POD_NAME", socket.gethostname()))
    parser.add_argument(
        "--weights", type=Path, default=Path("/weights"), help="memory shared with the trainer"
    )
    parser.add_argument("--engine", help="URL of the engine's server; default: that of this pod")
    parser.add_argument("--engine-ranks", type=int, default=1)
    parser.add_argument("--bucket-megabytes", type=int, default=512)
    parser.add_argument("--model-config", type=Path, help="config.json of the engine's model")
    parser.add_argument("--admin-key", type=Path, help="file with the key of the engine's control routes")
    parser.add_argument(
        "--own-weights", action="store_true", help="the engine serves those of its model; no job may write"
    )
    parser.add_argument("--api-key", type=Path, help="file with the key of the engine's other routes")
    parser.add_argument("--deltas", action="store_true", help="fetch changes instead of whole versions")
    parser.add_argument(
        "--double-buffer", action="store_true", help="the engine receives versions into a second copy"
    )
    parser.add_argument("--nixl", action="store_true", help="read the trainers' memory over NIXL")
    parser.add_argument("--turns", type=Path, help="colocated GPUs: file that keeps the engine's GPU lease")
    parser.add_argument("--routed-experts", type=Path, help="folder in which the engine keeps them")
    parser.add_argument("--writer", help="job that may update weights; default: none until bound")
    parser.add_argument("--writer-file", type=Path, help="keeps the writer and its attempt over a restart")
    parser.add_argument("--hosts", type=int, default=1, help="pods of the engine")
    parser.add_argument(
        "--host-index", type=_host_index, default=0, help="0: the first host, which leads the others"
    )
    parser.add_argument("--peers", help="headless service of the agents of the pool's engines")
    parser.add_argument("--store", type=Path, help="folder of the job in its checkpoint store")
    parser.add_argument(
        "--logs", type=Path, help="folder of the job's log files; default: lines are not kept"
    )
    parser.add_argument("--engine-log", type=Path, help="file with lines of the engine that are kept, too")
    parser.add_argument("--first-host", help="URL of the agent of the engine's first host")
    parser.add_argument("--address", default="127.0.0.1", help="at which the engine's hosts reach this pod")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of a call to the engine")
    parser.add_argument(
        "--start-seconds", type=float, default=1800, help="in which a started server must answer"
    )
    parser.add_argument("--gpu-seconds", type=float, default=10, help="between two readings of the GPUs")
    args = parser.parse_args()
    log_as("trainer-agent" if args.role == "trainer" else "engine-agent")
    engine_log = _keep_lines(args)
    app = _trainer(args.weights) if args.role == "trainer" else _rollout(args)
    gpus = GpuWatch(args.gpu_seconds)
    gpus.start()
    app.router.routes.append(gpus.route())
    signal.signal(signal.SIGTERM, lambda *_: _end(engine_log))  # uvicorn stops at it, and raises it again
    Server(app, args.port, args.host, _SHUTDOWN_SECONDS).run()
    _end(engine_log)


def _end(engine_log: EngineLog | None) -> NoReturn:
    """End the process. Threads may still wait for others, and the pod would wait for them."""
    if engine_log:
        engine_log.forward()
    logging.shutdown()  # writes the lines that wait for the store
    os._exit(0)


def _keep_lines(args: argparse.Namespace) -> EngineLog | None:
    """Keep the agent's lines in the job's store, and those of its engine by what is returned."""
    kind = "trainer-agent" if args.role == "trainer" else "engine"
    stored = keep_agent_lines(args.logs, kind, args.name)
    if stored is None or args.engine_log is None:
        return None
    engine_log = EngineLog(args.engine_log, stored)
    engine_log.start()
    return engine_log


def _host_index(label: str) -> int:
    """Return the value of a pod label that KubeRay sets."""
    if not label.isdigit():
        raise argparse.ArgumentTypeError(
            f"label ray.io/replica-host-index of this pod is {label!r}, not a number: "
            "KubeRay 1.5 needs the feature gate RayMultiHostIndexing for engines of several pods"
        )
    return int(label)


def _trainer(weights: Path) -> Starlette:
    from grpo_worker.weightsync.trainer.agent import application

    return application(weights)


def _rollout(args: argparse.Namespace) -> Starlette:
    if args.host_index:
        return _further_host(args)
    from grpo_worker.weightsync.agent.agent import Agent
    from grpo_worker.weightsync.agent.engine_client import Engine
    from grpo_worker.weightsync.agent.engine_place import EnginePlace
    from grpo_worker.weightsync.agent.fetcher import Fetcher
    from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous
    from grpo_worker.weightsync.agent.http import rollout_application
    from grpo_worker.weightsync.agent.peers import Peers, urls_of
    from grpo_worker.weightsync.agent.relay import Relay

    bucket = args.bucket_megabytes << 20
    fetcher = Fetcher(args.timeout, _whole_blobs(args))
    hosts = HostRendezvous(args.hosts) if args.hosts > 1 else None
    peers = Peers(urls_of(args.peers), args.timeout) if args.peers else None
    place = EnginePlace(
        args.address, hosts, args.start_seconds, peers, args.store, Relay(args.timeout), args.own_weights
    )
    url = args.engine or tls.url(loopback(), ENGINE_PORT)
    engine = Engine(url, args.timeout, args.admin_key, hosts, args.api_key)
    agent = Agent(
        args.name, engine, args.engine_ranks, bucket, args.timeout, args.writer, fetcher, args.turns, place,
        args.double_buffer, writer_file=args.writer_file,
    )  # fmt: skip
    threading.Thread(target=_watch_forever, args=(agent,), daemon=True).start()
    return rollout_application(
        agent, args.model_config, place if hosts else None, args.routed_experts, _profiles(args, engine)
    )


def _profiles(args: argparse.Namespace, engine: "Engine") -> "EngineProfiles | None":
    """Return the profiles of the engine, if the agent shares a folder with it."""
    from grpo_worker.weightsync.agent.engine_profiles import FOLDER, EngineProfiles

    if args.model_config is None:
        return None
    return EngineProfiles(engine, args.engine_ranks // args.hosts, args.model_config.parent / FOLDER)


def _whole_blobs(args: argparse.Namespace) -> "WholeBlobs | None":
    """Return the memory for whole versions that deltas and NIXL need; None: versions are streamed."""
    if not args.deltas and not args.nixl:
        return None
    from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
    from grpo_worker.weightsync.transport.nixl.importer import Importer

    return WholeBlobs(args.timeout, args.deltas, Importer() if args.nixl else None)


def _further_host(args: argparse.Namespace) -> Starlette:
    from grpo_worker.weightsync.agent.detours import Detours
    from grpo_worker.weightsync.agent.fetcher import Fetcher
    from grpo_worker.weightsync.agent.further_host import FurtherHost, answers, application
    from grpo_worker.weightsync.agent.part_routes import HostParts
    from grpo_worker.weightsync.agent.part_source import PartSource

    # SGLang's server of a further host answers probes only, without TLS.
    engine = args.engine or pod_url(loopback(), ENGINE_PORT)
    host = FurtherHost(
        args.host_index, args.name, args.first_host, lambda: answers(engine), args.start_seconds,
        tls.url(args.address, args.port),
    )  # fmt: skip
    fetcher = Fetcher(args.timeout, _whole_blobs(args))
    detours = Detours(args.first_host)
    source = PartSource(fetcher, args.bucket_megabytes << 20, args.store, args.timeout, detours)
    return application(host, HostParts(source, args.timeout), args.routed_experts)


def _watch_forever(agent: "Agent") -> None:
    from grpo_worker.weightsync.agent.engine_client import EngineError
    from grpo_worker.weightsync.agent.installer import UpdateError

    while True:
        try:
            agent.watch()
        except (EngineError, UpdateError) as error:
            log.warning("watch: %s", error)
        except Exception:  # the thread must go on; the next check may succeed
            log.exception("watch failed")
        time.sleep(WATCH_SECONDS)


if __name__ == "__main__":
    main()
