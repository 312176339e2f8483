"""Seven methods for three seeds on real speakers, in less than two minutes on two cores.

python experiments/demo/run.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedjax_pers.cli import main

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "results" / "demo"


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else RESULTS
    settings = HERE / "settings.json"
    methods = json.loads(settings.read_text())
    main(
        ["compare", "--config", str(HERE / "config.json"), "--settings", str(settings), "--folder", str(folder)]
        + ["--seeds", "0", "1", "2", "--methods", *methods]
    )
