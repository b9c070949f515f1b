"""The host shim itself: what it computes, and that it finds what it is there to find."""

import host_library
import pytest

MISTAKES = {
    "bad_barrier": "never reach",
    "bad_two_barriers": "have diverged",
    "bad_shuffle": "never reach",
    "bad_load": "misaligned",
    "bad_wait": "never waited for",
    "bad_shared": "outside of the block's 496 bytes",
}


def test_shim(host_folder):
    done = host_library.shim_test(host_folder, *host_library.SHIM_CHECKS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_shim_stops_at_mistakes(host_folder, name):
    done = host_library.shim_test(host_folder, name)
    assert done.returncode < 0 and MISTAKES[name] in done.stderr, done.stderr
