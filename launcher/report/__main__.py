"""`python -m launcher.report RUN|SWEEP`."""

import sys

from launcher.report.command_line import main

sys.exit(main())
