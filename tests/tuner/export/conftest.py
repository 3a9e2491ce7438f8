"""The toy study of tests/tuner/study, whose machine has no processes, is what reports and exports are made of here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "study"))
