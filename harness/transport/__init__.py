"""KV transfer: sans-I/O frames, a sender and a receiver over many TCP connections."""
