"""What every test run shares: one thread for each process, and the profiles of the property tests."""

import os

# With more threads the workers of pytest-xdist would wait for each other. Must come before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # No deadline: on a busy machine one slow example says nothing.
    settings.register_profile("default", deadline=None)
    settings.register_profile("long", deadline=None, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
