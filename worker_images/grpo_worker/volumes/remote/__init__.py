"""Sources of remote files with one interface: hubs, web servers and object stores."""
