"""How much memory an object holds, counted to the leaves."""

import sys
from array import array
from collections.abc import Mapping

__all__ = ["deep_size"]


def deep_size(root: object) -> int:
    """Return the bytes of *root* and of all that it alone or with others refers to."""
    seen: set[int] = set()
    pending = [root]
    total = 0
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif isinstance(item, array | str | bytes | int | float):
            continue
        elif hasattr(item, "nbytes"):
            base = getattr(item, "base", None)
            if base is not None:
                pending.append(base)
        else:
            pending.extend(getattr(item, "__dict__", {}).values())
            slots = getattr(type(item), "__slots__", ())
            pending.extend(getattr(item, name) for name in slots if hasattr(item, name))
    return total
