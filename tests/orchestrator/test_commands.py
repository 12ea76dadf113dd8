"""The command line: every command is listed and explains itself; anything else is refused."""

import pytest

from orchestrator.__main__ import COMMANDS, run_command
from orchestrator.checkpoint import folder_of
from tests.orchestrator.test_resume import save


def test_help_lists_every_command_with_what_it_does(capsys):
    with pytest.raises(SystemExit) as done:
        run_command(["--help"])
    said = capsys.readouterr().out
    assert done.value.code == 0
    for name, run in COMMANDS.items():
        assert f"  {name:<10} {run.__doc__.splitlines()[0]}" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as done:
        run_command([name, "--help"])
    assert done.value.code == 0 and f"rlooper {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["trian"], ["--fast", "train"]])
def test_what_is_no_command_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        run_command(arguments)
    assert done.value.code == 2 and "rlooper: error:" in capsys.readouterr().err


def test_an_export_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert run_command(["export", str(tmp_path), *arguments]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        return sentence

    assert "must have a complete checkpoint, got none" in refused()
    save(tmp_path, 1, 2, 3)
    assert "--step must be one of the run's checkpoints (1, 2, 3), got 4" in refused("--step", "4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "--output must be a new or empty folder" in refused("--output", str(tmp_path / "full"))
    assert "--output must be a new or empty folder" in refused("--output", str(tmp_path / "full" / "mine"))
    (folder_of(tmp_path, 2) / "COMPLETE").unlink()
    assert "step-000002: it was not finished" in refused("--step", "2")


def test_an_evaluation_that_cannot_be_is_refused_before_anything_starts(tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert run_command(["eval", *arguments]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        return sentence

    assert "eval.data must name held-out rows" in refused("some/model")
    assert "Did you mean eval.num_samples" in refused("some/model", "eval.num_sample=3")
    (tmp_path / "config.yaml").touch()
    assert "without a policy. Make one: rlooper export" in refused(str(tmp_path), "eval.data=x")
    assert "model.path must be a Hugging Face folder" in refused(str(tmp_path / "nowhere"), "eval.data=x")
