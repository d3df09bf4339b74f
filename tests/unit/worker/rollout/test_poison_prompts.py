"""Prompts that make engines fail are dropped; prompts that meet failing engines are not."""

import asyncio
import functools
from concurrent.futures import Future
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import PromptRefusedError, Sample
from grpo_worker.weightsync.protocol.version import Version
from support.generation_world import HANG, World, Worlds, assert_undisturbed, prompts
from support.objects import job, spec_of
from support.rollout_fakes import WANTED, Even

POISON = 2001  # first token of prompt 1


class Agents:
    """Restarts engines that die ``seconds`` later; counts how often each died."""

    def __init__(self, world: World, seconds: float = 40.0) -> None:
        self.world, self.seconds = world, seconds
        self.deaths = dict.fromkeys(world.engines, 0)
        for name, engine in world.engines.items():
            engine.died = lambda name=name: self.died(name)  # type: ignore[misc]

    def died(self, name: str) -> None:
        self.deaths[name] += 1
        self.world.table.suspect(name, "engine does not answer")
        asyncio.get_running_loop().call_later(self.seconds, self._restart, name)

    def _restart(self, name: str) -> None:
        engine = self.world.engines[name]
        engine.alive, engine.silent, engine.running, engine.used = True, False, 0, 0
        self.world.table.update(self.world.entry(name, restarts=self.deaths[name]))


def poison(world: World, harm: str, at: int = 4) -> None:
    """Let sequences of prompt 1 with ``at`` tokens or more do ``harm`` on all engines."""
    for engine in world.engines.values():
        engine.poison = lambda ids: harm if ids[0] == POISON and len(ids) >= at else ""


def others(groups: "list[Future[list[Sample]]]") -> list[Sample]:
    return [sample for number, group in enumerate(groups) if number != 1 for sample in group.result(120)]


def assert_dropped(world: World, asked: list[Prompt], match: str, tokens: int) -> None:
    groups = world.submit(asked)
    with pytest.raises(PromptRefusedError, match=match) as caught:
        groups[1].result(120)
    assert caught.value.prompt == asked[1]
    assert_undisturbed(others(groups), [p for p in asked if p.index != 1], 2, tokens)
    assert world.client.counts.refused == 1


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("harm", ["status", "stream", "abort"])
def test_a_prompt_that_every_engine_answers_by_an_error_is_dropped(
    world: Worlds, harm: str, count: int
) -> None:
    pool = world(count, tokens=5000)
    poison(pool, harm)
    if count > 1:  # with one engine the answers to other prompts end the suspicion
        _poll(pool)
    assert_dropped(pool, prompts(6), r"fails to sample: .* \(3 times, on engines that serve other", 5000)
    assert len(pool.table.serving(1)) == count, "a healthy engine is not suspected for long"
    tries = sum(r["input_ids"][0] == POISON for e in pool.engines.values() for r in e.requests)
    assert tries <= 20, "attempts become rare"


