"""Failures: named in one line, counted, and the end of the job when they repeat."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from ray.exceptions import RayTaskError

from grpo_operator.api.errors import cause_of, last_error_line
from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.restart_policy import RestartPolicySpec
from grpo_operator.api.v1alpha1.status import Phase, RestartCounts
from grpo_operator.api.weight_path import WeightPath
from grpo_worker.common.errors import one_line
from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.main import run
from grpo_worker.controller.recovery.failures import FailureHandler, comes_from_outside
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.rewards.base import RewardError
from grpo_worker.rollout.sample_watch import SampleWatch
from grpo_worker.rollout.sglang.engine_process import ErrorLog, last_error, report
from support.clocks import FakeClock
from support.objects import job, spec_of

TRACE = """\x1b[36mray::TrainerWorker.start()\x1b[39m (pid=12, ip=10.0.0.1)
  File "/x/actor.py", line 3, in start
KeyError: 'num_experts'
"""
SGLANG = """[2026-11-23 05:00:01] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/deepseek_v2.py", line 519, in __init__
    if config.topk_method == "noaux_tc":
AttributeError: 'DeepseekV3Config' object has no attribute 'topk_method'

[2026-11-23 05:00:02] Received sigquit from a child process. It usually means the child failed.
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACE, "KeyError: 'num_experts'"),
        (SGLANG, "AttributeError: 'DeepseekV3Config' object has no attribute 'topk_method'"),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
        ),
        ("usage: x\nx: error: unrecognized arguments: --nope", "x: error: unrecognized arguments: --nope"),
        ("", ""),
    ],
)
def test_the_last_error_is_found_without_colours(text: str, line: str) -> None:
    assert last_error_line(text) == line


def test_a_ray_task_is_named_by_what_it_raised() -> None:
    error = RayTaskError("start", TRACE, KeyError("num_experts"))
    assert one_line(error) == "KeyError: 'num_experts'"
    assert one_line(OSError("disk\n full")) == "OSError: disk full"


def test_causes_are_equal_but_for_numbers_and_addresses() -> None:
    assert cause_of("no answer in 61 s from 0x7f3a") == cause_of("no answer in 120 s from 0x91")
    assert cause_of("KeyError: 'a'") != cause_of("KeyError: 'b'")


@pytest.fixture
def handler(tmp_path: Path) -> FailureHandler:
    live = LiveFields(1, RestartPolicySpec(backoff_seconds=5))
    return FailureHandler(RunRecord.load(tmp_path / "run.json"), live)


def test_the_third_failure_of_one_cause_ends_the_job(handler: FailureHandler) -> None:
    assert handler.count("start: KeyError: 'x' at 1", "job") == 5
    assert handler.count("start: KeyError: 'x' at 2", "job") == 10
    assert not RunRecord.load(handler.record.path).failed
    handler.count("start: KeyError: 'x' at 3", "job")
    assert handler.record.failed == "start: KeyError: 'x' at 3 (3 times in a row)"
    again = RunRecord.load(handler.record.path)
    assert again.failed and again.same_failures == 3, "a controller that restarts knows it"


def test_other_causes_progress_and_infrastructure_do_not_add_up(handler: FailureHandler) -> None:
    for message in ("a", "b", "a", "b"):
        handler.count(message, "job")
    handler.count("b", "job", step=7)
    handler.step_finished(7)
    handler.count("a pod was lost", "infrastructure")
    handler.count("b", "job")
    assert not handler.record.failed and handler.record.restarts == {"job": 6, "infrastructure": 1}


def test_outside_causes_back_off_without_end_and_the_delay_decays(handler: FailureHandler) -> None:
    for seconds in (0, 5, 10, 20, 40, 80, 160, 300, 300):
        assert handler.count("a pod was lost", "infrastructure", step=4) == seconds
    for step in (
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ):  # steps 2 and 3 are replays, the others are finished for the first time
        handler.step_finished(step)
    assert handler.count("a pod was lost", "infrastructure", step=9) == 40
    assert not handler.record.failed
    again = FailureHandler(RunRecord.load(handler.record.path), handler.live)
    assert again.count("a pod was lost", "infrastructure", step=9) == 80, (
        "a controller that restarts knows it"
    )


