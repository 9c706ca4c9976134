"""The inter-cluster link: described, shaped, measured. Knows nothing of LLMs."""
