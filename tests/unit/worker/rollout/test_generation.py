"""Generation on stand-in engines in virtual time: admission, continuation, silence, refusals, cancel."""

import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import pytest

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import (
    PromptRefusedError,
    Sample,
    UnfitEngineError,
    sampling_seed,
)
from support.generation_world import HANG, World, Worlds, assert_undisturbed, expected, prompts
from support.stand_in_engines import END


def test_8192_samples_are_in_flight_at_the_limits_of_the_engines(world: Worlds) -> None:
    flagship = world(8, n=16, tokens=8, max_running=1024, seconds=8.0)
    asked = prompts(512)
    seen: list[int] = []
    flagship.at(30.0, lambda: seen.append(sum(engine.running for engine in flagship.engines.values())))
    samples = flagship.generate(asked)
    assert seen == [8192]
    assert_undisturbed(samples, asked, 16, 8)
    assert flagship.loop.time() < 70, "one wave"
    engines_of: dict[int, set[str]] = {}
    for sample in samples:
        engines_of.setdefault(sample.prompt_index, set()).add(sample.engine)
    assert all(len(names) == 1 for names in engines_of.values()), "a prompt's samples share a cache"


def test_engines_keep_a_small_queue_and_never_idle(world: Worlds) -> None:
    busy = world(2, n=4, tokens=50, max_running=32)
    samples = busy.generate(prompts(64))
    assert len(samples) == 256
    assert max(engine.most_waiting for engine in busy.engines.values()) <= 32 + 1
    waves = 256 / 64
    assert busy.loop.time() <= waves * 50 * 0.05 * 1.25 + 2


def test_a_full_kv_cache_limits_the_requests(world: Worlds) -> None:
    small = world(1, n=1, tokens=40, max_running=64, kv_tokens=200, seconds=0.5)
    samples = small.generate(prompts(30, length=20))
    assert len(samples) == 30
    (engine,) = small.engines.values()
    assert engine.most_waiting <= 10, "the rest waits here, where it can go to any engine"


def test_an_engine_that_reports_no_limit_gets_as_many_requests_as_the_job_says(world: Worlds) -> None:
    old = world(1, n=16, tokens=50, assumed=256, max_running=256)
    (engine,) = old.engines.values()
    engine.load = dict  # type: ignore[method-assign]
    running: list[int] = []
    old.at(2.0, lambda: running.append(engine.running))
    assert len(old.generate(prompts(20))) == 320
    assert running == [256]


@pytest.mark.fault(
    row="10",
    point="an engine dies in the middle of eight samples",
    witness="continued samples counted",
    compared="tokens of undisturbed samples",
    partial="stand-in engines",
)
@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "cumulative"])
def test_a_sample_goes_on_elsewhere_when_its_engine_dies(world: Worlds, incremental: bool) -> None:
    pair = world(2, n=4, tokens=1000, incremental=incremental)
    asked = prompts(4)
    pair.at(20.0, lambda: pair.kill("engine-0"))
    samples = pair.generate(asked)
    assert_undisturbed(samples, asked, 4, 1000)
    assert pair.client.counts.continued == 8 and pair.client.counts.retries >= 8
    again = [r for r in pair.engines["engine-1"].requests if len(r["input_ids"]) > 4]
    assert len(again) == 8
    assert all(r["sampling_params"]["max_new_tokens"] == 1004 - len(r["input_ids"]) for r in again)
    assert {e.name for e in pair.table.serving(1)} == {"engine-1"}, "the dead one is suspected"
    assert all(s.spans == () and s.version == 1 for s in samples)


def test_incremental_streams_carry_each_token_once(world: Worlds) -> None:
    one = world(1, n=1, tokens=1000)
    one.generate(prompts(1))
    assert one.engines["engine-0"].tokens_sent == 1000 == one.client.counts.tokens


def test_an_aborted_sample_goes_on_and_its_engine_is_not_suspected(world: Worlds) -> None:
    one = world(1, n=2, tokens=300, aborts={0})
    asked = prompts(1)
    assert_undisturbed(one.generate(asked), asked, 2, 300)
    assert one.client.counts.retries == 1 and len(one.table.serving(1)) == 1


def test_an_engine_that_trickles_for_hours_lives(world: Worlds) -> None:
    slow = world(1, n=2, tokens=66, seconds=110.0)  # a chunk of 64 tokens takes longer than the limit
    asked = prompts(1)
    assert_undisturbed(slow.generate(asked), asked, 2, 66)
    assert slow.loop.time() > 2 * 3600 and slow.client.counts.retries == 0


