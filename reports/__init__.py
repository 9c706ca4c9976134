"""Tables and charts rendered to one self-contained offline HTML file. Knows nothing of LLMs."""
