"""Whole update: one request to the engine pauses it, lets it take a version from its link, and resumes it.

Each further request would lengthen the pause by its way through the agent, HTTP and SGLang's processes. This
part of the plugin runs in the process of SGLang's HTTP server.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from grpo_worker.common.garbage import collector_paused
from grpo_worker.weightsync.protocol.direct_load import LINK_INSTALL, LINK_LOAD

TARGET = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_distributed"
Update = Callable[..., Awaitable[tuple[bool, str]]]


async def on_update(original: Update, manager: Any, obj: Any, request: Any = None) -> tuple[bool, str]:
    """Run SGLang's update of weights; a version that comes over a link gets a whole update.

    An engine that has not taken the version stays paused: its weights may be incomplete. The request's
    ``torch_empty_cache``: whether the engine returns the memory of its buffers before it resumes.
    """
    if not (obj.load_format or "").startswith((LINK_LOAD, LINK_INSTALL)):
        return await original(manager, obj, request)
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    with collector_paused():
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        success, message = await _in_session(original, manager, obj, request)
        if success:
            resumed = ContinueGenerationReqInput(torch_empty_cache=obj.torch_empty_cache)
            await manager.continue_generation(resumed)
    return success, message


async def _in_session(original: Update, manager: Any, obj: Any, request: Any) -> tuple[bool, str]:
    """Update within a session of its own, if the engine has sessions; see SGLang 0.5.23."""
    if not hasattr(manager, "begin_weight_update"):
        return await original(manager, obj, request)
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    begun, message = await manager.begin_weight_update(BeginWeightUpdateReqInput())
    if not begun:
        return False, message
    success, message = await original(manager, obj, request)
    ended, problem = await manager.end_weight_update(EndWeightUpdateReqInput())
    return (success, message) if ended else (False, f"{message} {problem}")
