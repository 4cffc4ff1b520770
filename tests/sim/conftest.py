"""Makes the helper modules of this folder importable here and in worker processes, which get this `sys.path`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
