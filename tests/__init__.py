from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
