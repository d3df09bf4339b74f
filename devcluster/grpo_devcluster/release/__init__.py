"""Version, images and chart of a release, for one registry."""
