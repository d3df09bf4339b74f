"""The gang of trainer ranks and the training of one batch."""
