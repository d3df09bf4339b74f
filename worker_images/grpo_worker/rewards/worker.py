"""Entry point of an answer worker: ``python -m grpo_worker.rewards.worker DESCRIPTOR``."""

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from grpo_worker.rewards.child import hide_memory


def main() -> None:
    """Receive an object, then call its methods, one after the other, until the connection closes.

    A call is (method, arguments); its answer is (result, None) or (None, the error's repr), because not
    every exception can be pickled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller closes the connection when it ends
    hide_memory()
    connection = Connection(int(sys.argv[1]))
    try:
        worker = connection.recv()
        while True:
            method, arguments = connection.recv()
            answer: tuple[Any, str | None]
            try:
                answer = getattr(worker, method)(*arguments), None
            except Exception as error:  # noqa: BLE001 - a task's library may raise anything
                answer = None, repr(error)
            connection.send(answer)
    except (EOFError, ConnectionError):  # the controller has ended
        return


if __name__ == "__main__":
    main()
