"""There, as far as anybody asks."""
