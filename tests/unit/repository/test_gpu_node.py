"""Packs for machines without a network: pieces, trees, images, environment, what is built, verdicts."""

import hashlib
import io
import json
import os
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import demo, gobuild, images, nvidia, packed
from grpo_devcluster.gpu_node import archives, debian, oci, pack, pods, unpack
from grpo_devcluster.gpu_node.pieces import CALL_BYTES, MANIFEST, Manifest, Piece, cut, into_calls
from grpo_devcluster.paths import REPO, tree_key
from grpo_devcluster.stages import StageError


def _piece(name: str, size: int) -> Piece:
    return Piece(name, 0, size, "0" * 64)


def test_an_archive_larger_than_a_call_is_cut_and_comes_back_whole() -> None:
    content = bytes(range(256)) * 10
    parts = cut("x-1", content, limit=1000)
    assert [piece.bytes for piece, _ in parts] == [1000, 1000, 560]
    assert [piece.file for piece, _ in parts] == ["x-1.txz.0", "x-1.txz.1", "x-1.txz.2"]
    assert b"".join(chunk for _, chunk in parts) == content
    assert parts[2][0].sha256 == hashlib.sha256(content[2000:]).hexdigest()


def test_calls_are_within_the_limit_and_later_groups_come_later() -> None:
    node = [_piece("a", 60), _piece("b", 50), _piece("c", 40), _piece("d", 30)]
    jobs = [_piece("e", 15), _piece("f", 90)]
    manifest = into_calls([node, jobs], limit=100)
    calls = {piece.archive: piece.call for piece in manifest.pieces}
    assert calls == {"a": 1, "c": 1, "b": 2, "d": 2, "e": 2, "f": 3}
    assert manifest.calls == 3
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_piece_that_no_call_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"bytes is {CALL_BYTES + 1}, .*cut big-1 into parts"):
        _piece("big-1", CALL_BYTES + 1)


def test_an_archive_depends_on_content_alone(tmp_path: Path) -> None:
    trees = []
    for name, mode, time in (("a", 0o700, 1), ("b", 0o755, 2)):
        tree = tmp_path / name
        (tree / "bin").mkdir(parents=True)
        (tree / "bin" / "tool").write_text("x")
        (tree / "bin" / "tool").chmod(mode)
        (tree / "link").symlink_to("bin/tool")
        os.utime(tree / "bin" / "tool", (time, time))
        trees.append(archives.tar(tree))
    assert trees[0] == trees[1]
    archives.extract(archives.compress(trees[0]), tmp_path / "c")
    assert (tmp_path / "c" / "link").read_text() == "x"
    assert (tmp_path / "c" / "bin" / "tool").stat().st_mode & 0o777 == 0o755


def _bring(received: Path, call: int, manifest: Manifest, contents: dict[str, bytes]) -> None:
    folder = received / f"call-{call}"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(manifest.to_json())
    for piece in manifest.pieces:
        if piece.call == call:
            (folder / piece.file).write_bytes(contents[piece.file])


