"""From the trainer's GPUs into the engine's, without a copy in anybody's memory on the way."""
