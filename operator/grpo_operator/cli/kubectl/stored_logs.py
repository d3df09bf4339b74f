"""Lines that pods of a job keep in its store, also those of pods that are gone."""

from grpo_operator.api.names import LOGS
from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.cli.kubectl.job_files import JobFiles
from grpo_operator.cli.kubectl.pods import LogTarget, Part

# Arguments: folder, pattern of the files, number of lines as tail takes it.
_TAIL = f'cd "$1/{LOGS}" && exec tail -v -n "$3" -- $2'
_ENGINES = "engine.*.log*"  # with the lines of their agents
_FILES = {
    Part.CONTROLLER: "controller.*.log*",
    Part.TRAINER: "trainer-*.attempt-*.log*",
    Part.TRAINER_AGENT: "trainer-agent.*.log*",
    Part.ENGINE: _ENGINES,
    Part.ENGINE_AGENT: _ENGINES,
}


def stored_command(
    cluster: Cluster, job: str, part: Part, rank: int | None, pod: str | None, tail: int
) -> list[str]:
    """Return the arguments with which kubectl prints the stored lines of a part, file by file.

    ``rank``, ``pod``: only of this one; None: of all. ``tail``: last lines of each file; -1: all.
    Raises KubectlError if nothing keeps such lines, or names the folder if no pod can read them.
    """
    if part not in _FILES:
        raise KubectlError(f"--part={part} keeps no lines in the store: choose one of {', '.join(_FILES)}")
    if rank is not None and part is not Part.TRAINER:
        raise KubectlError(f"--rank={rank}: only --part=trainer has ranks")
    if pod is not None and part in (Part.CONTROLLER, Part.TRAINER):
        raise KubectlError(f"--pod={pod}: files of --part={part} do not have the names of pods")
    if cluster.job(job)["spec"]["checkpoint"]["store"].get("uri"):
        raise KubectlError(f"{job} keeps no lines: checkpoint.store.uri is an object store")
    files = JobFiles.of(cluster, job, LOGS)
    pattern = _FILES[part]
    if rank is not None:
        pattern = pattern.replace("*", str(rank), 1)
    if pod is not None:
        pattern = pattern.replace("*", f"*.{pod}", 1)
    lines = "+1" if tail < 0 else str(tail)
    return [
        "exec",
        files.pod,
        "-c",
        "controller",
        "--",
        "sh",
        "-c",
        _TAIL,
        "sh",
        files.folder,
        pattern,
        lines,
    ]


def require_pods(cluster: Cluster, job: str, part: Part) -> None:
    """Raise KubectlError, which says where lines are kept, if a part of a job has no pods."""
    if cluster.items("pods", "-l", LogTarget.of(part).selector(job)):
        return
    files = JobFiles.of(cluster, job, LOGS)  # or the error names the folder
    raise KubectlError(
        f"{job} has no pods of {part} now: --stored shows what is kept in {files.folder}/{LOGS}"
    )
