"""Files and messages of a newer release that dataclasses and named tuples are made of."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from grpo_worker.checkpointing.store import MARKER, Origin, commit, directory, verify
from grpo_worker.common.known_fields import known
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.volumes.lease import FetchLease, Holder
from grpo_worker.weightsync.agent.host_rendezvous import HostReport
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice
from grpo_worker.weightsync.transport.nixl.agent import Offer
from support.releases import ADDED, of_tomorrow


def test_a_class_gets_the_fields_that_it_has() -> None:
    assert known(Offer, {"metadata": "m", "address": 1, "nbytes": 2, ADDED: 3}) == {
        "metadata": "m", "address": 1, "nbytes": 2,
    }  # fmt: skip
    assert known(Holder, {"writer": "w"}) == {"writer": "w"}, "missing ones are up to the class"
    with pytest.raises(TypeError, match=r"Offer: \[\] is no object"):
        known(Offer, [])  # type: ignore[arg-type]


def test_messages_of_agents_may_have_more_fields() -> None:
    report = HostReport(1, "pod", "process")
    assert HostReport(**known(HostReport, of_tomorrow(asdict(report)))) == report
    experts = RoutedExperts("http://a", "k", 3, 2, 1, 9)
    assert RoutedExperts(**known(RoutedExperts, of_tomorrow(asdict(experts)))) == experts


def test_a_manifest_of_weights_may_have_more_fields() -> None:
    manifest = Manifest(3, 0, 1, 4, "d", (Slice("w", (2,), "bfloat16", 0, 0, 2, 0, 4),), bytes(8))
    assert Manifest.from_json(json.dumps(of_tomorrow(json.loads(manifest.to_json())))) == manifest


def test_a_checkpoint_of_a_newer_image_is_not_damaged(tmp_path: Path) -> None:
    path = directory(tmp_path, 3)
    path.mkdir(parents=True)
    np.save(path / "state.npy", np.zeros(2))
    commit(tmp_path, 3, Origin("model", "TP1"))
    marker = json.loads((path / MARKER).read_text())
    marker |= {ADDED: 1, "origin": marker["origin"] | {ADDED: 1}}
    (path / MARKER).write_text(json.dumps(marker))
    assert verify(path, "model", contents=True) == Origin("model", "TP1")


def test_a_lease_of_a_newer_image_has_its_holder(tmp_path: Path) -> None:
    (tmp_path / "LEASE").write_text(json.dumps({"writer": "w", "pod": "p", "progress": "", ADDED: 1}))
    assert FetchLease(tmp_path, "other", "q").holder() == Holder("w", "p")


def test_a_run_record_keeps_what_a_newer_controller_wrote(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"attempt": 3, "job_restarts": 1, ADDED: {"of": 1}}))
    record = RunRecord.load(file)
    record.count_restart("infrastructure")
    written = json.loads(file.read_text())
    assert written[ADDED] == {"of": 1} and written["attempt"] == 3
    assert (written["job_restarts"], written["infrastructure_restarts"]) == (1, 1)
    assert "others" not in written and "path" not in written
