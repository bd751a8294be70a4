"""`headway report RUN`: one self-contained HTML page about a run. `headway report SWEEP`: its runs side by side, in the terminal or as a page.

    run folder --record.py--> Record --series.py--> points --curves.py, ages.py, timeline.py--> Charts --page.py, templates/--> report.html
                                 |                                     (geometry: plot.py)             ^
                                 +--changes.py: difference to the composed defaults -------------------+
    sweep --table.py--> one line a run; --sweep_page.py--> its curves overlaid

The coordinator has the page written when the run ends, the launcher where no coordinator could (ending.py): by a process of its own, so that
whatever goes wrong with it is said in a log and changes nothing.
"""

from launcher.report.command_line import main

__all__ = ["main"]