@pytest.mark.fault(
    row="11",
    point="an engine goes silent while it generates",
    witness="named",
    compared="tokens of undisturbed samples",
    partial="stand-in engines",
)
def test_a_silent_engine_is_named_and_its_samples_go_on(world: Worlds) -> None:
    pair = world(2, n=2, tokens=2000)
    asked = prompts(2)
    pair.at(10.0, lambda: setattr(pair.engines["engine-0"], "silent", True))
    reasons: list[str] = []
    pair.at(10 + HANG + 5, lambda: reasons.extend(e.reason for e in pair.table.entries()))
    samples = pair.generate(asked)
    assert_undisturbed(samples, asked, 2, 2000)
    assert reasons == ["no token for 240 s from any of 2 requests", ""]
    assert pair.client.counts.continued == 2
    assert pair.loop.time() < 10 + HANG + 2000 * 0.05 + 20


@pytest.mark.parametrize("back", [False, True], ids=["still silent", "moves again"])
def test_an_engine_that_is_silent_gets_no_request_although_its_agent_sees_nothing(
    world: Worlds, back: bool
) -> None:
    """An agent that calls its scheduler only for updates reports SERVING all the time."""
    pair = world(2, n=2, tokens=2000)
    engine, asked = pair.engines["engine-0"], prompts(8)
    pair.at(10.0, lambda: setattr(engine, "silent", True))
    for second in range(1, 4000, 7):
        pair.at(float(second), lambda: pair.table.update(pair.entry("engine-0")))
    sent: list[int] = []
    pair.at(10 + HANG + 5, lambda: sent.append(len(engine.requests)))
    if back:
        pair.at(10 + HANG + 10, lambda: setattr(engine, "silent", False))
    later: list[Future[list[Sample]]] = []
    pair.at(10 + HANG + 20, lambda: later.append(pair.client.submit(prompts(9)[8], 1)))
    assert_undisturbed(pair.generate(asked), asked, 2, 2000)
    assert len(later[0].result(120)) == 2
    assert (len(engine.requests) > sent[0]) is back


def test_a_request_that_its_engine_lost_goes_on(world: Worlds) -> None:
    """The engine generates others, so that it is not silent."""
    one = world(1, n=2, tokens=100_000, max_running=8)
    engine = one.engines["engine-0"]
    engine.forgets.add(0)
    one.at(3 * HANG, lambda: setattr(engine, "length", lambda _: 0))  # every answer ends now
    (first, second) = one.generate(prompts(1))
    assert first.ids[-1] == second.ids[-1] == END
    assert one.client.counts.retries == 1 and len(engine.requests) == 3
    assert len(one.table.serving(1)) == 1, "it is not suspected"
    assert HANG < one.loop.time() < 4 * HANG


def test_a_new_request_on_a_slow_engine_disturbs_no_other(world: Worlds) -> None:
    slow = world(1, n=1, tokens=70, seconds=30.0)
    late: list[Future[list[Sample]]] = []
    slow.at(1000.5, lambda: late.append(slow.client.submit(Prompt(1, (7, 8)), 1)))
    asked = prompts(1)
    assert_undisturbed(slow.generate(asked), asked, 1, 70)
    late[0].result(60)
    assert slow.client.counts.retries == 0


def test_too_few_engines_are_named_after_the_timeout(world: Worlds) -> None:
    none = world(1)
    none.table.replace([none.entry("engine-0", reason="")])
    with pytest.raises(TimeoutError, match=r"no engine serves version 2 after 6\d s"):
        none.generate(prompts(1), 2)
    assert len(none.generate(prompts(1))) == 2, "the next request has all its time"


def _outage(pair: World) -> list[Prompt]:
    """All engines die at 20 s, for longer than samples wait; one sample of each prompt is complete."""
    for name in pair.engines:
        pair.at(20.0, partial(pair.kill, name))
    asked = prompts(3)
    short = {sampling_seed(3, prompt.index, 0) for prompt in asked}
    for engine in pair.engines.values():
        engine.length = lambda seed: 100 if seed in short else 10**9
    with pytest.raises(TimeoutError, match="no engine serves version 1"):
        pair.generate(asked)
    for engine in pair.engines.values():
        engine.alive = True
    pair.table.replace([pair.entry(name) for name in pair.engines])
    return asked


def test_an_outage_of_all_engines_costs_no_token(world: Worlds) -> None:
    pair = world(2, tokens=1000)
    asked = _outage(pair)
    before = [len(engine.requests) for engine in pair.engines.values()]
    samples = pair.generate(asked)
    assert [len(sample.ids) for sample in samples] == [97, 1000] * 3
    assert all(tuple(s.ids[:96]) == expected(asked[s.prompt_index], s.number, 96) for s in samples)
    later = [r for e, n in zip(pair.engines.values(), before, strict=True) for r in e.requests[n:]]
    assert len(later) == 3, "the complete ones are not generated again"
    assert all(len(request["input_ids"]) > 4 + 300 for request in later), "they go on from their tokens"


