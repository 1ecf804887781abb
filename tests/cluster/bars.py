"""How long something may take on a machine that has other work, too: bars are for an idle one."""

import os


def by_load(bar_s: float) -> float:
    """The bar, multiplied by how many processes wanted each core in the last minute, where that is more than one."""
    return bar_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
