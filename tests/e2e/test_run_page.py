"""The page of a real run in a real browser: served by the controller, and as the file that the job leaves."""

import asyncio

import pytest

from grpo_devcluster.chromium import chromium
from grpo_devcluster.follow import JobView
from support.browser import browser_page
from support.faults import wait_step
from support.grpo_command import page_of
from support.jobs import ENDED, Start
from support.run_pages import metrics_of, series

pytestmark = pytest.mark.slow  # brings 200 MB of packages once
STEPS = 40
HEADER = "document.querySelector('header').textContent"


@pytest.fixture
def job(start: Start) -> JobView:
    chromium()  # its packages take longer than the job
    job = start("shown", steps=STEPS)
    wait_step(job, 3)
    return job


async def test_a_page_shows_the_steps_of_a_job_while_it_runs_and_after_it(job: JobView) -> None:
    async with browser_page() as page:
        with page_of(job.name) as url:
            await page.open(url)
            seen = await page.value("runPage.data.last.step")
            await page.until(f"runPage.data.last.step > {seen}", 120)
            assert f"of {STEPS}" in await page.value(HEADER) and not page.problems
            base = url.removesuffix("page")
            assert page.requests and all(request.startswith(base) for request in page.requests)
            shown = await series(page)
            last = max(point[0] for point in shown["actor/loss"])
            written = metrics_of(job.store())
            assert shown == {name: [p for p in points if p[0] <= last] for name, points in written.items()}
    status = await asyncio.to_thread(job.wait, ENDED, 600)
    assert status["phase"] == "Succeeded"
    file = job.store() / "run.html"
    async with browser_page() as page:
        await page.open(file.as_uri())
        found = await series(page)
        assert found == metrics_of(job.store()) and len(found["actor/loss"]) == STEPS
        assert "Succeeded" in await page.value(HEADER)
        assert page.requests == [file.as_uri()] and not page.problems
