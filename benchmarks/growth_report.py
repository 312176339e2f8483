from pathlib import Path
RESULTS = Path(__file__).parent / "results" / "growth.json"
def draw(x): pass
