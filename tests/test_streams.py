"""Output that nobody reads any more is no reason to stop."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from offload import streams

# Prints for as long as it is asked to, through the wrapper, and says at the end that it got there.
PRINTER = """
import os, sys
from offload import streams
with streams.unbreakable():
    for number in range(20000):
        print("line", number, flush=number % 2 == 0)
    os.system("echo from a child of it")
    print("the end", file=sys.stderr)
"""


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_a_reader_that_leaves() -> None:
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PRINTER], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.read(read, 100)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.splitlines() == ["standard output has no reader any more: the run goes on and saves as usual", "the end"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_streams_that_are_closed_from_the_start(closed: str, tmp_path: object) -> None:
    """A file that is opened must not be taken for a standard stream."""
    code = (
        "import os, sys; from offload import streams; streams.open_missing(); f = open('file', 'w'); "
        "assert f.fileno() > 2; os.system('echo stray; echo stray >&2'); print('x'); print('y', file=sys.stderr); "
        "sys.stdout.flush(); f.write('kept'); f.close()"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    result = run(["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code], cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    with open(os.path.join(str(tmp_path), "file")) as file:
        assert file.read() == "kept"


def test_a_full_disk_drops_lines_and_keeps_the_stream() -> None:
    class Full(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    beneath = Full()
    stream = streams.Unbreakable(beneath, "standard output")
    print("lost", file=stream)  # type: ignore[call-overload]
    beneath.is_full = False
    print("told", file=stream)  # type: ignore[call-overload]
    assert beneath.getvalue() == "told\n"


def test_a_stream_that_was_closed(capsys: pytest.CaptureFixture[str]) -> None:
    beneath = io.StringIO()
    stream = streams.Unbreakable(beneath, "standard output")
    beneath.close()
    print("a", "b", file=stream, flush=True)  # type: ignore[call-overload]
    assert capsys.readouterr().err.count("no reader any more") == 1


def test_a_stream_without_a_descriptor_keeps_none_open() -> None:
    beneath = io.StringIO()
    stream = streams.Unbreakable(beneath, "standard output")
    beneath.close()
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(20):
        print(number, file=stream)  # type: ignore[call-overload]
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_streams_come_back() -> None:
    before = sys.stdout, sys.stderr
    with streams.unbreakable():
        assert sys.stdout is not before[0] and sys.stdout.encoding == before[0].encoding
    assert (sys.stdout, sys.stderr) == before
