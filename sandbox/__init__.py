"""Runs untrusted programs. Imports neither jax nor jaxrl_code."""
