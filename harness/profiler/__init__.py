"""Measures what a profile holds, against a live engine: ``prfaas profile``."""
