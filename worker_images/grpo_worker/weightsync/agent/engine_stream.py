"""Engine stream: the agent that leads an update lets all ranks connect, each to the agent of its host."""

import threading
from collections.abc import Sequence

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.rank_streams import RankStreams
from grpo_worker.weightsync.protocol.agent_stream import LOOPBACK, places_of_hosts
from grpo_worker.weightsync.protocol.direct_load import MARK

# In the answer of an engine without this project's plugin: it takes the stream for a process group of its
# own, and its first rank tries to listen at the agent's port.
_LISTENS = "EADDRINUSE"


class EngineStream(RankStreams):
    """Streams to the ``ranks`` ranks of an engine that loads them directly, or to those of its first host.

    ``further_ports``: at which the agents of the engine's further hosts expect their ranks, by host; each
    host has equally many ranks. ``direct``: whether the engine can load directly. Raises EngineError if the
    engine does not join.
    """

    def __init__(
        self, engine: Engine, name: str, ranks: int, timeout: float, address: str = LOOPBACK,
        further_ports: Sequence[int] = (),
    ) -> None:  # fmt: skip
        own = ranks // (1 + len(further_ports))
        super().__init__(name, range(own), timeout, address)
        try:
            joined = threading.Event()
            accepted = self._threads.submit(self.accept, joined.is_set)
            place = places_of_hosts([self.port, *further_ports]) if further_ports else address
            try:
                self.direct = MARK in engine.join_group(place, self.port, name, ranks, 0)
            except EngineError as error:
                if _LISTENS not in str(error):
                    raise
                self.direct = False
            finally:
                joined.set()
            missing = accepted.result()
            if self.direct and missing:
                raise EngineError(f"{name}: {missing} of {own} ranks have not connected")
        except BaseException:
            self.close()
            raise
