"""Program: asks this pod's controller for paths of the run's page, for a user who may execute it here.

Each line of its input is a path below ``/``, each line of its output a JSON object with ``status``, ``type``
and ``body`` of the answer. It sends the key of the job's pods, which does not leave the pod.
"""

import json
import os
import sys
from typing import Any, TextIO

import httpx

from grpo_operator.api.names import CONTROLLER_PORT
from grpo_worker.common import auth, tls

_SECONDS = 180  # longer than the controller waits for its program


def relay(requests: TextIO, answers: TextIO, client: httpx.Client) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        answers.write(json.dumps(_answer(client, line.strip())) + "\n")
        answers.flush()


def _answer(client: httpx.Client, path: str) -> dict[str, Any]:
    try:
        # Keys change while this runs.
        found = client.get(path, headers=auth.headers())
    except httpx.HTTPError as error:
        why = f"the controller does not answer: {error or type(error).__name__}"
        return {"status": 502, "type": "application/json", "body": json.dumps({"error": why})}
    return {"status": found.status_code, "type": found.headers["content-type"], "body": found.text}


def main() -> None:
    """Relay between standard input and output."""
    os.nice(10)
    with httpx.Client(
        base_url=tls.url("127.0.0.1", CONTROLLER_PORT), verify=tls.own(), timeout=_SECONDS, trust_env=False
    ) as client:
        relay(sys.stdin, sys.stdout, client)


if __name__ == "__main__":
    main()
