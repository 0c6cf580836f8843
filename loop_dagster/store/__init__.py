"""What is kept: registry (SQL), lake (Delta), leases, artifacts, and the intake that fills them."""
