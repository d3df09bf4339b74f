"""A reward server in a process of its own, which dies or hangs with a request if there is such a fault.

    GRPO_TEST_FAULTS=FOLDER python reward_program.py HOST PORT

The controller notes the step whose samples are judged: see whole_controller.
"""

import os
import signal
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from support.at_points import FOLDER, REWARD_DIES, REWARD_HANGS, STEP, fire, pending


async def judge(request: Request) -> JSONResponse:
    items = (await request.json())["items"]
    for point, number in ((REWARD_DIES, signal.SIGKILL), (REWARD_HANGS, signal.SIGSTOP)):
        for fault in pending(point, noted_step()):
            fire(fault, os.getpid())
            os.kill(os.getpid(), number)
    return JSONResponse({"scores": [float(len(item["solution_str"]) % 2) for item in items]})


def noted_step() -> int:
    file = Path(os.environ[FOLDER]) / STEP
    return int(file.read_text()) if file.exists() else 0


if __name__ == "__main__":
    application = Starlette(routes=[Route("/", judge, methods=["POST"])])
    uvicorn.run(application, host=sys.argv[1], port=int(sys.argv[2]), log_level="warning")
