"""Commands that measure and print JSON; each is a module: ``python -m benchmarks.NAME``."""
