"""The page of an ended run as a file of its store, readable without the job's pods."""

import logging
from collections.abc import Callable

from grpo_worker.common.files import write_text
from grpo_worker.run_page.html import page
from grpo_worker.run_page.snapshot import Run, snapshot

log = logging.getLogger(__name__)
FILE = "run.html"


def write_page(run: Run, check: Callable[[], None] = lambda: None) -> None:
    """Write the page into the run's folder. A page that cannot be written costs a job nothing but the page.

    ``check``: called before the file appears; raises if this job has another controller now.
    """
    try:
        write_text(run.folder.store / FILE, page(snapshot(run), live=False), check=check)
    except Exception:
        log.exception("the page of the run is not written")
