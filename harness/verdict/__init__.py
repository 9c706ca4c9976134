"""The verdict: may the run's figures be believed? (law 8 of the design: refuse to conclude)

Each gate adds reasons in plain words; any reason makes the verdict ``not_supported``. What is worth
knowing but no reason to refuse (overheads, floors of the link, truncated spools) is a note.
"""

from harness.verdict.gates import Gates
from harness.verdict.judgement import Verdict, document, judge
from harness.verdict.notes import OVERHEADS

__all__ = ["OVERHEADS", "Gates", "Verdict", "document", "judge"]
