"""The page of a run in a real browser: what it draws, live and as a file, and how it shows hostile text."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx
import pytest

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record_from_test
from grpo_operator.cli.kubectl.run_page import LocalServer, Relay
from grpo_worker.checkpointing.best import Best
from grpo_worker.common.auth import FILE
from grpo_worker.common.listeners import Server
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller import show_page
from grpo_worker.controller.status.page_routes import PROGRAM, PageRoutes
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application
from support.browser import Page, browser_page
from support.engine_server import free_port
from support.run_pages import (
    MODEL,
    metrics_of,
    record,
    series,
    validations_of,
    write_records,
    write_restarts,
    write_samples,
    write_validations,
)

pytestmark = pytest.mark.slow  # brings 200 MB of packages once, and starts a browser for each test

STEPS = 120
KEPT = Best(90, "aime")
RESTARTS = (
    (37, "infrastructure", "rank 12 on node gpu-7: the pod was lost"),
    (71, "job", "rank 3: the loss is not finite"),
    (96, "controller", "the controller ended unexpectedly"),
)
QUESTIONS = [f"What is the greatest common divisor of {12 * at + 84} and {9 * at + 36}?" for at in range(40)]
ANSWERS = (
    "We divide with remainder: 84 = 2 * 36 + 12 and 36 = 3 * 12 + 0. The last remainder that is not zero is "
    "12, so the greatest common divisor is 12.",
    "Both numbers are even. Halving them twice gives 21 and 9, whose greatest common divisor is 3, and "
    "3 * 4 = 12.\n\nThe answer is 12.",
    "The divisors of 36 are 1, 2, 3, 4, 6, 9, 12, 18 and 36. Of these, 36 is the largest, so it is 36.",
    "Wait, let me think. 84 - 36 = 48, and 48 - 36 = 12, and then I subtract 12 three times. It is 12!",
)
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '<img src="http://evil.example/x.png" onerror="window.hacked = 2">',
    "]]><!--<script src=//evil.example/a.js></script>",
    "%%data%% ${alert(1)} <svg onload=window.hacked=3> \u2028",
)
DRAWN = """[...document.querySelectorAll("figure[data-metric]")].map((figure) => [
  figure.dataset.metric, figure.querySelector("polyline").points.length])"""
# By figure of a set: its title, the points of each curve, and whether it marks the checkpoint that is kept.
VALIDATED = """[...document.querySelectorAll("figure[data-set]")].map((figure) => [
  figure.dataset.set, figure.dataset.part,
  [...figure.querySelectorAll("polyline")].map((line) => line.points.length),
  figure.querySelectorAll("polygon.band").length, figure.querySelectorAll("circle.best").length])"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "rl-qwen3-1f0c2d3e"
    write_records(folder, range(1, STEPS + 1))
    write_restarts(folder, *RESTARTS)
    write_validations(folder, range(0, STEPS + 1, 10), KEPT)
    for step in (1, 60, 120):
        write_samples(folder, step, QUESTIONS, ANSWERS)
    return folder


def page_file(job: Path, *options: str) -> str:
    """Write the page of a job into a file and return its URL."""
    file = job / "run.html"
    show_page.main([str(job), f"--output={file}", f"--model={MODEL}", *options])
    return file.as_uri()


@dataclass(frozen=True)
class Live:
    """The page as a user has it: at this machine, relayed to a controller that needs the key of its pods."""

    url: str
    board: ProgressBoard
    controller: str


