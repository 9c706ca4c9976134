"""The planner: what to buy, how to split it, what it costs and what the plan hangs on."""
