"""HTTP surfaces without I/O: SGLang's /generate, OpenAI's, and server-sent events."""