@pytest.fixture
def live(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    (tmp_path / "key").write_text("a key of the job's pods")
    monkeypatch.setenv(FILE, str(tmp_path / "key"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    board, port = ProgressBoard(), free_port()
    board.update(phase="Training", step=STEPS, total_steps=500, attempt=4)
    routes = PageRoutes(board, JobFolder(job, job), [*PROGRAM, str(job), f"--model={MODEL}"]).routes()
    server = Server(application(board, list, pages=routes), port, "127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    program = (
        "import sys, httpx; from grpo_worker.controller.relay_page import relay;"
        f"relay(sys.stdin, sys.stdout, httpx.Client(base_url='{url}', timeout=60))"
    )
    relay = Relay(lambda: Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True))
    local = LocalServer(relay.get, 0)
    threads = [threading.Thread(target=one.run, daemon=True) for one in (server, local)]
    for thread in threads:
        thread.start()
    yield Live(local.url, board, url)
    local.stop()
    relay.close()
    server.stop()
    for thread in threads:
        thread.join(10)


async def validated(page: Page) -> dict[str, dict[str, list[list[float]]]]:
    found = await page.value("runPage.data.validation.sets")
    return {one["name"]: {curve["name"]: curve["points"] for curve in one["curves"]} for one in found}


async def open_all(page: Page) -> None:
    await page.value("document.getElementById('more').open = true")
    await page.until("document.querySelectorAll('figure[data-metric]').length === runPage.data.series.length")


async def test_a_file_draws_every_point_of_the_metrics_and_asks_nobody(job: Path) -> None:
    url = page_file(job, f"--total={STEPS}")
    async with browser_page() as page:
        await page.open(url)
        await open_all(page)
        written = metrics_of(job)
        assert await series(page) == written
        drawn = dict(await page.value(DRAWN))
        assert drawn == {name: len(points) for name, points in written.items()}
        assert [STEPS, len(RESTARTS)] == await page.value(
            "[document.querySelectorAll('#phases g[data-step]').length,"
            "document.querySelectorAll('#faults .mark.of-restart').length]"
        )
        assert await page.value("[...document.querySelectorAll('#idle polyline')].length") == 2
        assert "Succeeded" in await page.value("document.querySelector('header').textContent")
        assert await validated(page) == validations_of(job)
        points = STEPS // 10 + 1
        assert await page.value(VALIDATED) == [
            [name, part, [points] * count, count, int(part == "score" and name == KEPT.set)]
            for name in ("aime", "math-500") for part, count in (("score", 1), ("pass@k", 4))
        ]  # fmt: skip
        mean, half = next((p[1], p[2]) for p in validations_of(job)[KEPT.set]["score"] if p[0] == KEPT.step)
        said = await page.value("document.getElementById('validation-note').textContent")
        readings = "[...document.querySelectorAll('figure[data-set] .legend')].map((n) => n.textContent)"
        assert [text.count("±") for text in await page.value(readings)] == [4, 4]
        assert f"step {KEPT.step} is kept as the best of {KEPT.set}: {mean:.3g} ± {half:.3g}" in said
        assert page.requests == [url] and not page.problems
    record_from_test("experience", {"page_points_equal": sum(map(len, written.values()))})


async def test_a_run_of_many_steps_keeps_the_extremes_of_every_interval(tmp_path: Path) -> None:
    folder, steps = tmp_path / "long", 3000
    write_records(folder, range(1, steps + 1))
    url = page_file(folder)
    assert (folder / "run.html").stat().st_size < 1 << 20
    async with browser_page() as page:
        await page.open(url)
        found, width = await series(page), await page.value("runPage.data.width")
        for name, written in metrics_of(folder).items():
            expected = set()
            for first in range(0, steps + 1, width):
                inside = [tuple(p) for p in written if first <= p[0] < first + width]
                expected |= {choose(inside, key=lambda p: p[1]) for choose in (min, max) if inside}
            assert {tuple(point) for point in found[name]} == expected
        assert "no spike is lost" in await page.value("document.getElementById('bounds').textContent")


async def test_new_steps_appear_without_a_reload_and_repeated_ones_are_replaced(
    job: Path, live: Live
) -> None:
    async with browser_page() as page:
        await page.open(live.url)
        assert await series(page) == metrics_of(job)
        await page.value("window.marker = 'the same page'")
        write_records(job, [STEPS + 1, STEPS + 2])
        live.board.update(step=STEPS + 2, message="a message of the controller")
        await page.until(f"runPage.data.last.step === {STEPS + 2}")
        assert await series(page) == metrics_of(job)
        head = await page.value("document.querySelector('header').textContent")
        assert f"step {STEPS + 2} of 500" in head and "a message of the controller" in head
        again = {"actor/entropy": -1.0, "wall_time": 1.8e9}
        write_records(job, range(100, STEPS + 4), lambda step: record(step, **again))
        await page.until(f"runPage.data.last.step === {STEPS + 3}")
        assert await series(page) == metrics_of(job)
        assert await page.value("window.marker") == "the same page"
        assert not page.problems
        base = live.url.removesuffix("page")
        assert page.requests and all(request.startswith(base) for request in page.requests)


async def test_new_validations_appear_without_a_reload_and_repeated_ones_are_replaced(
    job: Path, live: Live
) -> None:
    async with browser_page() as page:
        await page.open(live.url)
        await page.value("window.marker = 'the same page'")
        write_validations(job, [STEPS + 10], Best(STEPS + 10, "math-500"))
        await page.until(f"runPage.data.validation.last === {STEPS + 10}")
        assert await validated(page) == validations_of(job)
        assert [one[2][0] for one in await page.value(VALIDATED)] == [STEPS // 10 + 2] * 4
        await page.until("document.querySelector('figure[data-set=math-500] circle.best')")
        write_validations(job, [STEPS], KEPT)  # the run has gone back
        await page.until(f"runPage.data.validation.last === {STEPS}")
        assert await validated(page) == validations_of(job)
        assert not await page.value("document.querySelector('figure[data-set=math-500] circle.best')")
        assert await page.value("window.marker") == "the same page" and not page.problems


async def test_the_page_says_when_the_controller_is_away_and_goes_on_when_it_is_back(live: Live) -> None:
    async with browser_page() as page:
        await page.open(live.url)
        key = os.environ[FILE]
        os.rename(key, f"{key}.away")
        await page.until("document.getElementById('status').textContent.includes('no answer')")
        os.rename(f"{key}.away", key)
        await page.until("document.getElementById('status').textContent.includes('live')")


async def test_any_group_of_any_step_can_be_asked_for(live: Live, job: Path) -> None:
    many = [f"Question {index}" for index in range(12)]
    rollouts = write_samples(job, 90, many, ANSWERS)
    async with browser_page() as page:
        await page.open(live.url)
        await page.value(
            "(i => {i.value = 90; i.dispatchEvent(new Event('change'));})"
            "(document.querySelector('#samples input'))"
        )
        await page.until("document.querySelectorAll('#samples circle').length === 12")
        await page.value(
            "document.querySelector('[data-prompt=\"11\"]').dispatchEvent(new MouseEvent('click'))"
        )
        await page.until("document.querySelector('.prompt .text').textContent === 'Question 11'")
        shown = await page.value("[...document.querySelectorAll('.answer .text')].map((n) => n.textContent)")
        written = [s for s in rollouts.samples if s.prompt_index == 11]
        assert sorted(shown) == sorted(ANSWERS[(11 + s.number) % len(ANSWERS)] for s in written)


async def test_hostile_text_is_shown_and_does_nothing(live: Live, job: Path) -> None:
    write_samples(job, STEPS, [f"prompt {text}" for text in HOSTILE], HOSTILE)
    write_restarts(job, (STEPS, "job", HOSTILE[0]))
    write_validations(job, [0, STEPS], Best(STEPS, HOSTILE[1]), [*HOSTILE, "__proto__"])
    live.board.update(message=HOSTILE[1])
    write_records(job, [STEPS + 1], lambda step: record(step) | {HOSTILE[1]: 1.0})
    for url in (page_file(job), live.url):
        async with browser_page() as page:
            await page.open(url)
            for prompt in range(len(HOSTILE)):
                await page.value(
                    f"document.querySelector('#samples [data-prompt=\"{prompt}\"]')"
                    ".dispatchEvent(new MouseEvent('click'))"
                )
                text = json.dumps(f"prompt {HOSTILE[prompt]}")
                await page.until(f"document.querySelector('.prompt .text').textContent === {text}")
                for coloring in range(4):
                    await page.value(f"document.querySelectorAll('.colorings button')[{coloring}].click()")
                    shown = await page.value(
                        "[...document.querySelectorAll('.answer .text')].map((n) => n.textContent)"
                    )
                    assert sorted(shown) == sorted(HOSTILE)
            sets = "[...document.querySelectorAll('figure[data-set]')].map((n) => n.dataset.set)"
            assert list(dict.fromkeys(await page.value(sets))) == [*HOSTILE, "__proto__"]
            await open_all(page)
            await asyncio.sleep(4)  # a poll, and what images and scripts would have loaded
            assert await page.value("window.hacked") is None
            assert await page.value("document.querySelectorAll('img, script:not([type])').length") == 1
            assert not [request for request in page.requests if "evil" in request]
            assert not page.problems


async def test_nobody_gets_the_page_without_the_key_or_the_secret_path(live: Live) -> None:
    paths = ("page", "v1/page/data", "v1/page/steps?after=0&time=0", "v1/page/samples?step=1")
    base = live.url.removesuffix("page")
    async with httpx.AsyncClient(timeout=60) as http:
        for path in paths:
            assert (await http.get(f"{live.controller}/{path}")).status_code == 401
            assert (await http.get(httpx.URL(live.url).join(f"/{path}"))).status_code == 404
            headers = {"host": "evil.example"}
            assert (await http.get(f"{base}{path}", headers=headers)).status_code == 404
        assert (await http.get(f"{base}v1/status")).status_code == 404, "only the page is relayed"
        found = await http.get(f"{base}v1/page/samples?step=7")
        assert found.status_code == 404 and found.json() == {"error": "there are no samples of step 7"}


async def test_tokens_are_colored_by_their_log_probabilities(job: Path) -> None:
    url = page_file(job, f"--total={STEPS}")
    async with browser_page() as page:
        await page.open(url)
        await page.value("document.querySelectorAll('.colorings button')[1].click()")
        cells: list[Any] = await page.value(
            "[...document.querySelectorAll('.answer:first-child .token')].map("
            "(n) => [n.textContent, Number(n.style.backgroundColor.match(/([\\d.]+)\\)/)[1])])"
        )
        tokens = await page.value("runPage.data.samples.steps.at(-1).shown[0].answers[0].tokens")
        assert [text for text, _ in cells] == tokens["pieces"]
        for (_, color), log_prob in zip(cells, tokens["trainer"], strict=True):
            assert color == pytest.approx((1 - 2.718281828**log_prob) * 0.85, abs=0.006)
        if os.environ.get("GRPO_RECORD") == "1":
            images = REPO / "docs" / "images"
            images.mkdir(exist_ok=True)
            curves, scores, steps, samples = (f"main section:nth-child({number})" for number in range(1, 5))
            (images / "run-page-curves.png").write_bytes(await page.picture("header", curves))
            (images / "run-page-validation.png").write_bytes(await page.picture(scores))
            (images / "run-page-steps.png").write_bytes(await page.picture(steps))
            (images / "run-page-samples.png").write_bytes(await page.picture(samples))
