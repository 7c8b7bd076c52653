"""Bring the graph up to date: Snakemake behind a lock that a kill releases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from .errors import InputError
from .runner import notebook_names, preset_parameters, project_root

FOLLOW = "ATTNLIB_EXIT_WITH_PARENT"


def make(target: str, preset: str = "quick", cores: int | None = None) -> None:
    """Become Snakemake, building a target; does not return.

    Snakemake's own lock outlives a kill and then has to be removed by hand. So the lock here is
    one that the system releases with the process, and whoever holds it may remove Snakemake's.

    Parameters
    ----------
    target : {"book", "notebooks"}
    preset : str
    cores : int, optional
        All by default. On a machine with a GPU one notebook runs at a time.

    Raises
    ------
    InputError
        Unknown preset, a parameter that does not fit, or another build that is running.
    """
    import fcntl

    for name in notebook_names():
        preset_parameters(preset, name)  # a mistake is found here, in a line
    root = project_root()
    lock = os.open(root / ".graph.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another build is running in {root}: wait for it") from error
    os.set_inheritable(lock, True)  # held until Snakemake ends, however it ends
    snakemake = str(Path(sys.executable).with_name("snakemake"))
    if any((root / ".snakemake" / "locks").glob("*")):
        unlock = [snakemake, "--unlock", "--cores", "1"]
        done = subprocess.run(unlock, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"cannot remove the lock that a killed build left: {done.stderr}")
    command = [snakemake, "--quiet", "rules", "host", "reason", "progress"]
    command += ["--rerun-incomplete", "--cores", str(cores or os.cpu_count())]
    if shutil.which("nvidia-smi"):
        command += ["--resources", "gpu=1"]
    command += ["--config", f"preset={preset}", "--", target]
    os.chdir(root)
    os.environ[FOLLOW] = "1"
    sys.stdout.flush()
    os.execv(snakemake, command)


def exit_with_parent() -> None:
    """End this process when its parent does, if the graph started it: no orphan trains on."""
    if os.environ.pop(FOLLOW, None) is None:
        return
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
