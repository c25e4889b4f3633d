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

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser
except ImportError:
    pass
else:
    # Every Python block of the pages is a test; the blocks of a page share their names, in order.
    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser()],
        patterns=["README.md", "CONTRIBUTING.md", "docs/*.md"],
        excludes=["docs/design.md"],  # signatures and sketches, not programs
    ).pytest()
