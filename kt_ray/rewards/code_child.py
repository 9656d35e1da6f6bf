"""A program that runs an answer's code and its tests under limits; `run_tests` starts it by the file's name.

It imports nothing of kt_ray. Standard input is one JSON object: code, tests, limits (name of the resource:
value), seconds, secret. Standard output gets a line `<secret> ready` and one `<secret> <test's number>` for
each test that passes; what the code itself prints goes nowhere. Without the secret, code that ends the
program or prints before the tests are through would look like code that passes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import types


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    signal.alarm(job["seconds"])  # should the driver die
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    secret, write, leave = job["secret"], os.write, os._exit  # the code may replace them in their modules
    write(report, f"{secret} ready\n".encode())
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses look there
    try:
        exec(compile(job["code"], "answer.py", "exec", dont_inherit=True), vars(module))
        for number, test in enumerate(job["tests"]):
            try:
                exec(compile(test, "tests.py", "exec", dont_inherit=True), vars(module))
            except BaseException:
                continue
            write(report, f"{secret} {number}\n".encode())
    finally:
        leave(0)


if __name__ == "__main__":
    main()
