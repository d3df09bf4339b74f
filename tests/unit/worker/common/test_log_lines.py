"""Lines of the log: their labels, and which of them a process writes."""

import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from grpo_worker.common.log_lines import LabelledLines, LogLabels

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def _line(labels: LogLabels, message: str = "message", **more: Any) -> str:
    record = logging.LogRecord("grpo_worker", logging.INFO, "", 0, message, None, None)
    vars(record).update(more)
    return LabelledLines(labels).format(record)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (LogLabels("trainer", 3, 2, 17), "trainer rank=3 attempt=2 step=17"),
        (LogLabels("trainer", 0, 1), "trainer rank=0 attempt=1"),
        (LogLabels("controller", attempt=2, step=17), "controller attempt=2 step=17"),
        (LogLabels("fetch"), "fetch"),
        (
            LogLabels("engine-agent", attempt=2, engine="a-b", version=0),
            "engine-agent engine=a-b attempt=2 version=0",
        ),
    ],
)
def test_a_line_has_the_labels_that_are_known(labels: LogLabels, text: str) -> None:
    assert re.fullmatch(f"{TIME} INFO {text}: message", _line(labels))


def test_labels_follow_the_process_and_a_record_may_have_its_own_step() -> None:
    labels = LogLabels("controller")
    assert "controller: message" in _line(labels)
    labels.attempt, labels.step = 1, 8
    assert "controller attempt=1 step=8: message" in _line(labels)
    assert "controller attempt=1 step=7: step 7: reward" in _line(labels, "step 7: reward", step=7)
    assert "engine attempt=1 step=8: 100% done" in _line(labels, "100% done", role="engine")


_PROGRAM = """
import logging, sys
from grpo_worker.common.log_lines import log_as
log_as("trainer", logging.WARNING)
for name in ("grpo_worker.roles.trainer", "megatron.core", "httpx"):
    logging.getLogger(name).info("info of %s", name)
    logging.getLogger(name).warning("warning of %s", name)
"""


def test_a_rank_writes_its_own_lines_and_the_warnings_of_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert [re.sub(TIME, "TIME", line) for line in done.stderr.splitlines()] == [
        "TIME INFO trainer: info of grpo_worker.roles.trainer",
        "TIME WARNING trainer: warning of grpo_worker.roles.trainer",
        "TIME WARNING trainer: warning of megatron.core",
        "TIME WARNING trainer: warning of httpx",
    ]
