"""The route from which Prometheus reads a process's metrics."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def metrics_route() -> Route:
    """Return the route of all metrics that are registered in this process."""
    return Route("/metrics", _answer)


def _answer(_: Request) -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
