"""The verbs of ``prfaas``: the options of each, and the one call it is."""
