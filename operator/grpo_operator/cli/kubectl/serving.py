"""``kubectl grpo serve``: a RolloutPool that serves the model of a checkpoint."""

from functools import partial
from typing import Annotated, Any

import typer

from grpo_operator.api.names import export_folder, job_store, writer
from grpo_operator.cli.kubectl.arguments import Job, errors
from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.cli.kubectl.output import Format, show, show_changed
from grpo_operator.cli.kubectl.requests import exported


def serve(
    context: typer.Context,
    job: Job,
    step: Annotated[int | None, typer.Option(help="step of the checkpoint; default: the newest")] = None,
    directory: Annotated[
        str, typer.Option("--export", help="serve this directory below export/ in place of a checkpoint")
    ] = "",
    quantization: Annotated[str, typer.Option(help="of the export: none or fp8-block128")] = "none",
    name: Annotated[str, typer.Option(help="of the RolloutPool; default: JOB-STEP")] = "",
    replicas: Annotated[int, typer.Option(help="number of engines", min=1)] = 1,
    wait: Annotated[float, typer.Option(help="seconds to wait for the export")] = 86400,
    dry_run: Annotated[bool, typer.Option(help="print the manifest; create and export nothing")] = False,
    output: Format = "text",
) -> None:
    """Serve the model of a checkpoint by an OpenAI-compatible API; export it first if that is needed."""
    # It imports pydantic, for which no other command should wait.
    from grpo_operator.client.serve_manifest import served

    cluster: Cluster = context.obj
    with errors():
        found = cluster.job(job)
        newest = ((found.get("status") or {}).get("lastCheckpoint") or {}).get("step")
        of = newest if step is None else step
        if directory:
            folder = job_store(found["metadata"]["namespace"], writer(found))
            path, of = export_folder(folder, directory), directory
        elif of is None:
            raise KubectlError(f"{job} has no checkpoint yet: serve it when status.lastCheckpoint is there")
        else:
            path = _export(cluster, found, of, quantization, wait, dry_run, output)
        pool = name or f"{job}-{of}"
        manifest = served(found, _engines(cluster, found), path, pool, replicas, quantization)
        from grpo_operator.api import manifest_yaml  # takes a while, and few commands need it

        text = manifest_yaml.dump(manifest)
        if dry_run:
            if not show(manifest, output):
                typer.echo(text, nl=False)
            return
        show_changed(partial(cluster.text, "create", "-f", "-", stdin=text), output)
        if output == "text":
            typer.echo(f"URL, model and Secret: kubectl get rpool {pool} -o jsonpath='{{.status.serve}}'")


def _export(
    cluster: Cluster,
    job: dict[str, Any],
    step: int,
    quantization: str,
    wait: float,
    dry_run: bool,
    output: str,
) -> str:
    """Return the directory of the checkpoint's export in the job's pods; export it if it is not there."""
    from grpo_operator.api.v1alpha1.export_request import ExportRequest, parse_request

    name = job["metadata"]["name"]
    last = (job.get("status") or {}).get("export") or {}
    written = last.get("state") == "Written" and last.get("step") == step
    if written and parse_request(last["request"]).quantization == quantization:
        return str(last["path"])
    if dry_run:
        typer.echo(f"first: kubectl grpo export {name} --step {step} --quantization {quantization}", err=True)
        request = ExportRequest.model_validate({"quantization": quantization})
        folder = job_store(job["metadata"]["namespace"], writer(job))
        return export_folder(folder, request.directory(step))
    entry = exported(cluster, name, step, quantization, "", wait, output)
    if entry.get("state") == "Written":
        return str(entry["path"])
    if entry.get("state") == "Failed":
        raise KubectlError(f"{entry.get('message')} (an export that is there already: --export DIRECTORY)")
    raise KubectlError(f"the export of step {step} is not complete yet: call this again later")


def _engines(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """Return the engines of a job: of its own template, or of the shared pool that it names."""
    rollout = job["spec"]["rollout"]
    if "template" in rollout:
        return dict(rollout["template"])
    return dict(cluster.get("rolloutpools.rl.grpo.dev", rollout["poolRef"]["name"])["spec"])
