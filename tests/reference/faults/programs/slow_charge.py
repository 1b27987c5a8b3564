"""Charges after a while: waits until the file `gate` exists, then appends a line to the file `charges`."""

import subprocess
import sys
import time
from pathlib import Path


def main(gate, charges):
    if "--through-a-child" in sys.argv:  # as a shell script would do it
        return subprocess.call([sys.executable, __file__, str(gate), str(charges)])
    print("working", flush=True)
    while not gate.exists():
        time.sleep(0.02)
    with charges.open("a") as out:
        out.write("charged\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
