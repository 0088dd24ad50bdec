"""Creates findings for `openrlhf doctor`: a pass, or a problem with its fix."""

from openrlhf.checks import Finding


def verdict(holds: bool, seen: str, problem: str, fix: str, *, fails: bool = False) -> Finding:
    """Return a pass if a requirement `holds`, or otherwise a warning or a failure.

    The text of a warning or failure is `seen` followed by `problem`.
    """
    if holds:
        return Finding(seen, passes=True)
    return Finding(f"{seen}{problem}", fix, fails=fails)
