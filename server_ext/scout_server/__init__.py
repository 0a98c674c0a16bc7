"""Scout on the serving side: the policy core and its adapters."""
