"""What a release publishes: version, images and chart, all for one registry."""
