"""The command line: every command is listed and explains itself; anything else is refused."""

import pytest

from orchestrator.__main__ import COMMANDS, run_command


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
