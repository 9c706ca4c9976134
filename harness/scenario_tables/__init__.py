"""The tables of a scenario's TOML form: keys, units and defaults, which live here alone."""
