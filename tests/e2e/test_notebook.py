"""The notebook of the docs runs against a real cluster, and shows what its job has written."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from grpo_devcluster.follow import JobView
from grpo_devcluster.paths import JOB_DATA
from grpo_devcluster.report import load
from grpo_worker.samples.reader import samples as samples_of
from support.faults import until
from support.notebook import NOTEBOOK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
# Prints what the notebook's cells have read, before the last one deletes the job.
_READ = """
import json
read = {"uid": job.uid, "losses": frame["actor/loss"].to_dict(), "step": int(samples["step"][0])}
print(json.dumps(read | {"samples": samples["uid"].to_list()}))
"""


@pytest.fixture
def job(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobView]:
    """The notebook's job, which the notebook finds as users do; gone after the test."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    job = JobView(kubeconfig, "first-job")
    yield job
    job.kubectl("delete", "grpojob", job.name, "--ignore-not-found", "--cascade=foreground")


def _run(notebook: Any, folder: Path) -> None:
    client = NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(folder)}})
    client.execute()


def _printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_runs_and_reads_what_the_job_writes(job: JobView, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    *cells, delete = notebook.cells
    assert delete.metadata.tags == ["delete"]
    reading = nbformat.v4.new_code_cell(_READ)
    notebook.cells = [*cells, reading, delete]
    _run(notebook, tmp_path)
    by_id = {cell.id: cell for cell in notebook.cells}
    assert re.search(r"^1\d/60 reward ", _printed(by_id["follow"]), re.MULTILINE)
    assert "image/png" in by_id["plot"].outputs[-1].data
    read = json.loads(_printed(reading))
    folder = JOB_DATA / f"{job.namespace}-{job.name}-{read['uid'][:8]}"
    written = {str(record["step"]): record["actor/loss"] for record in load(folder)}
    assert len(read["losses"]) >= 10 and read["losses"].items() <= written.items()
    assert read["samples"] == [sample["uid"] for sample in samples_of(folder, read["step"])]
    found = "get", "grpojob", job.name, "--ignore-not-found"
    until("the job is deleted", lambda: not job.kubectl(*found), 120)
