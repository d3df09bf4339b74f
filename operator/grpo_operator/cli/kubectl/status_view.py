"""The status of a job as text (pure)."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_operator.cli.kubectl.plain_text import plain
from grpo_operator.client.conditions import message_of

_BAD = ("Invalid", "Failed", "Recovering")
_ENGINE_COLUMNS = ("ENGINE", "STATE", "WEIGHTS", "RESTARTS", "MESSAGE")
_JOB_COLUMNS = ("NAME", "PHASE", "REASON", "STEP", "ETA", "REWARD", "TRAIN", "ROLLOUT", "MESSAGE")


def jobs_table(jobs: Iterable[dict[str, Any]], namespaces: bool = False) -> Table:
    """Return a line for each job. ``namespaces``: with its namespace."""
    table = _table(("NAMESPACE",) * namespaces + _JOB_COLUMNS)
    for job in jobs:
        status = _status(job)
        phase = str(status.get("phase", ""))
        cells = [status.get(key, "") for key in ("reason", "progress", "eta", "rewardMean")]
        pools = [status.get(key, "") for key in ("trainReady", "rolloutReady")]
        names = (job["metadata"]["namespace"],) * namespaces + (job["metadata"]["name"],)
        texts = [plain(cell) for cell in (*cells, *pools, message_of(status))]
        table.add_row(*names, _phase(phase), *texts)
    return table


def job_view(job: dict[str, Any], engines: Iterable[dict[str, Any]], events: Iterable[str]) -> Group:
    """Return all that concerns one job. ``engines``: of its pool's status. ``events``: the last ones."""
    status = _status(job)
    parts: list[RenderableType] = [_summary(job["metadata"]["name"], status)]
    table = _table(_ENGINE_COLUMNS)
    for engine in engines:
        table.add_row(*(plain(engine.get(key, "")) for key in _ENGINE_KEYS))
    if table.row_count:
        parts += [Text(), table]
    lines = list(events)
    if lines:
        parts += [Text("\nEVENTS"), *(plain(f"  {line}") for line in lines)]
    return Group(*parts)


_ENGINE_KEYS = ("name", "state", "weightVersion", "restarts", "message")


def _summary(name: str, status: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("job", name)
    for label, value in _lines(status):
        if value:
            table.add_row(label, plain(value) if isinstance(value, str) else value)
    return table


def _lines(status: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    """Yield labels and values; values that are not known are empty."""
    reason = f" ({status['reason']})" if status.get("reason") else ""
    yield "phase", _phase(str(status.get("phase", ""))) + Text(reason)
    yield "message", message_of(status)
    yield "step", _joined(status.get("progress"), _labelled("eta", status.get("eta")))
    yield "reward", str(status.get("rewardMean") or "")
    speed = status.get("tokensPerSecondPerGpu")
    yield "pace", f"{speed} tokens/s and trainer GPU" if speed else ""
    yield (
        "pools",
        _joined(
            _labelled("train", status.get("trainReady")), _labelled("rollout", status.get("rolloutReady"))
        ),
    )
    yield "weights", _joined(status.get("weights"), _labelled("over", status.get("weightPath")))
    yield "layout", _layout(status.get("layout") or {})
    checkpoint = status.get("lastCheckpoint")
    yield "checkpoint", f"step {checkpoint['step']} in {checkpoint['location']}" if checkpoint else ""
    yield "restarts", _restarts(status)
    yield "last failure", str(status.get("lastFailure") or "")
    yield "next attempt", str(status.get("nextAttemptAt") or "")
    effective = (status.get("goodput") or {}).get("effective")
    yield "goodput", f"{effective} % of the GPU time" if effective else ""
    for one in status.get("validation") or []:
        best = f"best {one['bestScore']} after step {one['bestStep']}"
        yield "validation", f"{one['set']}: {one['score']} after step {one['step']}, {best}"
    for straggler in status.get("stragglers") or []:
        yield (
            "straggler",
            f"rank {straggler['rank']} in {straggler['pod']}: {straggler['ratio']} times the median",
        )
    for node in status.get("sickNodes") or []:
        yield "sick node", str(node)
    for profile in status.get("profiles") or []:
        yield "profile", _joined(profile.get("state"), *(profile.get("files") or []))


def _layout(layout: dict[str, Any]) -> str:
    sizes = {"TP": "tensor", "PP": "pipeline", "CP": "context", "EP": "expert", "DP": "data"}
    return " ".join(f"{short}{layout[name]}" for short, name in sizes.items() if name in layout)


def _restarts(status: dict[str, Any]) -> str:
    counts = status.get("restarts") or {}
    named = {cause: f"by {'a' if cause == 'rollback' else 'the'} {cause}" for cause in counts}
    return ", ".join(f"{count} {named[cause]}" for cause, count in counts.items() if count)


def _labelled(label: str, value: Any) -> str:
    return f"{label} {value}" if value else ""


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _phase(phase: str) -> Text:
    style = "red" if phase in _BAD else "green" if phase in ("Training", "Succeeded") else ""
    return Text(phase, style=style)


def _status(job: dict[str, Any]) -> dict[str, Any]:
    return job.get("status") or {}


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "MESSAGE")
    return table
