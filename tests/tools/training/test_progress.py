import time

import pytest

from dspark.tools.training.progress import INTERVAL, Heartbeat, progress


def test_a_line_at_the_start_and_at_the_end():
    lines = []
    show = progress(lines.append, "reading")
    for done in range(4):
        show(done, 3)
    assert [line.split("  ")[0] for line in lines] == ["reading 0/3", "reading 3/3"]


class TestHeartbeat:
    def test_silence_is_broken_by_the_last_line(self):
        lines = []
        with Heartbeat(lines.append, interval=0.05) as log:
            log("responses 0/9")
            time.sleep(0.3)
            log("done")
        assert lines[0] == "responses 0/9" and lines[-1] == "done"
        assert 2 <= len(lines) - 2 <= 6 and set(lines[1:-1]) == {"0:00:00 since: responses 0/9"}

    def test_a_log_that_speaks_is_left_alone(self):
        lines = []
        with Heartbeat(lines.append, interval=0.2) as log:
            for n in range(10):
                log(str(n))
                time.sleep(0.05)
        assert lines == [str(n) for n in range(10)]

    def test_it_ends_with_an_error(self):
        lines = []
        with pytest.raises(ValueError), Heartbeat(lines.append, interval=0.02):
            raise ValueError
        time.sleep(0.1)
        assert lines == []

    def test_ten_seconds(self):
        assert INTERVAL <= 10
