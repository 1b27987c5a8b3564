import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_derived_text_is_up_to_date():
    """What `make sync` writes is committed: documents cannot drift from pages, modules and figures."""
    done = subprocess.run(
        [sys.executable, "-m", "guide.sync", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
