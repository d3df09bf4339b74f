"""Checks of RolloutPools: of one without a job, and of one that a job refers to (pure)."""

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec, check_context
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.plan.planner.host_memory import pool_shortage
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resolve import RefusedError, checked_engine, engine_shape
from grpo_operator.plan.weight_path import pool_weight_path_problem

_ENGINE = "spec.engine"


def check_pool(spec: RolloutPoolSpec) -> None:
    """Check that the engines of a RolloutPool without a job can run: model, files, weight path.

    Raises RefusedError.
    """
    if spec.model.volume is not None and spec.model.volume.uri is not None:
        raise RefusedError(
            f"spec.model.volume.uri={spec.model.volume.uri}: files are fetched into the store of a job, "
            "and a RolloutPool without a job has none: set spec.model.volume.pvc or .path"
        )
    problem = pool_weight_path_problem(spec)
    if problem:
        raise RefusedError(problem)
    if spec.engine.speculative == "mtp" and not spec.model.multi_token_prediction:
        raise RefusedError(
            f"{_ENGINE}.speculative=mtp: jobs must load and publish the layer that drafts: set "
            "spec.model.multiTokenPrediction to true, here and in the jobs"
        )
    config = spec.model.config()
    if config is not None:
        model = ModelShape.from_hf(config)
        checked_engine(model, engine_shape(spec.engine), spec.engine, _ENGINE)
        if shortage := pool_shortage(spec, model):
            raise RefusedError(shortage, "Infeasible")


def check_waits_for_jobs(pool: RolloutPoolSpec, name: str) -> None:
    """Check that the pool ``name`` takes weights from jobs. Raises RefusedError."""
    if pool.serve is not None:
        raise RefusedError(
            f"spec.rollout.poolRef.name={name}: this pool serves {pool.model.path} (spec.serve), and no job "
            "may change its weights: name another RolloutPool, or use rollout.template",
            "PoolServes",
        )


def check_reference(spec: GRPOJobSpec, pool: RolloutPoolSpec) -> None:
    """Check that a job can use a RolloutPool that it does not own. Raises RefusedError."""
    assert spec.rollout.pool_ref is not None
    name = spec.rollout.pool_ref.name
    check_waits_for_jobs(pool, name)
    # Job and pool may mount the same files in different ways.
    if pool.model.model_copy(update={"volume": spec.model.volume}) != spec.model:
        raise RefusedError(
            f"spec.rollout.poolRef.name={name}: the pool serves {pool.model.path}, but this job trains "
            f"{spec.model.path}: use the same model in both",
            "PoolMismatch",
        )
    check_tls(spec, pool, name)
    if pool.engine.speculative != "none" and spec.algorithm.min_p:
        raise RefusedError(
            f"spec.algorithm.minP={spec.algorithm.min_p}: RolloutPool {name} drafts tokens "
            "(engine.speculative mtp), and SGLang verifies them without it: set it to 0",
            "PoolMismatch",
        )
    try:
        check_context(spec.data, pool, f"engine.contextLength of RolloutPool {name}")
        if spec.algorithm.stop and not pool.engine.tokenizer:
            raise ValueError(
                f"spec.algorithm.stop: engines match stop strings on decoded text: set "
                f"engine.tokenizer: true in RolloutPool {name}"
            )
    except ValueError as error:
        raise RefusedError(str(error), "PoolMismatch") from error


def check_tls(spec: GRPOJobSpec, pool: RolloutPoolSpec, name: str) -> None:
    """Check that the pods of a job and of the pool ``name`` trust each other. Raises RefusedError."""
    ours, its = spec.scheduling.tls, pool.scheduling.tls
    problem = ""
    if (ours is None) != (its is None):
        problem = f"spec.scheduling.tls: {'RolloutPool ' + name if ours else 'this job'} has none"
    elif ours and its and ours.ca_bundle != its.ca_bundle:
        problem = f"spec.scheduling.tls.caBundle: that of RolloutPool {name} differs"
    if problem:
        raise RefusedError(f"{problem}: set the same in both, because each calls the other", "PoolMismatch")
