"""`python launch.py [GROUP=OPTION ...] [KEY=VALUE ...]`: the same as the installed command `kt-ray`."""

import sys

from kt_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
