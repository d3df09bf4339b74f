"""Remedies for options that have no counterpart, whatever framework they are of."""

UNKNOWN = "it is unknown here and may change what is trained: remove it if it does not"
LORA = "jobs train all weights: remove it for full training"
TURNS = "responses have one turn: jobs run no tools and no environments"
PROFILES = "request a profile while the job runs: kubectl grpo profile JOB torch trainer"
VALIDATION = "jobs do not validate: score an export with another tool"
MEMORY = "the planner and trainer.recompute decide about memory"
ENGINES = "engines are SGLang's, with their own settings: rollout.template.engine.extraArgs"
NO_PROFILE = (None, False, "null", "", 0)