@pytest.mark.parametrize("change", ["version", "restart"])
def test_after_a_change_of_weights_nothing_of_an_outage_is_used(world: Worlds, change: str) -> None:
    pair = world(2, tokens=1000)
    asked = _outage(pair)
    version = 1 + (change == "version")
    if change == "restart":
        pair.client.forget()
    for engine in pair.engines.values():
        engine.version, engine.length = version, lambda _: 10**9
    pair.table.replace([pair.entry(name) for name in pair.engines])
    before = [len(engine.requests) for engine in pair.engines.values()]
    assert_undisturbed(pair.generate(asked, version), asked, 2, 1000)
    later = [r for e, n in zip(pair.engines.values(), before, strict=True) for r in e.requests[n:]]
    assert [len(request["input_ids"]) for request in later] == [4] * 6


@pytest.mark.parametrize("in_stream", [True, False], ids=["stream", "status"])
def test_a_prompt_that_every_engine_refuses_is_named(world: Worlds, in_stream: bool) -> None:
    four = world(4, refuses=lambda ids: ids[0] == 2001, refuses_in_stream=in_stream)
    asked = prompts(3)
    groups = four.submit(asked)
    with pytest.raises(PromptRefusedError, match=r"refuses to sample: HTTP 400: too long \(") as caught:
        groups[1].result()
    assert caught.value.prompt == asked[1] and isinstance(caught.value, UnfitEngineError)
    assert_undisturbed([*groups[0].result(), *groups[2].result()], [asked[0], asked[2]], 2, 200)
    assert len(four.table.serving(1)) == 4, "an engine that refuses a prompt is well"
    assert four.client.counts.refused == 1


def test_a_request_that_one_engine_refuses_goes_to_another(world: Worlds) -> None:
    pair = world(2, n=1)
    pair.engines["engine-0"].refuses = lambda _: True
    asked = prompts(1)
    assert_undisturbed(pair.generate(asked), asked, 1, 200)
    assert len(pair.table.serving(1)) == 2


def test_an_engine_with_an_internal_error_is_suspected(world: Worlds) -> None:
    pair = world(2, n=1)
    pair.engines["engine-0"].status = 500
    asked = prompts(1)
    assert_undisturbed(pair.generate(asked), asked, 1, 200)
    assert [e.name for e in pair.table.serving(1)] == ["engine-1"]


def test_all_tokens_of_a_sample_come_from_one_version(world: Worlds) -> None:
    pair = world(2, n=1, tokens=1000)
    asked = prompts(1)
    pair.at(10.0, lambda: setattr(pair.engines["engine-0"], "version", 2))
    (sample,) = pair.generate(asked)
    assert (sample.version, sample.spans, sample.engine) == (1, (), "engine-1")
    assert tuple(sample.ids) == expected(asked[0], 0, 1000)
    assert len(pair.engines["engine-1"].requests[0]["input_ids"]) == 4, "from the start"


def test_a_partial_rollout_goes_on_with_newer_weights_and_its_spans_say_where(world: Worlds) -> None:
    pair = world(2, n=1, tokens=1000, partial=True)

    def replaced() -> None:
        pair.kill("engine-0")
        pair.engines["engine-1"].version = 2
        pair.table.update(pair.entry("engine-1"))

    pair.at(10.0, replaced)
    asked = prompts(1)
    (sample,) = pair.generate(asked)
    assert tuple(sample.ids) == expected(asked[0], 0, 1000)
    (first, cut), (second, end) = sample.spans
    assert (first, second, end) == (1, 2, 1000) and 150 <= cut <= 200 and sample.version == 1
    assert len(pair.engines["engine-1"].requests[0]["input_ids"]) == 4 + cut


def test_a_cancelled_generation_ends_its_requests(world: Worlds) -> None:
    one = world(1, n=8, tokens=10**9, max_running=16, seconds=1.0)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        awaited = thread.submit(one.client.generate, prompts(8), 1, stop)
        while one.client.in_flight == 0:
            time.sleep(0.01)
        stop.set()
        with pytest.raises(CancelledError):
            awaited.result(60)
    deadline = time.monotonic() + 10
    while one.client.in_flight or one.client.queued or one.transport.open:
        assert time.monotonic() < deadline, (one.client.in_flight, one.client.queued, one.transport.open)
        time.sleep(0.01)
    assert one.client.stalled(0) == "", "nothing is awaited"


