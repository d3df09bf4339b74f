"""Link receiver: lets the engine join a link with the trainer ranks, and receive versions over it.

The bytes bypass the agent. Such a version is not staged in host memory, and cannot be loaded again.
"""

from grpo_worker.weightsync.agent import engine_link
from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.link_calls import LinkCalls
from grpo_worker.weightsync.agent.managed_engine import ManagedEngine
from grpo_worker.weightsync.protocol.direct_load import KEPT
from grpo_worker.weightsync.protocol.link_offer import LinkOffer


class LinkReceiver:
    """Link of one engine. Callers hold the agent's lock, except for ``give_up``.

    ``fetcher``: frees its memory for whole versions when one comes over the link.
    ``double_buffer``: an engine that serves receives versions into a second copy.
    """

    def __init__(self, engine: ManagedEngine, fetcher: Fetcher, double_buffer: bool) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._calls = LinkCalls(engine.client)
        self.double_buffer = double_buffer

    def join(self, offer: LinkOffer) -> None:
        """Let the engine join the offered link in place of its present one. Raises EngineError.

        An engine that serves is paused meanwhile. It is out of service until it has received a version if its
        ranks recorded what they keep, which overwrites their weights.
        """
        engine, client = self._engine, self._engine.client
        engine.leave_link()
        serving, kept = engine.serving, False
        if serving:
            client.pause()
        try:
            engine.link, kept = self._calls.run(offer.name, lambda: engine_link.join(client, offer))
        except EngineError as error:
            kept = KEPT in str(error)
            raise
        finally:
            if serving:
                self._after_join(offer.name, kept)

    def _after_join(self, link: str, kept: bool) -> None:
        """Let an engine serve on, or take one that has lost its weights out of service."""
        if kept:
            self._engine.client.resume()
        else:
            self._engine.on_overwritten(f"joining {link}")

    def receive(self, version: int, link: str, patience: float) -> None:
        """Let the engine receive ``version`` over its link of that name, and commit it. Raises UpdateError.

        ``patience``: seconds that a rank waits for a wave. With a double buffer, an engine that serves goes
        on until it has all bytes.
        """
        engine, installer = self._engine, self._engine.installer
        with engine.updating(version, leave_link_on_error=True):
            joined = engine.link
            if joined is None or joined.name != link:
                raise EngineError(f"not in {link}, but in {joined.name if joined else 'no link'}")
            arguments = link, version, patience, self._calls
            fetched = self.double_buffer and engine.serving
            if fetched:
                installer.fetch(*arguments)
            engine.set_source(None)
            self._fetcher.forget()
            engine.write(version, lambda: installer.receive(*arguments, fetched))
            engine.set_source(joined)

    def give_up(self, link: str) -> None:
        """End the wait for an engine that does not answer a call about ``link``. Thread-safe."""
        self._calls.give_up(link)
