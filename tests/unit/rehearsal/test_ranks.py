"""Stand-in ranks of many pods behind the controller's own worker group."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from grpo_rehearsal.durations import Durations
from grpo_rehearsal.job import RehearsedJob
from grpo_rehearsal.standins.links import GangLinks
from grpo_rehearsal.standins.rank_methods import Job, RankMethods
from grpo_rehearsal.standins.rank_record import PoolRecord
from grpo_rehearsal.standins.ranks import Place, StandInProcesses, infos_of
from grpo_rehearsal.standins.tokens import log_probs
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_rehearsal.virtual.threads import virtual_time
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.trainer import TrainerWorker
from grpo_worker.weightsync.planner.layouts import EngineShape

PIPELINE, DATA = 6, 2
WORLD = PIPELINE * DATA


def test_passes_without_gradients_have_micro_batches_of_their_own(two_nodes: RehearsedJob) -> None:
    spec = two_nodes.spec
    trainer = spec.trainer.model_copy(update={"log_prob_max_tokens_per_gpu": 4 * 8192})
    larger = spec.model_copy(update={"trainer": trainer})
    lengths = [2000] * 64
    plain, fewer = (Durations(of, two_nodes.pool, two_nodes.plan) for of in (spec, larger))
    assert fewer.micro_batches(lengths, gradients=True) == plain.micro_batches(lengths, gradients=True)
    assert plain.micro_batches(lengths, gradients=False) == plain.micro_batches(lengths, gradients=True)
    quarter = plain.micro_batches(lengths, gradients=False) / 4
    assert fewer.micro_batches(lengths, gradients=False) == pytest.approx(quarter)
    assert fewer.forward(lengths) < plain.forward(lengths), "the host starts fewer kernels"
    assert fewer.update(lengths) == plain.update(lengths)


def test_results_come_from_the_right_ranks_and_in_the_rows_order(
    small_job: RehearsedJob, tmp_path: Path
) -> None:
    lengths = np.array([9, 4, 30, 12, 7, 7], dtype=np.int32) * 4000
    ids = np.arange(lengths.sum(), dtype=np.int32)
    batch = RaggedBatch(np.full(6, 2, np.int32), lengths, int(lengths.max()), ids)
    durations = Durations(small_job.spec, small_job.pool, small_job.plan)
    job = Job(small_job.spec, {}, small_job.plan.layout, durations, tmp_path)
    # The worker group orders pods by address as text: 10.2.0.10 comes before 10.2.0.2.
    place = Place([f"10.2.0.{n + 1}" for n in range(WORLD)], [f"pod-{n}" for n in range(WORLD)])
    record = PoolRecord()
    with virtual_time(Scheduler()) as scheduler:
        links = GangLinks({}, small_job.plan.layout, EngineShape(4, 1))
        methods = RankMethods(job, lambda: scheduler.now, links, Counter())
        infos = infos_of(1, 1, DATA, PIPELINE)
        group = WorkerGroup(
            TrainerWorker, StandInProcesses(scheduler, methods, infos, place, RankHost, record), 240.0
        )
        group.start({"attempt": 1})
        assert group.ranks == infos
        before = Counter(record.nbytes)
        shared = group.share(batch, 3)
        result = group.call("log_probs", shared.all())
        again = group.call("log_probs", shared.all())
    np.testing.assert_array_equal(result.response["log_probs"], log_probs(batch.response_of(ids)))
    np.testing.assert_array_equal(again.response["log_probs"], result.response["log_probs"])
    fetched = record.nbytes - before
    padded = shared.put_bytes - 2 * 4 * 8  # without the lengths: two steps of four rows, two int32 each
    assert padded > ids.nbytes, "copies of rows fill the steps"
    assert fetched["trainer>trainer"] == padded, "the last stages get the ids from the first ones"
    assert padded < fetched["controller>trainer"] < 1.01 * padded, "once for each column, and the lengths"
