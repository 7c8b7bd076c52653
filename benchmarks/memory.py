"""Growth of resident memory in one POD: ``python -m benchmarks.memory PACKAGE FIELDS.npy``.

A process of its own, in which the package has run once on tiny fields, so that libraries, threads
and their workspaces are there, and the fields have been read. What the peak of the resident set
then adds while the package runs is printed, in bytes; null where it cannot be measured.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import psutil

from .fields import make_fields
from .peers import PODS
from .timing import peak, reset_peak


def main() -> None:
    package, file = sys.argv[1:]
    run = PODS[package]
    run(make_fields(12, 16)[0].numpy())
    fields = np.load(file)
    try:
        reset_peak()
    except OSError:
        print(json.dumps({"growth": None}))
        return
    before = psutil.Process().memory_info().rss
    run(fields)
    print(json.dumps({"growth": max(0, peak() - before)}))


if __name__ == "__main__":
    main()
