"""Interface of a sink, and the data that it receives."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Some samples of a step or of a validation. ``name``: of the table; each step has one of this name.

    A row has a value for each column: a number, a text, or None.
    """

    name: str
    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class RunArtifacts:
    """Artifacts of an ended run. ``page``: HTML, "" if there is none.

    ``checkpoints``: addresses by what they are, such as ``last_checkpoint``; never their bytes.
    """

    page: str = ""
    checkpoints: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """Return the artifacts as texts of files, by name."""
        page = {"run.html": self.page} if self.page else {}
        return page | {"checkpoints.json": json.dumps(dict(self.checkpoints), indent=2)}


class Sink(Protocol):
    """Receiver of the run. It has its configuration since it was opened.

    Metrics of steps that are repeated after a restart replace the earlier ones, or follow them where a
    service cannot replace; a table is never there twice.
    """

    def begin(self, after: int) -> None:
        """Start an attempt that continues after step ``after``."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of one step."""

    def table(self, table: SampleTable) -> None:
        """Write a table of samples."""

    def artifacts(self, artifacts: RunArtifacts) -> None:
        """Write what is left of the run, in place of what an earlier end of it has left."""

    def end(self, failed: bool) -> None:
        """Finish: the job is complete, or has failed."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A sink that a job configures. ``open``: connects to its service; may take long and raise anything.

    ``name``: of the sink in messages. ``remedy``: what to look at when it fails.
    """

    name: str
    open: Callable[[], Sink]
    remedy: str
