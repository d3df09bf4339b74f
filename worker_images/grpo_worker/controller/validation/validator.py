"""Validator: validates weight versions beside the steps, and keeps the results."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

from grpo_operator.api.messages import ValidationResult
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.best import Best, keep_best, kept_best
from grpo_worker.common.log_records import log_records
from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.generation.group import GroupClient
from grpo_worker.controller.model_files import ModelFiles
from grpo_worker.controller.tracked_samples import FirstSamples, Tracked
from grpo_worker.controller.validation.regression import regression
from grpo_worker.controller.validation.run import Keepers, validate
from grpo_worker.controller.validation.scores import metrics_of
from grpo_worker.controller.validation.setback import ValidationRegressedError, WayBack
from grpo_worker.controller.validation.sets import ValidationSet
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.sampling import validation_params
from grpo_worker.samples.validation_writer import ValidationSampleWriter
from grpo_worker.weightsync.protocol.version import Version

log = logging.getLogger(__name__)
FILE = "validation.jsonl"
_LOOK_SECONDS = 0.2  # between two looks at why a wait might end
Figures = dict[str, dict[str, float]]
Report = Callable[[int, dict[str, float], Sequence[Tracked]], None]


class Validator(Protocol):
    """The part of a validator that the loop uses. ``total_steps``: of the job; it ends with one."""

    total_steps: int

    def begin_attempt(self, step: int, attempt: int, resumed: int) -> None:
        """Forget what was validated after ``step``, and what has not ended.

        ``attempt``: that begins. ``resumed``: step from which the job went on after it was resumed last; -1
        if it never was. Raises as ``finish``.
        """

    def begin(self, version: Version, position: dict[str, Any]) -> None:
        """Start to validate a version that engines serve, if its turn has come and it was not validated.

        ``position``: state of the source of prompts behind those of the steps that use this version.
        """

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until the validation has ended. ``check``: is called meanwhile; its errors end the wait.

        Raises ValidationRegressedError if the job is to end, or to be rolled back, because of its scores.
        """

    def flush(self) -> None:
        """Wait until all results are on the store."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the validations so far."""

    @property
    def results(self) -> list[ValidationResult]:
        """Last and best score of each set, for the status."""


