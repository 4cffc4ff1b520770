"""openpi's own client in an environment of its own, because it needs numpy below 2: the peer of tests and of `vla-rl bench serve`.

`python -m vla_rl.bench.openpi_environment` (or `make openpi-client`) builds it inside the project's environment, once.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

PACKAGES = ("openpi-client==0.1.2", "typing-extensions")
"""openpi-client imports typing_extensions without asking for it."""
FOLDER = Path(sys.prefix) / "openpi-client"
DONE = "installed"
"""Written last, so that an installation that was interrupted is made again."""


def openpi_python() -> Path:
    """The interpreter of an environment that has openpi-client; built if it is not there yet.

    Raises RuntimeError with the installer's output if that fails.
    """
    python = FOLDER / "bin" / "python"
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = "\n".join(PACKAGES)
        if not (FOLDER / DONE).is_file() or (FOLDER / DONE).read_text() != wanted:
            _run("uv", "venv", "--clear", "--python", sys.executable, str(FOLDER))
            _run("uv", "pip", "install", "--python", str(python), *PACKAGES)
            (FOLDER / DONE).write_text(wanted)
    return python


def _run(tool: str, *arguments: str) -> None:
    command = [str(Path(sys.prefix) / "bin" / tool), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(openpi_python())
