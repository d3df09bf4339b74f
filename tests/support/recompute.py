"""Recomputation in the form in which tests pass it to ranks: none, full, full:2 or selective:mlp,moe."""

from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule


def recompute_of(text: str) -> Recompute:
    name, _, rest = text.partition(":")
    kind = RecomputeKind(name)
    if kind is RecomputeKind.SELECTIVE:
        return Recompute(kind, tuple(RecomputeModule(module) for module in rest.split(",")))
    return Recompute(kind, layers=int(rest) if rest else None)