class NoValidator:
    """Validator of a job that names no validation sets."""

    results: list[ValidationResult] = []
    total_steps = 0

    def begin_attempt(self, step: int, attempt: int, resumed: int) -> None:
        """Do nothing."""

    def begin(self, version: Version, position: dict[str, Any]) -> None:
        """Do nothing."""

    def finish(self, check: Callable[[], None]) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return nothing."""
        return {}


class VersionValidator:
    """Validates versions in a thread of its own; a version is validated once, whatever restarts.

    When no engine serves the version, its validation is given up: it is not worth a pause of the training.
    """

    def __init__(
        self, spec: GRPOJobSpec, folder: JobFolder, sets: Sequence[ValidationSet], client: GroupClient,
        samples: ValidationSampleWriter, generates: Callable[[bool], None],
        report: Report, check: Callable[[], None],
    ) -> None:  # fmt: skip
        """``generates``: is called when engines begin and end to respond. ``report``: is called with the
        step, the metrics and some samples of a version. ``check``: see StepLog.
        """
        assert spec.validation is not None
        self._spec, self.total_steps = spec.validation, spec.total_steps
        self._generates, self._report = generates, report
        self._folder = folder
        self._log = StepLog(folder.disk / FILE, check, folder.pieces)
        self._tracked = FirstSamples(spec.observability.trackers.sample_rows)
        self._validate = partial(
            validate, sets, client=client, n=spec.validation.samples_per_prompt,
            pass_score=spec.validation.pass_score, pass_at=spec.validation.pass_at,
            at_once=spec.data.train_batch_size, keeper=Keepers(samples, self._tracked),
        )  # fmt: skip
        self._client, self._samples, self._attempt = client, samples, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="validate")
        self._running: tuple[Version, float, Future[Figures]] | None = None
        self._more: dict[str, Any] = {}  # fields of the records of the running validation
        self._cancelled = threading.Event()
        self._root, self._between = folder.store / "checkpoints", spec.checkpoint.every_steps
        self._check = check
        self._best: tuple[float, int] | None = None  # score of keepBest's set, and the step with it
        self._results: dict[str, ValidationResult] = {}
        self._scores: list[tuple[int, float]] = []  # of keepBest's set, with their steps
        self._position: dict[str, Any] | None = None  # that the last of them was recorded with
        self._resumed = -1
        self._last = -1  # the last version that was validated

    @property
    def results(self) -> list[ValidationResult]:
        """Last and best score of each set, for the status."""
        return list(self._results.values())

    def begin_attempt(self, step: int, attempt: int, resumed: int) -> None:
        """Forget what was validated after ``step``, and what has not ended; see Validator."""
        self._attempt, self._resumed = attempt, resumed
        self._cancelled.set()
        if self._running is not None:
            wait([self._running[2]])
            self._client.forget()
        self._running, self._cancelled = None, threading.Event()
        self._log.truncate(step)
        self._samples.truncate(step)
        self._results, self._last, self._best, self._scores = {}, -1, None, []
        for record in log_records(self._folder, FILE):
            self._note(record["step"], record["set"], record)
        self._keep_best()
        self._raise_if_regressed()

    def begin(self, version: Version, position: dict[str, Any]) -> None:
        """Start to validate a version that engines serve, if its turn has come; see Validator."""
        if self._due(version) and version > self._last:
            validated = self._thread.submit(self._run, version, self._cancelled)
            self._running = version, time.monotonic(), validated
            self._more = {"position": position} if self._spec.on_regression == "rollback" else {}

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until the validation has ended; see Validator."""
        if self._running is None:
            return
        version, began, validated = self._running
        while not wait([validated], _LOOK_SECONDS).done:
            check()
        self._running = None
        try:
            figures = validated.result()
        except (TimeoutError, ConnectionError) as error:
            log.warning("the validation of step %d is given up: %s", version, error)
            return
        seconds = round(time.monotonic() - began, 3)
        records: list[dict[str, Any]] = [
            {"set": name, "seconds": seconds, **found, **self._more} for name, found in figures.items()
        ]
        self._log.append(version, records)
        for record in records:
            self._note(version, record["set"], record)
        self._keep_best()
        self._report(version, metrics_of(figures), self._tracked.samples())
        self._raise_if_regressed()

    def flush(self) -> None:
        """Wait until all results are on the store."""
        self._log.flush()
        self._samples.flush()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the validations so far."""
        return self._samples.metrics()

    def _due(self, version: Version) -> bool:
        if version == 0:
            return self._spec.before_training
        return version % self._spec.every_steps == 0 or version == self.total_steps

    def _run(self, version: Version, cancelled: threading.Event) -> Figures:
        if cancelled.is_set():
            raise CancelledError
        self._generates(True)
        self._samples.begin(version, self._attempt)
        self._tracked.begin()
        complete = False
        try:
            found: Figures = self._validate(version, cancelled=cancelled)
            complete = True
            return found
        finally:
            self._samples.end(complete)
            self._generates(False)

    def _note(self, step: int, name: str, figures: dict[str, Any]) -> None:
        """Note the score of a set for the status."""
        self._last = max(self._last, step)
        score = figures.get("score/mean")
        if score is None:
            return
        if name == self._spec.keep_best:
            self._scores.append((step, score))
            self._position = figures.get("position")
        saved = step > 0 and (step % self._between == 0 or step == self.total_steps)
        if saved and name == self._spec.keep_best and (self._best is None or score > self._best[0]):
            self._best = score, step
        best = self._results.get(name)
        if best is None or score > best.best_score:
            self._results[name] = ValidationResult(
                set=name, step=step, score=score, best_step=step, best_score=score
            )
        else:
            self._results[name] = best.updated(step=step, score=score)

    def _keep_best(self) -> None:
        """Keep the checkpoint with the best score of the set of ``keepBest``."""
        if self._spec.keep_best is None:
            return
        best = None if self._best is None else Best(self._best[1], self._spec.keep_best)
        if best != kept_best(self._root):
            self._check()
            keep_best(self._root, best)

    def _raise_if_regressed(self) -> None:
        """Raise ValidationRegressedError if the scores have fallen, unless all steps are done."""
        if self._spec.on_regression == "continue" or self._last >= self.total_steps:
            return
        margin, most = self._spec.regression_margin, self._spec.regression_validations
        found = regression(self._scores, margin, most, self._resumed)
        if found is None:
            return
        self.flush()  # no checkpoint follows
        kept = "no checkpoint is kept for it"
        if self._best is not None:
            step = self._best[1]
            kept = f"the checkpoint of step {step} is kept: checkpoint.resumeFrom starts another job from it"
        text = found.text(self._spec.keep_best, margin)
        why, back = f"validation.onRegression: {text}", self._way_back(found.since)
        raise ValidationRegressedError(why, kept, back, self._spec.rollbacks)

    def _way_back(self, since: int) -> WayBack | None:
        """Return where a rollback leads to; None: nowhere.

        ``since``: step of the first score that has fallen. A checkpoint from then on is not better.
        """
        if self._spec.on_regression != "rollback" or self._position is None:
            return None
        if self._best is None or self._best[1] >= since:
            return None
        return WayBack(self._best[1], self._position)


def validator_of(
    spec: GRPOJobSpec, folder: JobFolder, sets: Sequence[ValidationSet], client: RolloutClient,
    model: ModelFiles, generates: Callable[[bool], None], report: Report,
    check: Callable[[], None],
) -> Validator:  # fmt: skip
    """Return the validator of a job. ``model``: its files; others as there."""
    if spec.validation is None:
        return NoValidator()
    params = validation_params(spec.algorithm, spec.validation, spec.data.response_length, model.tokens.end)
    sampler = client.sampler(
        params, n=spec.validation.samples_per_prompt, seed=spec.seed, share=spec.validation.engine_share
    )
    samples = ValidationSampleWriter(folder, spec.observability.samples, model.tokenizer.decode_all, check)
    return VersionValidator(spec, folder, sets, sampler, samples, generates, report, check)
