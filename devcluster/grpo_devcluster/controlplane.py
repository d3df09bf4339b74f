"""Control plane: etcd, API server, controller-manager and scheduler."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

from grpo_devcluster import processes
from grpo_devcluster.certs import PKI, kubeconfig, make_certificates
from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import KUBECONFIG, LOGS, RUN
from grpo_devcluster.settings import (
    API_PORT,
    ETCD,
    ETCD_PEER,
    GATEWAY,
    NODE,
    POD_CIDR,
    SERVER,
    SERVICE_CIDR,
    SERVICE_IP,
)
from grpo_devcluster.stages import wait_for

AUDIT_LOG = LOGS / "audit.log"
AUDITED_WHOLE = "grpo-replicas"  # a namespace: of operators there the log holds what they write, too
_WHOLE = [f"system:serviceaccounts:{AUDITED_WHOLE}"]
# Requests of the operator where it runs with its own account, without their contents elsewhere.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        {"level": "Metadata", "userGroups": _WHOLE, "resources": [{"group": "", "resources": ["secrets"]}]},
        {"level": "RequestResponse", "userGroups": _WHOLE, "verbs": ["create", "update", "patch", "delete"]},
        {"level": "Metadata", "userGroups": [*_WHOLE, "system:serviceaccounts:grpo-system"]},
        {"level": "None"},
    ],
}
COMPONENTS = ("controller-manager", "scheduler", "proxy", "kubelet", "admin")


def start() -> None:
    """Start the control plane and wait until the API answers."""
    if not (PKI / "admin.crt").exists():
        make_certificates(NODE, GATEWAY, SERVICE_IP)
        for name in COMPONENTS:
            kubeconfig(name, SERVER)
    _etcd()
    _api_server()
    wait_for("kube-apiserver", _ready, 60, processes.log_file("kube-apiserver"))
    _managers()


def audit_log() -> Iterator[str]:
    """Yield the lines of the audit log, the oldest first; those of files that became full, too."""
    for file in sorted(LOGS.glob(f"{AUDIT_LOG.stem}*{AUDIT_LOG.suffix}")):
        with file.open() as lines:
            yield from lines


def _etcd() -> None:
    processes.start(
        "etcd",
        [
            binary("etcd"),
            f"--data-dir={RUN / 'etcd'}",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            f"--listen-peer-urls={ETCD_PEER}",
            f"--initial-advertise-peer-urls={ETCD_PEER}",
            f"--initial-cluster=default={ETCD_PEER}",
            "--unsafe-no-fsync",  # /run does not survive a reboot anyway
            "--log-level=warn",
        ],
    )


def _api_server() -> None:
    policy = RUN / "audit-policy.json"
    policy.write_text(json.dumps(_AUDIT_POLICY))
    processes.start(
        "kube-apiserver",
        [
            binary("kube-apiserver"),
            f"--etcd-servers={ETCD}",
            f"--bind-address={GATEWAY}",
            f"--advertise-address={GATEWAY}",
            f"--secure-port={API_PORT}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--client-ca-file={PKI / 'ca.crt'}",
            f"--tls-cert-file={PKI / 'server.crt'}",
            f"--tls-private-key-file={PKI / 'server.key'}",
            f"--kubelet-client-certificate={PKI / 'admin.crt'}",
            f"--kubelet-client-key={PKI / 'admin.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            f"--service-account-key-file={PKI / 'sa.pub'}",
            f"--service-account-signing-key-file={PKI / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--allow-privileged=true",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={AUDIT_LOG}",
            "--profiling=false",
        ],
    )


def _ready() -> bool:
    context = ssl.create_default_context(cafile=str(PKI / "ca.crt"))
    context.load_cert_chain(PKI / "admin.crt", PKI / "admin.key")
    try:
        with urllib.request.urlopen(f"{SERVER}/readyz", context=context, timeout=2) as reply:  # noqa: S310 - our own HTTPS address
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _managers() -> None:
    assert KUBECONFIG.exists()
    processes.start(
        "kube-controller-manager",
        [
            binary("kube-controller-manager"),
            f"--kubeconfig={RUN / 'controller-manager.kubeconfig'}",
            f"--service-account-private-key-file={PKI / 'sa.key'}",
            f"--root-ca-file={PKI / 'ca.crt'}",
            f"--cluster-cidr={POD_CIDR}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            # A busy machine delays KWOK's heartbeats, and its pods never become Ready again by themselves.
            "--node-monitor-grace-period=300s",
            "--concurrent-gc-syncs=4",
        ],
    )
    processes.start(
        "kube-scheduler",
        [
            binary("kube-scheduler"),
            f"--kubeconfig={RUN / 'scheduler.kubeconfig'}",
            "--leader-elect=false",
        ],
    )
