"""A checkpoint by its name on the hub, fetched by the shipped command from a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hub_server import COMMIT, hub_with

from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.telemetry.files import folder_digest

RECIPE = Path(__file__).parents[2] / "configs/reach/eval.yaml"


def evaluate(name: str, run_dir: Path, hub: str) -> subprocess.CompletedProcess[str]:
    few = ["--episodes-per-task", "1", "--videos", "0", "--pool.workers", "1"]
    command = [sys.executable, "-m", "vla_rl.cli", "eval", str(RECIPE), "--policy.checkpoint", name, "--run-dir", str(run_dir), *few]
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(run_dir.parent / "hub_cache")}
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)


def test_a_model_of_the_hub_is_fetched_once_and_acts(tiny: Pi0Policy, tmp_path: Path) -> None:
    save_policy(tiny, tmp_path / "policy")
    with hub_with("somebody/tiny", tmp_path / "policy") as (address, asked):
        done = evaluate("somebody/tiny", tmp_path / "run", address)
    assert done.returncode == 0, done.stderr
    assert asked.count(f"GET /somebody/tiny/resolve/{COMMIT}/model.safetensors") == 1
    row = json.loads((tmp_path / "run" / "episodes.jsonl").read_text())
    assert row["weights"] == folder_digest(tmp_path / "policy")


def test_a_model_that_the_hub_does_not_have_is_named_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.joinpath("nothing").mkdir()
    with hub_with("somebody/tiny", tmp_path / "nothing") as (address, _):
        done = evaluate("somebody/else", tmp_path / "run", address)
    assert done.returncode == 2
    assert "somebody/else is not a folder, and the Hugging Face hub does not give it either" in done.stderr
    assert "Traceback" not in done.stderr
