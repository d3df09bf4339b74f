"""Pure decisions: what a spec and an observed cluster ask for. No I/O."""
