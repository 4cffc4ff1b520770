"""`episodes.jsonl` of an RL run: one row per episode that a step trained on or left out, from which its success rate can be recomputed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vla_rl.episode import Episode, Float32
from vla_rl.eval.results import row_of
from vla_rl.telemetry.files import append_jsonl, read_jsonl, write_text

CONDITION = "rollout"
"""Of all rows: episodes of training scenes, by a policy that explores."""


def rollout_row(episode: Episode, earned: Sequence[Float32], step: int) -> dict[str, Any]:
    """The row of an evaluation (`EpisodeRow`) and, beside it, `step` (the RL step, from 1), `return`, `weights_version` and `renderer`.

    `earned` holds the rewards of each chunk; `return` is their plain sum. `weights_version` is that of the weights that acted, and is
    null for a crash, of which nothing is left. `renderer` is the GL renderer that drew the episode's pictures.
    """
    versions = {chunk.proposed.weights_version for chunk in episode.steps}
    assert len(versions) <= 1, "an episode is made by one version of the weights"
    total = float(sum(float(part.sum()) for part in earned))
    told = {"step": step, "return": total, "weights_version": next(iter(versions), None), "renderer": episode.provenance.get("renderer")}
    return asdict(row_of(episode, CONDITION)) | told


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append the rows of a step."""
    for row in rows:
        append_jsonl(path, row)


def drop_steps_after(path: Path, step: int) -> None:
    """Rewrite the file without rows of later steps, which a crash undid and which run again (atomically; untouched without any)."""
    rows = read_jsonl(path)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
