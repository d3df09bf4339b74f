"""SGLang plugin: the key of the control routes stays within the pod.

SGLang 0.5.23 answers ``/server_info`` with all arguments of the server to everybody who may send prompts. One
of them is the key of the control routes, by which weights are written.
"""

from collections.abc import Callable
from typing import Any

_ADD_KEYS = "sglang.srt.utils.auth.add_api_key_middleware"
_TELLING = frozenset({"/server_info", "/get_server_info"})


def register() -> None:
    """Register the hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ADD_KEYS, _also_guard, HookType.AROUND)


def _also_guard(original: Callable[..., Any], app: Any, **keys: Any) -> None:
    """Let the routes that tell the keys require that of the control routes."""
    from sglang.srt.utils.auth import AuthLevel

    for route in app.routes:
        if getattr(route, "path", "") in _TELLING:
            route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL
    original(app, **keys)
