"""python -m tilewise.cli"""

import sys

from tilewise.cli.main import main

sys.exit(main())
