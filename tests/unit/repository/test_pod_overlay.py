"""The devcluster's pods find packages, CUDA and compiled kernels of their machine."""

import os
from pathlib import Path

import pytest

from grpo_devcluster import images, nvidia, packed, paths, pod_overlay
from grpo_devcluster.paths import REPO
from grpo_operator.api import names


def test_packages_that_the_machine_lacks_are_mounted_where_images_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (images, pod_overlay):
        monkeypatch.setattr(module, "PACK", tmp_path)
    without = pod_overlay.pod_overlay()
    (tmp_path / packed.SITE).mkdir()
    overlay = pod_overlay.pod_overlay()
    assert overlay["volumes"][-1]["hostPath"]["path"] == str(tmp_path / packed.SITE)
    assert overlay["volumeMounts"][-1]["mountPath"] == "/opt/grpo-packages"
    assert overlay["volumeMounts"][:-1] == without["volumeMounts"]
    for name in ("trainer", "rollout"):
        assert f":{pod_overlay.PACKAGES} " in (REPO / f"Dockerfile.{name}").read_text()


def test_pods_on_gpus_find_cudas_libraries_and_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the images of GPUs do, in which they are preset: engines load and compile kernels with them."""
    for part in ("cu13", "nccl"):
        (tmp_path / "lib/python3.12/site-packages/nvidia" / part / "lib").mkdir(parents=True)
    (tmp_path / "cuda-13").mkdir()
    (tmp_path / "cuda").symlink_to("cuda-13")
    monkeypatch.setattr(pod_overlay, "environment", lambda: tmp_path)
    monkeypatch.setattr(pod_overlay, "TOOLKIT", tmp_path / "cuda")
    monkeypatch.setattr(pod_overlay, "KERNELS", tmp_path / "kernels")
    for present in (False, True):
        monkeypatch.setattr(nvidia, "present", lambda present=present: present)
        overlay = pod_overlay.pod_overlay()
        found = {variable["name"]: variable["value"] for variable in overlay["env"]}
        libraries = [Path(part).parent.name for part in found.get("LD_LIBRARY_PATH", "").split(":") if part]
        assert libraries == (["cu13", "nccl"] if present else [])
        assert found.get("CUDA_HOME") == (str(tmp_path / "cuda-13") if present else None)
        kept = [mount for mount in overlay["volumeMounts"] if mount["name"] == "kernels"]
        assert [found["TRITON_CACHE_DIR"].startswith(mount["mountPath"]) for mount in kept] == [
            True
        ] * present
        if present:
            assert os.stat(found["TRITON_CACHE_DIR"]).st_mode & 0o777 == 0o777, "pods run as several users"
        assert str(pod_overlay.PACKAGES / "bin") in found["PATH"].split(":"), "ray, which KubeRay starts"


def test_the_folder_in_which_pods_meet_is_removed_with_the_devcluster() -> None:
    assert Path(names.SOCKETS) == paths.SOCKETS
