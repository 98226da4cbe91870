"""`python -m onbeat`: the same as the `onbeat` command."""

import sys

from onbeat.cli.main import main

sys.exit(main())
