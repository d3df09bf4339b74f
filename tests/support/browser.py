"""A page in a headless Chromium, driven over the DevTools protocol."""

import asyncio
import base64
import itertools
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from grpo_devcluster.chromium import chromium

_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0",
    "--disable-dev-shm-usage", "--force-color-profile=srgb",
)  # fmt: skip
_LISTENS = re.compile(rb"DevTools listening on ws://(\S+?)/")


class Page:
    """An open page. ``requests``: URLs that it has asked for. ``problems``: errors that it has logged."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], 30)
        assert "error" not in answer, answer["error"]
        return dict(answer["result"])

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), 30)

    async def value(self, expression: str) -> Any:
        """Return the JSON value of an expression in the page."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.value(f"Boolean({expression})"):
            assert asyncio.get_running_loop().time() < deadline, f"{expression}: {self.problems}"
            await asyncio.sleep(0.1)

    async def picture(self, *selectors: str) -> bytes:
        """Return a PNG of elements, from the first to the last one."""
        boxes = [
            await self.value(f"document.querySelector({json.dumps(one)}).getBoundingClientRect().toJSON()")
            for one in selectors
        ]
        left, top = (min(box[side] for box in boxes) for side in ("left", "top"))
        right, bottom = (max(box[side] for box in boxes) for side in ("right", "bottom"))
        margin = 10
        clip = {
            "x": left - margin, "y": top - margin, "width": right - left + 2 * margin,
            "height": bottom - top + margin, "scale": 1,
        }  # fmt: skip
        found = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            parameters = content.get("params", {})
            match content.get("method"):
                case None:
                    self._answers.pop(content["id"]).set_result(content)
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Network.requestWillBeSent":
                    self.requests.append(parameters["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(parameters["exceptionDetails"]))
                case "Log.entryAdded":
                    self.problems.append(parameters["entry"]["text"])


@asynccontextmanager
async def browser_page(width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """Start a browser and yield a page that shows nothing yet."""
    program, environment = chromium()
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            str(program), *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}",
            "about:blank", env=environment, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            host = await asyncio.wait_for(_host(process), 30)
            drain = asyncio.create_task(_drain(process))
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://{host}/json/list") as answer:
                    (target,) = [one for one in await answer.json() if one["type"] == "page"]
                async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Network", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.kill()
            await process.wait()
            drain.cancel()


async def _host(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if found := _LISTENS.search(line):
            return found[1].decode()
    raise AssertionError("Chromium has ended")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    async for _ in process.stderr:
        pass
