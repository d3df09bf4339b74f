"""Virtual time: threads and event loops of real code that wait without spending time."""