def _pack(tmp_path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Return a pack of two archives, of which the second is cut into parts for two calls."""
    pieces, contents = [], {}
    for name in ("one", "two"):
        tree = tmp_path / name
        tree.mkdir()
        (tree / name).write_bytes(os.urandom(300))
        packed_tree = archives.compress(archives.tar(tree))
        for piece, chunk in cut(f"{name}-1", packed_tree, 400 if name == "two" else 10_000):
            pieces.append(piece)
            contents[piece.file] = chunk
    return into_calls([[pieces[0]], pieces[1:]], limit=pieces[0].bytes + 400), contents


def test_pieces_are_unpacked_as_their_calls_come(tmp_path: Path) -> None:
    manifest, contents = _pack(tmp_path)
    assert manifest.calls == 2
    received, target = tmp_path / "received", tmp_path / "target"
    _bring(received, 1, manifest, contents)
    assert unpack.unpack(received, target) == [2]
    assert (target / "one").exists() and not (target / "two").exists()
    _bring(received, 2, manifest, contents)
    assert unpack.unpack(received, target) == []
    assert (target / "two").read_bytes() == (tmp_path / "two" / "two").read_bytes()


def test_a_damaged_piece_and_a_mixture_of_packs_are_named(tmp_path: Path) -> None:
    manifest, contents = _pack(tmp_path)
    damaged = contents | {"one-1.txz.0": b"x"}
    _bring(tmp_path / "a", 1, manifest, damaged)
    with pytest.raises(StageError, match=r"one-1\.txz\.0: sha256 is .*Bring call 1 again"):
        unpack.unpack(tmp_path / "a", tmp_path / "target")
    _bring(tmp_path / "b", 1, manifest, contents)
    _bring(tmp_path / "b", 2, Manifest(manifest.pieces[1:]), contents)
    with pytest.raises(StageError, match="are of different packs"):
        unpack.unpack(tmp_path / "b", tmp_path / "target")
    with pytest.raises(StageError, match="bring build/gpu-node/call-1 first"):
        unpack.unpack(tmp_path / "c", tmp_path / "target")


def test_packed_tools_come_before_the_machines_and_their_libraries_after() -> None:
    inherited = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}
    found = packed.tool_environment(Path("/p"), inherited)
    assert found["PATH"].split(":")[:2] == ["/p/tools", "/p/debian/usr/sbin"]
    assert found["PATH"].endswith(":/usr/bin:/bin")
    assert found["LD_LIBRARY_PATH"].startswith("/usr/local/nvidia/lib64:/p/debian/usr/lib/")
    assert packed.tool_environment(Path("/p"), found) == found
    assert packed.tool_environment(Path("/p"), {})["LD_LIBRARY_PATH"].startswith("/p/")


def test_pods_mount_the_environment_but_not_the_folder_of_the_driver(tmp_path: Path) -> None:
    for folder in ("usr/bin", "usr/lib", "usr/local/nvidia/lib64", "usr/local/cuda-13.0", "opt/torch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    mounts = packed.host_mounts(Path("/opt/torch"), Path("/usr"), tmp_path)
    assert mounts == [Path(p) for p in ("/usr/bin", "/usr/lib", "/opt/torch", "/usr/local/cuda-13.0")]
    assert packed.host_mounts(Path("/usr/lib/venv"), Path("/usr/local"), tmp_path)[2:] == mounts[3:]


def test_with_a_pack_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = gobuild.binary("etcd")
    monkeypatch.setattr(gobuild, "PACK", tmp_path)
    taken = gobuild.binary("etcd")
    assert (taken.parent, taken.name) == (tmp_path / "bin", built.name)
    assert gobuild.module_directory("kuberay", "x") == tmp_path / "sources" / "kuberay"
    assert not gobuild.available("etcd")
    with pytest.raises(StageError, match=r"lacks etcd as pinned in this checkout.*gpu-node-pack"):
        gobuild.build_all(("etcd",))
    taken.parent.mkdir()
    taken.touch()
    gobuild.build_all(("etcd",))
    assert gobuild.available("etcd")


def test_a_pack_without_tools_or_images_is_named(tmp_path: Path) -> None:
    (tmp_path / "debian").mkdir()
    with pytest.raises(StageError, match=r"has no images\. Bring the calls"):
        packed.require_parts(tmp_path)
    (tmp_path / "images").mkdir()
    packed.require_parts(tmp_path)


def test_the_projects_wheel_is_told_from_those_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's dependencies lie beside it, and the first by name is one of them."""
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in ("aiohttp-3.14.5-py3-none-any.whl", "grpo_operator-0.1.0-py3-none-any.whl"):
        (dist / name).touch()
    for name in ("operator", "worker_images", "pyproject.toml"):
        (tmp_path / name).touch()
    monkeypatch.setattr(images, "REPO", tmp_path)
    parts = (tmp_path / "operator", tmp_path / "worker_images", tmp_path / "pyproject.toml")
    (dist / ".key").write_text(tree_key(*parts))
    assert images.build_wheel().name == "grpo_operator-0.1.0-py3-none-any.whl"


def test_packages_without_rays_command_are_refused_and_scripts_run_any_python(tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    (folder / "bin").mkdir(parents=True)
    with pytest.raises(StageError, match=r"has no bin/ray: install ray\[default\]"):
        pack._site(folder)
    (folder / "bin" / "ray").write_text("#!/home/me/python\nimport ray\n")
    (folder / "bin" / "py-spy").write_bytes(b"\x7fELF\xff\n")
    pack._site(folder)(tmp_path)
    copied = tmp_path / packed.SITE / "bin"
    assert (copied / "ray").read_text() == "#!/usr/bin/env python3\nimport ray\n"
    assert (copied / "py-spy").read_bytes() == b"\x7fELF\xff\n"


def test_only_what_opens_the_driver_is_built_with_cgo() -> None:
    for name in ("nvidia-device-plugin", "nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime"):
        component = gobuild.COMPONENTS[name]
        assert gobuild._environment(cgo=component.driver)["CGO_ENABLED"] == "1"
        assert "-Wl,-z,lazy" in " ".join(gobuild._flags(component))
    assert not gobuild.COMPONENTS["containerd"].driver
    assert "lazy" not in " ".join(gobuild._flags(gobuild.COMPONENTS["containerd"]))


def test_containerd_has_two_runtimes_and_uses_nvidias_when_asked() -> None:
    runtimes = tomllib.loads(nvidia.containerd_runtimes())["plugins"]["io.containerd.grpc.v1.cri"][
        "containerd"
    ]
    assert runtimes["default_runtime_name"] == "runc" and sorted(runtimes["runtimes"]) == ["nvidia", "runc"]
    assert nvidia.runtime_class()["handler"] == "nvidia"
    own = tomllib.loads(nvidia.runtime_config())
    assert own["nvidia-container-runtime"]["runtimes"] == ["runc"]
    # NVIDIA's tools give other arguments to a program of another name.
    assert Path(own["nvidia-ctk"]["path"]).name == "nvidia-cdi-hook"


@pytest.mark.parametrize(
    ("gpus", "job"),
    [(0, "tiny-moe"), (1, "deepseek-v3-1b-1gpu"), (2, "deepseek-v3-1b-2gpu"), (8, "deepseek-v3-1b-2gpu")],
)
def test_the_demos_job_fits_the_nodes_gpus(gpus: int, job: str) -> None:
    manifest = demo.manifest_for(gpus)
    assert yaml.safe_load(manifest.read_text())["metadata"]["name"] == manifest.stem == job


def test_the_drivers_folder_is_searched_or_named_as_missing(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with pytest.raises(StageError, match=r"libnvidia-ml\.so\.1 is in none of .*/here"):
        nvidia.driver_folder(f"{here}:", ())
    (here / nvidia.LIBRARY).touch()
    assert nvidia.driver_folder("", (tmp_path, here)) == here


def test_files_of_packages_lie_below_usr_without_documentation() -> None:
    assert debian.place("./sbin/runc") == "usr/sbin/runc"
    assert debian.place("/lib/x86_64-linux-gnu/libz.so.1") == "usr/lib/x86_64-linux-gnu/libz.so.1"
    assert debian.place("./usr/lib/cni/bridge") == "usr/lib/cni/bridge"
    assert debian.place("./library/x") == "library/x"
    assert debian.wanted("usr/lib/cni/bridge", debian.NODE_FILES)
    assert not debian.wanted("usr/lib/cni/dhcp", debian.NODE_FILES)
    assert not debian.wanted("usr/lib/x86_64-linux-gnu/tc/q_atm.so", debian.NODE_FILES)


def test_an_image_has_the_settings_of_its_dockerfile() -> None:
    base = {"PATH": "/usr/bin"}
    operator = oci.dockerfile_settings((REPO / "Dockerfile.operator").read_text(), base)
    assert operator["User"] == "65532:65532"
    assert operator["Entrypoint"][:4] == ["python3", "-m", "kopf", "run"]
    assert "PYTHONPATH=/opt/grpo-operator:/opt/grpo-packages" in operator["Env"]
    trainer = oci.dockerfile_settings((REPO / "Dockerfile.trainer").read_text(), base)
    assert "PATH=/usr/bin:/opt/grpo-operator/bin:/opt/grpo-packages/bin" in trainer["Env"]
    assert "Entrypoint" not in trainer


def test_an_image_archive_names_every_blob_by_its_digest() -> None:
    made = {
        "localhost/a:1": oci.Image([b"base"]),
        "localhost/b:1": oci.Image([b"base", b"own"], {"User": "1"}),
    }
    content = oci.archive(made)
    assert content == oci.archive(dict(reversed(made.items())))
    with tarfile.open(fileobj=io.BytesIO(content)) as layout:
        files = {e.name: layout.extractfile(e).read() for e in layout}  # type: ignore[union-attr]
    blobs = {name.rsplit("/", 1)[1]: data for name, data in files.items() if name.startswith("blobs/")}
    assert len(blobs) == 6 and all(hashlib.sha256(data).hexdigest() == name for name, data in blobs.items())
    index: list[dict[str, Any]] = json.loads(files["index.json"])["manifests"]
    assert [m["annotations"]["io.containerd.image.name"] for m in index] == list(made)
    manifest = json.loads(blobs[index[1]["digest"].removeprefix("sha256:")])
    config = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]


def _log(gpus: list[str], error: float = 0.0) -> str:
    nodes = [f"/dev/nvidia{i}" for i in range(len(gpus))]
    return "a warning\n" + json.dumps({"gpus": gpus, "nodes": nodes, "error": error}) + "\n"


def test_a_pod_that_sees_another_ones_gpu_is_a_fault() -> None:
    assert pods.faults({"a": _log(["u0"]), "b": _log(["u1"])}, 1) == []
    assert pods.faults({"a": _log(["u0"]), "b": _log(["u0"])}, 1) == ["b and a both have u0"]
    assert "asked for 1 GPUs and sees ['u0', 'u1']" in pods.faults({"a": _log(["u0", "u1"])}, 1)[0]
    assert "wrong by 0.5" in pods.faults({"a": _log(["u0"], 0.5)}, 1)[0]
    assert "printed no record: 'Killed'" in pods.faults({"a": "Killed"}, 1)[0]


def test_a_gpu_pod_has_no_privileges_and_asks_for_its_gpus() -> None:
    pod = pods.gpu_pod("x", "image", 2, ["true"], [Path("/opt/torch")])
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "securityContext" not in container
    assert container["volumeMounts"] == [{"name": "host-0", "mountPath": "/opt/torch", "readOnly": True}]


def test_a_pod_waits_for_gpus_only_if_the_scheduler_says_so() -> None:
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    assert pods.waits_for_gpus({"status": {"phase": "Pending", "conditions": [condition]}}) == message
    assert pods.waits_for_gpus({"status": {"phase": "Running", "conditions": [condition]}}) == ""
    other = condition | {"message": "1 Insufficient cpu."}
    assert pods.waits_for_gpus({"status": {"phase": "Pending", "conditions": [other]}}) == ""
    assert pods.waits_for_gpus({}) == ""
