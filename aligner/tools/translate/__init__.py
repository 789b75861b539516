"""Translation of configs of other trainers: TRL, OpenRLHF, veRL."""
