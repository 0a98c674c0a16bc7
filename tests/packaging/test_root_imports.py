import subprocess
import sys

import pytest

import scout_sdk

SCRIPT = """
import sys
before = set(sys.modules)
import {module}
roots = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(roots - set(sys.stdlib_module_names) - {{"scout_sdk"}}))
"""


@pytest.mark.parametrize("module", ["scout_sdk", "scout_sdk.sleep"])
def test_the_client_imports_only_the_standard_library(module):
    """
    Importing the client loads nothing but itself and the standard library.
    """
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "[]" == out.stdout.strip()


def test_public_names_are_sorted_and_there():
    """
    Every public name of the client exists, and the list of them is sorted and without repetition.
    """
    names = scout_sdk.__all__

    assert names == sorted(set(names))
    assert [] == [name for name in names if not hasattr(scout_sdk, name)]
