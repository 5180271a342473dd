"""Tables of notebook 01's workshop: what a cheat claims, and what each detector finds."""

from lib.course.show import style_table
from lib.measure import cheats

import pandas as pd


def claims_of(*names):
    """One row per cheat: what it claims, beside the honest time."""
    rows = [{"cheat": c.name, "on": cheats.where(c), **cheats.claim(c)} for c in _found(names)]
    return style_table(pd.DataFrame(rows))


def findings_on(*names):
    """One row for each detector that found something."""
    rows = [
        {"cheat": c.name, "detector": detector, "finding": finding}
        for c in _found(names)
        for detector, finding in cheats.catch(c).items()
    ]
    return style_table(pd.DataFrame(rows, columns=["cheat", "detector", "finding"]))


def _found(names):
    return [cheats.find(name) for name in names]
