"""`python launch.py [GROUP=OPTION ...] [KEY=VALUE ...]`: the same as the installed command `kt-ray`."""

import sys

try:
    from kt_ray.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("kt_ray"):
        raise
    sys.exit(
        f"error: {sys.executable} lacks {error.name}. To fix: `. .venv/bin/activate` after `make demo`, "
        "or install kt_ray into this Python: pip install -e ."
    )
except KeyboardInterrupt:  # while it loads, before `main` looks after that
    print("interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
