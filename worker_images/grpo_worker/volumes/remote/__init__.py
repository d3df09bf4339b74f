"""Files of a hub, of a web server and of object stores, read alike."""
