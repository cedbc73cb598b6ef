"""A mistake on the command line is one line on stderr and exit code 2, whatever tyro thinks of it."""

import pytest

from fivefold.cli import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train digits --epoch 3", "unknown option --epoch; did you mean --epochs?"),
        ("train digits --epochs x", "--epochs x: expected a whole number."),
        ("train digits --epochs", "--epochs is missing."),
        ("train", "RECIPE is missing."),
        ("train --nonsense", "is missing."),
        ("train digits more", "unexpected argument more."),
        ("run -n two script.py", "--processes two: expected a whole number."),
        ("run --engin local script.py", "unknown option --engin; did you mean --engine?"),
        ("tarin digits", "unknown command 'tarin'; did you mean 'train'?"),
        ("train digit", "did you mean 'digits'?"),
        ("run -n 0 script.py", "at least 1 process is needed"),
        ("run nowhere.py", "there is no script nowhere.py"),
    ],
)
def test_it_is_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    if "command" not in says and "options" in err:
        assert f"fivefold {words.split(maxsplit=1)[0]} --help" in err
