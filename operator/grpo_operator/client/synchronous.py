"""Client of GRPOJobs over the official Kubernetes client."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Unpack

from kubernetes import client, config, stream, watch
from kubernetes.config.config_exception import ConfigException

from grpo_operator.api.base import API_VERSION, GROUP, VERSION
from grpo_operator.api.names import JOB_LABEL, POOL_LABEL, RESUME_ANNOTATION, job_store, writer
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.client.fork_manifest import fork
from grpo_operator.client.job import Job, JobFailedError
from grpo_operator.client.resumption import resumption
from grpo_operator.client.samples_command import SampleOptions, samples_command

_PLURAL = "grpojobs"
_WATCH_SECONDS = 60  # length of one watch; the next one begins with the state that was missed


class GRPOClient:
    """Creates, follows and changes the GRPOJobs of one namespace.

    ``namespace``: None: that of the context, or of the pod. ``context``, ``kubeconfig``: as in kubectl; where
    there is no kubeconfig, the client uses the service account of its pod. Methods raise
    kubernetes.client.ApiException for what the API server refuses.
    """

    def __init__(
        self, namespace: str | None = None, *, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._api, found = _connect(context, kubeconfig)
        self.namespace = namespace or found
        self._objects, self._pods = client.CustomObjectsApi(self._api), client.CoreV1Api(self._api)

    def create(
        self, name: str, spec: GRPOJobSpec | Mapping[str, Any], *, labels: Mapping[str, str] | None = None
    ) -> Job:
        """Create a job and return it. Raises pydantic.ValidationError for a mapping that is no spec."""
        checked = spec if isinstance(spec, GRPOJobSpec) else GRPOJobSpec.model_validate(dict(spec))
        metadata = {"name": name} | ({"labels": dict(labels)} if labels else {})
        return self._create({"metadata": metadata, "spec": checked.wire()})

    def get(self, name: str) -> Job:
        """Return a job."""
        return Job.of(self._objects.get_namespaced_custom_object(*self._place, name))

    def jobs(self, selector: str = "") -> list[Job]:
        """Return all jobs of the namespace. ``selector``: of labels."""
        found = self._objects.list_namespaced_custom_object(*self._place, label_selector=selector)
        return [Job.of(item) for item in found["items"]]

    def delete(self, name: str) -> None:
        """Delete a job with its pods. What it has in its store stays."""
        self._objects.delete_namespaced_custom_object(*self._place, name)

    def suspend(self, name: str) -> Job:
        """Let a job save a checkpoint and delete its pods."""
        return self._patch(name, {"spec": {"suspend": True}})

    def resume(self, name: str, *, total_steps: int | None = None) -> Job:
        """Let a job go on that is suspended, has failed, or has succeeded and gets more steps.

        Raises ValueError for any other job.
        """
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return self._patch(name, resumption(self.get(name).manifest, total_steps, now, RESUME_ANNOTATION))

    def fork(
        self, name: str, new: str, *, step: int | None = None, changes: Mapping[str, Any] | None = None
    ) -> Job:
        """Create the job ``new`` from a checkpoint of ``name``.

        ``step``: None: the newest checkpoint. ``changes``: values by their paths below spec, as in
        ``{"trainer.optimizer.lr": 5e-7}``. Raises ValueError for a path that does not exist.
        """
        made = fork(self.get(name).manifest, new, step, changes or {})
        GRPOJobSpec.model_validate(made["spec"])
        return self._create(made)

    def follow(self, name: str) -> Iterator[Job]:
        """Yield a job now and whenever it changes, until it has ended or is deleted."""
        version = None
        while True:
            job = self.get(name)
            if job.manifest["metadata"]["resourceVersion"] != version:
                yield job
            if job.ended:
                return
            last = job
            for last in self._changes(job):
                yield last
                if last.ended:
                    return
            version = last.manifest["metadata"]["resourceVersion"]

    def wait(self, name: str, phase: str = Phase.SUCCEEDED, *, seconds: float | None = None) -> Job:
        """Wait until a job is in a phase and return it. ``seconds``: at most so long.

        Raises JobFailedError when the job is Failed or Invalid, or has ended in another phase, and
        TimeoutError.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            job = self.get(name)
            if job.phase == phase:
                return job
            if job.ended or job.phase == Phase.INVALID:
                raise JobFailedError(job)
            left = _WATCH_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"GRPOJob {name} is {job.phase}, not {phase}, after {seconds} s")
            next(self._changes(job, left), None)

    def metrics(self, name: str, *, last: int | None = None) -> list[dict[str, Any]]:
        """Return the metrics of each step of a job that runs. ``last``: only of so many steps.

        Raises LookupError for a job without a running controller, with the folder that has its metrics.
        """
        # tail reads the whole file from its first line on.
        lines = str(last) if last is not None else "+1"
        return self._read(name, "metrics", lambda folder: ["tail", "-n", lines, f"{folder}/metrics.jsonl"])

    def metrics_frame(self, name: str, *, last: int | None = None) -> Any:
        """Return ``metrics`` as a pandas.DataFrame with the step as its index. Needs pandas."""
        import pandas

        steps = self.metrics(name, last=last)
        return pandas.DataFrame(steps).set_index("step") if steps else pandas.DataFrame()

    def samples(
        self, name: str, *, step: int | None = None, prompt: int | None = None, limit: int | None = None,
        tokens: bool = False, validation: bool = False, of: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return samples of a step of a job that runs: prompt, answer, score and more by column.

        ``step``: None: the last one that has samples. ``prompt``: index of the only prompt whose answers are
        wanted. ``limit``: at most so many. ``tokens``: with the ids and log-probabilities of all tokens.
        ``validation``: of the validation of the weights after the step. ``of``: only of this validation set.
        Raises LookupError as ``metrics`` does, and returns nothing for a step without samples.
        """
        command = samples_command(
            step=step, prompt=prompt, limit=limit, tokens=tokens, validation=validation, of=of
        )
        return self._read(name, "samples", lambda _: command)

    def samples_frame(self, name: str, **options: Unpack[SampleOptions]) -> Any:
        """Return ``samples``, with its options, as a pandas.DataFrame. Needs pandas."""
        import pandas

        return pandas.DataFrame(self.samples(name, **options))

    @property
    def _place(self) -> tuple[str, str, str, str]:
        return GROUP, VERSION, self.namespace, _PLURAL

    def _read(self, name: str, wanted: str, command: Callable[[str], list[str]]) -> list[dict[str, Any]]:
        """Return the JSON lines that a command in the controller's pod prints, by the folder of the job.

        Raises LookupError that names the folder when no controller runs. ``wanted``: what it has, for the
        message.
        """
        folder = job_store(self.namespace, writer(self.get(name).manifest))
        labels = f"{JOB_LABEL}={name},{POOL_LABEL}=controller"
        pods = self._pods.list_namespaced_pod(self.namespace, label_selector=labels).items
        running = [pod.metadata.name for pod in pods if pod.status.phase == "Running"]
        if not running:
            raise LookupError(f"{name} has no running controller: its {wanted} are in {folder} of the store")
        text = stream.stream(
            self._pods.connect_get_namespaced_pod_exec, running[0], self.namespace, command=command(folder),
            container="controller", stdout=True, stderr=False, stdin=False, tty=False, _preload_content=False,
        )  # fmt: skip
        return [json.loads(line) for line in _all_of(text).splitlines()]

    def _create(self, manifest: dict[str, Any]) -> Job:
        body = {"apiVersion": API_VERSION, "kind": "GRPOJob"} | manifest
        return Job.of(self._objects.create_namespaced_custom_object(*self._place, body))

    def _patch(self, name: str, change: dict[str, Any]) -> Job:
        return Job.of(self._objects.patch_namespaced_custom_object(*self._place, name, change))

    def _changes(self, job: Job, seconds: float = _WATCH_SECONDS) -> Iterator[Job]:
        """Yield the changes of a job for some seconds; stop when it is deleted."""
        watching = watch.Watch()
        options = {
            "field_selector": f"metadata.name={job.name}",
            "resource_version": job.manifest["metadata"]["resourceVersion"],
            "timeout_seconds": max(int(min(seconds, _WATCH_SECONDS)), 1),
        }
        try:
            for event in watching.stream(
                self._objects.list_namespaced_custom_object, *self._place, **options
            ):
                if event["type"] == "DELETED":
                    return
                yield Job.of(event["object"])
        except client.ApiException as error:
            if error.status != 410:  # the version is too old: the caller reads the job again
                raise
        finally:
            watching.stop()


def _connect(context: str | None, kubeconfig: str | None) -> tuple[client.ApiClient, str]:
    """Return a client of the API server and the namespace that the user works in."""
    try:
        api = config.new_client_from_config(kubeconfig, context)
    except ConfigException:
        if context or kubeconfig:
            raise
        config.load_incluster_config()
        place = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
        with open(place, encoding="utf-8") as file:
            return client.ApiClient(), file.read().strip()
    contexts, active = config.list_kube_config_contexts(kubeconfig)
    chosen = next((c for c in contexts if c["name"] == context), active)
    return api, chosen["context"].get("namespace", "default")


def _all_of(answer: Any) -> str:
    """Return what a command in a pod has printed."""
    parts = []
    while answer.is_open():
        answer.update(timeout=1)
        if answer.peek_stdout():
            parts.append(answer.read_stdout())
    answer.close()
    return "".join(parts)
