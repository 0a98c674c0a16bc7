"""What ScoutCallback costs an LLM call; `python tests/bench/bench_callback.py --json`."""

import sys

from scout_integrations._bench import main

if __name__ == "__main__":
    sys.exit(main())
