"""Status, conditions and events of both kinds."""
