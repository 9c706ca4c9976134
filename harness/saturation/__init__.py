"""Searches by simulation: the highest load at an SLO, and the plan with the least P90 of TTFT.

``lambda_max`` is the operational twin of Eq. 6 (arXiv 2604.15039): where the equations say at which
load a stage has no time left, it says up to which load users get their first token in time.
``optimum`` looks for threshold and split where the equations say they are, under the arrivals that
the scenario has, which no equation knows. Both run the same ``harness.simulator`` as everything
else, many short runs of it on all cores.

Loads in requests per second over the whole deployment, times in seconds, thresholds in tokens.
"""
