"""Link of the engine: the agent makes the engine join and leave; the weights bypass the agent."""

import logging
from dataclasses import dataclass

from grpo_worker.common.patient_http import UNLIMITED
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.direct_load import KEPT, MARK
from grpo_worker.weightsync.protocol.link_offer import LinkOffer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedLink:
    """A link that the engine has joined. ``gang``: of the trainer ranks in it."""

    name: str
    gang: str


def join(engine: Engine, offer: LinkOffer) -> tuple[JoinedLink, bool]:
    """Make the engine join the offered link; return the link, and whether the engine still has its weights.

    An engine loses them when it records what its ranks keep, which it does once. Raises EngineError if the
    engine does not join or does not support links.
    """
    link = JoinedLink(offer.name, offer.gang)
    engine.check_responsive()
    place = offer.address, offer.port, offer.name, offer.world, offer.trainers, offer.backend
    answer = engine.join_group(*place, timeout=UNLIMITED)
    if MARK not in answer:
        leave(engine, link)
        raise EngineError(f"{offer.name}: the engine does not support direct loads; {KEPT}")
    return link, KEPT in answer


def leave(engine: Engine, link: JoinedLink) -> None:
    """Make the engine leave a link. Errors are logged, because the engine may be gone."""
    try:
        engine.leave_group(link.name)
    except EngineError as error:
        log.info("leaving %s: %s", link.name, error)
