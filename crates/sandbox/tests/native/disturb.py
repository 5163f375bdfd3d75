"""Sends a signal to every process of the sandbox, again and again, from its first moment on."""

import os
import sys

signal = int(sys.argv[1])
print("begun", flush=True)
while True:
    try:
        os.kill(-1, signal)
    except ProcessLookupError:
        pass
