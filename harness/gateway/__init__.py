"""The front door: OpenAI and SGLang surfaces over prefill/decode pairs that the scheduler picks."""
