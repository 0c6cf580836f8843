"""HTTP routes stand here later, one router per resource (docs/adr/0001)."""
