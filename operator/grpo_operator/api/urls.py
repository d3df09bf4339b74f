"""URLs of pods, the one place that knows their scheme and the brackets of IPv6 addresses (pure)."""


def host_port(host: str, port: int) -> str:
    """Return a host name or an IP address with a port, as in URLs: IPv6 addresses are in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def pod_url(host: str, port: int, path: str = "", *, tls: bool = False) -> str:
    """Return the URL of a server in a pod. ``host``: name or IP address. ``tls``: it serves HTTPS."""
    return f"{'https' if tls else 'http'}://{host_port(host, port)}{path}"
