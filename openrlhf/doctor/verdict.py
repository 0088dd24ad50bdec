"""A finding of the doctor: either a pass or a problem with its fix."""

from openrlhf.checks import Finding


def verdict(holds: bool, seen: str, problem: str, fix: str, *, fails: bool = False) -> Finding:
    """Return a pass if a requirement `holds`, or else a warning or failure.

    `problem` continues the sentence in `seen`.
    """
    if holds:
        return Finding(seen, passes=True)
    return Finding(f"{seen}{problem}", fix, fails=fails)