def test_a_stall_is_told_with_its_reason(world: Worlds) -> None:
    one = world(1, n=1, silent=True)
    told: list[str] = []
    one.at(HANG + 30, lambda: told.append(one.client.stalled(200)))
    one.at(HANG + 40, lambda: setattr(one.engines["engine-0"], "silent", False))
    one.at(HANG + 50, lambda: one.table.replace([one.entry("engine-0")]))
    assert len(one.generate(prompts(1))) == 1
    assert told == ["no token arrived for 200 s: engine-0: no token for 240 s from any of 1 requests"]


def test_answers_of_hours_are_no_stall_while_tokens_arrive(world: Worlds) -> None:
    slow = world(1, n=2, tokens=4000, seconds=2.0)  # a chunk of 64 tokens every two minutes
    told: list[str] = []
    for hour in (1, 2):
        slow.at(3600.0 * hour, lambda: told.append(slow.client.stalled(200)))
    assert_undisturbed(slow.generate(prompts(1)), prompts(1), 2, 4000)
    assert told == ["", ""] and slow.loop.time() > 7200


def test_samples_of_a_validation_wait_behind_all_others_and_have_parameters_of_their_own(
    world: Worlds,
) -> None:
    busy = world(1, n=4, tokens=8, max_running=4, seconds=8.0)
    asked = prompts(3)
    sampler = busy.client.sampler(
        {"max_new_tokens": 3, "temperature": 0.0, "stop_token_ids": [END]}, n=1, seed=0
    )
    ended: list[str] = []
    with busy.loop.held():
        groups = [busy.client.submit(asked[0], 1)]  # fills the engine
        validated = sampler.submit(Prompt(2**40, asked[0].ids), 1)
        groups += [busy.client.submit(prompt, 1) for prompt in asked[1:]]
        for name, group in (("validation", validated), *(("training", group) for group in groups)):
            group.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
    (sample,) = validated.result(120)
    assert_undisturbed([sample for group in groups for sample in group.result(120)], asked, 4, 8)
    # It was asked for second, but gets an engine when the last sample of the training has one.
    assert ended.index("validation") >= 2, ended
    assert (sample.prompt_index, len(sample.ids)) == (2**40, 3)


@pytest.mark.parametrize(("share", "engines"), [(0.01, 1), (0.5, 2), (0.6, 3), (1.0, 4)])
def test_a_validation_on_a_share_of_the_engines_leaves_the_others_to_the_training(
    world: Worlds, share: float, engines: int
) -> None:
    busy = world(4, n=4, tokens=40, max_running=4)
    asked = prompts(4)
    sampler = busy.client.sampler(
        {"max_new_tokens": 80, "temperature": 0.0, "stop_token_ids": [END]}, n=1, seed=0, share=share
    )
    with busy.loop.held():
        validated = [sampler.submit(Prompt(2**40 + one, (1, 2, one)), 1) for one in range(40)]
        generate = lambda: groups.extend(busy.client.submit(prompt, 1) for prompt in asked)  # noqa: E731
        groups: list[Future[list[Sample]]] = []
        busy.loop.call_soon_threadsafe(busy.loop.call_later, 2.0, generate)
    responses = [sample for group in validated for sample in group.result(120)]
    assert {sample.engine for sample in responses} == {f"engine-{number}" for number in range(engines)}
    samples = [sample for group in groups for sample in group.result(120)]
    assert_undisturbed(samples, asked, 4, 40)
    if share < 1:
        assert {sample.engine for sample in samples} & {f"engine-{n}" for n in range(engines, 4)}


def test_a_validation_prompt_that_its_share_of_the_engines_refuses_is_refused(world: Worlds) -> None:
    strict = world(3, n=1, tokens=8)
    strict.engines["engine-0"].refuses = lambda ids: True
    sampler = strict.client.sampler(
        {"max_new_tokens": 3, "temperature": 0.0, "stop_token_ids": [END]}, n=1, seed=0, share=0.3
    )
    with strict.loop.held():
        validated = sampler.submit(Prompt(2**40, (1, 2)), 1)
    with pytest.raises(PromptRefusedError, match="engine-0 refuses"):
        validated.result(120)
    assert [len(engine.requests) for engine in strict.engines.values()] == [3, 0, 0]


def test_a_validation_goes_on_when_its_share_of_the_engines_is_lost(world: Worlds) -> None:
    dying = world(3, n=1, tokens=8)
    sampler = dying.client.sampler(
        {"max_new_tokens": 100, "temperature": 0.0, "stop_token_ids": [END]}, n=1, seed=0, share=0.3
    )
    with dying.loop.held():
        dying.loop.call_soon_threadsafe(dying.loop.call_later, 3.0, lambda: dying.kill("engine-0"))
        validated = sampler.submit(Prompt(2**40, (1, 2)), 1)
    (sample,) = validated.result(120)
    assert sample.engine == "engine-1" and len(sample.ids) == 100
