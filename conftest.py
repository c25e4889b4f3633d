"""One thread for each test process: with more, the workers of pytest-xdist would wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
