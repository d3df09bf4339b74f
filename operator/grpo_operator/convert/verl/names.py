"""Sections of verl's configurations."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF, MODEL, CRITIC = "actor_rollout_ref.ref", "actor_rollout_ref.model", "critic"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
