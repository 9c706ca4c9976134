"""SGLang servers of one cluster: launched or attached to, watched, and gone at the end."""
