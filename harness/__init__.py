"""prfaas-bench: measures whether LLM prefill can leave the datacenter."""

__version__ = "0.1.0"
