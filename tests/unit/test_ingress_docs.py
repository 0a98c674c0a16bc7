"""docs/trust.md speaks of what exists."""

import re
from pathlib import Path

from scout_server.config import describe

TEXT = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")


def test_every_setting_that_the_page_names_exists():
    """
    A renamed setting fails here, and every setting of ingress and snapshot is explained.
    """
    known = {f"{info.section}.{info.name}" for info in describe()}
    named = set(re.findall(r"`((?:policy|tenancy|ingress|snapshot|vllm)\.[a-z_]+)`", TEXT))

    assert named - known == set()
    ours = {name for name in known if name.startswith(("snapshot.", "tenancy."))}
    assert ours <= named


def test_the_names_in_answers_are_those_of_the_code():
    """
    What the page calls the counters and the sealed tenants is what the code calls them.
    """
    from scout_server.policy.readout import CoreState
    from scout_server.vllm.seal import Seals

    assert "clipped_blocks" in CoreState.__dataclass_fields__
    assert "`clipped_blocks`" in TEXT
    claimed = Seals().origin({"scout_tenant": "x"}).tenant
    assert f"`{claimed.removesuffix('x')}...`" in TEXT
