"""A pipeline runs its phases in order, fills in its folder, and goes on where it stopped."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from vla_rl.cli import main
from vla_rl.config import ConfigError, load_recipe
from vla_rl.phases.pipeline import PipelineConfig
from vla_rl.telemetry.files import read_jsonl

RECIPE = """
run_dir: RUN
phases:
  - command: collect
    recipe:
      run_dir: "{run_dir}/demonstrations"
      suite: reach
      tasks: [0]
      episodes_per_task: 4
      frame_every: 1
      env: {kind: reach, resolution: 64}
      pool: {backend: serial, workers: 1}
      show_progress: false
  - command: sft
    recipe:
      run_dir: "{run_dir}/sft"
      data: {paths: ["{run_dir}/demonstrations"], validation_fraction: 0}
      policy: {family: pi0, prompt_tokens: 16, language: {depth: 1}, expert: {depth: 1}}
      updates: 3
      global_batch_size: 4
      micro_batch_size_per_rank: 4
      show_progress: false
  - command: eval
    recipe:
      run_dir: "{run_dir}/eval"
      suite: reach
      tasks: [0]
      protocol: sampled
      episodes_per_task: 2
      policy: {checkpoint: "{run_dir}/sft/checkpoints/last/policy"}
      videos: 1
      env: {kind: reach, resolution: 64}
      pool: {backend: serial, workers: 1}
      show_progress: false
"""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whatever asks for a host that is not this one fails, and is listed."""
    asked: list[object] = []
    resolve = socket.getaddrinfo

    def refuse(host: object, *arguments: Any, **more: Any) -> Any:
        if host in (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname()):
            return resolve(host, *arguments, **more)  # pyright: ignore[reportArgumentType]
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


def test_collect_sft_eval_in_order_and_again_does_nothing_twice(tmp_path: Path, no_network: list[object]) -> None:
    """Nothing of it needs published weights, so nothing of it looks for a network (LeRobot #2566, #4131)."""
    recipe, run = tmp_path / "pipeline.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("RUN", str(run)))
    assert main(["run", str(recipe)]) == 0
    assert len(list((run / "demonstrations" / "episodes").glob("*.hdf5"))) == 4
    assert [row["update"] for row in read_jsonl(run / "sft" / "metrics.jsonl") if "loss" in row] == [1, 2, 3]
    assert len(read_jsonl(run / "eval" / "episodes.jsonl")) == 2
    report = (run / "report.html").read_text()
    assert "http://" not in report and "https://" not in report, "the report needs no network"
    assert main(["run", str(recipe)]) == 0
    assert len(read_jsonl(run / "eval" / "episodes.jsonl")) == 2
    assert len(read_jsonl(run / "sft" / "metrics.jsonl")) == 3
    assert no_network == []


def test_run_dir_moves_the_whole_pipeline(tmp_path: Path) -> None:
    recipe = tmp_path / "pipeline.yaml"
    recipe.write_text(RECIPE.replace("RUN", "runs/here"))
    assert load_recipe(PipelineConfig, recipe, ["--run-dir", "runs/there"]).run_dir == "runs/there"


def test_a_phase_that_fails_stops_the_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = tmp_path / "pipeline.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("RUN", str(run)).replace('{run_dir}/demonstrations"]', str(tmp_path / "nothing") + '"]'))
    assert main(["run", str(recipe)]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not (run / "eval").exists()


LAST_SUITE = "suite: reach\n      tasks: [0]\n      protocol"
LAST_ENV = "videos: 1\n      env: {kind: reach, resolution: 64}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({LAST_SUITE: LAST_SUITE.replace("reach", "libero_objekt"), LAST_ENV: "videos: 1"}, "did you mean 'libero_object'"),
        ({"protocol: sampled": "protocol: sample"}, "did you mean 'sampled'"),
        ({LAST_SUITE: LAST_SUITE.replace("[0]", "[77]")}, "tasks has [77]; suite 'reach' has tasks 0 to 3"),
    ],
    ids=["suite", "protocol", "task"],
)
def test_what_is_wrong_with_the_last_phase_is_found_before_the_first_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    recipe, run = tmp_path / "pipeline.yaml", tmp_path / "run"
    text = RECIPE.replace("RUN", str(run))
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong)
    recipe.write_text(text)
    assert main(["run", str(recipe)]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists()


def test_two_phases_in_one_folder_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "pipeline.yaml"
    recipe.write_text(RECIPE.replace("RUN", "runs/x").replace('{run_dir}/sft"', '{run_dir}/eval"'))
    with pytest.raises(ConfigError, match="two phases share the run_dir runs/x/eval; give each its own"):
        load_recipe(PipelineConfig, recipe)
    recipe.write_text(RECIPE.replace("RUN", "runs/x/").replace('{run_dir}/sft"', '{run_dir}"'))
    with pytest.raises(ConfigError, match=r"a phase has the run_dir of the whole pipeline, runs/x/; .* such as \{run_dir\}/sft"):
        load_recipe(PipelineConfig, recipe)
    recipe.write_text(RECIPE.replace("RUN", "runs/x").replace('{run_dir}/sft"', '{run_dir}/./eval/"'))
    with pytest.raises(ConfigError, match="two phases share the run_dir runs/x/eval; give each its own"):
        load_recipe(PipelineConfig, recipe)
    recipe.write_text(RECIPE.replace("RUN", "runs/x").replace('{run_dir}/sft"', '{run_dir}/"'))
    with pytest.raises(ConfigError, match="a phase has the run_dir of the whole pipeline, runs/x; "):
        load_recipe(PipelineConfig, recipe)


def test_a_pipeline_goes_on_where_its_phases_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With fields that its recorded recipe does not have yet, and with what may change in a phase; nothing else, before a phase starts."""
    recipe, run = tmp_path / "pipeline.yaml", tmp_path / "run"
    text = RECIPE.replace("RUN", str(run))
    recipe.write_text(text)
    assert main(["run", str(recipe)]) == 0
    for file in (run / "config.yaml", run / "sft" / "config.yaml"):
        older = file.read_text().replace("noise_draws: 1", "").replace("first_picture_repeats: 1", "")
        assert older != file.read_text()
        file.write_text(older)
    recipe.write_text(text.replace("show_progress: false", "show_progress: true"))
    assert main(["run", str(recipe)]) == 0
    kept = (run / "config.yaml").read_text()
    assert [phase["recipe"]["show_progress"] for phase in yaml.safe_load(kept)["phases"]] == [True] * 3
    capsys.readouterr()
    recipe.write_text(text.replace("updates: 3", "updates: 4"))
    assert main(["run", str(recipe)]) == 2
    assert f"{run}/sft holds a run of another recipe (recorded -> now):\n  updates: 3 -> 4\n" in (error := capsys.readouterr().err)
    assert "[1/3]" not in error, "found before the first phase starts"
    assert (run / "config.yaml").read_text() == kept
    recipe.write_text(text[: text.index("  - command: eval")])
    assert main(["run", str(recipe)]) == 2
    assert "phases[2]: {'command': 'eval', " in capsys.readouterr().err
