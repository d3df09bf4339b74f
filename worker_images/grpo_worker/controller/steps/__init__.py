"""Steps of the training loop: what engines and trainers do in one, and what is recorded of it."""
