"""The arithmetic estimate of HBM beside the compiler's figure, for every recorded train step.

    python -m tests.benchmarks.estimate [PART OF A NAME]

The compiler's figures are those of tests/golden/plans.json (`run.py plan --update-goldens` makes
them again); nothing is compiled here.
"""

import sys

from jaxtpu import environment
from jaxtpu.config import load
from jaxtpu.hardware import parse_slice
from jaxtpu.plan.candidates import candidate_of
from jaxtpu.plan.goldens import Case, read

_GIB = 2**30


def estimated(case: Case):
    """The estimate of a recorded case."""
    from jaxtpu.plan.command import without_mesh
    from jaxtpu.plan.estimate import estimate

    slice_ = parse_slice(case.slice)
    config = load(case.config, [(name, str(value)) for name, value in case.fields.items()])
    candidate = candidate_of(config, slice_)
    ready, units = without_mesh(config, slice_, vocab_size=257)
    return candidate, estimate(ready, candidate, slice_, units)


def main() -> None:
    environment.prepare(1, platform="cpu")
    wanted = " ".join(sys.argv[1:])
    print(
        f"{'HBM GiB: estimate':>17} {'compiled':>9} {'error':>7}  {'s':>6} {'predicted':>9} {'error':>6}"
    )
    for case in read():
        if wanted not in str(case) or not case.figures:
            continue
        candidate, guess = estimated(case)
        for version, found in case.figures.items():
            hbm, seconds = (
                guess.hbm_bytes / found["hbm_bytes"],
                guess.seconds / found["step_seconds"],
            )
            print(
                f"{guess.hbm_bytes / _GIB:17.2f} {found['hbm_bytes'] / _GIB:9.2f} {hbm - 1:+7.1%}  "
                f"{guess.seconds:6.3f} {found['step_seconds']:9.3f} {seconds - 1:+6.0%}  "
                f"{case.config} {case.slice} {candidate} (libtpu {version})"
            )
            if wanted:
                print({kind: round(size / _GIB, 3) for kind, size in guess.bytes_by_kind.items()})


if __name__ == "__main__":
    main()
