"""Generation of the samples of each step: scheduling, dynamic sampling and the sample ledger."""
