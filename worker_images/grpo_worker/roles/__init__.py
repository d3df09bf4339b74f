"""Ray actors: the trainer rank and how calls are dispatched to a group of ranks."""
