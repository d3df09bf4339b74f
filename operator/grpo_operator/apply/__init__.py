"""Server-side apply of rendered objects, and of status and events."""
