"""Certificates and kubeconfigs, made with openssl for one start of the cluster."""

import base64
import json
from pathlib import Path

from grpo_devcluster.paths import RUN
from grpo_devcluster.stages import run

PKI = RUN / "pki"
_REMEDY = "Is openssl installed?"


def make_certificates(node: str, address: str, service_ip: str) -> None:
    """Create the CA, serving certificates, the service-account key and a client certificate per component."""
    PKI.mkdir(parents=True, exist_ok=True, mode=0o700)
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "30", "-subj", "/CN=grpo-devcluster", "-keyout", PKI / "ca.key", "-out", PKI / "ca.crt",
    )  # fmt: skip
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", node]
    addresses = ["127.0.0.1", address, service_ip]
    alternatives = [f"DNS:{n}" for n in names] + [f"IP:{a}" for a in addresses]
    _sign("server", "/CN=kube-apiserver", alternatives)
    _sign("kubelet-server", f"/O=system:nodes/CN=system:node:{node}", alternatives)
    _sign("admin", "/O=system:masters/CN=admin")
    _sign("controller-manager", "/CN=system:kube-controller-manager")
    _sign("scheduler", "/CN=system:kube-scheduler")
    _sign("proxy", "/CN=system:kube-proxy")
    _sign("kubelet", f"/O=system:nodes/CN=system:node:{node}")
    _openssl("genrsa", "-out", PKI / "sa.key", "2048")
    _openssl("rsa", "-in", PKI / "sa.key", "-pubout", "-out", PKI / "sa.pub")


def _sign(name: str, subject: str, alternatives: list[str] | None = None) -> None:
    request, extensions = PKI / f"{name}.csr", PKI / f"{name}.ext"
    _openssl(
        "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-subj", subject, "-keyout", PKI / f"{name}.key", "-out", request,
    )  # fmt: skip
    usage = "extendedKeyUsage=clientAuth,serverAuth\n"
    extensions.write_text(usage + (f"subjectAltName={','.join(alternatives)}\n" if alternatives else ""))
    _openssl(
        "x509", "-req", "-in", request, "-CA", PKI / "ca.crt", "-CAkey", PKI / "ca.key",
        "-CAcreateserial", "-days", "30", "-extfile", extensions, "-out", PKI / f"{name}.crt",
    )  # fmt: skip


def _openssl(*arguments: str | Path) -> None:
    run(["openssl", *arguments], step="making certificates", remedy=_REMEDY)


def kubeconfig(name: str, server: str) -> Path:
    """Write the kubeconfig of one client certificate (JSON is YAML) and return its path."""
    path = RUN / f"{name}.kubeconfig"
    cluster = {"server": server, "certificate-authority-data": _data(PKI / "ca.crt")}
    user = {
        "client-certificate-data": _data(PKI / f"{name}.crt"),
        "client-key-data": _data(PKI / f"{name}.key"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "grpo-devcluster", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "grpo-devcluster", "context": {"cluster": "grpo-devcluster", "user": name}}],
        "current-context": "grpo-devcluster",
    }
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path


def _data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
