"""``kubectl grpo``: look at jobs, follow them, and tell them what to do."""

import sys
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from grpo_operator.api.names import RESUME_ANNOTATION, rollout_pool
from grpo_operator.cli.kubectl import cluster_names, requests, serving
from grpo_operator.cli.kubectl import events as job_events
from grpo_operator.cli.kubectl.arguments import Job, errors
from grpo_operator.cli.kubectl.cluster import Cluster
from grpo_operator.cli.kubectl.doctor import findings
from grpo_operator.cli.kubectl.global_options import hoisted
from grpo_operator.cli.kubectl.job_files import JobFiles
from grpo_operator.cli.kubectl.metrics_table import metrics_table
from grpo_operator.cli.kubectl.output import Format, show, show_changed
from grpo_operator.cli.kubectl.pods import LogTarget, Part
from grpo_operator.cli.kubectl.sample_view import sample_lines
from grpo_operator.cli.kubectl.status_view import job_view, jobs_table
from grpo_operator.cli.kubectl.stored_logs import require_pods, stored_command
from grpo_operator.client.fork_manifest import fork as fork_manifest
from grpo_operator.client.fork_manifest import parsed
from grpo_operator.client.resumption import resumption
from grpo_operator.client.samples_command import samples_command

app = typer.Typer(
    name="kubectl-grpo", no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help as plain as kubectl's: what frames it takes long to import
    help="Look at GRPOJobs, follow them, and tell them what to do.",
)  # fmt: skip
_LAST_EVENTS = 8


@app.callback()
def _options(
    context: typer.Context,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", help="default: the context's", autocompletion=cluster_names.namespaces
        ),
    ] = "",
    kube_context: Annotated[
        str,
        typer.Option("--context", help="context of the kubeconfig", autocompletion=cluster_names.contexts),
    ] = "",
    kubeconfig: Annotated[str, typer.Option("--kubeconfig", help="path of the kubeconfig")] = "",
    program: Annotated[str, typer.Option("--kubectl", envvar="KUBECTL", hidden=True)] = "kubectl",
) -> None:
    context.obj = cluster_names.cluster_of(context.params)


@app.command()
def status(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(help="name of the GRPOJob; all if not given", autocompletion=cluster_names.jobs),
    ] = None,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="jobs of all namespaces")
    ] = False,
    output: Format = "text",
) -> None:
    """Show all jobs, or one job with its engines and events."""
    cluster: Cluster = context.obj
    with errors():
        if job is None:
            jobs = cluster.items("grpojobs.rl.grpo.dev", *(["--all-namespaces"] if everywhere else []))
            if not show({"items": jobs}, output):
                _print(jobs_table(jobs, everywhere))
            return
        found = cluster.job(job)
        if show(found, output):
            return
        reference = found["spec"]["rollout"].get("poolRef")
        pools = cluster.items("rolloutpools.rl.grpo.dev")
        name = reference["name"] if reference else rollout_pool(job)
        own = [pool for pool in pools if pool["metadata"]["name"] == name]
        engines = (own[0].get("status") or {}).get("engines", []) if own else []
        _print(job_view(found, engines, job_events.lines(_events(cluster, job))[-_LAST_EVENTS:]))


@app.command()
def events(context: typer.Context, job: Job, output: Format = "text") -> None:
    """Show the events of a job, its pool, its RayCluster and its pods, the last one at the end."""
    with errors():
        found = _events(context.obj, job)
        if not show({"items": found}, output):
            for line in job_events.lines(found):
                typer.echo(line)


@app.command()
def logs(
    context: typer.Context,
    job: Job,
    part: Annotated[Part, typer.Option("--part", "-p", help="part of the job")] = Part.CONTROLLER,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="wait for more")] = False,
    tail: Annotated[int, typer.Option(help="last lines of each pod; -1: all")] = 200,
    previous: Annotated[bool, typer.Option(help="of the container before the last restart")] = False,
    stored: Annotated[
        bool, typer.Option(help="lines that a part keeps in the store, also of pods that are gone")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="with --stored: only this rank's", min=0)] = None,
    pod: Annotated[str | None, typer.Option(help="with --stored: only this engine's or agent's pod")] = None,
) -> None:
    """Show the logs of a part of a job, with the pod's name before each line."""
    cluster: Cluster = context.obj
    with errors():
        if stored:
            command = stored_command(cluster, job, part, rank, pod, tail)
        else:
            require_pods(cluster, job, part)
            options = [f"--tail={tail}", *(["-f"] if follow else []), *(["--previous"] if previous else [])]
            command = ["logs", *LogTarget.of(part).arguments(job), *options]
    cluster.follow(*command)


@app.command()
def metrics(
    context: typer.Context,
    job: Job,
    names: Annotated[list[str] | None, typer.Argument(help="names, or parts of names, of metrics")] = None,
    last: Annotated[int, typer.Option(help="number of steps", min=1)] = 10,
    output: Format = "text",
) -> None:
    """Show metrics of the last steps of a job that runs."""
    cluster: Cluster = context.obj
    with errors():
        files = JobFiles.of(cluster, job, "metrics")
        steps = files.lines("tail", "-n", str(last), f"{files.folder}/metrics.jsonl")
        if not show({"items": steps}, output):
            _print(metrics_table(steps, names or []))


