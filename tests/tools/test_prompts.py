import json

import pytest

from dspark.errors import UsageError
from dspark.tools.prompts import Prompt, read_prompts


def test_prompts_are_read_with_defaults(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "ä b"}, {"prompt": "c", "id": "x", "kind": "code"}]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert read_prompts(file) == [Prompt("1", "text", "ä b"), Prompt("x", "code", "c")]


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c\x85"}\n', encoding="utf-8")
    assert [(p.id, p.prompt, p.where) for p in read_prompts(file)] == [
        ("1", "a\u2028b", f"{file}: line 1"),
        ("2", "c\x85", f"{file}: line 2"),
    ]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2"),
        ("not json", "line 1"),
        ("[1]", "line 1"),
        ('{"prompt": ["a"]}', "line 1"),
        ('{"prompt": [true]}', "line 1"),
        ('{"prompt": "a"}\n\n{"prompt": ""}', "line 3.*empty"),
        ('{"prompt": []}', "line 1.*empty"),
        ('{"prompt": ' + "[" * 100_000, "line 1"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "same id"),
    ],
)
def test_prompts_that_cannot_be_read_are_one_clear_line(tmp_path, text, problem):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        read_prompts(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_missing_prompt_file_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
