"""`python -m launcher.report RUN|SWEEP`."""

import sys

from launcher.report.command import main

sys.exit(main())
