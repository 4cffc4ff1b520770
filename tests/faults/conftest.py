"""Makes the helper modules of the pool's tests importable here and in worker processes, which get this `sys.path`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "sim")]
