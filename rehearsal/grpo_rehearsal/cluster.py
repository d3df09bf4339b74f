"""The stand-in cluster of a job: engines with their agents, pods of the training pool, and faults."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT
from grpo_rehearsal.durations import Durations
from grpo_rehearsal.job import RehearsedJob, rollout_names, trainer_names
from grpo_rehearsal.network import Network
from grpo_rehearsal.scenario import Scenario
from grpo_rehearsal.standins.agent import StandInAgent
from grpo_rehearsal.standins.batching import Batch
from grpo_rehearsal.standins.engine import Answers, StandInEngine
from grpo_rehearsal.standins.links import GangLinks, Join
from grpo_rehearsal.standins.rank_methods import Job, RankMethods
from grpo_rehearsal.standins.rank_record import PoolRecord
from grpo_rehearsal.standins.ranks import Place, StandInProcesses, infos_of
from grpo_rehearsal.standins.tokens import TokenTable, drawn_lengths
from grpo_rehearsal.timed_pool import PoolWaits
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.roles.host import RankHost
from grpo_worker.weightsync.planner.layouts import EngineShape
from grpo_worker.weightsync.protocol.link_offer import LinkOffer

HEAD_LOST = "Ray's head is lost"
_BLOCK = 32  # tokens between two events of a stand-in engine


@dataclass(slots=True)
class Cluster:
    """Everything that stands in. ``attempts``: processes of each gang so far, the newest last.

    ``links``: of the newest gang. ``record``: of the ranks. ``waits``: of the controller for engines.
    """

    job: RehearsedJob
    scenario: Scenario
    scheduler: Scheduler
    network: Network
    durations: Durations
    hf: dict[str, Any]
    checkpoints: Path
    engines: list[StandInEngine] = field(default_factory=list)
    agents: list[StandInAgent] = field(default_factory=list)
    attempts: list[StandInProcesses] = field(default_factory=list)
    links: GangLinks | None = None
    record: PoolRecord = field(default_factory=PoolRecord)
    waits: PoolWaits = field(default_factory=PoolWaits)
    events: list[tuple[float, str]] = field(default_factory=list)
    cpu_before: dict[str, float] = field(default_factory=dict)  # by thread, until the first step
    _head_back: float = 0.0  # when Ray's head can start processes

    def build(self, end: int) -> None:
        """Create the engines and their addresses. ``end``: id of the token that ends a response."""
        job, durations = self.job, self.durations
        table = TokenTable(int(self.hf["vocab_size"]), end)
        answers = Answers(
            table,
            drawn_lengths(durations.lengths),
            job.spec.data.response_length,
            int(job.engine_arguments.get("stream-interval") or 1),
            "incremental-streaming-output" in job.engine_arguments,
            expert_layers(self.hf) if job.spec.algorithm.routing_replay else None,
        )
        for number, name in enumerate(rollout_names(job)):
            batch = Batch(job.plan.engine.attention_data, durations.capacity(_BLOCK), durations.speed())
            agent_url = f"http://{_address(number)}:{AGENT_PORT}"
            engine = StandInEngine(name, self.scheduler, batch, answers, agent_url)
            agent = StandInAgent(
                engine, self.scheduler, durations.updates(), writer=job.config.writer,
                ranks=job.pool.engine.tensor_parallel, hosts=job.pool.engine.nodes_per_engine,
                bucket_bytes=job.spec.weight_sync.bucket_megabytes << 20,
                version_bytes=int(durations.update_bytes) // job.pool.replicas,
                join=self._join, config=self.hf,
            )  # fmt: skip
            self.network.hosts[_address(number), ENGINE_PORT] = engine
            self.network.hosts[_address(number), AGENT_PORT] = agent
            self.engines.append(engine)
            self.agents.append(agent)
        self.network.names[job.config.rollout_service] = self._addresses
        for number, factor in self.scenario.slow_engines:
            self.engines[number].slowdown = factor
        for number, seconds in self.scenario.late_agents:
            self.agents[number].delay = seconds

    def processes(self, _: Any = None) -> StandInProcesses:
        """Return the processes of a new gang."""
        job, layout = self.job, self.job.plan.layout
        gpus = job.spec.trainer.gpus_per_node
        names = trainer_names(job)
        place = Place(
            [f"10.2.{rank // gpus // 250}.{rank // gpus % 250 + 1}" for rank in range(layout.world)],
            [names[rank // gpus] for rank in range(layout.world)],
        )
        packed = job.spec.trainer.max_tokens_per_gpu is not None
        infos = infos_of(layout.tensor, layout.context, layout.data, layout.pipeline, packed)
        engine = job.plan.engine
        shape = EngineShape(engine.tensor, engine.expert, engine.attention_tensor)
        self.links = GangLinks(self.hf, layout, shape)
        methods = RankMethods(
            Job(job.spec, self.hf, layout, self.durations, self.checkpoints),
            lambda: self.scheduler.now,
            self.links,
            self.record.nbytes,
            dict(self.scenario.slow_ranks),
            self.record.saves,
            late=max(self._head_back - self.scheduler.now, 0.0),
        )
        processes = StandInProcesses(self.scheduler, methods, infos, place, RankHost, self.record)
        self.attempts.append(processes)
        return processes

    def _join(self, offer: LinkOffer) -> Join:
        assert self.links is not None, "an offer comes from a gang"
        return self.links.join(offer)

    def begin_faults(self) -> None:
        """Start the clock of the scenario's faults; called at the begin of the first step."""
        self.cpu_before = self.scheduler.cpu_by_thread()
        scenario, later = self.scenario, self.scheduler.call_later
        for number, when in scenario.engine_deaths:
            later(when, partial(self._kill_engine, number))
        if scenario.hung_rank is not None:
            rank, when = scenario.hung_rank
            later(when, partial(self._on_ranks, f"rank {rank} hangs", lambda p: p.hang(rank)))
        for node, when in scenario.dead_nodes:
            later(when, partial(self._lose_node, node))
        if scenario.lost_head is not None:
            later(scenario.lost_head, self._lose_head)

    def _lose_head(self) -> None:
        """End all ranks: Ray's new head knows none of the old one's processes."""
        self._head_back = self.scheduler.now + self.durations.assumed.head_restart
        everyone = range(self.job.plan.layout.world)
        self._on_ranks(HEAD_LOST, lambda processes: processes.die(everyone))

    def _lose_node(self, node: int) -> None:
        gpus = self.job.spec.trainer.gpus_per_node
        lost = range(node * gpus, (node + 1) * gpus)
        self._on_ranks(f"training pod {node} is lost", lambda processes: processes.die(lost))

    def _on_ranks(self, event: str, fault: Callable[[StandInProcesses], None]) -> None:
        self.events.append((self.scheduler.now, event))
        fault(self.attempts[-1])

    def _kill_engine(self, number: int) -> None:
        self.events.append((self.scheduler.now, f"engine {number} dies"))
        self.engines[number].die()
        self.agents[number].engine_lost()
        self.scheduler.call_later(self.durations.assumed.engine_restart, partial(self._engine_back, number))

    def _engine_back(self, number: int) -> None:
        self.events.append((self.scheduler.now, f"engine {number} answers again"))
        self.engines[number].start()
        self.agents[number].engine_back()

    def _addresses(self) -> list[str]:
        """Return the addresses of the engines whose pods exist."""
        late = dict(self.scenario.late_engines)
        count = len(self.engines)
        return [_address(number) for number in range(count) if late.get(number, 0.0) <= self.scheduler.now]


def _address(engine: int) -> str:
    return f"10.1.{engine // 250}.{engine % 250 + 1}"
