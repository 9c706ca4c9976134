"""The run directory: what live processes append, joined by request into tables."""