def test_all_causes_share_one_back_off(handler: FailureHandler) -> None:
    assert handler.count("a pod was lost", "infrastructure") == 0
    assert handler.count("KeyError: 'x'", "job") == 10
    assert handler.count("a pod was lost", "infrastructure") == 10
    assert handler.count("KeyError: 'y'", "job") == 40


def test_a_store_a_server_and_the_network_are_outside() -> None:
    def error(cause: BaseException) -> RewardError:
        made = RewardError("the verifier cannot be asked")
        made.__cause__ = cause
        return made

    request = httpx.Request("POST", "http://verifier")
    for code, outside in ((503, True), (400, False)):
        status = httpx.HTTPStatusError("", request=request, response=httpx.Response(code))
        assert comes_from_outside(error(status)) is outside
    assert comes_from_outside(error(httpx.ConnectError("refused")))
    assert comes_from_outside(OSError("Stale file handle"))
    assert not comes_from_outside(error(KeyError("x"))) and not comes_from_outside(RewardError("no score"))


def test_a_record_of_a_newer_version_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"attempt": 3, "field_of_tomorrow": 1}')
    assert RunRecord.load(tmp_path / "run.json").attempt == 3


def test_replayed_steps_are_no_progress(handler: FailureHandler) -> None:
    for _ in range(3):
        for step in range(1, 15):
            handler.step_finished(step)
        handler.count("KeyError: 'x'", "job", step=15)
    assert "3 times in a row" in handler.record.failed


def test_a_store_that_is_away_is_no_reason_to_stop_counting(
    handler: FailureHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: RunRecord) -> None:
        raise OSError("Stale file handle")

    monkeypatch.setattr(RunRecord, "save", fail)
    for _ in range(3):
        handler.count("KeyError: 'x'", "job")
    assert handler.record.failed


def test_max_restarts_still_ends_a_job_of_many_causes(tmp_path: Path) -> None:
    live = LiveFields(1, RestartPolicySpec(max_restarts=1))
    handler = FailureHandler(RunRecord.load(tmp_path / "run.json"), live)
    handler.count("a", "job")
    handler.count("b", "job")
    assert handler.record.failed == "restartPolicy.maxRestarts (1) used up: b"


class _Loop:
    """Runs nothing."""

    def run(self) -> None: ...


def _config(tmp_path: Path) -> JobConfig:
    spec = spec_of(job(restartPolicy={"backoffSeconds": 0}))
    return JobConfig(
        name="j",
        namespace="default",
        spec=spec,
        rollout_service="service",
        min_available=1,
        fp8=False,
        weight_path=WeightPath(),
        writer="j-1",
        store=tmp_path / "store",
    )


@pytest.mark.parametrize(
    ("errors", "failed", "count"),
    [
        ([ValueError("spec.model.path: no config.json")], "spec.model.path: no config.json", 0),
        ([KeyError("x")] * 3, "KeyError: 'x' (3 times in a row)", 3),
        ([OSError("stale")] * 4 + [KeyError("x")], "", 1),
    ],
    ids=["what-is-missing-ends-at-once", "repeats", "passes"],
)
def test_every_exception_before_the_first_step_counts(
    tmp_path: Path, errors: list[Exception], failed: str, count: int
) -> None:
    board, left = ProgressBoard(), list(errors)

    def build(_: FailureHandler) -> Any:
        if left:
            raise left.pop(0)
        return _Loop()

    run(_config(tmp_path), board, build)
    assert not left
    assert board.get().phase == (Phase.FAILED if failed else Phase.STARTING)
    assert board.get().restarts.job == count
    if failed:
        assert board.get().message == failed


def test_a_resumed_job_that_had_failed_begins(tmp_path: Path) -> None:
    config, begun = _config(tmp_path), list[str]()

    def build(_: FailureHandler) -> Any:
        begun.append("a loop")
        if len(begun) == 1:
            raise ValueError("spec.model.path: no config.json")
        return _Loop()

    for resumes, loops in ((0, 1), (0, 1), (1, 2), (1, 3)):
        board = ProgressBoard()
        run(config.model_copy(update={"resumes": resumes}), board, build)
        assert len(begun) == loops
        assert board.get().phase == (Phase.STARTING if resumes else Phase.FAILED)


