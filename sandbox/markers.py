"""Milestone lines: what the instrumenter prints and the host reads back. A marker is a claim, never a proof."""

from __future__ import annotations

MILESTONES = ("imported", "loaded_data", "made_features", "defined_model", "trained", "predicted", "wrote_submission")


def marker_line(nonce: str, name: str) -> str:
    """The line, without its newline, by which the run with this nonce claims a milestone."""
    return f"@@{nonce}:{name}"


def parse_marker(line: str, nonce: str) -> str | None:
    """The milestone that a line claims, or None where it isn't a marker of this nonce."""
    prefix = f"@@{nonce}:"
    name = line[len(prefix) :].rstrip("\r\n")
    return name if nonce and line.startswith(prefix) and name in MILESTONES else None
