"""Load generators and what is reported of them."""
