"""Python client of GRPOJobs.

from grpo_operator.client import GRPOClient

client = GRPOClient(namespace="rl")
job = client.create("qwen3", spec)
job = client.wait("qwen3")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_operator.client.asynchronous import AsyncGRPOClient
    from grpo_operator.client.job import Job, JobFailedError
    from grpo_operator.client.synchronous import GRPOClient

__all__ = ["AsyncGRPOClient", "GRPOClient", "Job", "JobFailedError"]
_MODULES = {
    "AsyncGRPOClient": "asynchronous",
    "GRPOClient": "synchronous",
    "Job": "job",
    "JobFailedError": "job",
}


def __getattr__(name: str) -> Any:
    # The command line uses modules of this package without the Kubernetes client, which takes long to import.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
