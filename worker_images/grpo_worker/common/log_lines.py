"""Lines of the log of a process, each labelled with what the process is and does.

``2026-11-28 10:00:00,123 INFO trainer rank=3 attempt=2 step=17: message``
"""

import logging
from dataclasses import dataclass


@dataclass(slots=True)
class LogLabels:
    """Labels of the lines that this process writes from now on; None: unknown, or it has none.

    ``step``: that the process works on. A thread that still works on an earlier one gives its lines that
    step: ``log.info(..., extra={"step": step})``. ``engine``: its pod. ``version``: of the weights
    that the engine got last.
    """

    role: str = ""
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    engine: str | None = None
    version: int | None = None

    def text(self, step: int | None = None, role: str | None = None) -> str:
        """Return the labels as they stand before the message. The arguments replace those of the process."""
        values = {
            "engine": self.engine,
            "rank": self.rank,
            "attempt": self.attempt,
            "step": self.step if step is None else step,
            "version": self.version,
        }
        return " ".join([role or self.role, *(f"{name}={v}" for name, v in values.items() if v is not None)])


LABELS = LogLabels()


class LabelledLines(logging.Formatter):
    """Formats records as lines with time, level and the labels of the process."""

    def __init__(self, labels: LogLabels = LABELS) -> None:
        super().__init__("%(asctime)s %(levelname)s %(labels)s: %(message)s")
        self._labels = labels

    def format(self, record: logging.LogRecord) -> str:
        record.labels = self._labels.text(getattr(record, "step", None), getattr(record, "role", None))
        return super().format(record)


def log_as(role: str, others: int = logging.INFO) -> None:
    """Write the lines of this process, with its role, to stderr, unless they go somewhere already.

    ``others``: level from which lines of other packages are written.
    """
    LABELS.role = role
    handler = logging.StreamHandler()
    handler.setFormatter(LabelledLines())
    logging.basicConfig(level=others, handlers=[handler])
    logging.getLogger("grpo_worker").setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
