import pytest

from dspark.errors import UsageError
from dspark.reading import DEEPEST, read_object


def test_an_object(tmp_path):
    file = tmp_path / "a.json"
    nested = '{"a":' * (DEEPEST - 1) + "{}" + "}" * (DEEPEST - 1)
    for text in ('{"ä": [1, {"b": null}]}', nested):
        file.write_text(text, encoding="utf-8")
        assert read_object(file, "advice")
    file.write_text('{"limits": [0.0, Infinity]}')
    assert read_object(file, "advice", constants=True)["limits"][1] == float("inf")


@pytest.mark.parametrize(
    "data, problem",
    [
        (None, "no such file"),
        (b"", "cannot be read as JSON"),
        (b'{"a": 1', "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * DEEPEST + b"[]" + b"}" * DEEPEST, "nested too deeply"),
    ],
)
def test_anything_else_is_one_line_with_the_file_and_the_advice(tmp_path, data, problem):
    file = tmp_path / "a.json"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UsageError, match=problem) as caught:
        read_object(file, "get it again")
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and message.endswith("; get it again") and "\n" not in message
