"""Stand-in on CPUs for Transformer Engine's FusedAdam as the precision-aware optimizer uses it.

It follows version 2.12: names and dtypes of the state, fp32 copies in its state dict, and how the kernel
splits fp32 main weights into bf16 weights, rounded half up, and remainders.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from packaging.version import Version


class FusedAdam(torch.optim.Optimizer):
    """AdamW with main weights in the state. ``step`` is in the groups."""

    def __init__(
        self,
        params: Any,
        *,
        adam_w_mode: bool,
        master_weights: bool,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: bool,
        store_param_remainders: bool,
        **fields: Any,
    ) -> None:
        super().__init__(params, fields)
        assert adam_w_mode and master_weights and use_decoupled_grad and store_param_remainders
        assert master_weight_dtype is torch.float32
        self.master_weights, self.store_param_remainders = master_weights, store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders and parameter.dtype is torch.bfloat16
        state = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self.dtypes.items()}
        state["master_param"] = torch.zeros_like(parameter, dtype=torch.int16)
        self.state[parameter] = state

    def state_dict(self) -> dict[str, Any]:
        assert not self.state, "Transformer Engine's would have fp32 copies of the whole state"
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = {number: dict(state) for number, state in state_dict["state"].items()}
        super().load_state_dict(state_dict)  # converts the state to the parameters' dtype
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in kept.items():
            self.initialize_state(parameters[number], True)
            for name, values in state.items():
                self.state[parameters[number]][name].copy_(values)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter, True)
                self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = (
            self.state[parameter],
            parameter.decoupled_grad.float(),
            group["betas"],
        )
        first = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        second = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - beta2)
        bits = (parameter.view(torch.int16).int() << 16) + state["master_param"].int()
        main = bits.view(torch.float32)
        denominator = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        update = first / (1 - beta1 ** group["step"]) / denominator + group["weight_decay"] * main
        bits = (main - group["lr"] * update).view(torch.int32)
        parameter.view(torch.int16).copy_((bits + 2**15) >> 16)
        state["master_param"].copy_(bits & 0xFFFF)  # as int16
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)


def install() -> None:
    """Let Megatron-Core of this process use the stand-in."""
    names = "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules[names[0]].__version__ = "2.12.0"  # type: ignore[attr-defined]
    from megatron.core import utils

    utils._te_version = Version("2.12.0")
    for module in (optimizer, distrib_optimizer):
        module.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.HAVE_APEX_OR_TE = True
