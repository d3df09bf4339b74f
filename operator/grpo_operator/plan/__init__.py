"""Pure decisions from a spec and the observed cluster. No I/O."""
