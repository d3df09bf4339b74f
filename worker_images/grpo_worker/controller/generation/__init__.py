"""Which samples are generated, in which order, and their ledger."""
