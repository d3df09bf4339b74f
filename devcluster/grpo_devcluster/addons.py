"""CoreDNS, the KubeRay operator and KWOK, run as host processes."""

from pathlib import Path

from grpo_devcluster import processes
from grpo_devcluster.gobuild import COMPONENTS, binary, module_directory
from grpo_devcluster.paths import KUBECONFIG, RUN
from grpo_devcluster.settings import FAKE_POD_CIDR, GATEWAY
from grpo_devcluster.stages import StageError, run, wait_for

_COREFILE = f"""\
.:53 {{
    bind {GATEWAY}
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {RUN}/admin.kubeconfig
        ttl 1
    }}
    reload
}}
"""


def kubectl(*arguments: str | Path, stdin: str | None = None, kubeconfig: Path = KUBECONFIG) -> str:
    """Run kubectl as cluster administrator and return its output. Raises StageError with its message."""
    command = [binary("kubectl"), f"--kubeconfig={kubeconfig}", *arguments]
    what = " ".join(str(a) for a in arguments[:3])
    return run(command, step=f"kubectl {what}", remedy="See the message above.", stdin=stdin)


def served(resource: str) -> bool:
    """Return whether the API server serves this kind; a CRD is served some time after it is applied."""
    try:
        kubectl("get", resource)
    except StageError:
        return False
    return True


def start_coredns() -> None:
    """Start cluster DNS on the bridge's address; KubeRay's workers find their head by name."""
    corefile = RUN / "Corefile"
    corefile.write_text(_COREFILE)
    processes.start("coredns", [binary("coredns"), "-conf", corefile])


def start_kuberay(
    component: str = "kuberay-operator", gates: str = "", init_containers: bool = False
) -> None:
    """Install KubeRay's CRDs and start its operator. ``gates``: feature gates of the operator.

    ``init_containers``: it adds one to each worker, as by default. The pods wait for the head themselves, so
    here it would only start another interpreter in each.
    """
    source = module_directory(COMPONENTS[component].module, "github.com/ray-project/kuberay/ray-operator")
    kubectl("apply", "--server-side", "--force-conflicts", "-f", source / "config" / "crd" / "bases")
    processes.start(
        "kuberay-operator",
        [
            binary(component),
            *([f"--feature-gates={gates}"] if gates else []),
            f"--kubeconfig={KUBECONFIG}",
            "--metrics-addr=127.0.0.1:18080",
            "--health-probe-bind-address=127.0.0.1:18082",
            "--reconcile-concurrency=4",
            "--enable-leader-election=false",
        ],
        env={
            "KUBECONFIG": str(KUBECONFIG),
            "ENABLE_INIT_CONTAINER_INJECTION": "true" if init_containers else "false",
        },
    )


def start_kwok() -> None:
    """Start KWOK for nodes with its annotation: their pods are simulated without a kubelet."""
    source = module_directory("kwok", "sigs.k8s.io/kwok")
    kubectl("apply", "--server-side", "-f", source / "kustomize" / "crd" / "bases")
    wait_for("KWOK's Stage kind", lambda: served("stages.kwok.x-k8s.io"), 30)
    stages = source / "kustomize" / "stage"
    files = [
        argument
        for folder in ("node/fast", "node/heartbeat-with-lease", "pod/fast")
        for file in sorted((stages / folder).glob("*.yaml"))
        if file.name != "kustomization.yaml"
        for argument in ("-f", file)
    ]
    kubectl("apply", "--server-side", *files)
    processes.start(
        "kwok",
        [
            binary("kwok"),
            f"--kubeconfig={KUBECONFIG}",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            "--enable-crds=Stage",
            # Tests simulate nodes without power: nothing reports for them or confirms the end of a pod.
            "--disregard-status-with-annotation-selector=kwok.x-k8s.io/status=custom",
            f"--cidr={FAKE_POD_CIDR}",
            # Heartbeats by lease, like kubelets: status patches alone are too rare.
            "--node-lease-duration-seconds=20",
            "--server-address=127.0.0.1:10247",
        ],
    )
