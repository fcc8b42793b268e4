"""Reinforcement learning for machine-learning engineering, in JAX."""
