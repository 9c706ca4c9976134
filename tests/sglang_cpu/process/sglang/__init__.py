"""Processes as SGLang's, that compute nothing: to launch, to kill, to answer badly."""
