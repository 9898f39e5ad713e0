"""`make chaos`: a run that is killed, cut off and lied to at random moments ends as one that nobody disturbed."""
