"""LBANN, which has no adapter yet: its reason is reported.

LBANN is not on PyPI. Building version 0.105 on a machine without accelerators and without access to
GitHub: conduit 0.9.2 and Aluminum 1.4.2 (without hwloc) are built, DiHydrogen 0.3 ends in its
configuration, "Failed to clone repository: https://github.com/gabime/spdlog.git", before Hydrogen.
"""

raise SystemExit(" ".join(__doc__.split("\n\n")[-1].split()))
