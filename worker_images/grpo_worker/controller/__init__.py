"""The single controller of a job: one process that drives generation, training and weight updates."""
