"""Lines that the controller and the ranks of a job keep in its store, also of pods that are gone."""

from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.cli.kubectl.job_files import JobFiles
from grpo_operator.cli.kubectl.pods import LogTarget, Part

# Arguments: folder, pattern of the files, number of lines as tail takes it.
_TAIL = 'cd "$1/logs" && exec tail -v -n "$3" -- $2'


def stored_command(cluster: Cluster, job: str, part: Part, rank: int | None, tail: int) -> list[str]:
    """Return the arguments with which kubectl prints the stored lines of a part, file by file.

    ``rank``: only of this one; None: of all. ``tail``: last lines of each file; -1: all.
    Raises KubectlError if nothing keeps such lines, or names the folder if no pod can read them.
    """
    if part not in (Part.CONTROLLER, Part.TRAINER):
        raise KubectlError(f"--part={part}: only controller and trainer keep lines in the store")
    if rank is not None and part is not Part.TRAINER:
        raise KubectlError(f"--rank={rank}: only --part=trainer has ranks")
    if cluster.job(job)["spec"]["checkpoint"]["store"].get("uri"):
        raise KubectlError(f"{job} keeps no lines: checkpoint.store.uri is an object store")
    files = JobFiles.of(cluster, job, "logs")
    of_ranks = f"trainer-{'*' if rank is None else rank}.attempt-*.log*"
    pattern = of_ranks if part is Part.TRAINER else "controller.*.log*"
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
    files = JobFiles.of(cluster, job, "logs")  # or the error names the folder
    raise KubectlError(f"{job} has no pods of {part} now: --stored shows what is kept in {files.folder}/logs")
