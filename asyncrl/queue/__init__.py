"""The sample queue: transitions, ledger, journal, payloads and the actor around them."""
