"""GPU time in the status of a job."""

from grpo_operator.api.v1alpha1.goodput import GoodputStatus
from grpo_operator.plan.status.goodput import goodput_status
from support.objects import controller_status, job, spec_of

SECONDS = {"train": 3600, "generate": 1800, "idle": 600, "replayed": 1200}


def test_the_effective_share_leaves_out_what_was_idle_or_repeated() -> None:
    report = controller_status("Training", gpu_seconds=SECONDS, lost_gpu_seconds={"job": 1800})
    status = goodput_status(None, spec_of(job()), report)
    assert status is not None and status.effective == "75.0" and status.lost_gpu_seconds == {"job": 1800}
    assert status.cost is None and status.cost_per_step is None


def test_spare_gpus_are_held_but_not_used() -> None:
    report = controller_status("Training", gpu_seconds=SECONDS | {"spare": 1800})
    status = goodput_status(None, spec_of(job()), report)
    assert status is not None and status.effective == "60.0"


def test_the_cost_follows_from_a_price() -> None:
    spec = spec_of(job(observability={"pricePerGpuHour": 2.5}))
    report = controller_status("Training", gpu_seconds=SECONDS, step=4)
    status = goodput_status(None, spec, report)
    assert status is not None and (status.cost, status.cost_per_step) == ("5.00", "1.25")


def test_what_is_known_stays_without_a_report() -> None:
    old = GoodputStatus(effective="75.0")
    assert goodput_status(old, spec_of(job()), None) == old
    assert goodput_status(old, spec_of(job()), controller_status("Starting")) == old
