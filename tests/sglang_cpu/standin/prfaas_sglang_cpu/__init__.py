"""Stand-ins with which SGLang serves tiny text models on a machine without a GPU."""
