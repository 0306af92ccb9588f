"""`python -m unsum`."""

from unsum.cli import main

raise SystemExit(main())
