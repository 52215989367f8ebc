"""Runs servers of SGLang in which everything is SGLang's own but the scheduler's
model and its KV transfer (stub.py).

Each argument is the command line of one server. One process imports SGLang, which
takes a minute, and each server is a fork of it. A line "start NUMBER" on the standard
input starts a server anew. What is printed is "NUMBER PID".
"""

import os
import signal
import sys
import tempfile
import traceback

import absent

absent.install()

# What makes metrics asks when it is imported whether there is such a folder.
os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()

import sglang.srt.entrypoints.http_server  # what stub.py needs


def start(number, line):
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            devnull = os.open(os.devnull, os.O_RDONLY)
            os.dup2(devnull, 0)
            os.dup2(2, 1)
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
            import stub

            stub.serve(line.split())
        except BaseException:
            traceback.print_exc()
        os._exit(3)
    print(number, pid, flush=True)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    lines = sys.argv[1:]
    for number, line in enumerate(lines):
        start(number, line)
    for said in sys.stdin:
        word, number = said.split()
        if word == "start":
            start(int(number), lines[int(number)])


main()
