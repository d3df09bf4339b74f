"""Report of a rehearsal: figures as JSON, and a picture of the time line."""
