"""Small tools that every other package may use: authentication, files, user functions."""
