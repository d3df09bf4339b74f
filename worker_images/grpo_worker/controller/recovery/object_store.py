"""Look at a job's object store before anything else: whether it can be used, and what is wrong if not."""

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from grpo_operator.api.names import GOOGLE_KEY
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.clock import Clock
from grpo_worker.common.store_path import StorePath, create, patiently, remove_file

# By the scheme of a store's uri: how an object is created only if there is none, and entries of its Secret.
_CONDITION = {"s3": "If-None-Match", "gs": "ifGenerationMatch"}
_ENTRIES = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": GOOGLE_KEY}


def await_store(store: StorePath, spec: StoreSpec, report: Callable[[str], None], clock: Clock) -> None:
    """Wait until the job's object store answers; whoever uses a file system looks at that.

    ``report``: gets a message while it does not. Raises ValueError, which names field and remedy, if the job
    cannot use the store.
    """
    if isinstance(store, Path):
        return
    try:
        patiently(partial(_probe, store, spec), spec.label, clock.sleep, report)
    except PermissionError as error:
        raise ValueError(f"{_credentials(spec)} ({_text(error)})") from error
    except FileNotFoundError as error:
        raise ValueError(
            f"{spec.label}: there is no such bucket ({_text(error)}): create it, or correct uri"
        ) from error
    except ImportError as error:
        raise ValueError(
            f"{spec.label}: the image has no driver for it ({error}): add its package to spec.image"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{spec.label} cannot be used ({_text(error)}): correct uri, endpoint or region"
        ) from error


def _probe(store: StorePath, spec: StoreSpec) -> None:
    """Create an object twice, of which the second time must be refused, and remove it."""
    assert not isinstance(store, Path)
    place = store / f"probe-{uuid.uuid4().hex}"
    create(place, "")  # twice, if the answer to the first request was lost
    try:
        place.fs.pipe_file(place.path, b"", mode="create")
    except FileExistsError:
        return
    else:
        raise ValueError(
            f"{spec.label}: the server does not refuse to create what exists ({_CONDITION[_scheme(spec)]}), "
            "so two controllers could both run the job: use another server, or a store of kind pvc or path"
        )
    finally:
        remove_file(place)


def _scheme(spec: StoreSpec) -> str:
    return (spec.uri or "").partition(":")[0]


def _credentials(spec: StoreSpec) -> str:
    if spec.secret:
        return (
            f"checkpoint.store.secret={spec.secret}: its credentials give no access to {spec.uri}: correct "
            f"{_ENTRIES[_scheme(spec)]} in the Secret, or what they may do in the bucket"
        )
    return (
        f"{spec.label}: the controller's pod has no access: set checkpoint.store.secret, or a service "
        "account in controller.podTemplate and trainer.podTemplate"
    )


def _text(error: OSError) -> str:
    return " ".join(str(error.strerror or error).split())[:300]
