"""Names that a shell completes: of jobs, namespaces and contexts."""

from typing import Any

import typer

from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError

_PATIENCE = "--request-timeout=5s"  # users wait for nothing else meanwhile


def cluster_of(given: dict[str, Any]) -> Cluster:
    """Return the cluster of the plugin's own options, by the names of their parameters."""
    options = {
        "--namespace": given["namespace"],
        "--context": given["kube_context"],
        "--kubeconfig": given["kubeconfig"],
    }
    return Cluster(tuple(f"{name}={value}" for name, value in options.items() if value), given["program"])


def jobs(context: typer.Context) -> list[str]:
    """Return the jobs of the namespace."""
    return _names(context, "grpojobs.rl.grpo.dev")


def namespaces(context: typer.Context) -> list[str]:
    """Return the namespaces that the user may list."""
    return _names(context, "namespaces")


def contexts(context: typer.Context) -> list[str]:
    """Return the contexts of the kubeconfig."""
    return _lines(context, "config", "get-contexts", "-o", "name")


def _names(context: typer.Context, kind: str) -> list[str]:
    lines = _lines(context, "get", kind, "-o", "name", _PATIENCE)
    return [line.partition("/")[2] for line in lines]


def _lines(context: typer.Context, *arguments: str) -> list[str]:
    """Return what kubectl prints; nothing if it fails: a completion has no place for errors."""
    try:
        return cluster_of(context.find_root().params).text(*arguments).splitlines()
    except KubectlError:
        return []
