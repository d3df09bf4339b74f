"""Commands that ask a job for files by an annotation, and wait until its status names them."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn

import typer

from grpo_operator.api.names import EXPORT_ANNOTATION, PROFILE_ANNOTATION
from grpo_operator.cli.kubectl.arguments import Job, errors
from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError

_ENDED = ("Written", "Failed")


def export(
    context: typer.Context,
    job: Job,
    step: Annotated[int | None, typer.Option(help="step of the checkpoint; default: the newest")] = None,
    quantization: Annotated[str, typer.Option(help="none or fp8-block128")] = "none",
    name: Annotated[str, typer.Option(help="name of the directory below export/")] = "",
    wait: Annotated[float, typer.Option(help="seconds to wait for the export; 0: do not wait")] = 86400,
) -> None:
    """Export a checkpoint of a job in Hugging Face format, and name its directory in the store."""
    # It imports pydantic, for which no other command should wait.
    from grpo_operator.api.v1alpha1.export_request import request_text

    cluster: Cluster = context.obj
    with errors():
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = request_text(step, quantization, name, now)

        def written() -> dict[str, Any] | None:
            found: dict[str, Any] = _status(cluster, job).get("export") or {}
            return found if found.get("request") == text and found["state"] in _ENDED else None

        _ask(cluster, job, EXPORT_ANNOTATION, text)
        _end(written, wait)


def profile(
    context: typer.Context,
    job: Job,
    request: Annotated[list[str], typer.Argument(help="as in: torch engines, py-spy controller seconds=10")],
    wait: Annotated[float, typer.Option(help="seconds to wait for the files; 0: do not wait")] = 300,
) -> None:
    """Profile a running job, and name the files in its store."""
    cluster: Cluster = context.obj
    with errors():
        before = {each["id"] for each in _status(cluster, job).get("profiles") or []}

        def written() -> dict[str, Any] | None:
            new = [p for p in _status(cluster, job).get("profiles") or [] if p["id"] not in before]
            return new[-1] if new and new[-1]["state"] in _ENDED else None

        _ask(cluster, job, PROFILE_ANNOTATION, " ".join(request))
        _end(written, wait)


def _ask(cluster: Cluster, job: str, annotation: str, text: str) -> None:
    change = {"metadata": {"annotations": {annotation: text}}}
    typer.echo(cluster.patch(job, change), nl=False)


def _end(written: Callable[[], dict[str, Any] | None], seconds: float) -> None:
    """Wait for the end of a request; print where its files are, or why there are none, and exit."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = written()
        if found is not None:
            _print(found)
        time.sleep(1)


def _print(found: dict[str, Any]) -> NoReturn:
    if found["state"] == "Failed":
        raise KubectlError(found.get("message") or "the request failed")
    for file in found.get("files") or [""]:
        typer.echo(f"{found.get('path')}/{file}".removesuffix("/"))
    raise SystemExit(0)


def _status(cluster: Cluster, job: str) -> dict[str, Any]:
    return dict(cluster.job(job).get("status") or {})
