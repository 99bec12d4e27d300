"""Broken engines, by name. Each breaks one rule, as somebody did before (docs/promises.md); the simulation must notice.

A simulation that can't fail proves nothing: a mutant that survives is a hole in the checks or in what is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.testing.simulation.marker_mutants import MARKER_MUTANTS
from tidegate.testing.simulation.mutant import Mutant
from tidegate.testing.simulation.store_mutants import STORE_MUTANTS
from tidegate.testing.simulation.time_mutants import TIME_MUTANTS

MUTANTS: Mapping[str, Mutant] = {mutant.name: mutant for mutant in (*STORE_MUTANTS, *MARKER_MUTANTS, *TIME_MUTANTS)}
