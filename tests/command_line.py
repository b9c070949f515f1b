"""How the tests run `dspark` in this process."""

from dspark.tools.cli import main


def failed(capsys, argv, code, *words):
    """The command ends with `code`, says one line on stderr with `words` in it, and nothing on stdout."""
    try:
        found = main(argv)
    except SystemExit as exit_:  # argparse's way
        found = exit_.code
    out, err = capsys.readouterr()
    assert found == code, err
    assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err
