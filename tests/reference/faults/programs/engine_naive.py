"""The obvious way: the first process starts the server as its child and the others connect to it.

`plain` leaves the server behind when that process is killed; `tied` (PDEATHSIG) takes it from everybody else.
"""

import subprocess
import sys
import time

from harness.ports import free_port
from harness.processes import start_tied
from harness.redis import server_binary

mode, directory = sys.argv[1:]
port = free_port()
argv = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", ""]
process = start_tied(argv) if mode == "tied" else subprocess.Popen(argv)
print(f"server {port} {process.pid}")
while True:
    time.sleep(1)
