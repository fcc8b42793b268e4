"""`python -m sandbox run program.py --data DIR`: one program, with all limits, as the trainer runs it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from sandbox.manager import make_sandbox
from sandbox.protocol import Capabilities, Job, Limits, Outcome, Result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sandbox")
    command = parser.add_subparsers(required=True).add_parser("run", help="run one program and print what came of it")
    command.add_argument("program", type=Path)
    command.add_argument("--data", type=Path, required=True, help="the folder shown to the program as data/, read-only")
    command.add_argument("--backend", default="auto", choices=("auto", "local", "weak", "docker"))
    command.add_argument("--image", default="jaxrl-sandbox", help="for --backend docker")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--nonce", default="", help="of the program's milestone lines")
    command.add_argument("--submission", type=Path, help="where to write the program's submission.csv")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    for field in dataclasses.fields(Limits):
        name = "--" + field.name.replace("_", "-")
        command.add_argument(name, type=type(field.default), default=field.default, help="(%(default)s)")
    arguments = parser.parse_args()
    try:
        capabilities, result = asyncio.run(_run(arguments))
    except (ValueError, OSError) as error:
        sys.exit(f"{error}")
    if arguments.submission is not None and result.submission is not None:
        arguments.submission.write_bytes(result.submission)
    print(_json(capabilities, result) if arguments.json else _text(capabilities, result))
    sys.exit(result.outcome is not Outcome.OK)


async def _run(arguments: argparse.Namespace) -> tuple[Capabilities, Result]:
    limits = Limits(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Limits)})
    program, data = arguments.program.read_text(encoding="utf-8"), str(arguments.data.absolute())
    job = Job("command-line", program, data, nonce=arguments.nonce, limits=limits, seed=arguments.seed)
    sandbox = make_sandbox(arguments.backend, image=arguments.image, max_running=1)
    capabilities = await sandbox.start()
    try:
        return capabilities, await sandbox.run(job)
    finally:
        await sandbox.close()


def _json(capabilities: Capabilities, result: Result) -> str:
    record = dataclasses.asdict(result) | {"capabilities": dataclasses.asdict(capabilities)}
    record["submission"] = None if result.submission is None else result.submission.decode("utf-8", "replace")
    return json.dumps(record, indent=2)


def _text(capabilities: Capabilities, result: Result) -> str:
    lines = [result.output_head.rstrip("\n")]
    if result.output_tail:
        lines += ["", "[... output left out ...]", "", result.output_tail.rstrip("\n")]
    lines += ["", f"outcome     {result.outcome}" + (f" ({result.detail})" if result.detail else "")]
    lines += [f"time        {result.wall_s:.2f} s, {result.cpu_s:.2f} s of CPU; box start {result.start_s:.2f} s"]
    if result.milestones:
        lines += ["milestones  " + ", ".join(f"{claim.name} at {claim.at_s:.2f} s" for claim in result.milestones)]
    if result.submission is not None:
        rows = result.submission.count(b"\n")
        lines += [f"submission  {len(result.submission)} bytes, {rows} lines"]
    if result.flags:
        lines += [f"flags       {', '.join(result.flags)}"]
    lines += [f"box         {capabilities.backend}; not held back: {', '.join(capabilities.not_held) or 'nothing'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
