"""Run a file of golden cases: python -m tests.golden FILE.json

Prints one line per failed case and last `claimed N, passed N, failed N, not claimed N`; exit 0 only when none failed.
"""

import json
import sys
from pathlib import Path

from tests.golden.cases import NotClaimed, mismatches, run


def main(arguments: list[str]) -> int:
    """Run every case of a file; return the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print(f"The argument must be one file of golden cases, got {arguments}. Give tests/golden/golden_public.json.")
        return 2
    cases = json.loads(Path(arguments[0]).read_text())["cases"]
    passed = failed = not_claimed = 0
    for case in cases:
        try:
            wrong = mismatches(case, run(case))
        except NotClaimed:
            not_claimed += 1
            continue
        except Exception as error:  # a case that raises has failed; the others still run
            wrong = [f"raised {type(error).__name__}: {error}"]
        passed, failed = passed + (not wrong), failed + bool(wrong)
        if wrong:
            print(f"{case['id']}: {'; '.join(wrong)}")
    print(f"claimed {passed + failed}, passed {passed}, failed {failed}, not claimed {not_claimed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
