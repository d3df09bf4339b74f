"""Arguments of SGLang's server that depend on the pod, and the copies of its certificate."""

import stat
import time
from pathlib import Path

import pytest

from grpo_operator.render.certificates import RENEWED
from grpo_worker.rollout.sglang import engine_tls
from support.pod_tls import PodTls, owner


@pytest.fixture
def pod(tmp_path: Path) -> PodTls:
    return PodTls(tmp_path / "pod", "m" * 64, owner("GRPOJob", "a", "aaaa1111-1"))


def test_a_pod_without_certificates_and_with_ipv4_adds_nothing(tmp_path: Path) -> None:
    assert engine_tls.own_arguments(tmp_path / "copies") == []
    assert not (tmp_path / "copies").exists()


def test_a_pod_with_ipv6_only_listens_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_tls, "only_ipv6", lambda: True)
    assert engine_tls.own_arguments(tmp_path / "copies") == ["--host", "::"]


def test_users_of_a_served_model_have_a_key_of_their_own(
    pod: PodTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "api-key"
    key.write_text("of-users\n")
    monkeypatch.setenv("GRPO_API_KEY_FILE", str(key))
    assert engine_tls.own_arguments(tmp_path / "copies") == ["--api-key", "of-users"]
    with pod.inside():
        arguments = engine_tls.own_arguments(tmp_path / "copies")
    assert arguments.count("--api-key") == 1 and arguments[-1] == "of-users", "not that of a job"


def test_the_server_gets_a_certificate_that_only_its_user_can_read(pod: PodTls, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    with pod.inside():
        arguments = engine_tls.own_arguments(copies)
    given = dict(zip(arguments[0::2], arguments[1::2], strict=False))
    assert given["--ssl-certfile"] == str(copies / "tls.crt")
    assert given["--ssl-keyfile"] == str(copies / "tls.key")
    assert "--enable-ssl-refresh" in arguments
    assert arguments[-2:] == ["--api-key", (pod.folder / "generate").read_text()]
    for name in ("tls.crt", "tls.key"):
        assert (copies / name).read_text() == (pod.folder / name).read_text()
        assert stat.S_IMODE((copies / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(copies.stat().st_mode) == 0o700


def test_renewed_files_are_written_into_the_same_inodes_which_sglang_watches(
    pod: PodTls, tmp_path: Path
) -> None:
    engine_tls.copy(pod.folder, tmp_path)
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    before = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in (key, certificate)]
    pod.see(time.time() - RENEWED.total_seconds())
    engine_tls.copy(pod.folder, tmp_path)
    assert certificate.read_text() == (pod.folder / "tls.crt").read_text()
    assert [file.stat().st_ino for file in (key, certificate)] == [inode for inode, _ in before]
    assert key.stat().st_mtime_ns == before[0][1], "an unchanged file is not written again"
    assert certificate.stat().st_mtime_ns > before[1][1]
