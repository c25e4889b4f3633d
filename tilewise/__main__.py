"""python -m tilewise"""

import sys

from tilewise.cli.main import main

sys.exit(main())
