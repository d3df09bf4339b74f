"""The files that a raylet waits for exist before it starts, with the names that Ray's own agents use."""

import inspect
from pathlib import Path
from typing import Any

from ray import _raylet
from ray._private import node, services

from grpo_worker.roles.ray_node import FILES, PORTS, with_own_ports, with_ports


def test_the_known_ports_are_written_before_the_raylet_starts() -> None:
    events: list[Any] = []

    def start(node_id: str, session_dir: str, grpc: int | None = None, http: int = 0) -> str:
        events.append("start")
        return node_id

    names = {"grpc": "grpc_port", "http": "http_port"}
    started = with_ports(start, names, lambda *file: events.append(file))
    assert started("f00", "/session", grpc=52366) == "f00"
    assert events == [("/session", "f00", "grpc_port", 52366), "start"]


def test_given_ports_stay() -> None:
    own = [f"{name}={port}" for name, port in PORTS.items()]
    assert with_own_ports(["--head"]) == ["--head", *own]
    assert with_own_ports(["--runtime-env-agent-port=1"]) == ["--runtime-env-agent-port=1", own[0]]


def test_ray_has_what_is_replaced() -> None:
    asked = inspect.signature(services.start_raylet).parameters
    assert {"node_id", "session_dir", *FILES} <= set(asked)
    assert "services.start_raylet(" in inspect.getsource(node.Node), "Ray starts its raylet elsewhere"


def test_a_file_is_found_where_ray_looks_for_it(tmp_path: Path) -> None:
    ray: Any = _raylet  # its stubs lack some functions
    for number, name in enumerate((getattr(ray, name) for name in FILES.values()), 1):
        ray.persist_port(str(tmp_path), "f00", name, number)
        assert ray.wait_for_persisted_port(str(tmp_path), "f00", name, 100) == number
