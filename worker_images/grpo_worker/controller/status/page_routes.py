"""Routes of the run's page in the controller, which holds nothing of it.

Pages and samples are made by a program beside the controller, one at a time. New steps are read from the end
of the log.
"""

import subprocess
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_operator.api.messages import ControllerStatus
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.run_page.html import policy
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.records import kept_checkpoint, new_records, new_recoveries, new_validations
from grpo_worker.run_page.snapshot import summary
from grpo_worker.run_page.validations import validations

PROGRAM = (sys.executable, "-m", "grpo_worker.controller.show_page")
_SECONDS = 120  # for a program, which reads the store
_READERS = 4  # of new steps at a time
_HEADERS = {
    "content-security-policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class PageRoutes:
    """Answers ``GET /page`` and below ``/v1/page/``: ``data``, ``steps`` and ``samples``.

    ``program``: prints pages, see ``show_page``.
    """

    def __init__(self, board: ProgressBoard, folder: JobFolder, program: Sequence[str] = PROGRAM) -> None:
        self._board, self._folder, self._program = board, folder, program
        # A queue of requests for a store that does not answer would keep the operator's requests waiting.
        self._busy, self._reading = threading.Semaphore(1), threading.Semaphore(_READERS)

    def routes(self) -> list[Route]:
        """Return the routes, which need the key of the job's pods."""
        return [
            Route("/page", lambda _: self._made("text/html; charset=utf-8", "--live")),
            Route("/v1/page/data", lambda _: self._made("application/json", "--data")),
            Route("/v1/page/steps", self._steps),
            Route("/v1/page/samples", self._samples),
        ]

    def _steps(self, request: Request) -> Response:
        """Return the status, and a summary of the steps after ``after``, whose record is of ``time``.

        And of the validations after step ``validated``; default: of all. Not of all steps if there are many.
        ``new`` is null if the record of ``after`` or of ``validated`` has been replaced since.
        """
        given = request.query_params
        try:
            after, time = int(given["after"]), float(given["time"])
            validated = int(given.get("validated", -1))
        except (KeyError, ValueError) as error:
            why = f"after=STEP, time=SECONDS and validated=STEP are numbers: {error}"
            return _problem(HTTPStatus.BAD_REQUEST, why)
        if not self._reading.acquire(blocking=False):
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "the store is slow: try again")
        try:
            new = self._new(after, time, validated)
        finally:
            self._reading.release()
        return JSONResponse({"status": status(self._board.get()), "new": new}, headers=_HEADERS)

    def _new(self, after: int, time: float, validated: int) -> dict[str, Any] | None:
        found = new_records(self._folder, after, time)
        scores = new_validations(self._folder, validated)
        if found is None or scores is None:
            return None
        kept = kept_checkpoint(self._folder) if scores or validated >= 0 else None
        before, records = (found[0], found[1:]) if found else ({"step": after, "wall_time": time}, [])
        more = {"validation": validations(scores, kept, Limits())}
        return summary(records, new_recoveries(self._folder, after), Limits(), before) | more

    def _samples(self, request: Request) -> Response:
        given = request.query_params
        try:
            options = [f"--{name}={int(given[name])}" for name in ("step", "prompt") if name in given]
        except ValueError as error:
            return _problem(HTTPStatus.BAD_REQUEST, f"step and prompt are numbers: {error}")
        if "step" not in given:
            return _problem(HTTPStatus.BAD_REQUEST, "step=NUMBER is missing")
        return self._made("application/json", *options)

    def _made(self, kind: str, *options: str) -> Response:
        """Return what the program prints."""
        if not self._busy.acquire(blocking=False):
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "another page is being made: try again")
        try:
            done = subprocess.run(
                [*self._program, *options], capture_output=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return _problem(HTTPStatus.GATEWAY_TIMEOUT, f"the store has not answered for {_SECONDS} s")
        finally:
            self._busy.release()
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            return _problem(HTTPStatus.NOT_FOUND, lines[-1] if lines else "the page cannot be made")
        return Response(done.stdout, media_type=kind, headers=_HEADERS)


def status(now: ControllerStatus) -> dict[str, Any]:
    """Return what the head of the page shows of the controller's status (pure)."""
    restarts = now.restarts
    return {
        "phase": now.phase,
        "message": now.message,
        "step": now.step,
        "total": now.total_steps or None,
        "attempt": now.attempt,
        "restarts": restarts.job + restarts.infrastructure,
    }


def _problem(code: HTTPStatus, why: str) -> Response:
    return JSONResponse({"error": why}, code, headers=_HEADERS)
