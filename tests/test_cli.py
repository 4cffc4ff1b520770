"""Commands, exit statuses and what bad input prints."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vla_rl.cli import COMMANDS, RECIPES, main
from vla_rl.telemetry.files import only_writer

ROOT = Path(__file__).resolve().parents[1]


def test_help_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS), "the usage text names every command"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([name, "--help"]) == 0
    except SystemExit as end:  # argparse's way of having printed help
        assert end.code == 0
    assert f"{name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evla"], "no command 'evla'; did you mean 'eval'?"),
        (["sft"], "the first argument is a recipe file"),
        (["sft", "no/such.yaml"], "no recipe at no/such.yaml"),
        (["bench", "simm"], "no benchmark 'simm'; did you mean 'sim'?"),
        (["compare", "a"], "compare takes two run directories"),
        (["report"], "report takes one run directory"),
        (["record", "x", "--command", "c", "--run", "after"], "'after' must be NAME=VALUE"),
        (["record", "x", "--command", "c", "--run", "after=no/such"], "no/such"),
        (
            ["record", "x", "--command", "c", "--run", "after=no/such", "--bar", "success_rate=high"],
            "success_rate=high must end in a number",
        ),
        (["collect", "configs/reach/collect.yaml", "--run-dir", "README.md/run"], "README.md/run'; a file is where a folder should be"),
        (["collect", "configs/reach/collect.yaml", "--run-dir", "README.md"], "README.md'; a file is where a folder should be"),
        (["doctor", "--jsn"], "doctor takes only --json, not --jsn"),
    ],
)
def test_bad_commands_are_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("sft", "run_dir: {dir}/x\ndata: {paths: [a]}\nengine: {lrr: 1.0}\n", "unknown key 'engine.lrr'; did you mean"),
        ("sft", "run_dir: {dir}/x\ndata: {paths: [a]}\nlr: 1.0\n", "belongs at 'engine."),
        ("sft", "run_dir: {dir}/x\ndata: {paths: [a]}\nupdates: many\n", "updates is 'many' (str); it must be a int"),
        ("sft", "run_dir: {dir}/x\ndata: {paths: [a]}\npolicy: {family: pi1}\n", "did you mean"),
        ("eval", "run_dir: {dir}/x\nactor: noop\nsuite: libero_objct\n", "libero_object"),
        ("eval", "run_dir: {dir}/x\nactor: noop\nprotocol: openpie\n", "openpi"),
        ("eval", "run_dir: {dir}/x\nactor: noop\ntasks: [12]\n", "tasks 0 to 9"),
        ("eval", "run_dir: {dir}/x\nactor: policy\npolicy: {checkpoint: '{dir}/nothing'}\n", "nothing"),
        ("collect", "run_dir: {dir}/x\ntasks: [77]\n", "tasks 0 to 9"),
        ("collect", "run_dir: {dir}/x\nenv: {resolution: 7}\n", "recipe.yaml: env: resolution is 7, must be 16 to 1024"),
        ("collect", "run_dir: {dir}/x\nenv: {packaging: hf-liber}\n", "did you mean 'hf-libero'?"),
        ("eval", "run_dir: {dir}/x\nactor: noop\ndataset: d\n", "recipe.yaml: actor 'noop' takes no dataset"),
        (
            "eval",
            "run_dir: {dir}/x\npolicy: {checkpoint: c, device: gpu}\n",
            "device is 'gpu'; did you mean 'cpu'? (allowed: auto, cpu, cuda)",
        ),
        ("eval", "run_dir: {dir}/x\nactor: expert\nsuite: libero_90\ntasks: [0]\n", "actor 'expert' cannot act in libero_90 task 0"),
        ("run", "run_dir: {dir}/x\nphases: []\n", "phases is empty"),
        ("run", "run_dir: {dir}/x\nphases: [{command: evil, recipe: {}}]\n", "did you mean 'eval'"),
    ],
)
def test_bad_recipes_name_the_key_and_write_no_result(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("{dir}", str(tmp_path)))
    assert main([command, str(recipe)]) == 2
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err
    assert not (tmp_path / "x" / "episodes.jsonl").exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C works as in a terminal: a shell starts what it runs in the background with SIGINT ignored, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("swallowed", [False, True])
def test_ctrl_c_is_one_clear_line(
    swallowed: bool, interruptible: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also inside an import that guards itself against everything, and then fails."""

    def report(arguments: Sequence[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not swallowed:
                raise
        raise ImportError("partially initialized module")

    monkeypatch.setitem(COMMANDS, "report", report)
    before = signal.getsignal(signal.SIGINT)
    assert main(["report"]) == 130 and signal.getsignal(signal.SIGINT) is before
    what = " (partially initialized module)" if swallowed else ""
    assert capsys.readouterr().err == f"vla-rl report: interrupted{what}; start the same command again to go on\n"


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "report", lambda arguments: [][1])
    with pytest.raises(IndexError):
        main(["report"])


BUSY = {
    "collect": "suite: reach\ntasks: [0]\nenv: {kind: reach}\n",
    "sft": "data: {paths: [nowhere]}\n",
    "rl": "initial_policy: nowhere\nsuite: reach\nenv: {kind: reach}\n",
    "eval": "suite: reach\ntasks: [0]\nactor: noop\nprotocol: sampled\nenv: {kind: reach}\n",
    "run": "phases: [{command: sft, recipe: {run_dir: '{run_dir}/sft', data: {paths: [nowhere]}}}]\n",
}
"""Recipes that get as far as the run directory."""


@pytest.mark.parametrize("command", list(RECIPES))
def test_no_command_runs_where_another_process_does(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(f"run_dir: {run}\n{BUSY[command]}")
    with only_writer(run):
        assert main([command, str(recipe)]) == 2
    output = capsys.readouterr()
    assert f"vla-rl {command}: {run} is being written to by process " in output.err and output.err.count("\n") == 1
    assert [file.name for file in run.iterdir()] == [".lock"], "it left no trace"