@app.command()
def samples(
    context: typer.Context,
    job: Job,
    step: Annotated[int | None, typer.Option(help="default: the last step that has samples")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="of the validation of a step")] = False,
    of: Annotated[str | None, typer.Option("--set", help="only of this validation set")] = None,
    prompt: Annotated[int | None, typer.Option(help="index of a prompt: only its answers")] = None,
    order: Annotated[str, typer.Option(help="column, smallest first; -COLUMN: largest first")] = "",
    limit: Annotated[int, typer.Option(help="number of samples", min=1)] = 8,
    tokens: Annotated[bool, typer.Option(help="with the ids and log-probabilities of tokens")] = False,
    output: Format = "text",
) -> None:
    """Show prompts, answers and scores of a step, or of a validation, of a job that runs."""
    command = samples_command(
        step=step, prompt=prompt, limit=limit, order=order, tokens=tokens, validation=validation, of=of
    )
    with errors():
        files = JobFiles.of(context.obj, job, "samples")
        found = files.lines(*command)
        if not show({"items": found}, output):
            typer.echo("\n".join(sample_lines(found)))


@app.command()
def ui(
    context: typer.Context,
    job: Job,
    file: Annotated[Path | None, typer.Option("--output", "-o", help="write a file instead")] = None,
    port: Annotated[int, typer.Option(help="of 127.0.0.1; 0: any")] = 0,
    browser: Annotated[bool, typer.Option(help="open the page in a browser")] = True,
) -> None:
    """Show the page of a run: curves, phases, faults and samples."""
    run_page = import_module("grpo_operator.cli.kubectl.run_page")
    with errors():
        if file is not None:
            file.write_text(run_page.page_of(context.obj, job), encoding="utf-8")
        else:
            run_page.serve(context.obj, job, port, browser)


@app.command()
def suspend(context: typer.Context, job: Job, output: Format = "text") -> None:
    """Save a checkpoint and delete the pods of a job."""
    with errors():
        show_changed(partial(context.obj.patch, job, {"spec": {"suspend": True}}), output)


@app.command()
def resume(
    context: typer.Context,
    job: Job,
    steps: Annotated[int | None, typer.Option(help="new totalSteps, for a job that has succeeded")] = None,
    output: Format = "text",
) -> None:
    """Let a job go on that is suspended, has failed or has succeeded."""
    cluster: Cluster = context.obj
    with errors():
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        change = resumption(cluster.job(job), steps, now, RESUME_ANNOTATION)
        show_changed(partial(cluster.patch, job, change), output)


@app.command()
def fork(
    context: typer.Context,
    job: Job,
    name: Annotated[str, typer.Argument(help="name of the new job", metavar="NAME")],
    step: Annotated[int | None, typer.Option(help="step of the checkpoint; default: the newest")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="PATH=VALUE below spec, as in trainer.optimizer.lr=5e-7")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="print the manifest and create nothing")] = False,
    output: Format = "text",
) -> None:
    """Start a job from a checkpoint of another one, with other values."""
    cluster: Cluster = context.obj
    with errors():
        values = dict(map(parsed, changes or []))
        manifest = fork_manifest(cluster.job(job), name, step, values)
        from grpo_operator.api import manifest_yaml  # takes a while, and few commands need it

        text = manifest_yaml.dump(manifest)
        if not dry_run:
            show_changed(partial(cluster.text, "create", "-f", "-", stdin=text), output)
        elif not show(manifest, output):
            typer.echo(text, nl=False)


@app.command()
def doctor(context: typer.Context, output: Format = "text") -> None:
    """Check what jobs need from a cluster: CRDs, KubeRay, the operator, rights and GPUs."""
    found = list(findings(context.obj))
    if not show({"items": [each._asdict() for each in found]}, output):
        for each in found:
            mark = {True: "ok  ", False: "FAIL", None: "note"}[each.ok]
            typer.echo(f"{mark}  {each.check}: {each.text}")
    raise SystemExit(1 if any(each.ok is False for each in found) else 0)


app.command()(requests.export)
app.command()(requests.profile)
app.command()(serving.serve)

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASSED_ON)
def plan(context: typer.Context) -> None:
    """Print the operator's plan for a manifest, without a cluster; see grpo-plan --help."""
    raise SystemExit(import_module("grpo_operator.cli.plan").main(context.args))


@app.command(context_settings=_PASSED_ON)
def rehearse(context: typer.Context) -> None:
    """Run the first steps of a manifest on virtual time; see grpo-plan --rehearse --help."""
    raise SystemExit(import_module("grpo_operator.cli.plan").main(["--rehearse", *context.args]))


@app.command(context_settings=_PASSED_ON)
def convert(context: typer.Context) -> None:
    """Turn a configuration of verl, slime or NeMo-RL into a manifest; see grpo-convert --help."""
    raise SystemExit(import_module("grpo_operator.cli.convert").main(context.args, context.command_path))


def _events(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    return job_events.of_job(cluster.items("events"), job)


def _print(what: Any) -> None:
    if sys.stdout.isatty():
        Console().print(what)
        return
    # Without a terminal lines are not folded, so that they can be searched.
    console = Console(width=4096, no_color=True)
    with console.capture() as captured:
        console.print(what)
    typer.echo("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def main() -> None:
    """Run the plugin under the name that kubectl's users know.

    With ``__complete`` first it is kubectl_complete-grpo, for installations that have only one program.
    """
    if sys.argv[1:2] == ["__complete"]:
        import_module("grpo_operator.cli.kubectl.complete").main(sys.argv[2:])
        return
    app(args=hoisted(sys.argv[1:]), prog_name="kubectl grpo")


if __name__ == "__main__":
    main()
