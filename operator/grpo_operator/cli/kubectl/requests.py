"""Commands that ask a job for files by an annotation, and wait until its status names them."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from grpo_operator.api.names import EXPORT_ANNOTATION, PROFILE_ANNOTATION
from grpo_operator.cli.kubectl.arguments import Job, errors
from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.cli.kubectl.output import Format, show

_ENDED = ("Written", "Failed")


def export(
    context: typer.Context,
    job: Job,
    step: Annotated[int | None, typer.Option(help="step of the checkpoint; default: the newest")] = None,
    quantization: Annotated[str, typer.Option(help="none or fp8-block128")] = "none",
    name: Annotated[str, typer.Option(help="name of the directory below export/")] = "",
    wait: Annotated[float, typer.Option(help="seconds to wait for the export; 0: do not wait")] = 86400,
    output: Format = "text",
) -> None:
    """Export a checkpoint of a job in Hugging Face format, and name its directory in the store."""
    with errors():
        _report(exported(context.obj, job, step, quantization, name, wait, output), output)


def exported(
    cluster: Cluster, job: str, step: int | None, quantization: str, name: str, wait: float, output: str
) -> dict[str, Any]:
    """Ask for an export, wait for its end, and return its entry of the status; see ``export``."""
    # It imports pydantic, for which no other command should wait.
    from grpo_operator.api.v1alpha1.export_request import request_text

    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = request_text(step, quantization, name, now)

    def entry() -> dict[str, Any]:
        found: dict[str, Any] = _status(cluster, job).get("export") or {}
        return found if found.get("request") == text else {}

    _ask(cluster, job, EXPORT_ANNOTATION, text, output)
    return {"request": text} | _ended(entry, wait)


def profile(
    context: typer.Context,
    job: Job,
    request: Annotated[list[str], typer.Argument(help="as in: torch engines, py-spy controller seconds=10")],
    wait: Annotated[float, typer.Option(help="seconds to wait for the files; 0: do not wait")] = 300,
    output: Format = "text",
) -> None:
    """Profile a running job, and name the files in its store."""
    cluster: Cluster = context.obj
    with errors():
        text = " ".join(request)
        before = {each["id"] for each in _status(cluster, job).get("profiles") or []}

        def entry() -> dict[str, Any]:
            new = [p for p in _status(cluster, job).get("profiles") or [] if p["id"] not in before]
            return new[-1] if new else {}

        _ask(cluster, job, PROFILE_ANNOTATION, text, output)
        _report({"request": text} | _ended(entry, wait), output)


def _ask(cluster: Cluster, job: str, annotation: str, text: str, output: str) -> None:
    message = cluster.patch(job, {"metadata": {"annotations": {annotation: text}}})
    if output == "text":
        typer.echo(message, nl=False)


def _ended(entry: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Wait for the end of a request, and return its entry of the status: the last one seen, or {}."""
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {}
    while time.monotonic() < deadline and found.get("state") not in _ENDED:
        found = entry()
        if found.get("state") not in _ENDED:
            time.sleep(1)
    return found


def _report(found: dict[str, Any], output: str) -> None:
    """Print where the files of a request are; raise KubectlError that says why there are none."""
    state = found.get("state")
    if state == "Failed":
        raise KubectlError(found.get("message") or "the request failed")
    if not show(found, output) and state == "Written":
        for file in found.get("files") or [""]:
            typer.echo(f"{found.get('path')}/{file}".removesuffix("/"))


def _status(cluster: Cluster, job: str) -> dict[str, Any]:
    return dict(cluster.job(job).get("status") or {})