def test_controllers_that_die_share_the_back_off(tmp_path: Path) -> None:
    """A controller that dies, here by an exception that nothing handles, can count nothing itself."""
    config, clock = _config(tmp_path), FakeClock()
    config = config.model_copy(update={"spec": spec_of(job(restartPolicy={"backoffSeconds": 5}))})
    starts: list[float] = []

    class DiesError(Exception): ...

    def begin(ends: Callable[[FailureHandler], None]) -> ProgressBoard:
        class Loop(_Loop):
            def __init__(self, failures: FailureHandler) -> None:
                self._failures = failures

            def run(self) -> None:
                starts.append(clock.now())
                ends(self._failures)

        board = ProgressBoard()
        run(config, board, cast(Any, Loop), clock)
        return board

    def die(_: FailureHandler) -> None:
        raise DiesError

    for _ in range(4):
        with pytest.raises(DiesError):
            begin(die)
    assert [after - before for before, after in itertools.pairwise(starts)] == [0, 5, 10]

    def suspend_and_die(failures: FailureHandler) -> None:
        with failures.idle():
            raise DiesError

    with pytest.raises(DiesError):
        begin(suspend_and_die)
    assert clock.now() - starts[-2] == 20
    board = begin(FailureHandler.finished)
    assert starts[-1] == starts[-2], "a suspended job has lost nothing"
    assert board.get().restarts == RestartCounts(), "nothing new"
    begin(FailureHandler.finished)
    record = RunRecord.load(config.store / "run.json")
    assert record.infrastructure_restarts == record.recent_failures == 4 and not record.failed


def test_waiting_without_a_token_is_said_after_the_limit() -> None:
    now = [0.0]
    watch = SampleWatch(lambda: now[0])
    assert watch.stalled(10) == ""
    with watch.waiting():
        now[0] = 9.0
        assert watch.stalled(10) == ""
        watch.problem("no engine serves version 3", unless_known=True)
        watch.problem("engine-0: HTTP 500")
        watch.problem("no engine serves version 3", unless_known=True)
        now[0] = 10.0
        assert watch.stalled(10) == "no token arrived for 10 s: engine-0: HTTP 500"
        watch.moved()
        assert watch.stalled(10) == ""
        now[0] = 30.0
        assert watch.stalled(10) == "no token arrived for 10 s: engines do not respond"
    assert watch.stalled(10) == "", "while trainers compute nothing is awaited"
    with watch.waiting():
        assert watch.stalled(10) == ""


def test_kubelet_gets_the_error_and_not_its_echo(tmp_path: Path) -> None:
    file = tmp_path / "termination-log"
    message = last_error(SGLANG.splitlines(keepends=True))
    report(message, file)
    assert not file.exists(), "outside of a container there is no such file"
    file.touch()
    report(message, file)
    assert file.read_text() == "AttributeError: 'DeepseekV3Config' object has no attribute 'topk_method'"


def test_the_end_of_a_log_is_waited_for_after_its_process_was_reaped() -> None:
    script = "import os, sys, time; os.fork() and os._exit(1); time.sleep(0.3); sys.exit('ValueError: no')"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    log = ErrorLog(process)
    assert process.wait(20) == 1
    assert log.last_error() == "ValueError: no"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import sys; print('out'); print('ValueError: no', file=sys.stderr); sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os, time; os.fork() or time.sleep(30)", 0),
    ],
    ids=["exit-code", "killed", "orphans-do-not-hold-it"],
)
def test_the_first_process_ends_with_its_child(script: str, code: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "grpo_worker.rollout.sglang.engine_process",
        sys.executable,
        "-c",
        script,
    ]
    out, errors = tmp_path / "out", tmp_path / "errors"
    with out.open("w") as stdout, errors.open("w") as stderr:  # no pipes: an orphan would hold them open
        done = subprocess.run(command, stdout=stdout, stderr=stderr, timeout=20, check=False)
    assert done.returncode == code
    if code == 3:
        assert (out.read_text(), errors.read_text()) == ("out\n", "ValueError: no\n")


def test_the_controller_says_what_is_wrong_before_it_imports_torch_or_ray() -> None:
    code = "import sys, grpo_worker.controller.main; sys.exit(bool({'torch', 'ray'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