@pytest.mark.parametrize("at", [4, 500], ids=["at once", "at token 496"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_prompt_that_kills_its_engine_is_dropped_after_few_lives(
    world: Worlds, count: int, at: int
) -> None:
    pool = world(count, tokens=3000)
    agents = Agents(pool)
    poison(pool, "death", at)
    assert_dropped(pool, prompts(6), "fails to sample: ReadError", 3000)
    assert 3 <= sum(agents.deaths.values()) <= 6


def test_a_prompt_that_is_left_alone_with_one_engine_is_dropped(world: Worlds) -> None:
    """No other prompt runs that could show that the engine works: one that was sampled before is asked."""
    one = world(1, n=1, tokens=1000)
    agents = Agents(one)
    poison(one, "death", 900)
    others([*one.submit(prompts(1)), Future()])
    with pytest.raises(PromptRefusedError):
        one.client.submit(prompts(2)[1], 1).result(120)
    assert agents.deaths == {"engine-0": 5}, "two until it is suspected, three alone"


def _restarted(world: Worlds) -> tuple[World, list[str]]:
    """Return a pool whose engine has just started again; the list gets the reasons of suspicions."""
    one, reasons = world(1, n=1, tokens=200), list[str]()
    others([*one.submit(prompts(1)), Future()])  # the life before has served prompts
    one.table.update(one.entry("engine-0", restarts=1))
    suspect = one.table.suspect

    def noted(name: str, reason: str) -> None:
        reasons.append(reason)
        suspect(name, reason)

    one.table.suspect = noted  # type: ignore[method-assign]
    _poll(one)
    return one, reasons


def test_an_engine_that_has_answered_nothing_yet_is_not_blamed_for_a_bad_prompt(world: Worlds) -> None:
    """The first failure has two suspects; then the engine serves another prompt before it is tried again."""
    one, reasons = _restarted(world)
    poison(one, "status")
    with pytest.raises(PromptRefusedError, match=r"500.* \(3 times, on engines that serve other"):
        one.submit(prompts(2))[1].result(120)
    assert len(reasons) == 1 and len(one.table.serving(1)) == 1


def test_a_prompt_is_not_blamed_for_an_engine_that_has_answered_nothing_yet(world: Worlds) -> None:
    one, reasons = _restarted(world)
    one.engines["engine-0"].poison = lambda _: "status"
    one.at(one.loop.time() + 1800.0, lambda: poison(one, ""))
    began, asked = one.loop.time(), prompts(2)[1:]
    assert_undisturbed(_until_served(one, asked), asked, 1, 200)
    assert one.loop.time() - began >= 1800 and one.client.counts.refused == 0
    assert reasons, "the fault fired"


def test_evidence_survives_the_parking_of_the_job(world: Worlds) -> None:
    """Each death leaves no engine for longer than samples wait, and the prompt is submitted again."""
    one = world(1, n=2, tokens=1000)
    agents = Agents(one, seconds=90.0)
    poison(one, "death")
    asked, parked, dropped = prompts(4), 0, False
    while not dropped:
        groups = one.submit(asked)
        ends = [group.exception(120) for group in groups]
        parked += any(isinstance(end, TimeoutError) for end in ends)
        dropped = isinstance(ends[1], PromptRefusedError)
        assert parked < 20
    assert parked >= 3 and agents.deaths["engine-0"] == 4
    groups = one.submit(asked)
    assert isinstance(groups[1].exception(120), PromptRefusedError), "other groups ended by TimeoutError"
    while any(groups[k].exception(120) for k in (0, 2, 3)):
        groups = one.submit(asked)
    assert_undisturbed(others(groups), [p for p in asked if p.index != 1], 2, 1000)
    assert agents.deaths["engine-0"] == 4 and one.client.counts.refused == 1


def test_a_prompt_that_silences_its_engine_is_dropped(world: Worlds) -> None:
    pool = world(4, tokens=20_000)
    agents = Agents(pool)
    poison(pool, "silence")

    def probe(name: str) -> None:
        if pool.engines[name].silent:
            agents.died(name)

    for name in pool.engines:
        for k in range(1, 8):
            pool.at(k * (HANG + 60), functools.partial(probe, name))
    assert_dropped(pool, prompts(6), "fails to sample: TimeoutError", 20_000)


def _kept(pool: World, asked: list[Prompt], tokens: int) -> None:
    """Generate as a controller that parks and submits again; no prompt is dropped."""
    assert_undisturbed(_until_served(pool, asked), asked, 2, tokens)
    assert pool.client.counts.refused == 0


def _until_served(pool: World, asked: list[Prompt]) -> list[Sample]:
    while True:
        try:
            return pool.generate(asked)
        except TimeoutError:
            assert pool.loop.time() < 10_000


def test_no_prompt_is_dropped_when_all_engines_die_again_and_again(world: Worlds) -> None:
    pool = world(4, tokens=2000, max_running=4)
    agents = Agents(pool, seconds=20.0)

    def crash() -> None:
        for name, engine in pool.engines.items():
            engine.alive = False
            agents.died(name)

    for k in range(12):  # each life lasts for 40 tokens
        pool.at(5.0 + 22.0 * k, crash)
    _kept(pool, prompts(8), 2000)


def test_no_prompt_is_dropped_when_engines_die_one_after_the_other(world: Worlds) -> None:
    pool = world(8, tokens=1000, max_running=4)
    agents = Agents(pool)
    for k, name in enumerate(pool.engines):

        def crash(name: str = name) -> None:
            pool.engines[name].alive = False
            agents.died(name)

        pool.at(4.0 + 1.5 * k, crash)
    _kept(pool, prompts(8), 1000)


@pytest.mark.parametrize("harm", ["status", "stream", "abort", "death"])
def test_no_prompt_is_dropped_when_engines_fail_at_all_prompts(world: Worlds, harm: str) -> None:
    """After an hour the engines work again."""
    pool = world(4, tokens=200)
    Agents(pool, seconds=30.0)
    for engine in pool.engines.values():
        engine.poison = lambda _: harm
    pool.at(3600.0, lambda: poison(pool, ""))
    _poll(pool)
    _kept(pool, prompts(8), 200)
    assert pool.loop.time() > 3600


def _step(world: Worlds, harm: str) -> RolloutBatch:
    """Return the batch of a job's first step, in which the fourth prompt does ``harm``."""
    pool = world(4, tokens=1000)
    Agents(pool)
    source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096)
    bad = list(source.take(4, after=0)[3].ids)
    for engine in pool.engines.values():
        engine.poison = lambda ids: harm if ids[: len(bad)] == bad else ""
    client: Any = pool.client
    reward: Any = Even()
    return StepSampler(spec_of(job()), source, client, reward).sample(Version(1), StepTimer())


@pytest.mark.parametrize("harm", ["stream", "death"])
def test_a_replay_replaces_the_dropped_prompt_by_the_same_one(world: Worlds, harm: str) -> None:
    """The record of the drop goes to the ledger; all other samples are those of a step without harm."""
    first, again, calm = _step(world, harm), _step(world, harm), _step(world, "")
    assert list(first.refused) == list(again.refused) == [3] and not calm.refused
    assert [p.index for p in first.prompts] == [0, 1, 2, *range(4, WANTED + 1)]
    assert [p.index for p in first.taken] == list(range(WANTED + 1)), "the dropped prompt is consumed"
    answers = [{s.uid: (s.ids, s.log_probs) for s in batch.samples} for batch in (first, again, calm)]
    assert list(answers[0]) == list(answers[1]) and answers[0] == answers[1]
    assert all(answers[0][uid] == answers[2][uid] for uid in answers[0].keys() & answers[2].keys())


def test_half_of_the_engines_may_be_broken(world: Worlds) -> None:
    pool = world(8, tokens=3000)
    for name in list(pool.engines)[:4]:
        pool.engines[name].poison = lambda _: "status"
    _poll(pool)
    _kept(pool, prompts(16), 3000)


def test_pods_that_leave_count_against_no_prompt(world: Worlds) -> None:
    pool = world(5, n=2, tokens=2000)

    def leave(name: str) -> None:
        pool.engines[name].alive = False
        pool.table.replace([e for e in pool.table.entries() if e.name != name])

    for k in range(4):
        pool.at(4.0 + 34.0 * k, functools.partial(leave, f"engine-{k}"))
    _kept(pool, prompts(4), 2000)


def test_a_new_version_explains_aborted_answers(world: Worlds) -> None:
    pool = world(3, n=1, tokens=3000)
    updates = iter(range(2, 10**6))

    def harm(name: str, ids: list[int]) -> str:
        if ids[0] != POISON or pool.loop.time() > 600:
            return ""
        since = str(next(updates))
        pool.loop.call_later(0.1, lambda: pool.table.update(pool.entry(name, since=since)))
        return "abort"

    for name, engine in pool.engines.items():
        engine.poison = functools.partial(harm, name)
    asked = prompts(3)
    assert_undisturbed(pool.generate(asked), asked, 1, 3000)
    assert pool.loop.time() > 600 and pool.client.counts.refused == 0


def test_requests_that_never_reach_an_engine_count_against_no_prompt(world: Worlds) -> None:
    """The agents say that the engines serve, but connections are refused."""
    pool = world(4, n=2, tokens=200)
    _poll(pool)
    pool.generate(prompts(4))
    for name in pool.engines:
        pool.kill(name)
    pool.at(600.0, lambda: _revive(pool))
    asked = [Prompt(9, (7, 8))]
    _kept(pool, asked, 200)


def _revive(pool: World) -> None:
    for engine in pool.engines.values():
        engine.alive = True


def _poll(pool: World) -> Any:
    """Let the agents report every half second that their engines serve, if they live."""

    def poll() -> None:
        for name, engine in pool.engines.items():
            entry = pool.table.entry(name)
            if engine.alive and entry is not None and entry.state is not EngineState.SERVING:
                pool.table.update(pool.entry(name, restarts=entry.restarts))
        if pool.client.in_flight or pool.client.queued or pool.loop.time() < 4000:
            pool.loop.call_later(0.5, poll)

    pool.at(0.5, poll)
