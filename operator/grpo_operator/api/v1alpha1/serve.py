"""Serving of a model by a RolloutPool that no job writes to."""

import re
from typing import TYPE_CHECKING, Any

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.catalog.presets import PRESET
from grpo_operator.api.rules import Rule, UpdateRule
from grpo_operator.api.v1alpha1.tls import SecretName

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec

_KEY_OR_NAME = r"^--(api-key|served-model-name|weight-version)(=.*)?$"
_RULES: tuple[Rule["RolloutPoolSpec"], ...] = (
    Rule(
        f"!has(self.serve) || !self.model.path.startsWith('{PRESET}')",
        "serve needs weights, which a preset does not have: set model.path to a model directory, such as an "
        "export",
        lambda pool: pool.serve is None or not pool.model.path.startswith(PRESET),
    ),
    Rule(
        "!has(self.serve) || !(self.engine.returnRoutedExperts || self.engine.doubleBuffer)",
        "serve excludes engine.returnRoutedExperts and engine.doubleBuffer, which jobs need: remove them",
        lambda pool: (
            pool.serve is None or not (pool.engine.return_routed_experts or pool.engine.double_buffer)
        ),
    ),
    Rule(
        "!has(self.serve) || !has(self.engine.extraArgs)"
        f" || !self.engine.extraArgs.exists(argument, argument.matches('{_KEY_OR_NAME}'))",
        "serve excludes api-key, served-model-name and weight-version in engine.extraArgs: set "
        "serve.secretName and serve.modelName instead",
        lambda pool: (
            pool.serve is None or not any(re.match(_KEY_OR_NAME, given) for given in pool.engine.extra_args)
        ),
    ),
)
SERVE_RULES: tuple[Rule[Any], ...] = _RULES  # beside those of RolloutTemplate, which RolloutPoolSpec extends
SERVE_UPDATE_RULES = (
    UpdateRule(
        "has(oldSelf.serve) == has(self.serve) && (!has(self.serve) || oldSelf.serve == self.serve)",
        "serve is fixed once the pool exists: create another RolloutPool",
    ),
    UpdateRule(
        "!has(self.serve) || !has(oldSelf.serve) || oldSelf.model == self.model",
        "model is fixed once a pool serves it: create another RolloutPool, and delete this one",
    ),
)


class ServeSpec(Model):
    """Serves the model in model.path by SGLang's OpenAI-compatible API until the pool is deleted.

    The engines load its weights at their start, instead of waiting for those of a job.
    """

    model_name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        description="name of the model in the API; default: metadata.name",
    )
    secret_name: SecretName | None = Field(
        None,
        description="Secret in the namespace with the entry api-key, which requests must have as their bearer"
        " token; default: one that the operator creates, see status.serve. A new key is used by engines that"
        " start after the change",
    )


class ServeStatus(Model):
    """Address and key of a served model."""

    url: str = Field(max_length=512, description="URL of the Service of all engines, inside the cluster")
    model_name: str = Field(max_length=253, description="name of the model in the API")
    secret_name: str = Field(max_length=253, description="Secret with the entry api-key")
