"""Decisions: no clock, no socket, no global RNG."""
