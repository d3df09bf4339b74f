"""What the controller says of an object store that it cannot use."""

import importlib
import sys
from pathlib import Path

import pytest

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.clock import SYSTEM_CLOCK
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.recovery.object_store import await_store

_REGISTRY = importlib.import_module("fsspec.registry")._registry  # fsspec hides the module by its content


def test_an_image_without_the_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_REGISTRY, "gs", raising=False)  # as in a process that has not loaded it
    for name in ("gcsfs", "gcsfs.core", "gcsfs.retry", "grpo_worker.common.google_storage"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = StoreSpec(uri="gs://runs/jobs")
    store = JobFolder.of(spec, Path("/store/x")).store
    with pytest.raises(ValueError, match=r"store\.uri=gs://runs/jobs: the image has no driver .*gcsfs"):
        await_store(store, spec, print, SYSTEM_CLOCK)
