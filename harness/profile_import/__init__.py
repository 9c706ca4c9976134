"""Profiles from elsewhere: tables of measurements, published rates, NVIDIA's operator model."""
