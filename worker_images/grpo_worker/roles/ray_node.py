"""``python -m grpo_worker.roles.ray_node``: ``ray start`` whose raylet does not wait for its agents.

A raylet ends when its dashboard agent has not written the numbers of its ports after 15 seconds, and no
option changes that. The agent imports for that long where the pods of a job start on a few busy cores. With
ports that are known before, the files can be written before the raylet looks for them.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Options of ``ray start``, beside those that KubeRay sets.
PORTS = {"--dashboard-agent-grpc-port": 52366, "--runtime-env-agent-port": 52367}
# Milliseconds that a raylet waits for the agent that prepares the environments of its workers, and how often,
# every two seconds, Ray asks for the head's node.
_PATIENCE = {"RAY_agent_register_timeout_ms": "300000", "RAY_NUM_REDIS_GET_RETRIES": "150"}
# Argument of Ray's start_raylet -> Ray's name of the file. The values are checked by a test.
FILES = {
    "metrics_agent_port": "METRICS_AGENT_PORT_NAME",
    "metrics_export_port": "METRICS_EXPORT_PORT_NAME",
    "dashboard_agent_listen_port": "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "runtime_env_agent_port": "RUNTIME_ENV_AGENT_PORT_NAME",
}
Persist = Callable[[str, str, str, int], None]  # (folder of the session, id of the node, name, port)


def with_ports(start: Callable[..., Any], names: Mapping[str, str], persist: Persist) -> Callable[..., Any]:
    """Return ``start``, Ray's start_raylet, preceded by the files of the ports that are known.

    ``names``: argument of ``start`` -> name of the file.
    """
    signature = inspect.signature(start)

    def start_with_ports(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for argument, name in names.items():
            if port := given.get(argument):
                persist(given["session_dir"], given["node_id"], name, port)
        return start(*args, **kwargs)

    return start_with_ports


def with_own_ports(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``ray start`` with a port for each agent that has none."""
    given = {argument.partition("=")[0] for argument in arguments}
    return [*arguments, *(f"{name}={port}" for name, port in PORTS.items() if name not in given)]


def main() -> None:
    """Run ``ray start`` with the arguments of this process."""
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    from ray import _raylet
    from ray._private import services
    from ray.scripts.scripts import cli

    raylet: Any = _raylet  # its stubs lack some functions
    names = {argument: getattr(raylet, name) for argument, name in FILES.items()}
    services.start_raylet = with_ports(services.start_raylet, names, raylet.persist_port)
    cli(["start", *with_own_ports(sys.argv[1:])])


if __name__ == "__main__":
    main()
