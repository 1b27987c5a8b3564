"""A child ends when its parent is killed."""

import os
import subprocess
import sys

from harness.processes import alive
from harness.waiting import until_sync
from studyhall.patterns.parent_death import die_with_parent  # noqa: F401  the child imports it too

CHILD = """
import sys, time
from studyhall.patterns.parent_death import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_killed_parent_takes_its_child_along():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until_sync(lambda: not alive(child), 20, "the end of the child")
