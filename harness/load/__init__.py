"""Open-loop load. The only package that imports locust; always run as its own process."""
