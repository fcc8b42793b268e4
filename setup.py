"""Package metadata; tool settings live in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="jaxrl-code",
    version="0.1.0",
    description="Reinforcement learning for machine-learning engineering, in JAX",
    python_requires=">=3.11",
    packages=find_packages(include=["jaxrl_code*", "sandbox*", "configs*", "launch*"]),
    install_requires=[
        "jax>=0.10.2,<0.11",
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        # Hugging Face's formats.
        "transformers>=5.24", "tokenizers", "huggingface_hub", "safetensors>=0.5", "jinja2>=3.1",
        # Flags and configs, and what a person watches.
        "absl-py", "ml-collections>=1.1", "pyyaml>=6",
        "tensorboard>=2.21", "tensorboardX>=2.6.5", "rich>=14", "matplotlib>=3.10",
        # The Docker backend.
        "aiodocker>=0.27", "aiohttp",
        # What the policy's programs and the graders run on.
        "numpy>=2",
        "pandas>=2.2",
        "scikit-learn>=1.6",
        # Real data sets for the built-in tasks (13 MB, every file with its licence).
        "bokeh-sampledata>=2026.1",
    ],
    extras_require={
        "cuda": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
        "test": ["pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout>=2.4", "hypothesis>=6.150"],
        "dev": ["ruff", "pyright[nodejs]"],
    },
)
