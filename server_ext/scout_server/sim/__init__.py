"""The agent-program simulator: the policy core on a virtual clock."""
