"""How the tests run `dspark` in this process."""

import json

from dspark.tools.cli import main


def failed(capsys, argv, code, *words):
    """The command ends with `code` and says one line on stderr with `words` in it; on stdout nothing, or with --json
    the one object about it."""
    try:
        found = main(argv)
    except SystemExit as exit_:  # argparse's way
        found = exit_.code
    out, err = capsys.readouterr()
    assert found == code, err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    if "--json" in argv:
        assert json.loads(out) == {"error": err.partition("error: ")[2].rstrip("\n"), "exit_code": code}
    else:
        assert out == ""
    for word in words:
        assert word in err
