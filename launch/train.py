"""Trains a policy.

    python launch/train.py --config=configs/mlebench.py:local --workdir=runs/local

Start again with the same command to go on from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/, ':preset' behind it.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", "", "Where checkpoints and metrics go; '' is runs/<config>-<preset>.")


def main(argv: list[str]) -> None:
    config = parse(argv)
    try:
        # Imported late: a misspelt flag should not wait for jax, nor a missing folder for all the rest.
        from jaxrl_code import preflight

        preflight.check(config)

        from jaxrl_code import trainer

        plan = trainer.plan(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    workdir = Path(WORKDIR.value or f"runs/{config_name()}")
    try:
        asyncio.run(trainer.train(plan, workdir))
    except trainer.Stop as stop:
        sys.exit(f"error: {stop}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from the last checkpoint")


def parse(argv: list[str]) -> ConfigDict:
    """Reads the flags; what is wrong with them is one line, not a traceback."""
    try:
        left = flags.FLAGS(argv)[1:]
        config = CONFIG.value
        if left:
            raise ValueError(f"unexpected argument {left[0]!r}; flags look like --config.ppo.clip=0.1")
        if config is None:
            raise ValueError("--config is missing; try --config=configs/mlebench.py:local")
        config.to_dict()  # a config file that could not be read fails here
        return config
    except (flags.Error, AttributeError, KeyError, OSError, SyntaxError, TypeError, ValueError) as error:
        sys.exit(f"error: {_reason(error)}")


def _reason(error: Exception) -> str:
    """One line. absl and ml_collections wrap the reason in tracebacks and in the repr of other errors."""
    text = str(error).replace("\\n", "\n").replace("\\'", "'").strip()
    if isinstance(error, AttributeError | KeyError):
        return "unknown config key " + " ".join(text.replace("'", "").strip('"').split())
    lines = text.splitlines()
    return lines[-1].strip() if "Traceback" in text else " ".join(" ".join(lines).split())


def config_name() -> str:
    path, _, preset = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return f"{stem}-{preset}" if preset else stem


if __name__ == "__main__":
    main(sys.argv)
